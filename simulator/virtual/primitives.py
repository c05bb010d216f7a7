"""What replaces the primitives of `threading` and `queue` while a run is under way.

The standard library's `Thread`, `Barrier`, `Timer`, `Queue` and `ThreadPoolExecutor` are written in Python on top of
these and run unchanged. A scheduling point stands before whatever another thread could see or prevent: taking a lock or
a semaphore, setting an event.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

from .scheduler import SECOND_NS, Scheduler, Task

_os_thread = _thread.get_ident
#: The run under way, the OS thread it is in, and the code that runs when its patched calls come from elsewhere.
_running: Scheduler | None = None
_thread_of_run = 0


def running() -> Scheduler | None:
    """The scheduler, when the caller is a task of the run under way; else None."""
    scheduler = _running
    if scheduler is None or scheduler.current is None or _os_thread() != _thread_of_run:
        return None
    return scheduler


def set_running(scheduler: Scheduler | None) -> None:
    """Make a scheduler's run, in this OS thread, the one under way; None ends it."""
    global _running, _thread_of_run
    _running, _thread_of_run = scheduler, _os_thread()


class Lock:
    """`threading.Lock`. A released lock is free for all: a waiter that was woken may find it taken again."""

    __slots__ = ("__weakref__", "_held", "_waiting")

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = _running
        if scheduler is None or scheduler.current is None:
            return self._acquire_alone(blocking)
        if timeout != -1:
            _check_timeout(blocking, timeout)
        scheduler.point()
        if self._held:
            if not blocking or timeout == 0:
                return False
            if not self._wait(scheduler, timeout):
                return False
        self._held = True
        return True

    def _wait(self, scheduler: Scheduler, timeout: float) -> bool:
        """Wait until the lock is free; False after a time-out."""
        task = scheduler.current
        assert task is not None
        limit_ns = None
        if timeout > 0:
            limit_ns = scheduler.now_ns + scheduler.clock.true_ns(int(timeout * SECOND_NS))
        while self._held:
            self._waiting.append(task)
            left_ns = None if limit_ns is None else limit_ns - scheduler.now_ns
            if not scheduler.wait("a lock", left_ns):
                with contextlib.suppress(ValueError):
                    self._waiting.remove(task)
                return not self._held
        return True

    def _acquire_alone(self, blocking: bool) -> bool:
        """Outside of a run there is one thread: nobody could release a lock that is held."""
        if self._held and blocking:
            raise RuntimeError("a lock that was made in a simulated run is held for ever: the run is over")
        taken, self._held = not self._held, True
        return taken

    def release(self) -> None:
        if not self._held:
            if _running is not None and _running.reaping:
                return  # a wait that was unwound never got its lock back
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiting and _running is not None:
            _wake_one(_running, self._waiting)

    def locked(self) -> bool:
        return self._held

    __enter__ = acquire

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._held = False
        self._waiting = []

    acquire_lock, release_lock, locked_lock = acquire, release, locked


class ModuleLock:
    """A lock that a module of the standard library holds: each rank has a process, and so such a lock, of its own.

    One that a killed rank held keeps nobody else waiting. Used as a context manager only.
    """

    def __init__(self) -> None:
        self._locks: dict[object, Lock] = {}

    def _of_rank(self) -> Lock:
        # A rank has a new clock in each attempt of the job.
        scheduler = running()
        return self._locks.setdefault(None if scheduler is None else scheduler.clock, Lock())

    def __enter__(self) -> bool:
        return self._of_rank().acquire()

    def __exit__(self, *exc: object) -> None:
        self._of_rank().release()


class RLock(Lock):
    """`threading.RLock`, with what `threading.Condition` needs of it."""

    __slots__ = ("_count", "_owner")

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _me()
        if self._owner is me and self._held:
            self._count += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._owner is not _me():
            if _running is not None and _running.reaping:
                return
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()

    __enter__ = acquire

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._owner is _me()

    def _release_save(self) -> tuple[int, object]:
        state = self._count, self._owner
        self._count, self._owner = 0, None
        super().release()
        return state

    def _acquire_restore(self, state: tuple[int, object]) -> None:
        super().acquire()
        self._count, self._owner = state

    def _recursion_count(self) -> int:
        return self._count if self._owner is _me() else 0

    def _at_fork_reinit(self) -> None:
        super()._at_fork_reinit()
        self._owner, self._count = None, 0


def _me() -> object:
    """Who takes a lock: the running task, or, outside of a run, nobody in particular (there is one thread)."""
    return None if _running is None else _running.current or _running


def _scheduler_and_task() -> tuple[Scheduler, Task]:
    if _running is None or _running.current is None:
        raise RuntimeError("what was made in a simulated run cannot wait outside of it: the run is over")
    return _running, _running.current


def _wake_one(scheduler: Scheduler, waiting: list[Task]) -> None:
    """Wake the first that is still there; who gets the lock is decided when they run."""
    while waiting:
        task = waiting.pop(0)
        if task.alive and task.waits_for is not None:
            scheduler.wake(task)
            return


def _check_timeout(blocking: bool, timeout: float) -> None:
    if not blocking and timeout != -1:
        raise ValueError("can't specify a timeout for a non-blocking call")
    if timeout < 0 and timeout != -1:
        raise ValueError("timeout value must be a non-negative number")


def start_new_thread(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> int:
    """`_thread.start_new_thread`: a new task of the caller's rank."""
    scheduler, current = _scheduler_and_task()
    bound = getattr(function, "__self__", None)
    name = getattr(bound, "_name", None) or getattr(bound, "name", None) or getattr(function, "__name__", "thread")

    def run() -> None:
        try:
            function(*args, **(kwargs or {}))
        except SystemExit:
            pass
        finally:
            if task.sentinel is not None and task.sentinel.locked() and not scheduler.reaping:
                task.sentinel.release()

    task = scheduler.spawn(run, str(name), current.rank)
    return task.ident


def set_sentinel() -> Lock:
    """`_thread._set_sentinel`: a lock that is released when the calling thread ends; `Thread.join` waits for it."""
    _, current = _scheduler_and_task()
    sentinel = current.sentinel = Lock()
    return sentinel


def get_ident() -> int:
    """`threading.get_ident`"""
    scheduler = running()
    return _os_thread() if scheduler is None or scheduler.current is None else scheduler.current.ident


class Condition:
    """`threading.Condition` over any lock. As there, `notify` wakes those that have waited longest."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: list[Task] = []

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *exc: object) -> Any:
        return self._lock.__exit__(*exc)

    def __repr__(self) -> str:
        return f"<Condition({self._lock}, {len(self._waiters)})>"

    def _is_owned(self) -> bool:
        if hasattr(self._lock, "_is_owned"):
            return bool(self._lock._is_owned())
        return bool(self._lock.locked())

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        scheduler, task = _scheduler_and_task()
        self._waiters.append(task)
        saved: Any = self._lock._release_save() if hasattr(self._lock, "_release_save") else self._lock.release()
        try:
            woken = scheduler.wait("a condition", _timeout_ns(scheduler, timeout))
        finally:
            if not scheduler.reaping:
                if task in self._waiters:
                    self._waiters.remove(task)
                if hasattr(self._lock, "_acquire_restore"):
                    self._lock._acquire_restore(saved)
                else:
                    self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None
        result = predicate()
        while not result:
            scheduler, _ = _scheduler_and_task()
            now = scheduler.clock.monotonic_ns(scheduler.now_ns) / SECOND_NS
            if timeout is not None:
                end = now + timeout if end is None else end
                if end - now <= 0:
                    break
            self.wait(None if end is None else end - now)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if not self._is_owned():
            if _running is not None and _running.reaping:
                return
            raise RuntimeError("cannot notify on un-acquired lock")
        woken = self._waiters[:n]
        del self._waiters[:n]
        if woken:
            scheduler, _ = _scheduler_and_task()
            for task in woken:
                scheduler.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    notifyAll = notify_all  # noqa: N815 - the standard library has it

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()
        self._waiters.clear()


class Event:
    """`threading.Event`"""

    def __init__(self) -> None:
        self._flag = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._flag

    isSet = is_set  # noqa: N815 - the standard library has it

    def set(self) -> None:
        scheduler = running()
        if scheduler is not None:
            scheduler.point()
        self._flag = True
        waiters, self._waiters = self._waiters, []
        if scheduler is not None:
            for task in waiters:
                scheduler.wake(task)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._flag:
            return True
        scheduler, task = _scheduler_and_task()
        limit_ns = _timeout_ns(scheduler, timeout)
        if limit_ns is not None:
            limit_ns += scheduler.now_ns
        while not self._flag:
            self._waiters.append(task)
            left_ns = None if limit_ns is None else limit_ns - scheduler.now_ns
            if not scheduler.wait("an event", left_ns):
                with contextlib.suppress(ValueError):
                    self._waiters.remove(task)
                break
        return self._flag

    def _at_fork_reinit(self) -> None:
        self._flag = False
        self._waiters.clear()


class Semaphore:
    """`threading.Semaphore`"""

    _bound: int | None = None

    def __init__(self, value: int = 1) -> None:
        if value < 0:
            raise ValueError("semaphore initial value must be >= 0")
        self._value = value
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not blocking and timeout is not None:
            raise ValueError("can't specify timeout for non-blocking acquire")
        scheduler, task = _scheduler_and_task()
        scheduler.point()
        if not self._value and (not blocking or timeout == 0):
            return False
        limit_ns = _timeout_ns(scheduler, timeout)
        if limit_ns is not None:
            limit_ns += scheduler.now_ns
        while not self._value:
            self._waiters.append(task)
            left_ns = None if limit_ns is None else limit_ns - scheduler.now_ns
            if not scheduler.wait("a semaphore", left_ns):
                with contextlib.suppress(ValueError):
                    self._waiters.remove(task)
                if not self._value:
                    return False
        self._value -= 1
        return True

    __enter__ = acquire

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self, n: int = 1) -> None:
        if n < 1:
            raise ValueError("n must be one or more")
        if self._bound is not None and self._value + n > self._bound:
            raise ValueError("Semaphore released too many times")
        scheduler = running()
        if scheduler is not None:
            scheduler.point()
        self._value += n
        if scheduler is not None:
            for _ in range(n):
                _wake_one(scheduler, self._waiters)


class BoundedSemaphore(Semaphore):
    """`threading.BoundedSemaphore`"""

    def __init__(self, value: int = 1) -> None:
        super().__init__(value)
        self._bound = value


class SimpleQueue:
    """`queue.SimpleQueue`"""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._count = Semaphore(0)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._count.release()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        if not (self._count.acquire(timeout=timeout) if block else self._count.acquire(blocking=False)):
            raise queue.Empty
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def _timeout_ns(scheduler: Scheduler, timeout: float | None) -> int | None:
    return None if timeout is None else scheduler.clock.true_ns(int(max(0.0, timeout) * SECOND_NS))

"""What replaces the primitives below `threading` while a run is under way: locks, re-entrant locks and thread starts.

The standard library's `Thread`, `Condition`, `Event`, `Semaphore`, `Barrier`, `Timer`, `queue` and `ThreadPoolExecutor`
are written in Python on top of these and run unchanged.
"""

from __future__ import annotations

import _thread
import contextlib
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
        scheduler = running()
        if scheduler is None:
            return self._acquire_alone(blocking)
        _check_timeout(blocking, timeout)
        scheduler.point()
        if not self._held:
            self._held = True
            return True
        if not blocking or timeout == 0:
            return False
        task = scheduler.current
        assert task is not None
        limit_ns = None
        if timeout > 0:
            limit_ns = scheduler.now_ns + scheduler.clock.true_ns(int(timeout * SECOND_NS))
        while self._held:
            self._waiting.append(task)
            left_ns = None if limit_ns is None else limit_ns - scheduler.now_ns
            woken = scheduler.wait("a lock", left_ns)
            if not woken:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(task)
                if self._held:
                    return False
        self._held = True
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
        if self._waiting:
            scheduler = running()
            if scheduler is not None:
                _wake_one(scheduler, self._waiting)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._held = False
        self._waiting = []

    acquire_lock, release_lock, locked_lock = acquire, release, locked


class RLock:
    """`threading.RLock`, with what `threading.Condition` needs of it."""

    __slots__ = ("__weakref__", "_count", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _me()
        if self._owner is me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
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
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._owner is _me()

    def _release_save(self) -> tuple[int, object]:
        state = self._count, self._owner
        self._count, self._owner = 0, None
        self._lock.release()
        return state

    def _acquire_restore(self, state: tuple[int, object]) -> None:
        self._lock.acquire()
        self._count, self._owner = state

    def _recursion_count(self) -> int:
        return self._count if self._owner is _me() else 0

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


def _me() -> object:
    scheduler = running()
    return _os_thread() if scheduler is None else scheduler.current


def _scheduler_and_task() -> tuple[Scheduler, Task]:
    scheduler = running()
    assert scheduler is not None
    assert scheduler.current is not None
    return scheduler, scheduler.current


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

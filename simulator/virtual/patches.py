"""What is replaced while a run is under way, and put back after it: threads, time, chance and asyncio's loop.

Replaced are the attributes of the standard library's modules *and* every module attribute that is one of the replaced
objects under its own name (``from time import sleep``). Not reached: a function that was stored elsewhere before the
run (a default argument, a dictionary, an instance attribute).

A call from another OS thread, or from the harness itself, gets the real thing: whatever runs beside the simulation in
this process (pytest's plugins, a debugger) does not notice.

What cannot be simulated raises `SimulationError` and names the call: sockets, processes, signals.
"""

from __future__ import annotations

import _thread
import _threading_local
import asyncio
import concurrent.futures.thread
import contextlib
import datetime
import gc
import importlib
import itertools
import os
import queue
import random
import sys
import tempfile
import threading
import time
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ...reference import errors
from . import files, primitives
from .files import SameInstances
from .primitives import running
from .scheduler import SECOND_NS, RunningLoop, Scheduler, SimulationError

SUPPORTED = (3, 11), (3, 13)


class _Shutdown:
    """`concurrent.futures.thread._shutdown`: true for the threads of a rank whose main function has returned."""

    def __init__(self) -> None:
        self.ranks: set[int | None] = set()

    def __bool__(self) -> bool:
        scheduler = running()
        task = None if scheduler is None else scheduler.current
        return task is not None and task.rank in self.ranks


class Chance:
    """`os.urandom` and everything built on it, from the run's seed."""

    def __init__(self, seed: object) -> None:
        self._random = _RealRandom(f"chance/{seed}")

    def urandom(self, size: int) -> bytes:
        return self._random.randbytes(size)


_RealRandom = random.Random
_bootstrap: Any = importlib._bootstrap
_real_load = _bootstrap._find_and_load
_real = types.SimpleNamespace(
    sleep=time.sleep,
    time=time.time,
    time_ns=time.time_ns,
    monotonic=time.monotonic,
    monotonic_ns=time.monotonic_ns,
    perf_counter=time.perf_counter,
    perf_counter_ns=time.perf_counter_ns,
    localtime=time.localtime,
    gmtime=time.gmtime,
    strftime=time.strftime,
    ctime=time.ctime,
    urandom=os.urandom,
    seed=random.Random.seed,
    allocate_lock=_thread.allocate_lock,
    rlock=threading.RLock,
    local=threading.local,
    simple_queue=queue.SimpleQueue,
    start_new_thread=_thread.start_new_thread,
    set_sentinel=getattr(_thread, "_set_sentinel", None),
    get_ident=_thread.get_ident,
    get_native_id=threading.get_native_id,
    datetime=datetime.datetime,
    date=datetime.date,
    new_event_loop=asyncio.new_event_loop,
)
_chance: Chance | None = None


# -- time --------------------------------------------------------------------------------------------------------------


def _clock(real: Callable[[], Any], read: Callable[[Scheduler], Any]) -> Callable[[], Any]:
    def fake() -> Any:
        scheduler = running()
        if scheduler is None:
            return real()
        scheduler.now_ns += 100  # so that a loop which only looks at the clock comes to an end
        return read(scheduler)

    fake.__name__ = real.__name__
    return fake


def _wall_ns(scheduler: Scheduler) -> int:
    return scheduler.clock.wall_ns(scheduler.now_ns)


def _monotonic_ns(scheduler: Scheduler) -> int:
    return scheduler.clock.monotonic_ns(scheduler.now_ns)


def _sleep(seconds: float) -> None:
    scheduler = running()
    if scheduler is None:
        _real.sleep(seconds)
        return
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    scheduler.sleep(seconds)


def _of_now(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `time` whose last argument is the present time unless one is given."""

    def fake(*args: Any) -> Any:
        scheduler = running()
        wanted = 2 if real is _real.strftime else 1
        if scheduler is None or (len(args) >= wanted and args[-1] is not None):
            return real(*args)
        now_s = _wall_ns(scheduler) / SECOND_NS
        return real(args[0], _real.localtime(now_s)) if wanted == 2 else real(now_s)

    return fake


class _Datetime(_real.datetime, metaclass=SameInstances):  # type: ignore[name-defined]
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _real.datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _real.datetime.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return _real.datetime.fromtimestamp(time.time())


class _Date(_real.date, metaclass=SameInstances):  # type: ignore[name-defined]
    @classmethod
    def today(cls) -> Any:
        return _real.date.fromtimestamp(time.time())


# -- chance ------------------------------------------------------------------------------------------------------------


def _urandom(size: int) -> bytes:
    return _real.urandom(size) if running() is None or _chance is None else _chance.urandom(size)


def _seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """`random.Random.seed`, which takes its own entropy, below Python, when it is given none."""
    if a is None and running() is not None:
        a = int.from_bytes(_urandom(32), "big")
    _real.seed(self, a, version)


# -- threads -----------------------------------------------------------------------------------------------------------


def _or_real(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if running() is None else fake(*args, **kwargs)

    return either


def _class(real: type, fake: type) -> type:
    """A class that makes the fake in a simulated rank and the real thing elsewhere; instances of either are its own."""

    class Either(fake, metaclass=_EitherKind):
        _real = real

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if running() is not None:
                return super().__new__(cls)
            return cls._real(*args, **kwargs)

    Either.__name__ = Either.__qualname__ = real.__name__
    return Either


class _EitherKind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, cls._real)  # type: ignore[attr-defined]


def _hash_by_age(self: Any) -> int:
    """Hash of threads and futures: the standard library keeps sets of them, whose order must not come from memory."""
    scheduler = running()
    if scheduler is not None:
        return int(self.__dict__.setdefault("_deltaproof_age", next(scheduler.ages)))
    return int(self.__dict__.get("_deltaproof_age", object.__hash__(self)))


def _thread_died(args: Any) -> None:
    if args.exc_type is SystemExit:
        return
    scheduler = running()
    if scheduler is None:
        threading.__excepthook__(args)
    elif scheduler.thread_died is not None and not scheduler.reaping:
        scheduler.thread_died(args)


# -- asyncio -----------------------------------------------------------------------------------------------------------


class _Selector:
    """Waits for the loop's next timer, or for `call_soon_threadsafe`. No file descriptor is ever watched."""

    def __init__(self) -> None:
        self._awake = threading.Event()

    def select(self, timeout: float | None = None) -> list[Any]:
        self._awake.wait(timeout)
        self._awake.clear()
        return []

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None: ...

    def get_map(self) -> dict[int, Any]:
        return {}


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time, without files, sockets, processes and signals."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector()

    def _process_events(self, events: object) -> None: ...

    def _write_to_self(self) -> None:
        self._selector.wake()

    def close(self) -> None:
        super().close()
        self._selector.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    scheduler = running()
    if scheduler is None:
        return _real.new_event_loop()
    scheduler.loops = RunningLoop(asyncio._get_running_loop, asyncio._set_running_loop)
    return VirtualLoop()


# -- what cannot be simulated ------------------------------------------------------------------------------------------

#: Audit events of calls that leave the simulation, and what to do instead.
_REFUSED = {
    "socket.__new__": "reach the store through the client that the context gives you",
    "socket.connect": "reach the store through the client that the context gives you",
    "socket.bind": "reach the store through the client that the context gives you",
    "socket.getaddrinfo": "reach the store through the client that the context gives you",
    "subprocess.Popen": "use the process engine for targets that start processes",
    "os.fork": "use the process engine for targets that start processes",
    "os.forkpty": "use the process engine for targets that start processes",
    "os.exec": "use the process engine for targets that start processes",
    "os.posix_spawn": "use the process engine for targets that start processes",
    "os.spawn": "use the process engine for targets that start processes",
    "os.system": "use the process engine for targets that start processes",
    "os.kill": "use the process engine for targets that use signals",
    "signal.pthread_kill": "use the process engine for targets that use signals",
}
_audited = False


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event in _REFUSED and running() is not None:
        _raise(event, _REFUSED[event])


def _raise(call: str, instead: str) -> NoReturn:
    scheduler = running()
    where = "" if scheduler is None or scheduler.current is None else f" (in {scheduler.current.name!r})"
    raise SimulationError(f"{call} cannot be simulated{where}: {instead}")


# -- installing --------------------------------------------------------------------------------------------------------

_ABSENT = object()
_shutdown = _Shutdown()
_REPLACED: list[tuple[Any, str, Any]] = [
    (time, "sleep", _sleep),
    (time, "time", _clock(_real.time, lambda s: _wall_ns(s) / SECOND_NS)),
    (time, "time_ns", _clock(_real.time_ns, _wall_ns)),
    (time, "monotonic", _clock(_real.monotonic, lambda s: _monotonic_ns(s) / SECOND_NS)),
    (time, "monotonic_ns", _clock(_real.monotonic_ns, _monotonic_ns)),
    (time, "perf_counter", _clock(_real.perf_counter, lambda s: _monotonic_ns(s) / SECOND_NS)),
    (time, "perf_counter_ns", _clock(_real.perf_counter_ns, _monotonic_ns)),
    (time, "localtime", _of_now(_real.localtime)),
    (time, "gmtime", _of_now(_real.gmtime)),
    (time, "ctime", _of_now(_real.ctime)),
    (time, "strftime", _of_now(_real.strftime)),
    (datetime, "datetime", _Datetime),
    (datetime, "date", _Date),
    (os, "urandom", _urandom),
    (random, "_urandom", _urandom),
    (random.Random, "seed", _seed),
    (_thread, "get_ident", primitives.get_ident),
    (threading, "get_ident", primitives.get_ident),
    (threading, "get_native_id", primitives.get_ident),
    (threading, "_start_new_thread", _or_real(_real.start_new_thread, primitives.start_new_thread)),
    (threading, "_allocate_lock", _or_real(_real.allocate_lock, primitives.Lock)),
    (threading, "Lock", _or_real(_real.allocate_lock, primitives.Lock)),
    (threading, "RLock", _or_real(_real.rlock, primitives.RLock)),
    (threading, "Condition", _class(threading.Condition, primitives.Condition)),
    (threading, "Event", _class(threading.Event, primitives.Event)),
    (threading, "Semaphore", _class(threading.Semaphore, primitives.Semaphore)),
    (threading, "BoundedSemaphore", _class(threading.BoundedSemaphore, primitives.BoundedSemaphore)),
    (threading, "_set_sentinel", _or_real(_real.set_sentinel, primitives.set_sentinel)),
    (threading, "local", _threading_local.local),
    (threading.Thread, "__hash__", _hash_by_age),
    (concurrent.futures.Future, "__hash__", _hash_by_age),
    (threading, "excepthook", _thread_died),
    (queue, "SimpleQueue", _class(queue.SimpleQueue, primitives.SimpleQueue)),
    (concurrent.futures.thread, "_shutdown", _shutdown),
    (uuid, "_generate_time_safe", None),  # libuuid reads the real clock
    (uuid, "_node", 0x0200_0000_0001),
    (uuid, "_last_timestamp", None),
    (asyncio, "new_event_loop", _new_event_loop),
    (asyncio.events, "new_event_loop", _new_event_loop),
    *files.REPLACED,
]
#: What each run gets anew: names that count up, and what holds threads or locks.
_FRESH: list[tuple[Any, str, Callable[[], Any]]] = [
    (threading, "_counter", lambda: itertools.count(1).__next__),
    (concurrent.futures.ThreadPoolExecutor, "_counter", lambda: itertools.count().__next__),
    (concurrent.futures.thread, "_threads_queues", weakref.WeakKeyDictionary),
    (concurrent.futures.thread, "_global_shutdown_lock", primitives.ModuleLock),
    (tempfile, "_name_sequence", lambda: None),
    # Credentials that this process has met are no affair of the ranks', whose errors would be redacted otherwise.
    (errors, "_remembered", lambda: deque(maxlen=errors._remembered.maxlen)),
]
#: Real object -> its replacement, for names bound by ``from ... import ...``.
_BY_IDENTITY: dict[int, Any] = {
    id(vars(module)[name]): fake
    for module, name, fake in _REPLACED
    if isinstance(module, types.ModuleType) and callable(vars(module)[name]) and fake is not None
}
#: Modules whose own attributes stay real: this package's, `_thread`, which fakes use to stay outside, and Arrow's
#: compiled ones, whose classes others of its modules take by name when they are loaded.
_SPARED = (
    "deltaproof.simulator.virtual",
    "_thread",
    "faulthandler",
    "greenlet",
    "hypothesis",
    "pyarrow._",
    "_pytest",
    "xdist",
)
_searched: set[str] = set()
_found: list[tuple[Any, str, Any, Any]] = []
_modules_searched = 0


def _bindings() -> list[tuple[Any, str, Any, Any]]:
    """(module, name, real, fake) of every module attribute that is a replaced object; each module is searched once."""
    global _modules_searched
    if len(sys.modules) == _modules_searched:
        return _found
    _modules_searched = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name not in _searched:
            _searched.add(name)
            if isinstance(module, types.ModuleType) and not name.startswith(_SPARED):
                _found.extend(
                    (module, attribute, value, _BY_IDENTITY[id(value)])
                    for attribute, value in list(vars(module).items())
                    if id(value) in _BY_IDENTITY
                )
    return _found


Replacements = Callable[[], list[tuple[Any, str, Any]]]


def _loading(saved: list[tuple[Any, str, Any]], more: Replacements) -> Callable[..., Any]:
    """`importlib._bootstrap._find_and_load`, which loads what was not imported before the run as if there were none.

    Locks and clocks of a module outlive the run, and the lock of a module that loads knows nothing of tasks.
    """

    def load(*args: Any) -> Any:
        scheduler = running()
        if scheduler is None:
            return _real_load(*args)
        primitives.set_running(None)
        try:
            return _real_load(*args)
        finally:
            primitives.set_running(scheduler)
            for owner, name, fake in more():
                if vars(owner)[name] is not fake:
                    saved.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, fake)

    return load


@contextlib.contextmanager
def installed(scheduler: Scheduler, seed: object, more: Replacements = list) -> Iterator[None]:
    """Everything replaced, for a run of ``scheduler`` in this OS thread. ``more()``: further (object, name, fake),
    asked for again whenever a module was imported.

    Raises:
        SimulationError: a run is under way already, or this Python's threads are not known.
    """
    global _audited, _chance
    if primitives._running is not None:
        raise SimulationError("a simulated run is under way already: runs cannot be nested, nor run side by side")
    if not SUPPORTED[0] <= sys.version_info[:2] < SUPPORTED[1]:
        raise SimulationError("the virtual engine knows the threads of Python 3.11 and 3.12; use one of them")
    if not _audited:
        sys.addaudithook(_refuse)
        _audited = True
    # `_Datetime` and others read the names that are replaced here, so all are set before the first task runs.
    found = _bindings()
    saved: list[tuple[Any, str, Any]] = [(m, n, real) for m, n, real, _ in found]
    replaced = [(m, n, fake) for m, n, _, fake in found]
    fresh = [(owner, name, make()) for owner, name, make in _FRESH]
    importing = (_bootstrap, "_find_and_load", _loading(saved, more))
    for owner, name, fake in [*_REPLACED, *fresh, *more(), importing]:
        saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        replaced.append((owner, name, fake))
    state, loop = random.getstate(), asyncio._get_running_loop()
    active, limbo = dict(threading._active), dict(threading._limbo)  # type: ignore[attr-defined]
    collecting = gc.isenabled()
    gc.disable()  # a collection runs finalisers at moments that no seed decides
    for thread in threading.enumerate():
        thread.__dict__.setdefault("_deltaproof_age", hash(thread))  # they keep the hash they have
    _chance = Chance(seed)
    _shutdown.ranks.clear()
    random.seed(f"random/{seed}")
    for owner, name, fake in replaced:
        setattr(owner, name, fake)
    primitives.set_running(scheduler)
    try:
        yield
    finally:
        try:
            scheduler.reap()
        finally:
            primitives.set_running(None)
            asyncio._set_running_loop(loop)
            for owner, name, real in reversed(saved):
                if real is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, real)
            random.setstate(state)
            threading._active.clear()  # type: ignore[attr-defined]
            threading._active.update(active)  # type: ignore[attr-defined]
            threading._limbo.clear()  # type: ignore[attr-defined]
            threading._limbo.update(limbo)  # type: ignore[attr-defined]
            _chance = None
            if collecting:
                gc.enable()


def new_processes() -> None:
    """The ranks of a new attempt are other processes than those of the one before."""
    _shutdown.ranks.clear()


def is_daemon(ident: int) -> bool:
    """Whether the thread of this ident is one that an interpreter does not wait for at its end."""
    return bool(getattr(threading._active.get(ident), "daemon", False))  # type: ignore[attr-defined]


def end_of_main(rank: int | None) -> None:
    """What the interpreter does when a rank's main function returned: idle executor threads end.

    Non-daemon threads are waited for by the engine, which knows them.
    """
    _shutdown.ranks.add(rank)
    scheduler = running()
    assert scheduler is not None
    mine = {task.name for task in scheduler.tasks if task.rank == rank}
    for thread, work in list(concurrent.futures.thread._threads_queues.items()):
        if thread.name in mine:
            work.put(None)

"""One thread, many greenlets, one seeded choice at a time: the order of a run, and its time.

Tasks are greenlets. A task runs until it reaches a *scheduling point* (`point`), waits (`wait`, `sleep`) or ends; then
the policy picks who goes on. Time is virtual: an int of nanoseconds that moves by `TICK_NS` at each point, so that a
loop that polls a clock comes to an end, and jumps to the next timer when nobody can run. Each choice among two or more
options is recorded; the record replays the run exactly.

An option is also to let the next timer fire although somebody can run (a *warp*, within `WARP_NS`): real code takes
time between two points, and a time-out that races with it must be able to win. And a running task can be *stalled* for
`STALL_NS`, as by a busy machine, while all others go on.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import greenlet

_HERE = os.path.dirname(__file__)
TICK_NS: Final = 1_000
WARP_NS: Final = 20_000_000
STALL_NS: Final = 5_000_000
#: The choice, at a point of a running task, to stall it.
STALL: Final = -1
#: Scheduling points after which a run counts as a livelock: a loop that never waits.
POINTS_MAX: Final = 2_000_000
SECOND_NS: Final = 1_000_000_000
#: Where every run's true time begins: 2026-01-01T00:00:00Z for wall clocks, in nanoseconds since 1970.
EPOCH_NS: Final = 1_767_225_600 * SECOND_NS
#: What a rank's monotonic clock says at the beginning: not 0, which code might take for "never".
MONOTONIC_BASE_NS: Final = 1_000 * SECOND_NS


class SimulationError(RuntimeError):
    """Code under simulation did what cannot be simulated. The message names the call, and what to use instead."""


class ScheduleDiverged(RuntimeError):
    """A recorded schedule does not fit the run: the code, or what it depends on, is not what it was."""


class Policy(Protocol):
    """Who goes on. Every answer is recorded, in the order in which the questions are asked."""

    def gap(self) -> int:
        """How many points, from now on, a running task passes until `preempt` is asked: at least 1."""

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        """At a point of a running task: 0 lets it go on, 1..n picks ``ready[i - 1]``, n + 1 (if ``warp``) warps, and
        `STALL` stalls it."""

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        """After a task waited or ended: 0..n-1 picks ``ready[i]``, n (if ``warp``) warps."""

    def born(self, task: Task) -> None:
        """A task was made."""


class RunningLoop(NamedTuple):
    """How to read and set asyncio's running loop."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


class Task:
    """One greenlet: a thread of a rank, or one of the simulation's own (``rank`` None).

    ``ident`` is what `threading.get_ident` says in it. ``waits_for`` says, for reports, why it does not run.
    ``in_flight`` is what a store still does of this task's request should the rank be killed now.
    """

    __slots__ = (
        "_token",
        "alive",
        "greenlet",
        "ident",
        "in_flight",
        "joining",
        "name",
        "priority",
        "rank",
        "run",
        "sentinel",
        "timed_out",
        "waits_for",
    )

    def __init__(
        self, name: str, rank: int | None, ident: int, run: Callable[[], object], carrier: greenlet.greenlet
    ) -> None:
        self.name, self.rank, self.ident, self.run, self.greenlet = name, rank, ident, run, carrier
        self.alive = True
        self.waits_for: str | None = None
        self.timed_out = False
        self.sentinel: Any = None
        self.in_flight: Callable[[], object] | None = None
        self.joining: list[Task] = []
        self.priority = 0.0
        self._token = 0

    def __repr__(self) -> str:
        return f"<Task {self.name} rank={self.rank} {self.waits_for or 'ready'}>"

    def stack(self) -> str:
        """Python stack of a task that does not run now, innermost call last; "" when it has none."""
        frame = self.greenlet.gr_frame
        if frame is None:
            return ""
        lines = [entry for entry in traceback.extract_stack(frame) if os.path.dirname(entry.filename) != _HERE]
        return "".join(traceback.format_list(lines))


class RankClock:
    """Wall and monotonic clock of one rank, as functions of true time. ``drift_ppm`` moves both."""

    __slots__ = ("_base_ns", "_since_ns", "_wall_ns", "drift_ppm", "frozen", "on_monotonic", "on_wall")

    def __init__(self, drift_ppm: float = 0.0) -> None:
        self.drift_ppm = drift_ppm
        self.frozen = False
        #: Told about the next reading of either clock.
        self.on_wall: Callable[[], None] | None = None
        self.on_monotonic: Callable[[], None] | None = None
        self._since_ns = 0
        self._base_ns = 0  # elapsed on this rank's clock at _since_ns
        self._wall_ns = EPOCH_NS  # wall minus elapsed

    def elapsed_ns(self, now_ns: int) -> int:
        passed = now_ns - self._since_ns
        return self._base_ns + (passed if not self.drift_ppm else passed + int(passed * self.drift_ppm / 1e6))

    def true_ns(self, own_ns: int) -> int:
        """True time that passes while this rank's clock counts ``own_ns``."""
        return own_ns if not self.drift_ppm else int(own_ns / (1 + self.drift_ppm / 1e6))

    def wall_ns(self, now_ns: int) -> int:
        if self.on_wall is not None:
            told, self.on_wall = self.on_wall, None
            told()
        return self._wall_ns + (0 if self.frozen else self.elapsed_ns(now_ns))

    def monotonic_ns(self, now_ns: int) -> int:
        if self.on_monotonic is not None:
            told, self.on_monotonic = self.on_monotonic, None
            told()
        return MONOTONIC_BASE_NS + self.elapsed_ns(now_ns)

    def advance(self, seconds: float) -> None:
        """Let time pass at once, by both clocks."""
        self._base_ns += round(seconds * SECOND_NS)

    def shift(self, seconds: float) -> None:
        """Move the wall clock; negative moves it backwards."""
        self._wall_ns += round(seconds * SECOND_NS)

    def set_drift(self, drift_ppm: float, now_ns: int) -> None:
        self._base_ns, self._since_ns = self.elapsed_ns(now_ns), now_ns
        self.drift_ppm = drift_ppm

    def freeze(self, now_ns: int) -> None:
        """The wall clock stands still from now on."""
        if not self.frozen:
            self._wall_ns += self.elapsed_ns(now_ns)
            self.frozen = True


class Scheduler:
    """Runs tasks to the end of all of them. ``current`` is the running task, None outside of tasks.

    ``clocks``: one per rank. ``stuck`` says after `run` why tasks are left: "" (none are), "deadlock" (all wait and no
    timer is set) or "livelock" (`POINTS_MAX` points).
    """

    def __init__(self, policy: Policy, clocks: Sequence[RankClock], *, points_max: int = POINTS_MAX) -> None:
        self.policy, self.clocks = policy, clocks
        self.now_ns = 0
        self.points = 0
        self.points_max = points_max
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self.schedule: list[int] = []
        self.stuck = ""
        self.reaping = False
        #: Told what `threading.excepthook` is told when a thread ends by an exception.
        self.thread_died: Callable[[Any], None] | None = None
        #: The running asyncio loop of this OS thread, once a task has made a loop.
        self.loops: RunningLoop | None = None
        self.ages = itertools.count()
        self._own_clock = RankClock()
        self._ready: list[Task] = []
        self._timers: list[tuple[int, int, Task, int]] = []
        self._timer_seq = 0
        self._hub = greenlet.getcurrent()
        self._asks_at = self._gap()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def spawn(self, run: Callable[[], object], name: str, rank: int | None) -> Task:
        """Make a task; it runs when the policy picks it."""
        task = Task(name, rank, 1000 + len(self.tasks), run, greenlet.greenlet(self._body, self._hub))
        self.tasks.append(task)
        self._ready.append(task)
        self.policy.born(task)
        return task

    def _body(self) -> None:
        task = self.current
        assert task is not None
        if self.loops is not None:
            self.loops.set(None)
        try:
            task.run()
        except greenlet.GreenletExit:
            pass
        finally:
            task.alive = False
            task.waits_for = None
            for other in task.joining:
                self.wake(other)

    def join(self, task: Task) -> None:
        """The running task waits until another has ended."""
        assert self.current is not None
        while task.alive:
            task.joining.append(self.current)
            self.wait(f"the end of {task.name}")

    def run(self) -> None:
        """Run until no task can. Exceptions of a task's function come out of here: they are the simulation's own."""
        self._hub = greenlet.getcurrent()
        for made in self.tasks:
            made.greenlet.parent = self._hub
        try:
            while (task := self._next()) is not None:
                self.current = task
                task.greenlet.switch()
                if self.stuck:
                    return
        finally:
            self.current = None
        if any(task.alive for task in self.tasks):
            self.stuck = "deadlock"

    def point(self) -> None:
        """A scheduling point of the running task."""
        self.now_ns += TICK_NS
        self.points += 1
        if self.points >= self._asks_at:
            self._ask()

    def _ask(self) -> None:
        """Ask the policy whether the running task goes on."""
        if self.reaping or self.points >= self.points_max:
            self._tick()
        current = self.current
        assert current is not None
        ready, timers = self._ready, self._timers
        warp = False
        if timers:
            if timers[0][0] <= self.now_ns:
                self._fire()
            warp = bool(timers) and timers[0][0] - self.now_ns <= WARP_NS
        choice = 0
        if ready or warp:
            choice = self.policy.preempt(ready, current, warp)
            self.schedule.append(choice)
        self._asks_at = self.points + self._gap()
        if choice == len(ready) + 1:
            self._warp()
        elif choice == STALL:
            self.wait("stalled", STALL_NS)
        elif choice:
            task = ready[choice - 1]
            ready[choice - 1] = current
            self._switch(task)

    def _gap(self) -> int:
        gap = self.policy.gap()
        self.schedule.append(gap)
        return gap

    def wait(self, why: str, timeout_ns: int | None = None) -> bool:
        """The running task waits until `wake` (True) or until ``timeout_ns`` of true time passed (False)."""
        self._tick()
        task = self.current
        assert task is not None
        task.waits_for = why
        task.timed_out = False
        task._token += 1
        if timeout_ns is not None:
            self._timer_seq += 1
            heapq.heappush(self._timers, (self.now_ns + max(0, timeout_ns), self._timer_seq, task, task._token))
        other = self._next()
        if other is not task:
            self._switch(other)
        task.waits_for = None
        return not task.timed_out

    def _switch(self, other: Task | None) -> None:
        """Leave the running task for another (None: for the hub); returns when it is picked again."""
        carrier = self._hub if other is None else other.greenlet
        if other is not None:
            self.current = other
        if self.loops is None:
            carrier.switch()
        else:
            # asyncio keeps the running loop per OS thread, and all tasks share one.
            loop = self.loops.get()
            carrier.switch()
            self.loops.set(loop)
        if self.reaping:
            raise greenlet.GreenletExit

    def wake(self, task: Task) -> None:
        """Let a waiting task go on; nothing happens to one that does not wait or whose rank is gone."""
        if task.waits_for is not None and task.alive:
            task.waits_for = None
            task._token += 1
            self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        """The running task sleeps for ``seconds`` of its rank's clock."""
        own_ns = round(seconds * SECOND_NS)
        self.wait(f"sleep({seconds:g})", self.clock.true_ns(own_ns))

    def kill(self, rank: int) -> list[Task]:
        """End a rank as SIGKILL does: its tasks never run again, not even their `finally` blocks. Returns them.

        When the running task is one of them, this call does not return.
        """
        gone = [task for task in self.tasks if task.rank == rank and task.alive]
        for task in gone:
            task.alive = False
            task._token += 1
            if task.in_flight is not None and task.greenlet:
                self.spawn(task.in_flight, f"in flight from {task.name}", None)
        self._ready = [task for task in self._ready if task.alive]
        if self.current is not None and not self.current.alive:
            self.leave()
        return gone

    def leave(self) -> NoReturn:
        """Leave the running task, which nobody will wake, for ever."""
        other = self._next()
        if other is None:
            self._hub.switch()
        else:
            self.current = other
            other.greenlet.switch()
        raise greenlet.GreenletExit

    def reap(self) -> None:
        """After a run: unwind what is left. Every primitive raises GreenletExit by now, so nothing can happen."""
        self.reaping = True
        self._asks_at = 0
        handle, hook = logging.Logger.handle, sys.unraisablehook
        # Executors log every exception, and what is unwound here is nobody's.
        logging.Logger.handle = lambda *_: None  # type: ignore[method-assign]
        sys.unraisablehook = lambda _: None
        try:
            for task in self.tasks:
                for _ in range(100):
                    if not task.greenlet:
                        break
                    self.current = task
                    with contextlib.suppress(Exception):  # of a `finally` block that finds things half done
                        task.greenlet.throw(greenlet.GreenletExit)
            self.current = None
            self.tasks.clear()
            self._ready.clear()
            self._timers.clear()
        finally:
            logging.Logger.handle = handle  # type: ignore[method-assign]
            sys.unraisablehook = hook

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> RankClock:
        """The clock of the running task's rank; true time for the simulation's own tasks."""
        task = self.current
        return self._own_clock if task is None or task.rank is None else self.clocks[task.rank]

    @property
    def now_ms(self) -> float:
        """True time since the run began, in ms."""
        return self.now_ns / 1e6

    def _tick(self) -> None:
        if self.reaping:
            raise greenlet.GreenletExit
        self.now_ns += TICK_NS
        self.points += 1
        if self.points > self.points_max:
            self.stuck = "livelock"
            self._hub.switch()
            raise greenlet.GreenletExit

    def _fire(self) -> None:
        """Wake every task whose timer is due; drop timers of waits that ended."""
        timers = self._timers
        while timers and (timers[0][0] <= self.now_ns or timers[0][2]._token != timers[0][3]):
            _, _, task, token = heapq.heappop(timers)
            if task._token == token and task.waits_for is not None:
                task.timed_out = True
                task.waits_for = None
                task._token += 1
                self._ready.append(task)

    def _warp(self) -> None:
        self._skip_dead_timers()  # behind a dead one, which made the warp possible, the next may be far away
        if self._timers and self._timers[0][0] - self.now_ns <= WARP_NS:
            self.now_ns = max(self.now_ns, self._timers[0][0])
            self._fire()

    def _skip_dead_timers(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._token != timers[0][3]:
            heapq.heappop(timers)

    def _next(self) -> Task | None:
        """Who runs now, when the running task cannot: taken out of the ready tasks; None when nobody can, ever."""
        while True:
            timers = self._timers
            if timers and timers[0][0] <= self.now_ns:
                self._fire()
            ready = self._ready
            if ready:
                n = len(ready)
                warp = bool(timers) and timers[0][0] - self.now_ns <= WARP_NS
                if n == 1 and not warp:
                    return ready.pop()
                choice = self.policy.pick(ready, warp)
                self.schedule.append(choice)
                if choice == n:
                    self._warp()
                    continue
                task = ready[choice]
                ready[choice] = ready[-1]
                ready.pop()
                return task
            self._skip_dead_timers()
            if not timers:
                return None
            self.now_ns = timers[0][0]

    def waiting(self) -> Iterator[Task]:
        """Tasks that are alive and wait."""
        return (task for task in self.tasks if task.alive and task.waits_for is not None)


class RandomPolicy:
    """Uniform among what is ready; at each point a running task is left alone with probability 1 - ``preemption``.

    ``warp`` and ``stall`` are the probabilities of those choices at a point.
    """

    def __init__(self, seed: object, preemption: float = 0.2, warp: float = 0.01, stall: float = 0.0) -> None:
        self._random = random.Random(f"schedule/{seed}").random
        self._warp = warp
        total = preemption + warp + stall
        self._warps, self._stalls = warp / total, (warp + stall) / total
        self._scale = 1 / math.log1p(-min(total, 0.999))

    def born(self, task: Task) -> None: ...

    def gap(self) -> int:
        return 1 + int(math.log(1.0 - self._random()) * self._scale)  # geometric

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        drawn = self._random()
        if drawn < self._stalls:
            if drawn >= self._warps:
                return STALL
            if warp:
                return len(ready) + 1
        return 1 + int(self._random() * len(ready)) if ready else 0

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        if warp and self._random() < self._warp:
            return len(ready)
        return int(self._random() * len(ready))


class PctPolicy:
    """Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): random priorities, ``depth`` - 1 changes.

    The ready task of highest priority runs; at each of the change points, drawn among the first ``length`` choices, the
    running task falls below all others. A bug of depth d is met with probability of at least 1 / (tasks * length **
    (d - 1)). Time-outs fire early with probability ``warp``.
    """

    def __init__(self, seed: object, depth: int = 3, length: int = 1000, warp: float = 0.005) -> None:
        self._rng = random.Random(f"pct/{seed}")
        self._changes = sorted(self._rng.randrange(1, max(2, length)) for _ in range(depth - 1))
        self._warp = warp
        self._made = 0
        self._lowest = 0.0

    def born(self, task: Task) -> None:
        task.priority = 1.0 + self._rng.random()

    def gap(self) -> int:
        return 1

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        if self._warps(warp):
            return len(ready) + 1
        self._made += 1
        while self._changes and self._made >= self._changes[0]:
            self._changes.pop(0)
            self._lowest -= 1.0
            current.priority = self._lowest
        if not ready:
            return 0
        best = max(range(len(ready)), key=lambda i: ready[i].priority)
        return best + 1 if ready[best].priority > current.priority else 0

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        if self._warps(warp):
            return len(ready)
        self._made += 1
        return max(range(len(ready)), key=lambda i: ready[i].priority)

    def _warps(self, warp: bool) -> bool:
        return warp and self._rng.random() < self._warp


class RoundRobinPolicy:
    """No chance at all: a task runs until it waits, then the oldest of those that are ready goes on."""

    def born(self, task: Task) -> None: ...

    def gap(self) -> int:
        return POINTS_MAX

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        return 0

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        return min(range(len(ready)), key=lambda i: ready[i].ident)


def varied(seed: object) -> Policy:
    """A policy drawn from the seed: no single one finds every kind of bug (Burckhardt et al., section 6)."""
    draw = random.Random(f"policy/{seed}")
    kind = draw.randrange(4)
    if kind == 3:
        return PctPolicy(seed, depth=draw.randint(2, 4), length=draw.choice([100, 400, 1600]))
    return RandomPolicy(
        seed,
        preemption=(0.05, 0.2, 0.5)[kind],
        warp=draw.choice([0.0, 0.01, 0.05]),
        stall=draw.choice([0.0, 0.005, 0.05]),
    )


class ReplayPolicy:
    """Follows a recorded schedule (`Scheduler.schedule`).

    Raises:
        ScheduleDiverged: the record names an option that is not there, or ends too early.
    """

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule, self._at = schedule, 0

    def born(self, task: Task) -> None: ...

    def _take(self, least: int, most: int) -> int:
        if self._at >= len(self._schedule):
            raise ScheduleDiverged(f"the recorded schedule ends after {self._at} choices, the run does not")
        choice = self._schedule[self._at]
        self._at += 1
        if not least <= choice <= most:
            raise ScheduleDiverged(f"choice {self._at} of the recorded schedule is {choice}, not in {least} to {most}")
        return choice

    def gap(self) -> int:
        return self._take(1, sys.maxsize)

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        return self._take(STALL, len(ready) + warp)

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        return self._take(0, len(ready) - 1 + warp)


class SearchPolicy(RoundRobinPolicy):
    """Follows ``choices`` (no gaps: every point is one), then does as `RoundRobinPolicy`. Made by
    `preemption_bounded`."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self.taken: list[int] = []
        self.options: list[tuple[int, bool]] = []  # per choice: how many, and whether taking another is a preemption

    def gap(self) -> int:
        return 1

    def preempt(self, ready: Sequence[Task], current: Task, warp: bool) -> int:
        return self._take(1 + len(ready) + warp, 0, True)

    def pick(self, ready: Sequence[Task], warp: bool) -> int:
        return self._take(len(ready) + warp, super().pick(ready, warp), False)

    def _take(self, options: int, default: int, preemption: bool) -> int:
        at = len(self.taken)
        choice = self._choices[at] if at < len(self._choices) else default
        self.options.append((options, preemption))
        self.taken.append(choice)
        return choice


def preemption_bounded(run: Callable[[SearchPolicy], bool], bound: int, runs_max: int) -> list[int] | None:
    """Systematic search of small cases: every order with at most ``bound`` preemptions, fewest first.

    ``run`` runs once under the policy it is given and says whether all was well. Returns the choices (`SearchPolicy`)
    of the first run that was not, or None after all of them, or after ``runs_max``.
    """
    frontier: list[tuple[int, list[int]]] = [(0, [])]
    runs = 0
    while frontier and runs < runs_max:
        spent, prefix = frontier.pop(0)
        policy = SearchPolicy(prefix)
        runs += 1
        if not run(policy):
            return prefix
        for at in range(len(prefix), len(policy.options)):
            options, preemption = policy.options[at]
            cost = spent + preemption
            if cost > bound:
                continue
            for choice in range(options):
                if choice != policy.taken[at]:
                    # Cheaper orders first: the shortest explanation of a bug has the fewest preemptions.
                    place = next((i for i, other in enumerate(frontier) if other[0] > cost), len(frontier))
                    frontier.insert(place, (cost, [*policy.taken[:at], choice]))
    return None

"""The deterministic engine: one scenario, one seed, one history, byte for byte."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...fakes.feature_store_py.client import FeatureStoreClient
from ...fakes.server.faults import FaultPlan, Strike
from ...fakes.store import Store
from ...reference.delta import Rows
from ..disk import FaultyDisk, Shard, read_shards
from ..errors import KitError, ScenarioError
from ..faults import DiskCrash, DiskError
from ..history import (
    FINAL_SCHEMA,
    WRITES_SCHEMA,
    Attempt,
    Event,
    History,
    Leak,
    LedgerTable,
    RankOutcome,
    append_attempt,
    told_by_target,
)
from ..instrument import ObservedClient
from ..loop import Checkpoint, TrainingLoop
from ..scenario import Scenario
from ..store_faults import planned
from ..target import PASSWORD, PROJECT, VERSION, VIEW, RankContext, contents, resolve
from ..workload import Workload
from . import patches
from .collectives import Group, torch_replacements
from .files import ROOT, Disk, mounted
from .lines import preemptible
from .memory import held_bytes
from .network import VirtualTransport
from .scheduler import EPOCH_NS, SECOND_NS, Policy, RankClock, ReplayPolicy, Scheduler, varied
from .tables import Ledger, Model, VirtualSource, VirtualTrainer

_monotonic = time.monotonic
#: Set to planted values: what a trainer's own environment holds.
SECRET_VARIABLES = ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN", PASSWORD)


#: Folders of the virtual disk.
RETAINED, SPILLED = f"{ROOT}/retained", f"{ROOT}/spilled"


class VirtualEngine:
    """Runs scenarios in this thread, in virtual time. Same scenario, same target, same history.

    ``policy``: who goes on at a scheduling point, made from the scenario's seed and the run's ``variant`` (default:
    `scheduler.varied`). ``preempt``: names of modules (a package stands for all below it) whose lines are scheduling
    points too; a target's own package is always one of them, this package's never.
    """

    def __init__(self, policy: Callable[[object], Policy] = varied, preempt: Sequence[str] = ()) -> None:
        self._policy, self._preempt = policy, tuple(preempt)

    def __enter__(self) -> VirtualEngine:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def run(
        self,
        scenario: Scenario,
        target: str = "reference",
        *,
        variant: int = 0,
        schedule: Sequence[int] | None = None,
    ) -> History:
        """Run one scenario to its end.

        ``variant`` gives the same scenario another order of events; ``schedule``, the recorded choices of an earlier
        run, repeats that run.

        Raises:
            ScenarioError: bad input. ScheduleDiverged: the schedule does not fit. KitError: the harness itself failed.
        """
        scenario.checked()
        if (missing := lacks(scenario)) is not None:
            raise ScenarioError(f"{scenario.name}: the virtual engine has {missing}; use the process engine")
        seed = f"{scenario.seed}/{variant}" if variant else scenario.seed
        policy = self._policy(seed) if schedule is None else ReplayPolicy(schedule)
        began_s = _monotonic()
        resolve(target)  # imports it: whatever its modules do when they are imported is no part of the run
        kind, _, specimen = target.partition(":")
        with ExitStack() as undo:
            undo.enter_context(preemptible([*self._preempt, *_own_package(target)]))
            if kind == "specimen":
                # All ranks share this process, and it goes on: the bug is put in for the run only.
                specimens = importlib.import_module("...conformance.specimens", __package__)
                undo.enter_context(specimens.activate(specimen, {"TorchRecSource": VirtualSource}))
            history = _Job(scenario, "reference" if kind == "specimen" else target, policy).history()
        history.target = target
        history.wall_s = _monotonic() - began_s
        return history


def lacks(scenario: Scenario) -> str | None:
    """What this engine lacks to run a scenario, in words; None when it can."""
    return None if scenario.devices == "cpu" else f"no devices, and this scenario's are {scenario.devices!r}"


def _own_package(target: str) -> list[str]:
    module = target.partition(":")[0].partition(".")[0]
    return [] if module in ("reference", "specimen", "deltaproof") else [module]


class _Job:
    """One run: the store and the time that all attempts of a job share."""

    def __init__(self, scenario: Scenario, target: str, policy: Policy) -> None:
        self.scenario, self.target = scenario, target
        self.manifest = scenario.manifest()
        scheduler = self.scheduler = Scheduler(policy, [])
        scheduler.thread_died = self._thread_died
        self.events: list[Event] = []
        self.model = Model(scenario)
        self.chance = random.Random(f"network/{scenario.seed}")
        self.disk = Disk(scheduler, random.Random(f"disk/{scenario.seed}"))
        self.store = Store(lambda: (EPOCH_NS + scheduler.now_ns) // 1_000_000, monotonic_ms=lambda: scheduler.now_ms)
        self.store.reset([PROJECT])
        self.plan = _ToldPlan(lambda: scheduler.now_ms, self._struck)
        self.plan.set(planned(scenario))
        self.checkpoints: dict[tuple[int, int], tuple[list[Rows], list[Mapping[str, Any]]]] = {}
        self.refused: ScenarioError | None = None
        self.shared: dict[str, Any] = {}
        self.foreign: pa.Table | None = None  # what the target's own store holds, if it has one
        self.secrets = {
            name: hashlib.sha256(f"{name}/{scenario.seed}".encode()).hexdigest()[:32] for name in SECRET_VARIABLES
        }
        self.logged: list[str] = []
        self.attempts: list[_Attempt] = []

    @property
    def attempt(self) -> _Attempt:
        """The attempt under way."""
        return self.attempts[-1]

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """What else is replaced in a run: `torch.distributed`, which asks the attempt under way."""
        return torch_replacements(lambda: self.attempt.group)

    def history(self) -> History:
        scheduler = self.scheduler
        retained: list[Shard] | None = None
        with (
            self._environment(),
            mounted(self.disk),
            patches.installed(scheduler, self.scenario.seed, self.replacements),
        ):
            scheduler.spawn(self._launch, "supervisor", None)
            scheduler.run()
            if scheduler.stuck:
                self.attempt.end_rest("deadline")
            if self.refused is not None:
                raise self.refused
            schedule = scheduler.schedule
            if self.scenario.publisher.retain:
                retained = read_shards(Path(RETAINED))
        final, writes = self._content()
        if self.foreign is not None:
            final, writes = told_by_target(self.foreign, scheduler.now_ms, VERSION)
        fired = [0] * len(self.scenario.faults)
        for event in self.events:
            if event.kind == "fault":
                fired[event.data["index"]] += 1
        starts: list[Attempt] = []
        tables: dict[str, LedgerTable] = {}
        for run in self.attempts:
            start = run.outcome()
            mine = run.ledger.tables(self.manifest)
            restored = next((e for e in self.events if e.kind == "restored" and e.attempt == run.number), None)
            try:
                tables = append_attempt(tables, mine, start, starts, restored) if starts else mine
            except ValueError as error:
                raise KitError(f"the ledger of {self.scenario.name!r} contradicts itself: {error}") from error
            starts.append(start)
        history = History(
            scenario=self.scenario,
            target=self.target,
            engine="virtual",
            events=self.events,
            outcomes=starts[-1].outcomes,
            tables=tables,
            manifest=self.manifest,
            writes=writes.filter(pc.equal(writes["version"], VERSION)),
            strays=writes.filter(pc.not_equal(writes["version"], VERSION)),
            final=final,
            fired=fired,
            stacks=self.attempt.stacks,
            schedule=schedule,
            attempts=starts if len(starts) > 1 else [],
            retained=retained,
            store_log=self.foreign is None,
        )
        history.planted, history.leaks = tuple(self.secrets), self._leaks()
        return history

    def _launch(self) -> None:
        """What a launcher does: start the ranks, wait for their end, and start them again where that is planned."""
        for number in range(1 + len(self.scenario.restarts)):
            self.attempts.append(_Attempt(self, number))
            self.attempt.supervise()
            if self.attempt.succeeded:
                break
        if self.refused is None:
            try:
                self.foreign = contents(self.target, self.attempt.reader())
            except ScenarioError as error:
                self.refused = error

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """The planted secrets where a trainer finds its credentials, and everything logged kept in ``logged``.

        What is logged is what a process that says nothing of it logs: a record reads the clock, which moves it on, so
        the level that a user or a test of this process has set would tell in the history.
        """
        before = {name: os.environ.get(name) for name in self.secrets}
        root = logging.getLogger()
        level, disabled = root.level, root.manager.disable
        root.setLevel(logging.WARNING)
        root.manager.disable = logging.NOTSET
        handler = logging.Handler()
        handler.emit = self._log  # type: ignore[method-assign]
        root.addHandler(handler)
        os.environ.update(self.secrets)
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.manager.disable = disabled
            root.setLevel(level)  # which forgets what was enabled
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _log(self, record: logging.LogRecord) -> None:
        task = self.scheduler.current
        rank = None if task is None else task.rank
        self.logged.append(f"rank{rank} {record.levelname} {record.getMessage()}")

    def _leaks(self) -> list[Leak]:
        left = {"log": "\n".join(self.logged), "stacks": "\n".join(self.attempt.stacks.values())}
        left["events"] = msgspec.json.encode(self.events, enc_hook=str).decode()
        left |= {path: content.decode(errors="replace") for path, content in self.disk.contents().items()}
        return [
            Leak(name, file, text[max(0, at - 200) : at] + f"[{name}]")
            for file, text in left.items()
            for name, value in self.secrets.items()
            if (at := text.find(value)) >= 0
        ]

    def _content(self) -> tuple[pa.Table, pa.Table]:
        if not any(view.name == VIEW for view in self.store.views(PROJECT)):
            return FINAL_SCHEMA.empty_table(), WRITES_SCHEMA.empty_table()
        final = self.store.snapshot(PROJECT, VIEW, VERSION).table().select(FINAL_SCHEMA.names)
        return final, self.store.log(PROJECT, VIEW).select(WRITES_SCHEMA.names)

    def request(self, route: str, client: str, **data: Any) -> None:
        """Note what became of a request (event `request`)."""
        told = {"route": route, "client": client, **data}
        self.events.append(
            Event(t_ms=self.scheduler.now_ms, who="store", kind="request", rank=_rank_of(client), data=told)
        )

    def _struck(self, index: int, client: str) -> None:
        kind = self.scenario.faults[index].kind
        struck = {"index": index, "kind": kind, "client": client}
        self.events.append(
            Event(t_ms=self.scheduler.now_ms, who="store", kind="fault", rank=_rank_of(client), data=struck)
        )

    def _thread_died(self, args: Any) -> None:
        task = self.scheduler.current
        rank = None if task is None else task.rank
        message = f"{args.exc_type.__name__}: {args.exc_value}"
        events = _Events(self, f"rank{rank}", rank, self.attempt.number)
        events.write("thread-died", thread=getattr(task, "name", ""), error=message)


def _rank_of(client: str) -> int | None:
    number = client.removeprefix("rank")
    return int(number) if client.startswith("rank") and number.isdecimal() else None


class _ToldPlan(FaultPlan):
    """A plan that tells ``struck(index, client)`` of each firing."""

    def __init__(self, clock_ms: Callable[[], float], struck: Callable[[int, str], None]) -> None:
        super().__init__(clock_ms)
        self._struck = struck

    def strike(self, route: str, group: str, client: str) -> Strike:
        strike = super().strike(route, group, client)
        for index in strike.ids:
            self._struck(int(index), client)
        return strike


class _Attempt:
    """One start of the job: its ranks, their collectives, and their supervision with torchrun's semantics."""

    def __init__(self, job: _Job, number: int) -> None:
        self.job, self.number = job, number
        self.scenario = job.scenario.of_attempt(number)
        scheduler = self.scheduler = job.scheduler
        scheduler.clocks = [RankClock() for _ in range(self.scenario.world_size)]
        patches.new_processes()
        self.group = Group(scheduler, self.scenario.world_size)
        self.workload = Workload(self.scenario, number)
        self.ledger = Ledger(self.scenario, job.model)
        self.stacks: dict[int, str] = {}
        self.begin_ms, self.end_ms = scheduler.now_ms, float("inf")
        self._began_ns = scheduler.now_ns
        self._failed_at_ns: int | None = None
        self._outcomes: dict[int, RankOutcome] = {}
        self._events = _Events(job, "supervisor", None, number)
        self._supervisor = scheduler.current
        for rank in range(self.scenario.world_size):
            scheduler.spawn(functools.partial(self._process, rank), f"rank{rank}", rank)

    @property
    def succeeded(self) -> bool:
        return all(outcome.status == "ok" for outcome in self._outcomes.values())

    def reader(self) -> RankContext:
        """What a target is told that has to say what its own store holds: no model, no client, no barrier."""
        job = self.job
        return RankContext.reader(self.scenario, run=f"{job.scenario.name}-{job.scenario.seed}", shared=job.shared)

    def outcome(self) -> Attempt:
        """What became of it, for the history."""
        outcomes = [self._outcomes[rank] for rank in sorted(self._outcomes)]
        return Attempt(self.scenario.world_size, outcomes, begin_ms=self.begin_ms, end_ms=self.end_ms)

    # -- supervision ---------------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Until every rank is gone, by itself or by us. The first failure shortens everybody's deadline to the
        grace."""
        deadlines = self.scenario.deadlines
        while len(self._outcomes) < self.scenario.world_size:
            limit_ns = self._began_ns + int(deadlines.run_s * SECOND_NS)
            if self._failed_at_ns is not None:
                limit_ns = min(limit_ns, self._failed_at_ns + int(deadlines.grace_s * SECOND_NS))
            left_ns = limit_ns - self.scheduler.now_ns
            if left_ns <= 0:
                self.end_rest("deadline" if self._failed_at_ns is None else "ended")
                break
            self.scheduler.wait("the ranks", left_ns)
        self.end_ms = self.scheduler.now_ms

    def end_rest(self, why: Literal["deadline", "ended"]) -> None:
        """End the ranks that are left. One that raised but lives on has outstayed a deadline of its own."""
        for rank in range(self.scenario.world_size):
            if rank not in self._outcomes:
                status = "deadline" if self._error_of(rank) is not None else why
                self.stacks[rank] = "\n".join(
                    f"{task.name}: {task.waits_for or 'ready to run'}\n{task.stack()}"
                    for task in self.scheduler.tasks
                    if task.rank == rank and task.alive
                )
                self._events.write("rank-ended-by-supervisor", rank=rank, why=status, deadlock=self.scheduler.stuck)
                self._gone(rank, status, -9)
                if not self.scheduler.stuck:
                    self.scheduler.kill(rank)

    def _error_of(self, rank: int) -> Event | None:
        mine = (e for e in self.job.events if e.rank == rank and e.kind == "error" and e.attempt == self.number)
        return next(mine, None)

    def _gone(self, rank: int, status: str, code: int) -> None:
        """A rank's process has ended, or is about to."""
        error = self._error_of(rank)
        outcome = RankOutcome(rank, status, code, attempt=self.number)
        if error is not None:
            outcome.error = f"{error.data['type']}: {error.data['message']}"
            outcome.where, outcome.unacknowledged = error.data["where"], tuple(error.data["unacknowledged"])
        self._outcomes[rank] = outcome
        self.group.leave(rank)
        self.job.disk.end_process(rank)
        if status != "ok":
            self._failed()
        self._wake_supervisor()

    def _failed(self) -> None:
        if self._failed_at_ns is None:
            self._failed_at_ns = self.scheduler.now_ns
            self._wake_supervisor()

    def _wake_supervisor(self) -> None:
        if self._supervisor is not None:
            self.scheduler.wake(self._supervisor)

    # -- the processes -------------------------------------------------------------------------------------------------

    def _process(self, rank: int) -> None:
        """The process of one rank, from its first line to its exit."""
        events = _Events(self.job, f"rank{rank}", rank, self.number)
        loop = _Loop(self, rank, events)
        events.write("rank-start")
        status, code = "ok", 0
        try:
            loop.publish_and_train()
            events.write("rank-end", step=loop.own_step)
        except ScenarioError as error:
            self.job.refused = error
            status, code = "error", 2
        except Exception as error:
            events.write(
                "error",
                step=loop.step,
                type=type(error).__name__,
                message="; ".join([str(error), *getattr(error, "__notes__", ())]),
                where=loop.where,
                unacknowledged=list(getattr(error, "unacknowledged", ()) or ()),
                traceback=traceback.format_exc()[-4000:],
            )
            status, code = "error", 1
            self._failed()
        self._await_threads(rank)
        self._events.write("rank-exit", rank=rank, exitcode=code)
        self._gone(rank, status, code)
        self.scheduler.kill(rank)

    def _await_threads(self, rank: int) -> None:
        """The interpreter's own end: executors are told, and threads that are no daemons are waited for."""
        patches.end_of_main(rank)
        mine = [task for task in self.scheduler.tasks if task.rank == rank and task is not self.scheduler.current]
        for task in mine:
            if not patches.is_daemon(task.ident):
                self.scheduler.join(task)
        for task in mine:
            task.in_flight = None  # an exit closes connections after what was written to them

    def killed(self, rank: int) -> None:
        """SIGKILL of a rank, by the scenario, from within."""
        self._events.write("rank-exit", rank=rank, exitcode=-9)
        self._gone(rank, "killed", -9)
        self.scheduler.kill(rank)


class _Events:
    """Recorder of one rank, or of the supervisor."""

    def __init__(self, job: _Job, who: str, rank: int | None, attempt: int) -> None:
        self._job, self._who, self._rank, self._attempt = job, who, rank, attempt

    def write(self, kind: str, *, step: int | None = None, rank: int | None = None, **data: Any) -> None:
        self._job.events.append(
            Event(
                t_ms=self._job.scheduler.now_ms,
                who=self._who,
                kind=kind,
                rank=self._rank if rank is None else rank,
                step=step,
                data=data,
                attempt=self._attempt,
            )
        )


class _Loop(TrainingLoop):
    """The training loop of a simulated rank."""

    def __init__(self, attempt: _Attempt, rank: int, events: _Events) -> None:
        job, scenario = attempt.job, attempt.scenario
        super().__init__(scenario, rank, job.target, events, job.secrets, attempt.number)
        self._attempt, self._job = attempt, job
        self.trainer = self._model = VirtualTrainer(
            scenario, job.model, attempt.workload, rank, attempt.group, attempt.ledger, job.chance
        )
        if not attempt.number:
            self._model.begin()
        planned: list[tuple[int, DiskCrash] | tuple[int, DiskError]]
        planned = [*self._planned(DiskCrash), *self._planned(DiskError)]
        job.disk.faulty[rank] = FaultyDisk(
            planned, (RETAINED, SPILLED), self.points.fired, self._lose_power, job.disk.open
        )

        # To count what a target holds takes longer than a step: left out where no property would look at it.
        rows = scenario.world_size * scenario.workload.batch_size * scenario.workload.ids_per_sample_max
        step_bytes = sum(4 * t.dim * min(t.rows, rows * len(t.feature_names)) for t in scenario.tables)
        self._may_hold_much = step_bytes * scenario.workload.steps > scenario.publisher.queue_bytes_max

    def _lose_power(self) -> None:
        self._job.disk.lose_power(self.rank)
        self.die()

    def context(self) -> RankContext:
        job, rank, group = self._job, self.rank, self._attempt.group

        def client() -> Any:
            transport = VirtualTransport(job.scheduler, job.store, f"rank{rank}", job.plan, job.chance, job.request)
            return ObservedClient(FeatureStoreClient(transport=transport), self.points, self.events)

        return RankContext(
            rank=rank,
            world_size=self.scenario.world_size,
            tables=self.scenario.tables,
            config=self.scenario.publisher,
            model=self._model.source,
            client_factory=client,
            barrier=lambda: group.barrier(rank),
            endpoint="",
            version=self.version,
            dynamic=tuple(self._model.dynamic.handles.values()),
            retain=RETAINED if self.scenario.publisher.retain else None,
            spill=SPILLED if self.scenario.publisher.spill else None,
            run=f"{job.scenario.name}-{job.scenario.seed}",
            shared=job.shared,
        )

    def live_threads(self) -> list[threading.Thread]:
        mine = {task.ident for task in self._job.scheduler.tasks if task.rank == self.rank}
        active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined] # without its lock
        return [thread for ident, thread in active.items() if ident in mine]

    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        votes = self._attempt.group.exchange(self.rank, f"all_reduce ({how})", mine)
        return all(votes) if how == "all" else any(votes)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        group = self._attempt.group
        found = group.exchange(self.rank, "checkpoint (write)", (self._model.shards(), state))
        weights = self._model.assembled([shards for shards, _ in found])
        self._job.checkpoints[self.attempt, step] = weights, [state for _, state in found]
        group.exchange(self.rank, "checkpoint (done)")

    def restore(self) -> Checkpoint | None:
        newest = max(self._job.checkpoints, default=None)
        weights, states = self._job.checkpoints[newest] if newest else ([], [])
        if newest:
            self._model.load(weights)
        self._model.begin()
        return Checkpoint(*newest, states) if newest else None

    def shift_clock(self, seconds: float) -> None:
        clock = self._job.scheduler.clocks[self.rank]
        clock.shift(seconds)
        clock.on_wall = self.clock_read

    def advance_clocks(self, seconds: float) -> None:
        self._job.scheduler.clocks[self.rank].advance(seconds)
        self._tell_of_readings()

    def drift_clocks(self, ppm: float) -> None:
        self._job.scheduler.clocks[self.rank].set_drift(ppm, self._job.scheduler.now_ns)
        self._tell_of_readings()

    def freeze_clock(self) -> None:
        self._job.scheduler.clocks[self.rank].freeze(self._job.scheduler.now_ns)
        self._tell_of_readings()

    def _tell_of_readings(self) -> None:
        clock = self._job.scheduler.clocks[self.rank]
        clock.on_wall = self.clock_read
        clock.on_monotonic = lambda: self.clock_read(wall=False)

    def stall(self, seconds: float) -> None:
        self._job.scheduler.wait("a stall", int(seconds * SECOND_NS))

    def counting(self) -> AbstractContextManager[Counter[str]]:
        return self._attempt.group.counting()

    def resident_bytes(self) -> int | None:
        if not self._may_hold_much:
            return None
        tasks = (task for task in self._job.scheduler.tasks if task.rank == self.rank and task.alive)
        stacks = [task.greenlet.gr_frame for task in tasks]
        return self._model.bytes + held_bytes([self.publisher, *stacks])

    def die(self) -> None:
        self._attempt.killed(self.rank)

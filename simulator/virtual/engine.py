"""The deterministic engine: one scenario, one seed, one history, byte for byte."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from ...fakes.feature_store_py.client import FeatureStoreClient
from ...fakes.server.faults import FaultPlan
from ...fakes.store import Store
from ..errors import ScenarioError
from ..history import FINAL_SCHEMA, WRITES_SCHEMA, Event, History, RankOutcome
from ..instrument import ObservedClient
from ..loop import TrainingLoop
from ..scenario import Scenario
from ..store_faults import planned
from ..target import PROJECT, VERSION, VIEW, RankContext, resolve
from ..workload import Workload
from . import patches
from .collectives import Group
from .lines import preemptible
from .network import VirtualTransport
from .scheduler import EPOCH_NS, SECOND_NS, Policy, RankClock, ReplayPolicy, Scheduler, Task, varied
from .tables import Ledger, Model, VirtualTrainer

_monotonic = time.monotonic


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
        seed = f"{scenario.seed}/{variant}" if variant else scenario.seed
        policy = self._policy(seed) if schedule is None else ReplayPolicy(schedule)
        began_s = _monotonic()
        resolve(target)  # imports it: whatever its modules do when they are imported is no part of the run
        with preemptible([*self._preempt, *_own_package(target)]):
            history = _Run(scenario, target, policy).history()
        history.wall_s = _monotonic() - began_s
        return history


def _own_package(target: str) -> list[str]:
    module = target.partition(":")[0].partition(".")[0]
    return [] if module in ("reference", "specimen", "deltaproof") else [module]


class _Run:
    def __init__(self, scenario: Scenario, target: str, policy: Policy) -> None:
        self.scenario, self.target = scenario, target
        self.manifest = scenario.manifest()
        self.scheduler = Scheduler(policy, [RankClock() for _ in range(scenario.world_size)])
        self.scheduler.thread_died = self._thread_died
        self.events: list[Event] = []
        self.group = Group(self.scheduler, scenario.world_size)
        self.model = Model(scenario)
        self.workload = Workload(scenario)
        self.ledger = Ledger(self.model)
        self.chance = random.Random(f"network/{scenario.seed}")
        self.store = Store(lambda: (EPOCH_NS + self.scheduler.now_ns) // 1_000_000)
        self.store.reset([PROJECT])
        self.plan = FaultPlan(lambda: self.scheduler.now_ms)
        self.plan.set(planned(scenario))
        self.outcomes: dict[int, RankOutcome] = {}
        self.stacks: dict[int, str] = {}
        self.refused: ScenarioError | None = None
        self.failed_at_ns: int | None = None
        self._wake_supervisor: Task | None = None

    # -- the run -------------------------------------------------------------------------------------------------------

    def history(self) -> History:
        scenario, scheduler = self.scenario, self.scheduler
        with patches.installed(scheduler, scenario.seed, self.group.torch_replacements()):
            for rank in range(scenario.world_size):
                scheduler.spawn(lambda rank=rank: self._rank(rank), f"rank{rank}", rank)
            self._wake_supervisor = scheduler.spawn(self._supervise, "supervisor", None)
            scheduler.run()
            if scheduler.stuck:
                self._end_rest("deadline")
            if self.refused is not None:
                raise self.refused
            schedule = scheduler.schedule
        tables = self.ledger.tables(self.manifest)
        final, writes = self._content()
        fired = [0] * len(scenario.faults)
        for event in self.events:
            if event.kind == "fault":
                fired[event.data["index"]] += 1
        for entry in self.plan.fired():
            fired[int(entry.fault.id)] += entry.fired
        history = History(
            scenario=scenario,
            target=self.target,
            engine="virtual",
            events=self.events,
            outcomes=[self.outcomes[rank] for rank in sorted(self.outcomes)],
            tables=tables,
            manifest=self.manifest,
            writes=writes.filter(pc.equal(writes["version"], VERSION)),
            strays=writes.filter(pc.not_equal(writes["version"], VERSION)),
            final=final,
            fired=fired,
            stacks=self.stacks,
        )
        history.schedule = schedule
        return history

    def _content(self) -> tuple[pa.Table, pa.Table]:
        if not self.store.views(PROJECT):
            return FINAL_SCHEMA.empty_table(), WRITES_SCHEMA.empty_table()
        final = self.store.snapshot(PROJECT, VIEW, VERSION).table().select(FINAL_SCHEMA.names)
        return final, self.store.log(PROJECT, VIEW).select(WRITES_SCHEMA.names)

    def _rank(self, rank: int) -> None:
        """The process of one rank, from its first line to its exit."""
        events = _Events(self, f"rank{rank}", rank)
        loop = _Loop(self, rank, events)
        events.write("rank-start")
        code = 0
        try:
            loop.publish_and_train()
            events.write("rank-end", step=loop.own_step)
        except ScenarioError as error:
            self.refused = error
            code = 2
        except Exception as error:
            events.write(
                "error",
                step=loop.step,
                type=type(error).__name__,
                message=str(error),
                where=loop.where,
                unacknowledged=list(getattr(error, "unacknowledged", ()) or ()),
                traceback=traceback.format_exc()[-4000:],
            )
            code = 1
            self._failed(rank)
        # The interpreter's own end: executors are told, and threads that are no daemons are waited for.
        patches.end_of_main(rank)
        for task in self.scheduler.tasks:
            if task.rank == rank and task is not self.scheduler.current and not self._is_daemon(task):
                self.scheduler.join(task)
        for task in self.scheduler.tasks:
            if task.rank == rank and task is not self.scheduler.current:
                task.in_flight = None  # an exit closes connections after what was written to them
        self._exited(rank, code, loop)

    def _is_daemon(self, task: Task) -> bool:
        import threading

        thread = threading._active.get(task.ident)  # type: ignore[attr-defined]
        return bool(getattr(thread, "daemon", False))

    def _exited(self, rank: int, code: int, loop: TrainingLoop) -> None:
        error = next((e for e in self.events if e.who == f"rank{rank}" and e.kind == "error"), None)
        status = "error" if code else "ok"
        text = "" if error is None else f"{error.data['type']}: {error.data['message']}"
        where = "" if error is None else error.data["where"]
        steps = () if error is None else tuple(error.data["unacknowledged"])
        self.outcomes[rank] = RankOutcome(rank, status, code, text, where, steps)
        self._note("rank-exit", rank, exitcode=code)
        self._gone(rank)
        current = self.scheduler.current
        for task in self.scheduler.tasks:
            if task.rank == rank and task is not current:
                task.alive = False
        if current is not None:
            self.scheduler.kill(rank)

    def killed(self, rank: int) -> None:
        """SIGKILL of a rank, by the scenario."""
        self.outcomes[rank] = RankOutcome(rank, "killed", -9)
        self._note("rank-exit", rank, exitcode=-9)
        self._gone(rank)
        self._failed(rank)
        self.scheduler.kill(rank)

    def _gone(self, rank: int) -> None:
        self.group.leave(rank)
        if self._wake_supervisor is not None:
            self.scheduler.wake(self._wake_supervisor)

    def _failed(self, rank: int) -> None:
        if self.failed_at_ns is None:
            self.failed_at_ns = self.scheduler.now_ns
            if self._wake_supervisor is not None:
                self.scheduler.wake(self._wake_supervisor)

    def _supervise(self) -> None:
        """Torchrun's semantics in virtual time: the run's deadline, and the grace after the first failure."""
        deadlines, scheduler = self.scenario.deadlines, self.scheduler
        while len(self.outcomes) < self.scenario.world_size:
            limit_ns = int(deadlines.run_s * SECOND_NS)
            if self.failed_at_ns is not None:
                limit_ns = min(limit_ns, self.failed_at_ns + int(deadlines.grace_s * SECOND_NS))
            left_ns = limit_ns - scheduler.now_ns
            if left_ns <= 0:
                self._end_rest("deadline" if self.failed_at_ns is None else "ended")
                return
            scheduler.wait("the ranks", left_ns)

    def _end_rest(self, why: Literal["deadline", "ended"]) -> None:
        for rank in range(self.scenario.world_size):
            if rank in self.outcomes:
                continue
            error = next((e for e in self.events if e.who == f"rank{rank}" and e.kind == "error"), None)
            status = "deadline" if error is not None else why
            self.stacks[rank] = "\n".join(
                f"{task.name}: {task.waits_for or 'ready to run'}\n{task.stack()}"
                for task in self.scheduler.tasks
                if task.rank == rank and task.alive
            )
            self._note("rank-ended-by-supervisor", rank, why=status, deadlock=self.scheduler.stuck)
            text = "" if error is None else f"{error.data['type']}: {error.data['message']}"
            where = "" if error is None else error.data["where"]
            steps = () if error is None else tuple(error.data["unacknowledged"])
            self.outcomes[rank] = RankOutcome(rank, status, -9, text, where, steps)
            self.group.leave(rank)
            if not self.scheduler.stuck:
                self.scheduler.kill(rank)

    # -- events --------------------------------------------------------------------------------------------------------

    def write(self, who: str, kind: str, rank: int | None, step: int | None, data: dict[str, Any]) -> None:
        self.events.append(Event(t_ms=self.scheduler.now_ms, who=who, kind=kind, rank=rank, step=step, data=data))

    def _note(self, kind: str, rank: int, **data: Any) -> None:
        self.write("supervisor", kind, rank, None, data)

    def request(self, route: str, client: str, **data: Any) -> None:
        rank = int(client[4:]) if client.startswith("rank") and client[4:].isdigit() else None
        self.write("store", "request", rank, None, {"route": route, "client": client, **data})

    def _thread_died(self, args: Any) -> None:
        task = self.scheduler.current
        rank = None if task is None else task.rank
        message = f"{args.exc_type.__name__}: {args.exc_value}"
        self.write(f"rank{rank}", "thread-died", rank, None, {"thread": getattr(task, "name", ""), "error": message})


class _Events:
    """Recorder of one rank."""

    def __init__(self, run: _Run, who: str, rank: int) -> None:
        self._run, self._who, self._rank = run, who, rank

    def write(self, kind: str, *, step: int | None = None, **data: Any) -> None:
        self._run.write(self._who, kind, self._rank, step, data)


class _Loop(TrainingLoop):
    def __init__(self, run: _Run, rank: int, events: _Events) -> None:
        super().__init__(run.scenario, rank, run.target, events)
        self._run = run
        self._virtual = VirtualTrainer(run.model, run.workload, rank, run.group, run.ledger)
        self.trainer = self._virtual

    def context(self) -> RankContext:
        run, rank = self._run, self.rank

        def client() -> Any:
            transport = VirtualTransport(run.scheduler, run.store, f"rank{rank}", run.plan, run.chance, run.request)
            return ObservedClient(FeatureStoreClient(transport=transport), self.points, self.events)

        return RankContext(
            rank=rank,
            world_size=run.scenario.world_size,
            tables=run.scenario.tables,
            config=run.scenario.publisher,
            model=self._virtual.source,
            client_factory=client,
            barrier=lambda: run.group.exchange(rank, "barrier"),
            endpoint="",
        )

    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        votes = self._run.group.exchange(self.rank, f"all_reduce ({how})", mine)
        return all(votes) if how == "all" else any(votes)

    def shift_clock(self, seconds: float) -> None:
        clock = self._run.scheduler.clocks[self.rank]
        clock.shift(seconds)

        def read() -> None:
            clock.on_read = None
            self.clock_read()

        clock.on_read = read

    def die(self) -> None:
        self._run.killed(self.rank)

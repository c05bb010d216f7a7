"""Any sequence of steps, dumps, evaluations, checkpoints, crashes and restores ends with the store equal to the model.

Real publishers of several ranks on the fake store, with planned store faults. Their background threads are greenlets
that move only when the machine says so and stop at each request, so that a crash or a checkpoint can come between any
two; time is virtual. The truth is the machine's own: the model's weights, and which rows were ever trained.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import hypothesis
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deltaproof.fakes.feature_store_py import in_process_client
from deltaproof.fakes.server.faults import FaultPlan, PartialFault, ResetFault, StatusFault
from deltaproof.fakes.store import Store
from deltaproof.reference import publisher as publisher_module
from deltaproof.reference import restart, uploader
from deltaproof.reference.dumper import DATA_PARALLEL, Dumper, Pause, TableInfo, keys_of, merge_keys
from deltaproof.reference.publisher import Publisher
from deltaproof.reference.settings import Settings
from deltaproof.reference.uploader import Uploader, UploadError

WALL_S = 1_700_000_000.0
ROWS = {  # table: (owner, rows, sharding); the second is published under its twin's name
    "rw": ("m.ebc", 14, "row_wise"),
    "tw": ("m.ebc_user", 6, "table_wise"),
    "dp": ("m.ebc", 5, DATA_PARALLEL),
}
FQNS = {table: f"{owner}.embedding_bags.{table}" for table, (owner, _, _) in ROWS.items()}
NAMES = {table: full.replace("ebc_user", "ebc") for table, full in FQNS.items()}
DIM = 2
pytestmark = pytest.mark.timeout(300)  # seconds, of which an idle machine needs a few


class Simulation:
    """Virtual time, and the greenlets that stand for background threads. Also what `uploader.threading` is."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.current: Process | None = None
        self.ts_fell = False
        self.late: list[Callable[[], object]] = []  # requests of dead processes that the store has not seen yet

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Thread(self, target: Callable[[], None], **_: Any) -> Worker:  # noqa: N802
        assert self.current is not None
        return Worker(self.current, target)

    def Condition(self) -> Condition:  # noqa: N802
        assert self.current is not None
        return Condition(self.current)

    def land(self) -> None:
        landing, self.late = self.late, []
        for request in landing:
            request()


class Time:
    """What `uploader.time` and `publisher.time` are."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.simulation.now_s

    def sleep(self, wait_s: float) -> None:
        self.simulation.now_s += wait_s
        self.simulation.land()


class Clock:
    """A rank's own clock: off by `offset_s`, and `rate` seconds for each true one."""

    def __init__(self, simulation: Simulation, offset_s: float, rate: float) -> None:
        self.simulation, self.offset_s, self.rate = simulation, offset_s, rate

    def time(self) -> float:
        return WALL_S + self.offset_s + self.rate * self.simulation.now_s

    def monotonic(self) -> float:
        return self.rate * self.simulation.now_s


class Process:
    """One rank's process: its clock, its threads, what it has sent without an answer."""

    def __init__(self, simulation: Simulation, clock: Clock) -> None:
        self.simulation, self.clock = simulation, clock
        self.workers: list[Worker] = []
        self.views: list[View] = []
        self.dead = False
        self.ts_last = self.step = 0
        self.source: Any = None
        self.publisher: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Any]:
        before, self.simulation.current = self.simulation.current, self
        try:
            yield self.publisher
        finally:
            self.simulation.current = before

    def worker(self) -> Worker | None:
        return next((worker for worker in self.workers if worker.green is greenlet.getcurrent()), None)

    def point(self) -> None:
        """A place where a background thread may be overtaken, or die."""
        if (worker := self.worker()) is not None:
            worker.block(0.0)

    def advance(self) -> bool:
        """Let one background thread go to its next point; False when all of them wait."""
        ready = [worker for worker in self.workers if worker.wake_s <= self.simulation.now_s]
        if ready:
            ready[0].green.switch()
            self.workers = [worker for worker in self.workers if not worker.green.dead]
        return bool(ready)

    def wait(self, timeout_s: float) -> None:
        """The main thread waits: others move, and time passes when they cannot."""
        if not self.advance():
            until_s = min([self.simulation.now_s + timeout_s, *(worker.wake_s for worker in self.workers)])
            assert until_s < math.inf, "deadlock: the training thread waits for a thread that will never move"
            self.simulation.now_s = until_s

    def last_gasp(self, moves: int, requests: int) -> Callable[[], None]:
        """What a killed process still does: it makes some moves, or some of the requests on their way arrive."""
        sent = [(view, method, how) for view in self.views for method, how in view.outbox[:requests]]

        def land() -> None:
            for view, method, how in sent:
                getattr(view.real, method)(**how)
                view.real.write_flush()
            for _ in range(moves):
                self.advance()
            self.kill()

        return land

    def kill(self) -> None:
        self.dead = True
        for worker in self.workers:
            worker.green.throw()
        for view in self.views:
            view.real.close()


class Worker:
    """A background thread."""

    def __init__(self, process: Process, target: Callable[[], None]) -> None:
        self.process, self.green, self.wake_s = process, greenlet.greenlet(target), 0.0

    def start(self) -> None:
        self.process.workers.append(self)

    def is_alive(self) -> bool:
        return not self.green.dead

    def join(self, timeout: float = math.inf) -> None:
        deadline_s = self.process.simulation.now_s + timeout
        while self.is_alive() and self.process.simulation.now_s < deadline_s:
            self.process.wait(timeout)

    def block(self, timeout_s: float) -> None:
        self.wake_s = self.process.simulation.now_s + timeout_s
        assert self.green.parent is not None
        self.green.parent.switch()
        self.wake_s = 0.0


class Condition:
    def __init__(self, process: Process) -> None:
        self.process = process

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is preempted, so nothing needs a lock."""

    def wait(self, timeout: float | None = None) -> None:
        timeout_s = math.inf if timeout is None else timeout
        worker = self.process.worker()
        if worker is not None:
            worker.block(timeout_s)
        else:
            self.process.wait(timeout_s)

    def wait_for(self, predicate: Any, timeout: float | None = None) -> None:
        until_s = self.process.simulation.now_s + (math.inf if timeout is None else timeout)
        while not predicate() and self.process.simulation.now_s < until_s:
            self.wait(until_s - self.process.simulation.now_s)

    def notify_all(self) -> None:
        for worker in self.process.workers:
            worker.wake_s = 0.0


class View:
    """The fake's view, as one process sees it: requests are on their way until the flush, and may outlive it."""

    def __init__(self, real: Any, process: Process) -> None:
        self.real, self.process = real, process
        self.outbox: list[tuple[str, dict[str, Any]]] = []
        real._max_workers = 1  # requests in order, so that the same faults strike the same ones
        process.views.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write_features_arrow(self, **how: Any) -> None:
        self.write("write_features_arrow", how)

    def write_features(self, **how: Any) -> None:
        self.write("write_features", how)

    def write(self, method: str, how: dict[str, Any]) -> None:
        # Kept, not raised: the uploader would take an exception for an answer of the store.
        self.process.simulation.ts_fell |= how["ts"] <= self.process.ts_last
        self.process.ts_last = how["ts"]
        self.outbox.append((method, how))

    def write_flush(self) -> Any:
        self.process.point()  # sent, not applied
        if self.process.dead:
            raise ConnectionError("this process is dead")
        sent, self.outbox = self.outbox, []
        for method, how in sent:
            getattr(self.real, method)(**how)
        summary = self.real.write_flush()
        self.process.point()  # applied, and nobody knows yet
        return summary

    def close(self, wait: bool = True) -> None:
        self.real.close()


class Client:
    """The fake's client for one process; also its project."""

    def __init__(self, real: Any, process: Process) -> None:
        self.real, self.process = real, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get_project(self, name: str) -> Client:
        return Client(self.real.get_project(name), self.process)

    def get_dynamic_embedding_feature_view(self, name: str) -> View | None:
        found = self.real.get_dynamic_embedding_feature_view(name)
        return None if found is None else View(found, self.process)


class Model:
    """Weights of all ranks, and which rows were trained since the beginning of what the model remembers."""

    def __init__(self) -> None:
        self.weights = {t: np.full((rows, DIM), -1.0, np.float32) for t, (_, rows, _) in ROWS.items()}
        self.trained: set[tuple[str, int]] = set()
        self.step = 0

    def copy(self) -> Model:
        other = Model()
        other.weights = {table: rows.copy() for table, rows in self.weights.items()}
        other.trained, other.step = set(self.trained), self.step
        return other


class Source:
    """Table source of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.paused = job, rank, Pause()
        self.seen: dict[str, set[int]] = {}

    def tables(self) -> dict[str, TableInfo]:
        return {
            FQNS[table]: TableInfo(FQNS[table], owner, "ebc", table, (f"f_{table}",), rows, DIM, sharding, True)
            for table, (owner, rows, sharding) in ROWS.items()
        }

    def look_up(self, table: str, keys: list[int], batch_of: int) -> None:
        """What the tracker of this rank is told of a lookup that rank `batch_of` needs."""
        if not self.paused:
            wanted = np.array(keys, np.int64)
            here = self.hosts(FQNS[table], wanted) & (ROWS[table][2] != DATA_PARALLEL or batch_of == self.rank)
            self.seen.setdefault(FQNS[table], set()).update(wanted[here].tolist())

    def drain(self) -> dict[str, Any]:
        seen, self.seen = self.seen, {}
        return {fqn: np.array(sorted(keys), np.int64) for fqn, keys in seen.items() if keys}

    def hosts(self, fqn: str, keys: Any) -> Any:
        table, ranks = fqn.rpartition(".")[2], self.job.world_size
        _, rows, sharding = ROWS[table]
        block = -(-rows // ranks)
        owners = {"row_wise": keys // block, "table_wise": np.full_like(keys, ranks - 1)}
        return (keys >= 0) & (keys < rows) & (owners.get(sharding, self.rank) == self.rank)

    def gather(self, fqn: str, keys: Any) -> Any:
        assert self.hosts(fqn, keys).all()
        return self.job.model.weights[fqn.rpartition(".")[2]][keys]


class Job:
    """All ranks of one start of the job."""

    def __init__(self, machine: Convergence, model: Model, world_size: int, clocks: list[Clock]) -> None:
        self.model, self.world_size = model, world_size
        self.processes = [Process(machine.simulation, clocks[rank]) for rank in range(world_size)]
        for rank, process in enumerate(self.processes):
            process.source, process.step = Source(self, rank), model.step
            client = Client(in_process_client(machine.store, f"rank{rank}", machine.plan), process)
            process.publisher = Publisher(
                process.source,
                client,
                machine.settings,
                rank=rank,
                world_size=world_size,
                barrier=lambda: None,  # rank 0 starts first
                clock=process.clock,
            )

    def each(self, call: Callable[[Any], object]) -> None:
        for process in self.processes:
            with process.running() as publisher:
                call(publisher)


class Checkpoint:
    def __init__(self, model: Model, states: list[bytes]) -> None:
        self.model, self.states = model, states

    def load(self) -> list[dict[str, Any]]:
        return [pickle.loads(state) for state in self.states]


def numbers(text: int) -> list[int]:
    """Three numbers from 0 to 5, of one that is drawn: drawing takes most of the time."""
    return [text % 6, text // 6 % 6, text // 36]


def keys(text: int) -> list[int]:
    return list(range(text % 14, text % 14 + text // 14))


rows = st.tuples(st.sampled_from(list(itertools.product(ROWS, range(3)))), st.integers(14, 55).map(keys))
batches = st.lists(rows, max_size=3)
points = st.integers(0, 6**3 - 1).map(numbers)
clock = st.sampled_from(list(itertools.product([0.0, 3600.0, -3600.0, 0.25, -7.0], [1.0, 1.0, 0.5, 3.0])))
clocks = st.tuples(clock, clock, clock)
settings_changes = st.fixed_dictionaries(
    {
        "cadence": st.sampled_from([{"every_steps": 1}, {"every_steps": 3}, {"every_minutes": 0.05}]),
        "upload_format": st.sampled_from(["arrow", "json"]),
        "batch_size": st.sampled_from([2, 5]),
        "naming": st.sampled_from(["fqn", "role"]),
    }
)
faults = st.one_of(
    st.builds(StatusFault, id=st.just("f"), code=st.sampled_from([503, 429]), skip=st.integers(0, 2)),
    st.builds(StatusFault, id=st.just("f"), code=st.just(500), when=st.just("after-commit"), count=st.integers(1, 2)),
    st.builds(ResetFault, id=st.just("f"), when=st.sampled_from(["before-commit", "after-commit"])),
    st.builds(PartialFault, id=st.just("f"), rows_failed=st.integers(1, 2), count=st.integers(1, 2)),
    st.builds(StatusFault, id=st.just("f"), code=st.just(403)),
    st.builds(StatusFault, id=st.just("f"), code=st.just(503), count=st.just(9)),  # more than the retries
    st.builds(StatusFault, id=st.just("f"), route=st.just("changes"), code=st.just(503), count=st.sampled_from([2, 9])),
)


class Convergence(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(uploader, "threading", self.simulation)
        self.patch.setattr(uploader, "time", Time(self.simulation))
        self.patch.setattr(publisher_module, "time", Time(self.simulation))
        self.plan = FaultPlan(lambda: self.simulation.now_s * 1000)
        self.store = Store(lambda: int(WALL_S * 1000))
        self.ever: set[tuple[str, int]] = set()  # rows trained in any past, also a discarded one
        self.value = 0.0
        self.struck = False
        self.job: Job | None = None
        self.checkpoints: list[Checkpoint] = []
        self.checked = 0

    @initialize(world_size=st.integers(1, 3), clocks=clocks, changes=settings_changes, warm_up=batches)
    def begin(self, world_size: int, clocks: Any, changes: dict[str, Any], warm_up: Any) -> None:
        how = {name: value for name, value in changes.items() if name != "cadence"} | changes["cadence"]
        self.settings = Settings(
            project="deltaproof",
            view="v",
            version="v1",
            max_workers=2,
            queue_steps_max=2,
            retry_attempts_max=4,
            ttl_s=10**9,
            **how,
        )
        self.restore(None, world_size, clocks, warm_up, True)

    # -- the job -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.job)
    @rule(batch=batches, stopped=st.sets(st.integers(0, 2), max_size=1), emergency=st.booleans(), moves=points)
    def step(self, batch: Any, stopped: set[int], emergency: bool, moves: list[int]) -> None:
        """All ranks take part in the step; those of `stopped` have run out of data and do not count it as their own.

        `emergency`: when a rank's publisher reports an error, the job saves a checkpoint before it ends.
        """
        assert self.job is not None
        model = self.job.model
        model.step += 1
        self.simulation.now_s += 1.0
        for table, touched in self.look_up(self.job, batch):
            for key in touched:
                self.value += 1
                model.weights[table][key] = self.value
                model.trained.add((table, key))
        self.ever |= model.trained
        for rank, process in enumerate(self.job.processes):
            if rank not in stopped:
                process.step = model.step
                self.attempt(process, lambda publisher: publisher.after_step(model.step), emergency)
        self.upload(moves)

    @precondition(lambda self: self.job)
    @rule(batch=batches, nested=st.booleans(), fails=st.booleans())
    def evaluate(self, batch: Any, nested: bool, fails: bool) -> None:
        assert self.job is not None
        with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
            for process in self.job.processes:
                stack.enter_context(process.publisher.paused())
            if nested:
                for process in self.job.processes:
                    with process.publisher.paused():
                        pass
            self.look_up(self.job, batch)
            if fails:
                raise ZeroDivisionError

    @precondition(lambda self: self.job)
    @rule(moves=points)
    def upload(self, moves: list[int]) -> None:
        """The ranks' background threads go on to as many of their next points."""
        for process, times in zip(self.job.processes if self.job else (), moves, strict=False):
            for _ in range(times):
                process.advance()

    @precondition(lambda self: self.job)
    @rule(
        rank=st.integers(0, 2), by_s=st.sampled_from([-3600.0, -5.0, 5.0, 3600.0]), wait_s=st.sampled_from([0.0, 9.0])
    )
    def clock_jumps(self, rank: int, by_s: float, wait_s: float) -> None:
        assert self.job is not None
        self.job.processes[rank % self.job.world_size].clock.offset_s += by_s
        self.simulation.now_s += wait_s

    @rule(fault=st.none() | faults)
    def store_fault(self, fault: Any) -> None:
        """The store misbehaves in this way from now on, or no more."""
        self.struck = True
        self.plan.set([] if fault is None else [fault])

    # -- what ends a job, and what follows -----------------------------------------------------------------------------

    @precondition(lambda self: self.job)
    @rule()
    def checkpoint(self) -> None:
        assert self.job is not None
        states = [pickle.dumps(process.publisher.state_dict(self.job.model.step)) for process in self.job.processes]
        self.checkpoints.append(Checkpoint(self.job.model.copy(), states))

    @precondition(lambda self: self.job)
    @rule(moves=points, requests=points, warned=st.booleans())
    def crash(self, moves: list[int], requests: list[int], warned: bool = False) -> None:
        """Every process dies where it stands. Of what each had sent, some lands while the next job settles."""
        assert self.job is not None
        if warned:  # a preempted machine, say
            self.checkpoint()
        self.simulation.late += map(Process.last_gasp, self.job.processes, moves, requests)
        self.job = None

    @precondition(lambda self: not self.job)
    @rule(
        which=st.integers(0, 9),
        world_size=st.integers(1, 3),
        clocks=clocks,
        warm_up=batches,
        load_first=st.booleans(),
    )
    def restart(self, which: int, world_size: int, clocks: Any, warm_up: Any, load_first: bool) -> None:
        """A new job, from a checkpoint or, when there is none, from the beginning."""
        checkpoint = self.checkpoints[-1 - which % len(self.checkpoints)] if self.checkpoints else None
        self.restore(checkpoint, world_size, clocks, warm_up, load_first)

    @precondition(lambda self: self.job and self.checkpoints)
    @rule(which=st.integers(0, 9), warm_up=batches)
    def roll_back(self, which: int, warm_up: Any) -> None:
        """The running job goes back to a checkpoint, as after a loss that became NaN."""
        assert self.job is not None
        checkpoint = self.checkpoints[-1 - which % len(self.checkpoints)]
        self.checkpoints = self.checkpoints[: self.checkpoints.index(checkpoint) + 1]
        self.job.model = checkpoint.model.copy()
        self.look_up(self.job, warm_up)
        for process in self.job.processes:
            self.attempt(process, lambda publisher: publisher.load_state_dict(checkpoint.load()))

    def restore(
        self, checkpoint: Checkpoint | None, world_size: int, clocks: Any, warm_up: Any, load_first: bool
    ) -> None:
        made = [Clock(self.simulation, offset_s, rate) for offset_s, rate in clocks]
        if checkpoint is not None:
            self.checkpoints = self.checkpoints[: self.checkpoints.index(checkpoint) + 1]
        model = Model() if checkpoint is None else checkpoint.model.copy()
        self.job = job = Job(self, model, world_size, made)

        def load(publisher: Any) -> None:
            if checkpoint is not None:
                publisher.load_state_dict(checkpoint.load())
            else:
                publisher.start_over()

        calls: list[Callable[[Any], object]] = [Publisher.start]
        calls.insert(0 if load_first else 1, load)
        for call in calls:
            self.look_up(job, warm_up)
            for process in job.processes:
                self.attempt(process, call)
        self.simulation.land()  # what came too late to be seen; nothing, if the job settled

    @staticmethod
    def look_up(job: Job, batch: Any) -> list[tuple[str, list[int]]]:
        """Make the lookups of a batch: (table, rank whose batch it is), keys."""
        made = [(table, of % job.world_size, [key % ROWS[table][1] for key in drawn]) for (table, of), drawn in batch]
        for table, of, touched in made:
            for process in job.processes:
                process.source.look_up(table, touched, of)
        return [(table, touched) for table, _, touched in made]

    def attempt(self, process: Process, call: Callable[[Any], object], emergency: bool = False) -> None:
        """A call of the training loop. An error the publisher reports ends the job; any other is a bug."""
        if self.job is None:
            return
        try:
            with process.running() as publisher:
                call(publisher)
        except UploadError:
            assert self.struck, "a publisher failed, and no fault was planned"
            if emergency:
                self.checkpoint()
            self.crash([0, 0, 0], [0, 0, 0])

    # -- the truth -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.job)
    @rule()
    def finish(self) -> None:
        assert self.job is not None
        for process in self.job.processes:
            self.attempt(process, operator.methodcaller("finish", process.step))
        if self.job is not None:
            self.check()

    def check(self) -> None:
        assert self.job is not None
        assert not self.simulation.ts_fell, "a rank's ts did not grow strictly"
        model = self.job.model
        names = NAMES if self.settings.naming == "fqn" else {table: table for table in ROWS}
        tables = {name: table for table, name in names.items()}
        rows = self.store.snapshot("deltaproof", "v", "v1").table()
        stored = {
            (tables[pk], sk): embedding
            for pk, sk, embedding in zip(*(rows[c].to_pylist() for c in ("pk", "sk", "embedding")), strict=True)
        }
        expected = {(table, key): model.weights[table][key].tolist() for table, key in {*stored, *model.trained}}
        assert stored == expected, "the store differs from the model"
        assert stored.keys() <= self.ever, "rows that were never trained were published"
        self.checked += 1

    def teardown(self) -> None:
        try:
            if hasattr(self, "settings"):
                self.plan.set([])
                if self.job is None:
                    self.restore(self.checkpoints[-1] if self.checkpoints else None, 2, [(-3600.0, 1.0)] * 3, [], True)
                self.finish()
                if self.job is None:  # what failed before the store recovered is reported at the next call
                    self.restore(self.checkpoints[-1] if self.checkpoints else None, 2, [(-3600.0, 1.0)] * 3, [], True)
                    self.finish()
                assert self.checked
        finally:
            if self.job is not None:
                for process in self.job.processes:
                    process.kill()
            self.simulation.land()
            self.patch.undo()


def search(examples: int, *phases: hypothesis.Phase) -> None:
    how = hypothesis.settings(max_examples=examples, stateful_step_count=30, phases=phases, report_multiple_bugs=False)
    run_state_machine_as_test(Convergence, settings=how)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader.log, "disabled", True)


def test_the_store_ends_equal_to_the_model() -> None:
    search(150, hypothesis.Phase.generate, hypothesis.Phase.shrink)


def s01(self: Any, step: int) -> None:
    if step % (self._settings.every_steps or 1):
        self._publish(step, "final")


def s08(self: Any, job: Any, error: Exception) -> None:
    self._jobs.popleft()
    self._changed.notify_all()


def s12(self: Any, job: Any) -> Any:
    first = max(self._ts_last + 1, self._wall_ms())
    self._ts_last = first + math.ceil(job.table.num_rows / self._batch_size) - 1
    return range(first, first + 10**9)


def s13(self: Any, job: Any, original: Any = Uploader._stamps) -> Any:
    if getattr(self, "_kept", (None,))[0] is not job:
        self._kept = (job, original(self, job))
    return self._kept[1]


def s14(self: Any, job: Any) -> None:
    if getattr(self, "_tried_of", None) is not job:
        self._tried_of, self._tried = job, 0
    job.stamps = list(self._stamps(job))
    batches, width = list(self._batches(job.table)), self._settings.max_workers
    for start in range(self._tried * width, len(batches), width):
        self._tried += 1
        self._window(batches[start : start + width], job.stamps[start : start + width])


def s26(self: Any, original: Any = Dumper._collect) -> Any:
    touched = dict(original(self))
    quiet = self.__dict__.setdefault("_quiet", set())
    for fqn in self._tables:
        if not len(touched.get(fqn, ())):
            quiet.add(fqn)
        elif fqn in quiet:
            quiet.discard(fqn)
            del touched[fqn]
    return touched


@contextlib.contextmanager
def s29_never_ends(self: Pause) -> Iterator[None]:
    token = self._held.set(True)
    yield
    self._held.reset(token)


def s44(self: Any, touched: Any, original: Any = Dumper._targets) -> Any:
    return [fqn for fqn in original(self, touched) if self._tables[fqn].sharding != DATA_PARALLEL or self._rank == 0]


def s46(self: Any, step: int, table: pa.Table, original: Any = Uploader.submit) -> None:
    if step not in self.pending_steps() and step != self.acknowledged_step:
        original(self, step, table)


def queued_only(self: Any, uploader: Any) -> Any:
    return merge_keys(*(keys_of(table) for _, table in uploader.pending()))


def newest_watermark(states: Any, settings: Settings) -> restart.Restart:
    joined = restart.join(states, settings)
    return msgspec.structs.replace(joined, ts_min=joined.ts_max)


def first_state_only(states: Any, settings: Settings) -> restart.Restart:
    return restart.join([states[0] | {"world_size": 1}], settings)


BUGS: dict[str, tuple[Any, str, Any]] = {
    "S01 boundary-skip": (Publisher, "_flush_last", s01),
    "S02 no-final-flush": (Publisher, "_flush_last", lambda self, step: None),
    "S08 swallowed-worker-error": (Uploader, "_fail", s08),
    "S11 partial-flush-accepted": (Uploader, "_check_summary", lambda self, summary, rows, batches: None),
    "S12 ts-undercount": (Uploader, "_stamps", s12),
    "S13 retry-reuses-ts": (Uploader, "_stamps", s13),
    "S14 retry-tail-only": (Uploader, "_send", s14),
    "S15 clock-backwards": (Uploader, "_stamps", lambda self, job: range(self._wall_ms(), 10**15)),
    "S16 restart-behind": (Uploader, "_high_water_ts", lambda self: 0),
    "S26 quiet-shifts-cursor": (Dumper, "_collect", s26),
    "S29 eval-recorded": (Publisher, "paused", lambda self: contextlib.nullcontext()),
    "S29 pause-never-ends": (Pause, "__call__", s29_never_ends),
    "S30 restore-dummy": (Dumper, "discard", lambda self: None),
    "S31 pending-lost-on-crash": (Publisher, "_pending", lambda self, uploader: self._dumper.tracked()),
    "S31 tracked-lost-on-crash": (Publisher, "_pending", queued_only),
    "S32 discarded-future": (Publisher, "_discarded", lambda self, ts_min, uploader: {}),
    "S44 dp-rank0-only": (Dumper, "_targets", s44),
    "S46 duplicate-step-dropped": (Uploader, "submit", s46),
    "late requests unseen": (Publisher, "_settle", lambda self: None),
    "watermark of the newest rank": (publisher_module, "join", newest_watermark),
    "state of the first rank only": (publisher_module, "join", first_state_only),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_search_finds(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises(AssertionError):
        search(1000, hypothesis.Phase.generate)

"""The training loop of one rank, with the scenario's faults in it: the same on every engine.

An engine brings the trainer (model, weights, ledger), a way for ranks to agree, the context that a target is made with,
and the rank's clock.
"""

from __future__ import annotations

import abc
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from .disk import corrupt
from .errors import KitError
from .faults import (
    BadRow,
    ClockDrift,
    ClockFreeze,
    ClockJump,
    ClockOffset,
    ClockStall,
    CloseRaces,
    DuplicateTable,
    EvaluationRaises,
    Exhaustion,
    Fault,
    InjectedFault,
    QuietTable,
    RefusedVersion,
    ReservedKey,
    ShardCorrupted,
    StorageReplaced,
)
from .instrument import Points, Recorder
from .scenario import Scenario
from .target import VERSION, RankContext, make_publisher, readback
from .workload import Bags, Workload

F = TypeVar("F", bound=Fault)
#: How long threads may take to end after `close` has returned.
THREADS_END_S = 1.0
#: Names of threads that belong to the SDK or to this loop.
THREADS_OF_OTHERS = ("feature_store_py", "deltaproof-close")


class Trainer(Protocol):
    """Model and optimizer of one rank; writes the ledger."""

    workload: Workload

    def announce(self, step: int, bags: dict[str, Bags]) -> None:
        """Write the keys that this rank is about to look up."""

    def forward(self, bags: dict[str, Bags], rank_step: tuple[int, int]) -> Any:
        """Look up and compute; returns what `backward` takes."""

    def backward(self, loss: Any) -> None:
        """Update the weights."""

    def record(self, step: int) -> int:
        """Write the rows that changed since the last call; returns how many there were."""

    def evaluate(self, bags: dict[str, Bags], step: int) -> None:
        """A forward that must not be published."""

    def holders(self, table: str) -> list[str]:
        """FQNs of the tables that bear this bare name."""

    def warm_up(self) -> None:
        """Train on the workload's warm-up batches, which do not count, then put the weights back in place."""

    def spoil(self, table: str, value: float) -> int | None:
        """Put ``value`` into a row of a table of this bare name that is hosted here and changed since the last record.

        Returns its key, or None where there is no such row.
        """

    def replace_storage(self) -> None:
        """Move the weights of the sharded tables to other memory. What holds on to the old one sees no update."""


class Checkpoint(NamedTuple):
    """What a checkpoint says besides the weights: the attempt and lockstep step it was made in, and the states of all
    publishers."""

    attempt: int
    step: int
    states: list[Mapping[str, Any]]


class TrainingLoop(abc.ABC):
    """One rank of one run. ``step`` counts lockstep steps, ``own_step`` this rank's own; ``where`` is the target's call
    that is under way, or ``train``."""

    trainer: Trainer

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        target: str,
        events: Recorder,
        secrets: Mapping[str, str] | None = None,
        attempt: int = 0,
    ) -> None:
        """``secrets``: planted credentials of this rank, by name. ``scenario``: as ``attempt`` runs it, 0 the first."""
        self.scenario, self.rank, self.target, self.events = scenario, rank, target, events
        self.attempt = attempt
        self.points = Points(scenario, rank, events, self.die, secrets, attempt, self.stall)
        self.step = self.own_step = 0
        self.where = "train"
        self.publisher: Any = None
        self.exhaustion = next(self._planned(Exhaustion), None)
        self.policy = next((f.policy for f in scenario.faults if isinstance(f, Exhaustion)), None)
        #: Fault, by how much (seconds or ppm), whether the monotonic clock shows it too.
        self._misread: list[tuple[int, float, bool]] = []

    def _planned(self, kind: type[F], step: int | None = None) -> Iterator[tuple[int, F]]:
        """(index, fault) of the faults of a kind planned for this rank, and for this step when one is given."""
        for index, fault in enumerate(self.scenario.faults):
            mine = (getattr(fault, "rank", self.rank), getattr(fault, "attempt", self.attempt))
            due = step in (None, getattr(fault, "step", None))
            if isinstance(fault, kind) and mine == (self.rank, self.attempt) and due:
                yield index, fault

    @property
    def skewed(self) -> bool:
        """Whether this rank's clocks differ from the host's at some time of the run."""
        planned = (ClockOffset, ClockJump, ClockStall, ClockDrift, ClockFreeze)
        return self.scenario.workload.step_seconds > 0 or any(True for kind in planned for _ in self._planned(kind))

    @abc.abstractmethod
    def context(self) -> RankContext:
        """What the target's factory is told."""

    @abc.abstractmethod
    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        """A collective of the trainer's own: whether all, or any, of the ranks say yes."""

    @abc.abstractmethod
    def shift_clock(self, seconds: float) -> None:
        """Move this rank's wall clock; `clock_read` is to be called when somebody reads it next."""

    def advance_clocks(self, seconds: float) -> None:
        """Let time pass at once by this rank's clocks; `clock_read` is to be called when somebody reads either next."""
        raise KitError("the clocks of this engine cannot be moved on")

    def drift_clocks(self, ppm: float) -> None:
        """Let both of this rank's clocks run fast from now on; `clock_read` is to be called when somebody reads one."""
        raise KitError("the clocks of this engine cannot drift")

    def freeze_clock(self) -> None:
        """Stop this rank's wall clock; `clock_read` is to be called when somebody reads it next."""
        raise KitError("the clocks of this engine cannot be stopped")

    def stall(self, seconds: float) -> None:
        """Stand still for so long, by true time."""
        time.sleep(seconds)

    @abc.abstractmethod
    def die(self) -> None:
        """End this rank's process as SIGKILL does. Does not return."""

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Make a checkpoint of the model after ``step`` with ``state``, what this rank's publisher has to say. A
        collective of the trainer's own."""
        raise KitError("this engine makes no checkpoints")

    def restore(self) -> Checkpoint | None:
        """Put the weights of the newest whole checkpoint into the model and tell the ledger; None where there is
        none, which leaves the initial weights. A collective of the trainer's own."""
        raise KitError("this engine makes no checkpoints")

    def counting(self) -> AbstractContextManager[Counter[str]]:
        """Counts the collectives that this thread issues inside: ``"allreduce at trainer.py:12 in vote"`` -> number."""
        return contextlib.nullcontext(Counter())

    def resident_bytes(self) -> int | None:
        """Memory that this rank holds, where the engine can tell."""
        return None

    def live_threads(self) -> list[threading.Thread]:
        """This rank's threads."""
        return threading.enumerate()

    @property
    def version(self) -> str:
        """The store's version that the target is asked to publish to."""
        return next((fault.store_version for _, fault in self._planned(RefusedVersion)), VERSION)

    def publish_and_train(self) -> None:
        """From the target's factory to its `close`. What the target raises is raised, after it was closed."""
        if self.rank == 0:
            self._fire_duplicates()
        for index, offset in self._planned(ClockOffset):
            self._misread.append((index, offset.seconds, False))
            self.shift_clock(offset.seconds)
        for index, _ in self._planned(RefusedVersion):
            self.points.fired(index, version=self.version)
        context, threads = self.context(), set(self.live_threads())
        with self._in_target("factory"):
            publisher = self.publisher = make_publisher(self.target, context, self.scenario)
        if self.attempt:
            self._continue(publisher)
        if self.scenario.workload.warmup_batches:
            self.trainer.warm_up()
        self.points.passing("publisher.start")
        try:
            with self._in_target("start"):
                publisher.start()
            self.events.write("publisher-started", target=re.sub(r" at 0x\w+", "", repr(publisher)))
            self._train(publisher)
            self.points.passing("finish.before")
            for index, fault in self._planned(CloseRaces):
                self._close_from_another_thread(publisher, index, fault)
            with self._in_target("finish"):
                publisher.finish(self.own_step)
            self.events.write("finished", step=self.own_step)
        except BaseException as error:
            # As a `with publisher:` block would do it; the first exception is the one that counts.
            with contextlib.suppress(Exception):
                if hasattr(publisher, "__exit__"):
                    publisher.__exit__(type(error), error, error.__traceback__)
                else:
                    publisher.close()
            raise
        with self._in_target("close"):
            publisher.close()
        self.events.write("closed", step=self.own_step, threads=self._left_running(threads))
        self.points.passing("finish.after")
        if self.scenario.publisher.readback and self.agree(True, "all") and self.rank == 0:
            self._read_back()

    def _left_running(self, before: set[threading.Thread]) -> list[str]:
        """Names of the threads that the target did not end with `close`, after a moment to do so. The SDK's own, which
        end with its client, are none of its."""
        before = {*before, threading.current_thread()}
        left = [t for t in self.live_threads() if t not in before and not t.name.startswith(THREADS_OF_OTHERS)]
        for thread in left:
            thread.join(THREADS_END_S / len(left))
        return sorted(thread.name for thread in left if thread.is_alive())

    def _read_back(self) -> None:
        """Compare what was retained with the store, now that every rank is done."""
        context = self.context()
        for index, fault in self._planned(ShardCorrupted):
            damaged = context.retain and corrupt(Path(context.retain), fault.nth)
            if damaged:
                self.points.fired(index, shard=damaged)
        try:
            report = readback(self.target, context)
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        self.events.write("readback", report=report)

    def _continue(self, publisher: Any) -> None:
        """Restore model and publisher from the newest checkpoint, or let both begin anew."""
        found = self.restore()
        with self._in_target("load_state_dict"):
            if found is not None:
                publisher.load_state_dict(found.states)
            elif hasattr(publisher, "start_over"):
                publisher.start_over()
        self.step = self.own_step = 0 if found is None else found.step
        self.events.write("restored", step=self.step, checkpoint_of=None if found is None else found.attempt)

    def _train(self, publisher: Any) -> None:
        trainer, rank, workload = self.trainer, self.rank, self.scenario.workload
        for step in range(self.step + 1, workload.steps + 1):
            self.step = step
            self._before_step(step)
            mine = self._has_batch()
            if mine is None:
                break
            bags = trainer.workload.batch(rank, step) if mine else trainer.workload.empty_batch()
            self.points.passing("train.before-forward")
            trainer.announce(step, bags)
            loss = trainer.forward(bags, (rank, step))
            self.points.passing("train.before-backward")
            trainer.backward(loss)
            for index, bad in self._planned(BadRow, step):
                key = trainer.spoil(bad.table, float(bad.value))
                if key is not None:
                    self.points.fired(index, table=bad.table, key=key, value=bad.value)
            for index, reserved in self._planned(ReservedKey, step):
                self._look_up_reserved(index, reserved)
            changed = trainer.record(step)
            clock_s = time.monotonic()
            self.events.write("step", step=step, own_step=self.own_step + bool(mine), changed=changed, clock_s=clock_s)
            self.points.passing("train.after-step")
            if mine:
                self.own_step += 1
                self.points.passing("publish.before")
                with self._in_target("after_step"), self.counting() as collectives:
                    publisher.after_step(self.own_step)
                seen = {"resident_bytes": self.resident_bytes(), "collectives": dict(collectives)}
                self.events.write("after-step", step=self.own_step, **seen)
                self.points.passing("publish.after")
            if workload.eval_every_steps and step % workload.eval_every_steps == 0:
                self._evaluate(publisher, step)
            if workload.checkpoint_every_steps and step % workload.checkpoint_every_steps == 0:
                self.points.passing("checkpoint.before")
                with self._in_target("state_dict"):
                    state = publisher.state_dict(step)
                self.save(step, state)
                self.events.write("checkpoint", step=step)
                self.points.passing("checkpoint.after")

    def _before_step(self, step: int) -> None:
        """Whatever is planned to happen between the step before and this one."""
        if self.scenario.workload.step_seconds:
            self.advance_clocks(self.scenario.workload.step_seconds)
        for index, jump in self._planned(ClockJump, step):
            self._misread.append((index, jump.seconds, False))
            self.shift_clock(jump.seconds)
        for index, drift in self._planned(ClockDrift, step):
            self._misread.append((index, drift.ppm, True))
            self.drift_clocks(drift.ppm)
        for index, _ in self._planned(ClockFreeze, step):
            self._misread.append((index, 0.0, False))
            self.freeze_clock()
        for index, stall in self._planned(ClockStall, step):
            self._misread.append((index, stall.seconds, True))
            self.advance_clocks(stall.seconds)
        for index, _ in self._planned(StorageReplaced, step):
            self.trainer.replace_storage()
            self.points.fired(index)
        if self.rank == 0:
            for index, _ in self._planned(QuietTable, step):
                self.points.fired(index)

    def _look_up_reserved(self, index: int, fault: ReservedKey) -> None:
        for handle in self.context().dynamic:
            if handle.spec.name == fault.table:
                self.points.fired(index, table=handle.spec.fqn)
                for listener in handle.listeners:
                    listener(np.array([-1]))

    def _evaluate(self, publisher: Any, step: int) -> None:
        raises = next(self._planned(EvaluationRaises, step), None)
        try:
            with self._in_target("paused"), publisher.paused():
                self.trainer.evaluate(self.trainer.workload.eval_batch(self.rank, step), step)
                if raises is not None:
                    self.points.fired(raises[0])
                    raise InjectedFault(f"injected by the scenario: rank {self.rank}: the evaluation of step {step}")
        except InjectedFault:
            self.where = "train"
        self.events.write("evaluation", step=step)

    def _close_from_another_thread(self, publisher: Any, index: int, fault: CloseRaces) -> None:
        def close() -> None:
            time.sleep(fault.delay_ms / 1000)
            self.points.fired(index)
            try:
                publisher.close()
            except Exception as error:  # the training thread has an error of its own
                self.events.write("close-raced", message=str(error))

        threading.Thread(target=close, name="deltaproof-close", daemon=True).start()

    def _has_batch(self) -> bool | None:
        """Whether this rank has a batch of its own; None when training ends here."""
        if self.policy is None:
            return True
        left = self.exhaustion is None or self.step <= self.exhaustion[1].batches
        if not left and self.exhaustion is not None and self.step == self.exhaustion[1].batches + 1:
            self.points.fired(self.exhaustion[0], batches=self.exhaustion[1].batches, policy=self.policy)
        if self.policy == "fail-loudly":
            if not left:
                raise RuntimeError(
                    f"rank {self.rank}: data exhausted after {self.step - 1} batches while peers have more"
                )
            return True
        return left if self.agree(left, "all" if self.policy == "stop-together" else "any") else None

    @contextlib.contextmanager
    def _in_target(self, call: str) -> Iterator[None]:
        """While inside, an exception is the target's; it stays so noted when it leaves."""
        self.where = call
        yield
        self.where = "train"

    def clock_read(self, wall: bool = True) -> None:
        """A wrong clock counts as having struck when somebody read it; ``wall`` says whether it was the wall clock."""
        misread, self._misread = self._misread, []
        for index, wrong_by, by_both in misread:
            if wall or by_both:
                self.points.fired(index, wrong_by=wrong_by)
            else:
                self._misread.append((index, wrong_by, by_both))

    def _fire_duplicates(self) -> None:
        for index, fault in enumerate(self.scenario.faults):
            if isinstance(fault, DuplicateTable) and len(holders := self.trainer.holders(fault.table)) > 1:
                self.points.fired(index, tables=holders)

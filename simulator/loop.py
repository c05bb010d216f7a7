"""The training loop of one rank, with the scenario's faults in it: the same on every engine.

An engine brings the trainer (model, weights, ledger), a way for ranks to agree, the context that a target is made with,
and the rank's clock.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from .errors import ScenarioError
from .faults import ClockJump, ClockOffset, DuplicateTable, Exhaustion
from .instrument import Points, Recorder
from .scenario import Scenario
from .target import RankContext, resolve
from .workload import Bags, Workload


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


class TrainingLoop(abc.ABC):
    """One rank of one run. ``step`` counts lockstep steps, ``own_step`` this rank's own; ``where`` is the target's call
    that is under way, or ``train``."""

    trainer: Trainer

    def __init__(self, scenario: Scenario, rank: int, target: str, events: Recorder) -> None:
        self.scenario, self.rank, self.target, self.events = scenario, rank, target, events
        self.points = Points(scenario, rank, events, self.die)
        self.step = self.own_step = 0
        self.where = "train"
        mine = [(i, f) for i, f in enumerate(scenario.faults) if getattr(f, "rank", None) == rank]
        self.exhaustion = next(((i, f) for i, f in mine if isinstance(f, Exhaustion)), None)
        self.policy = next((f.policy for f in scenario.faults if isinstance(f, Exhaustion)), None)
        self.shifts = [(i, f) for i, f in mine if isinstance(f, ClockOffset | ClockJump)]
        self._shifted: list[tuple[int, float]] = []

    @abc.abstractmethod
    def context(self) -> RankContext:
        """What the target's factory is told."""

    @abc.abstractmethod
    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        """A collective of the trainer's own: whether all, or any, of the ranks say yes."""

    @abc.abstractmethod
    def shift_clock(self, seconds: float) -> None:
        """Move this rank's wall clock; `clock_read` is to be called when somebody reads it next."""

    @abc.abstractmethod
    def die(self) -> None:
        """End this rank's process as SIGKILL does. Does not return."""

    def publish_and_train(self) -> None:
        """From the target's factory to its `close`. What the target raises is raised, after it was closed."""
        if self.rank == 0:
            self._fire_duplicates()
        self._shift(ClockOffset)
        publisher = resolve(self.target)(self.context())
        missing = [m for m in ("start", "after_step", "paused", "finish", "close") if not hasattr(publisher, m)]
        if missing:
            raise ScenarioError(
                f"target {self.target!r} returned {type(publisher).__name__}, which has no {', '.join(missing)}; "
                "a publisher has start, after_step, paused, finish and close"
            )
        self.points.passing("publisher.start")
        try:
            with self._in_target("start"):
                publisher.start()
            self.events.write("publisher-started")
            self._train(publisher)
            self.points.passing("finish.before")
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
        self.events.write("closed", step=self.own_step)
        self.points.passing("finish.after")

    def _train(self, publisher: Any) -> None:
        trainer, rank = self.trainer, self.rank
        for step in range(1, self.scenario.workload.steps + 1):
            self.step = step
            self._shift(ClockJump)
            mine = self._has_batch()
            if mine is None:
                break
            bags = trainer.workload.batch(rank, self.step) if mine else trainer.workload.empty_batch()
            self.points.passing("train.before-forward")
            trainer.announce(self.step, bags)
            loss = trainer.forward(bags, (rank, self.step))
            self.points.passing("train.before-backward")
            trainer.backward(loss)
            changed = trainer.record(self.step)
            self.events.write("step", step=self.step, own_step=self.own_step + bool(mine), changed=changed)
            self.points.passing("train.after-step")
            if mine:
                self.own_step += 1
                self.points.passing("publish.before")
                with self._in_target("after_step"):
                    publisher.after_step(self.own_step)
                self.events.write("after-step", step=self.own_step)
                self.points.passing("publish.after")
            every = self.scenario.workload.eval_every_steps
            if every and self.step % every == 0:
                with publisher.paused():
                    trainer.evaluate(trainer.workload.eval_batch(rank, self.step), self.step)

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

    def _shift(self, kind: type[ClockOffset] | type[ClockJump]) -> None:
        for index, fault in self.shifts:
            if isinstance(fault, kind) and getattr(fault, "step", self.step) == self.step:
                self._shifted.append((index, fault.seconds))
                self.shift_clock(fault.seconds)

    def clock_read(self) -> None:
        """A wrong clock counts as having struck when somebody read it."""
        shifted, self._shifted = self._shifted, []
        for index, seconds in shifted:
            self.points.fired(index, seconds=seconds)

    def _fire_duplicates(self) -> None:
        for index, fault in enumerate(self.scenario.faults):
            if isinstance(fault, DuplicateTable) and len(holders := self.trainer.holders(fault.table)) > 1:
                self.points.fired(index, tables=holders)

"""One rank of a run: joins the process group, trains, publishes, and writes down what happened.

Everything it learns from is in ``RankSpec``; everything it leaves is in the run's folder: ``rank<r>.events.jsonl``,
``rank<r>.ledger.arrows`` and ``rank<r>.log`` (stdout and stderr).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clocks import SkewedClock
from ..errors import ScenarioError
from ..faults import ClockJump, ClockOffset, DuplicateTable, Exhaustion
from ..history import EventWriter, LedgerWriter
from ..instrument import ObservedClient, Points
from ..scenario import Scenario
from ..target import RankContext, resolve

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSpec:
    """What the supervisor tells a rank. ``endpoint``: host:port of the store; ``folder``: of this run."""

    scenario: str
    rank: int
    target: str
    endpoint: str
    folder: str


def die_with_parent() -> None:
    """End this process when the supervisor is gone, even by SIGKILL: nothing outlives it.

    The kernel signals the death of the parent, which under a forkserver is the forkserver; a thread waits for the end
    of the process that asked for this one, because the forkserver may have been gone before this line ran.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:

        def watch() -> None:
            multiprocessing.connection.wait([supervisor.sentinel])
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="deltaproof-supervisor-watch", daemon=True).start()


def main(spec: RankSpec) -> None:
    """Entry point of a rank process. Exits 0 after a clean run and 1 after any exception, which it records first."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle: it ends the ranks in order
    folder, rank = Path(spec.folder), spec.rank
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"rank{rank}.stacks", "w"), all_threads=True)  # noqa: SIM115
    scenario = Scenario.from_json(spec.scenario)
    events = EventWriter(folder / f"rank{rank}.events.jsonl", f"rank{rank}", rank)
    events.write("rank-start", pid=os.getpid(), preloaded="torchrec" in sys.modules)
    run = Run(scenario, spec, events)
    try:
        run.everything()
    except ScenarioError as error:
        events.write("bad-input", message=str(error))
        sys.exit(2)
    except BaseException as error:
        events.write(
            "error",
            step=run.step,
            type=type(error).__name__,
            message=str(error),
            where=run.where,
            unacknowledged=list(getattr(error, "unacknowledged", ()) or ()),
            traceback=traceback.format_exc()[-4000:],
        )
        traceback.print_exc()
        # The supervisor gives this rank a grace from here on, should it not manage to exit.
        (folder / f"rank{rank}.failed").touch()
        sys.exit(1)
    events.write("rank-end", step=run.own_step)


class Run:
    """The training loop of one rank, with the scenario's faults in it."""

    def __init__(self, scenario: Scenario, spec: RankSpec, events: EventWriter) -> None:
        self.scenario, self.spec, self.events = scenario, spec, events
        self.points = Points(scenario, spec.rank, events)
        self.step = self.own_step = 0
        self.where = "train"
        mine = [(i, f) for i, f in enumerate(scenario.faults) if getattr(f, "rank", None) == spec.rank]
        self.exhaustion = next(((i, f) for i, f in mine if isinstance(f, Exhaustion)), None)
        self.policy = next((f.policy for f in scenario.faults if isinstance(f, Exhaustion)), None)
        self.shifts = [(i, f) for i, f in mine if isinstance(f, ClockOffset | ClockJump)]
        self._shifted: list[tuple[int, float]] = []
        self.clock = SkewedClock(self._clock_read)
        if self.shifts:
            self.clock.install()

    def everything(self) -> None:
        import torch
        import torch.distributed as dist

        from .model import Trainer

        spec, scenario = self.spec, self.scenario
        os.environ.update(
            RANK=str(spec.rank),
            WORLD_SIZE=str(scenario.world_size),
            # Every rank is its own host for TorchRec: one device each, no assumption about neighbours.
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            GLOO_SOCKET_IFNAME="lo",
        )
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            # A file instead of a port: no other process can take it in between.
            init_method=f"file://{spec.folder}/rendezvous",
            rank=spec.rank,
            world_size=scenario.world_size,
            timeout=datetime.timedelta(seconds=scenario.deadlines.run_s),
        )
        ledger = LedgerWriter(Path(spec.folder) / f"rank{spec.rank}.ledger.arrows")
        self.trainer = Trainer(scenario, spec.rank, ledger, torch.device("cpu"))
        self.events.write("model-ready", shards=len(self.trainer._shards))
        if spec.rank == 0:
            self._fire_duplicates()
        self._shift(ClockOffset)
        publisher = resolve(spec.target)(self._context())
        missing = [m for m in ("start", "after_step", "paused", "finish", "close") if not hasattr(publisher, m)]
        if missing:
            raise ScenarioError(
                f"target {spec.target!r} returned {type(publisher).__name__}, which has no {', '.join(missing)}; "
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
        ledger.close()
        dist.destroy_process_group()

    def _train(self, publisher: Any) -> None:
        trainer, rank = self.trainer, self.spec.rank
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
        """Whether this rank has a batch of its own; None when training ends here. Collectives are the trainer's own."""
        if self.policy is None:
            return True
        import torch
        import torch.distributed as dist

        left = self.exhaustion is None or self.step <= self.exhaustion[1].batches
        if not left and self.exhaustion is not None and self.step == self.exhaustion[1].batches + 1:
            self.points.fired(self.exhaustion[0], batches=self.exhaustion[1].batches, policy=self.policy)
        if self.policy == "fail-loudly":
            if not left:
                raise RuntimeError(
                    f"rank {self.spec.rank}: data exhausted after {self.step - 1} batches while peers have more"
                )
            return True
        flag = torch.tensor([int(left)])
        dist.all_reduce(flag, dist.ReduceOp.MIN if self.policy == "stop-together" else dist.ReduceOp.MAX)
        return left if int(flag) else None

    # -------------------------------------------------------------------------------------------- faults and seams
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
                self.clock.shift(fault.seconds)

    def _clock_read(self) -> None:
        """A wrong clock counts as having struck when somebody read it."""
        shifted, self._shifted = self._shifted, []
        for index, seconds in shifted:
            self.points.fired(index, seconds=seconds)

    def _fire_duplicates(self) -> None:
        names = [name.removesuffix(".weight") for name in self.trainer.model.state_dict()]
        for index, fault in enumerate(self.scenario.faults):
            if isinstance(fault, DuplicateTable):
                holders = [n for n in names if n.rsplit(".", 1)[-1] == fault.table]
                if len(holders) > 1:
                    self.points.fired(index, tables=holders)

    def _context(self) -> RankContext:
        import torch.distributed as dist

        from ...fakes.feature_store_py import FeatureStoreClient

        def client() -> Any:
            inner = FeatureStoreClient(
                access_key_id="deltaproof",
                access_key_secret="deltaproof",
                region="local",
                endpoint=self.spec.endpoint,
                featuredb_username=f"rank{self.spec.rank}",
                featuredb_password="deltaproof",
            )
            return ObservedClient(inner, self.points, self.events)

        return RankContext(
            rank=self.spec.rank,
            world_size=self.scenario.world_size,
            tables=self.scenario.tables,
            config=self.scenario.publisher,
            model=self.trainer.model,
            client_factory=client,
            barrier=dist.barrier,
            endpoint=self.spec.endpoint,
        )

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
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..clocks import SkewedClocks
from ..disk import FaultyDisk
from ..errors import ScenarioError
from ..faults import DiskCrash, DiskError
from ..history import EventWriter, LedgerWriter
from ..instrument import ObservedClient
from ..loop import Checkpoint, TrainingLoop
from ..scenario import Scenario
from ..target import PASSWORD, RankContext

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSpec:
    """What the supervisor tells a rank. ``endpoint``: host:port of the store; ``folder``: of this run; ``secrets``:
    environment variables with values that must not appear in anything the run leaves behind; ``attempt``: 0 for the
    first start of the job; ``run``: the folder of the run, which all attempts share."""

    scenario: str
    rank: int
    target: str
    endpoint: str
    folder: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    attempt: int = 0
    run: str = ""


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
    os.environ.update(spec.secrets)
    scenario = Scenario.from_json(spec.scenario).of_attempt(spec.attempt)
    events = EventWriter(folder / f"rank{rank}.events.jsonl", f"rank{rank}", rank, spec.attempt)
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
            message="; ".join([str(error), *getattr(error, "__notes__", ())]),
            where=run.where,
            unacknowledged=list(getattr(error, "unacknowledged", ()) or ()),
            traceback=traceback.format_exc()[-4000:],
        )
        traceback.print_exc()
        # The supervisor gives this rank a grace from here on, should it not manage to exit.
        (folder / f"rank{rank}.failed").touch()
        sys.exit(1)
    events.write("rank-end", step=run.own_step)


class Run(TrainingLoop):
    """The training loop of a real rank: TorchRec's model, torch.distributed, the fake store over HTTP."""

    def __init__(self, scenario: Scenario, spec: RankSpec, events: EventWriter) -> None:
        super().__init__(scenario, spec.rank, spec.target, events, spec.secrets, spec.attempt)
        self.spec = spec
        self.clocks = SkewedClocks(self.clock_read)
        if self.skewed:
            self.clocks.install()
        disk_faults: list[tuple[int, DiskCrash] | tuple[int, DiskError]]
        disk_faults = [*self._planned(DiskCrash), *self._planned(DiskError)]
        if disk_faults:
            folders = [f"{spec.run}/{name}" for name in ("retained", "spilled")]
            FaultyDisk(disk_faults, folders, self.points.fired, self.die).install()

    def everything(self) -> None:
        import torch
        import torch.distributed as dist

        from .collectives import Collectives
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
        self.collectives = Collectives()
        self.collectives.install()
        ledger = LedgerWriter(Path(spec.folder) / f"rank{spec.rank}.ledger.arrows")
        self.trainer = self._model = Trainer(scenario, spec.rank, ledger, torch.device("cpu"), spec.attempt)
        if not spec.attempt:
            self._model.begin()
        self.events.write("model-ready", shards=len(self._model._shards))
        self.publish_and_train()
        ledger.close()
        dist.destroy_process_group()

    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN if how == "all" else dist.ReduceOp.MAX)
        return bool(flag)

    def shift_clock(self, seconds: float) -> None:
        self.clocks.shift(seconds)

    def advance_clocks(self, seconds: float) -> None:
        self.clocks.advance(seconds)

    def counting(self) -> AbstractContextManager[Counter[str]]:
        return self.collectives.counting()

    def resident_bytes(self) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Whole or not there: a checkpoint's folder gets its name when all ranks have written."""
        import torch
        import torch.distributed as dist

        name = f"attempt-{self.attempt:03d}-step-{step:09d}"
        unfinished = Path(self.spec.run) / "checkpoints" / f"unfinished-{name}"
        self._model.save(unfinished)
        torch.save(dict(state), unfinished / f"publisher-{self.rank:05d}.pt")
        dist.barrier()
        if self.rank == 0:
            unfinished.rename(unfinished.parent / name)
        dist.barrier()

    def restore(self) -> Checkpoint | None:
        import torch

        newest = max((Path(self.spec.run) / "checkpoints").glob("attempt-*"), default=None)
        if newest is not None:
            self._model.load(newest)
        self._model.begin()
        if newest is None:
            return None
        states = [torch.load(path, weights_only=True) for path in sorted(newest.glob("publisher-*.pt"))]
        _, attempt, _, step = newest.name.split("-")
        return Checkpoint(int(attempt), int(step), states)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def context(self) -> RankContext:
        import torch.distributed as dist

        from ...fakes.feature_store_py import FeatureStoreClient

        def client() -> Any:
            inner = FeatureStoreClient(
                access_key_id="deltaproof",
                access_key_secret="deltaproof",
                region="local",
                endpoint=self.spec.endpoint,
                featuredb_username=f"rank{self.spec.rank}",
                featuredb_password=self.spec.secrets[PASSWORD],
            )
            return ObservedClient(inner, self.points, self.events)

        return RankContext(
            rank=self.spec.rank,
            world_size=self.scenario.world_size,
            tables=self.scenario.tables,
            config=self.scenario.publisher,
            model=self._model.model,
            client_factory=client,
            barrier=dist.barrier,
            endpoint=self.spec.endpoint,
            version=self.version,
            dynamic=tuple(self._model.dynamic.handles.values()),
            retain=f"{self.spec.run}/retained" if self.scenario.publisher.retain else None,
            spill=f"{self.spec.run}/spilled" if self.scenario.publisher.spill else None,
        )

"""One rank of a run: joins the process group, trains, publishes, and writes down what happened.

Everything it learns from is in ``RankSpec``; everything it leaves is in the run's folder: ``rank<r>.events.jsonl``,
``rank<r>.ledger.arrows`` and ``rank<r>.log`` (stdout and stderr).
"""

from __future__ import annotations

import builtins
import datetime
import faulthandler
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..clocks import SkewedClocks
from ..disk import FaultyDisk
from ..errors import ScenarioError
from ..faults import DiskCrash, DiskError
from ..history import EventWriter, LedgerWriter
from ..instrument import ObservedClient
from ..loop import Checkpoint, TrainingLoop
from ..scenario import Scenario
from ..target import PASSWORD, RankContext
from .hang import Listener
from .lifeline import die_with_parent

if TYPE_CHECKING:
    import torch

#: The NCCL from which on several ranks may be on one device.
NCCL_SHARES_SINCE = (2, 31)
#: The exit code of a rank whose scenario or target cannot be run.
BAD_INPUT = 2


@dataclass(frozen=True)
class RankSpec:
    """What the supervisor tells a rank. ``endpoint``: host:port of the store; ``folder``: of this run; ``secrets``:
    environment variables with values that must not appear in anything the run leaves behind; ``attempt``: 0 for the
    first start of the job; ``run``: the folder of the run, which all attempts share; ``supervisor_pid``: set under
    torchrun, which tells the rank its number and where the process group meets."""

    scenario: str
    rank: int
    target: str
    endpoint: str
    folder: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    attempt: int = 0
    run: str = ""
    supervisor_pid: int = 0


def main(spec: RankSpec) -> None:
    """Entry point of a process that is one rank of one run. Exits with the code of `perform`."""
    die_with_parent()
    sys.exit(perform(spec, ExitStack(), Listener()))


def launched(spec_file: Path) -> None:
    """Entry point of a rank under torchrun, which sets RANK and WORLD_SIZE. The file holds a ``RankSpec`` for all."""
    spec = msgspec.json.decode(spec_file.read_bytes(), type=RankSpec)
    die_with_parent(spec.supervisor_pid)
    listener = Listener()
    from . import collectives, model  # noqa: F401 - torch, before the first record, from which on the deadlines count

    secrets = {name: os.environ[name] for name in spec.secrets}
    code = perform(replace(spec, rank=int(os.environ["RANK"]), secrets=secrets), ExitStack(), listener)
    # As multiprocessing ends a rank: it waits for threads, but taking torch apart would eat up the grace.
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(code)


def serve(tasks: Connection) -> None:
    """Entry point of a process that is a rank of one run after another, as long as nothing of a run stays behind.

    Takes a ``RankSpec`` from ``tasks`` and answers, when the run ended well, with the bytes by which the process has
    grown. When it did not, or left something that cannot be undone, the process ends with the run's exit code instead.
    """
    die_with_parent()
    listener = Listener()
    begun = Slate()
    for number in itertools.count(1):
        try:
            spec: RankSpec = tasks.recv()
        except EOFError:
            return
        threads = set(threading.enumerate())
        undo = ExitStack()
        code = perform(spec, undo, listener, runs_before=number - 1)
        if code or not _ended(set(threading.enumerate()) - threads):
            sys.exit(code)
        undo.close()
        if not begun.intact():
            sys.exit(code)
        begun.restore()
        tasks.send(begun.grown_bytes())
        # Behind the answer: the next run is prepared meanwhile, and waits for this only if it is faster.
        gc.collect()


def _ended(threads: Iterable[threading.Thread]) -> bool:
    """Whether all of them are over, now or within a moment."""
    limit = time.monotonic() + 0.5
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


class Slate:
    """What a process was before its first run, to be put back after each.

    With the globals of torchrec and of this package that are plain values: torchrec remembers in one of them that it
    has asked its peers something, and would then wait with a fresh process for an answer that nobody sends.
    """

    def __init__(self) -> None:
        import torch
        import torchrec

        packages = (torchrec.__name__, __name__.partition(".")[0])
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in packages]
        self._globals = [
            (vars(module), {n: v for n, v in vars(module).items() if v is None or isinstance(v, int | float | str)})
            for module in modules
        ]

        self._patchable = [(vars(module), dict(vars(module))) for module in (builtins, os, threading, time)]
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._bytes: int | None = None

    def intact(self) -> bool:
        """Whether the functions that faults replace are the process's own."""
        return all(now.get(name) is was for now, then in self._patchable for name, was in then.items())

    def restore(self) -> None:
        import torch

        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for namespace, values in self._globals:
            namespace.update(values)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)

    def grown_bytes(self) -> int:
        """Resident memory over that after the first run, which fills the caches of libraries."""
        now = resident_bytes()
        self._bytes = now if self._bytes is None else self._bytes
        return now - self._bytes


def resident_bytes() -> int:
    """Memory that this process holds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def perform(spec: RankSpec, undo: ExitStack, listener: Listener, runs_before: int = 0) -> int:
    """One rank of one run. Returns 0 after a clean one, BAD_INPUT for a scenario or target that cannot be run and 1
    after any other exception, which it records first. ``undo`` gets what makes the process ready for another run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle: it ends the ranks in order
    folder, rank = Path(spec.folder), spec.rank
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stacks = open(folder / f"rank{rank}.stacks", "w")  # noqa: SIM115 (open as long as the signal may come)
    undo.callback(stacks.close)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    undo.callback(faulthandler.unregister, signal.SIGUSR1)
    listener.where = folder / f"rank{rank}.recorder.json"
    undo.callback(setattr, listener, "where", None)
    undo.enter_context(warnings.catch_warnings())  # forgets which ones were shown: each run shows them once
    os.environ.update(spec.secrets)
    scenario = Scenario.from_json(spec.scenario).of_attempt(spec.attempt)
    events = EventWriter(folder / f"rank{rank}.events.jsonl", f"rank{rank}", rank, spec.attempt)
    undo.callback(events.close)
    events.write("rank-start", pid=os.getpid(), preloaded="torchrec" in sys.modules, runs_before=runs_before)
    run = Run(scenario, spec, events)
    try:
        run.everything(undo)
    except ScenarioError as error:
        events.write("bad-input", message=str(error))
        return BAD_INPUT
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
        return 1
    events.write("rank-end", step=run.own_step)
    return 0


def run_name(folder: Path) -> str:
    """What a target may call the run whose files are in ``folder``; no two runs of a machine have one."""
    return "-".join(folder.parts[-2:])


def place(scenario: Scenario, rank: int) -> torch.device:
    """The device of a rank, made its current one; sets what NCCL must know before it starts. Raises ScenarioError
    where there are too few devices."""
    import torch

    if scenario.devices == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    needed = 1 if scenario.devices == "shared" else scenario.world_size
    if found < needed:
        raise ScenarioError(
            f"devices {scenario.devices!r} needs {needed} CUDA device{'s' if needed > 1 else ''} and torch "
            f"{torch.__version__} finds {found} here; --devices cpu --backend gloo runs the scenario without"
        )
    # NVLink multicast stays off: on a shared host it is not ours to use.
    os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo")
    if scenario.devices == "per-rank":
        # Each rank is its own host for TorchRec, so the device that it sees is the first one of that host.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    elif scenario.backend == "nccl":
        # NCCL refuses two ranks on one device, unless it is told that this is meant, or takes them for two hosts. It
        # reads this once in a process.
        meant = torch.cuda.nccl.version() >= NCCL_SHARES_SINCE
        os.environ.update(
            {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if meant else {"NCCL_HOSTID": f"deltaproof-{os.getpid()}"}
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def used(device: torch.device, backend: str) -> dict[str, Any]:
    """What a rank runs on, for the history."""
    import torch

    found = {"device": str(device), "backend": backend, "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"device_name": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    if backend == "nccl":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


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

    def everything(self, undo: ExitStack) -> None:
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
        device = self.device = place(scenario, spec.rank)
        if device.type == "cuda":
            undo.callback(torch.cuda.empty_cache)
        dist.init_process_group(
            scenario.backend,
            # A file instead of a port: no other process can take it in between.
            init_method="env://" if spec.supervisor_pid else f"file://{spec.folder}/rendezvous",
            rank=spec.rank,
            world_size=scenario.world_size,
            timeout=datetime.timedelta(seconds=scenario.deadlines.run_s),
            device_id=device if scenario.backend == "nccl" else None,
        )
        self.collectives = Collectives(Path(spec.folder) / f"rank{spec.rank}.flight.json")
        undo.callback(self.collectives.install())
        ledger = LedgerWriter(Path(spec.folder) / f"rank{spec.rank}.ledger.arrows")
        self.trainer = self._model = Trainer(scenario, spec.rank, ledger, device, spec.attempt)
        if not spec.attempt:
            self._model.begin()
        self.events.write("model-ready", shards=len(self._model._shards), **used(device, scenario.backend))
        self.publish_and_train()
        ledger.close()
        dist.destroy_process_group()

    def agree(self, mine: bool, how: Literal["all", "any"]) -> bool:
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(mine)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN if how == "all" else dist.ReduceOp.MAX)
        return bool(flag)

    def shift_clock(self, seconds: float) -> None:
        self.clocks.shift(seconds)

    def advance_clocks(self, seconds: float) -> None:
        self.clocks.advance(seconds)

    def counting(self) -> AbstractContextManager[Counter[str]]:
        return self.collectives.counting()

    def resident_bytes(self) -> int:
        return resident_bytes()

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

    def drift_clocks(self, ppm: float) -> None:
        self.clocks.drift(ppm)

    def freeze_clock(self) -> None:
        self.clocks.freeze()

    def stall(self, seconds: float) -> None:
        """By SIGSTOP, which no thread of this process survives awake: another process ends it."""
        me = os.getpid()
        # Again and again: the first SIGCONT may come before this process has got as far as to stop.
        script = f"sleep {seconds:g}; while kill -CONT {me} 2>/dev/null; do sleep 0.05; done"
        with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.DEVNULL) as waker:
            # To this thread, which stops before this line is over; os.kill may reach another one, later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            waker.kill()

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
            process_group=dist.group.WORLD,
            run=run_name(Path(self.spec.run)),
        )


if __name__ == "__main__":
    from . import rank  # under its own name: what is imported later must find the same classes

    rank.launched(Path(sys.argv[1]))

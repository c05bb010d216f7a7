"""Publishers that misbehave, named as targets by the engine's tests. Imported inside rank processes only."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading

from deltaproof.simulator.target import reference


class Silent:
    """Publishes nothing and says all is well."""

    def __init__(self, context) -> None:
        self.rank = context.rank

    def start(self) -> None: ...

    def after_step(self, step: int) -> None: ...

    def paused(self):
        return contextlib.nullcontext()

    def finish(self, step: int) -> None: ...

    def close(self) -> None: ...


class HangsInStart(Silent):
    def start(self) -> None:
        threading.Event().wait()


class RaisesButLives(Silent):
    """Raises on rank 1 and leaves a thread behind that keeps the process alive."""

    def after_step(self, step: int) -> None:
        if self.rank == 1 and step == 2:
            threading.Thread(target=threading.Event().wait).start()
            raise RuntimeError("rank 1: step 2: the store said no")


class ExitsQuietly(Silent):
    def after_step(self, step: int) -> None:
        if step == 2:
            os._exit(0)


class NotAcknowledged(RuntimeError):
    unacknowledged = (2, 3)


class NamesSteps(Silent):
    def finish(self, step: int) -> None:
        raise NotAcknowledged(f"rank {self.rank}: steps 2 and 3 are not acknowledged")


def nothing(context) -> None:
    return None


class Votes(Silent):
    """Takes part in collectives of its own: in the training thread and, unasked, in another."""

    def after_step(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        dist.barrier()
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        thread.start()
        thread.join()


class PrintsItsLogin(Silent):
    def after_step(self, step: int) -> None:
        print("logging in with", os.environ["FEATUREDB_PASSWORD"], flush=True)


class Restarts(Silent):
    """Keeps a state in checkpoints, and insists on getting that of every rank back."""

    def state_dict(self, step: int) -> dict:
        return {"step": step}

    def load_state_dict(self, states) -> None:
        assert [state["step"] for state in states] == [2, 2]

    def start_over(self) -> None: ...


not_callable = 7


class BreaksTheRecords(Silent):
    """Lets every later write of the rank's events fail, as a full disk would."""

    def after_step(self, step: int) -> None:
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").endswith("events.jsonl"):
                    os.dup2(os.open("/dev/full", os.O_WRONLY), int(entry))


class KillsTheForkserver(Silent):
    def after_step(self, step: int) -> None:
        if self.rank == 0 and step == 2:
            os.kill(os.getppid(), signal.SIGKILL)
        if step == 2:
            threading.Event().wait(30)  # until the death of the parent ends this rank too


def writes_elsewhere(context):
    return _with_version(context, lambda version: ["elsewhere"])


def also_writes_elsewhere(context):
    return _with_version(context, lambda version: [version, "default"])


def _with_version(context, versions):
    """The reference on a client whose views write to other versions than they are told."""
    client = context.client_factory()

    class View:
        def __init__(self, inner) -> None:
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def write_features_arrow(self, *, version, **kwargs):
            for other in versions(version):
                self.inner.write_features_arrow(version=other, **kwargs)

        def write_flush(self):
            summary = self.inner.write_flush()
            share = len(versions(""))
            return {k: v // share if isinstance(v, int) else v for k, v in summary.items()}

    class Project:
        def __init__(self, inner) -> None:
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def get_dynamic_embedding_feature_view(self, name):
            found = self.inner.get_dynamic_embedding_feature_view(name)
            return found and View(found)

    class Client:
        def get_project(self, name):
            return Project(client.get_project(name))

    return reference(dataclasses.replace(context, client_factory=Client))


def leave_things_behind_and_restore(answers) -> None:
    """No target: run in a process of its own, it tells what a run can change, and what of that is put back."""
    import random

    import torch
    from torchrec.distributed import collective_utils

    from deltaproof.simulator.processes.rank import Slate

    def seen():
        return (
            os.environ.get("PLANTED"),
            os.environ["PATH"],
            os.getcwd(),
            collective_utils._INITIALIZED,
            random.getstate(),
            torch.get_rng_state().tolist(),
        )

    slate = Slate()
    before = seen()
    os.environ.update(PLANTED="by a run", PATH="/nowhere")
    os.chdir("/")
    collective_utils._INITIALIZED = True
    random.random()
    torch.rand(1)
    changed = seen()
    slate.restore()
    answers.send((before, changed, seen()))


class StopsItself(Silent):
    def after_step(self, step: int) -> None:
        if self.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)


class VotesAlone(Silent):
    """A collective that rank 0 takes no part in."""

    def after_step(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        if step == 2 and self.rank == 1:
            dist.all_reduce(torch.ones(1))
        if step == 2 and self.rank == 0:
            threading.Event().wait()


class IgnoresSigterm(Silent):
    """Rank 0 waits for nothing and cannot be asked to end; rank 1 fails."""

    def after_step(self, step: int) -> None:
        if self.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if step == 2:
                threading.Event().wait()
        elif step == 2:
            raise RuntimeError("rank 1: step 2: the store said no")


class LeavesAChild(Silent):
    """Starts a process that would outlive it, in the session that the rank is the leader of."""

    def start(self) -> None:
        assert os.getsid(0) == os.getpid()
        self.child = subprocess.Popen(["sleep", "600"])


def placed(answers, scenario: str, nccl: tuple[int, ...]) -> None:
    """No target: run in a process of its own, it tells where rank 1 of 2 is put where torch.cuda has two devices."""
    import torch

    from deltaproof.simulator.processes.rank import place
    from deltaproof.simulator.scenario import Scenario

    current: list[int] = []
    vars(torch.cuda).update(device_count=lambda: 2, set_device=current.append)
    torch.cuda.nccl.version = lambda: nccl
    for name in [n for n in os.environ if n.startswith(("NCCL_", "CUDA_"))]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,7"
    device = place(Scenario.from_json(scenario), 1)
    environment = {n: v for n, v in os.environ.items() if n.startswith(("NCCL_", "CUDA_"))}
    answers.send((str(device), current, {n: v.replace(str(os.getpid()), "PID") for n, v in environment.items()}))


def cuda_of_a_fork(answers) -> None:
    """No target: run in a process of its own, it tells what that has of CUDA from the process it was forked from."""
    import sys

    preloaded = "torch" in sys.modules
    import torch

    answers.send(
        {
            "devices": torch.cuda.device_count(),
            "preloaded": preloaded,
            "initialized": torch.cuda.is_initialized(),
            "lost in the fork": torch.cuda._is_in_bad_fork(),
            "check by NVML": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
        }
    )

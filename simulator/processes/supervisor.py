"""Starting, watching and ending rank processes.

Supervision has torchrun's semantics: when one rank fails, its peers get a grace period to end by themselves and are
then ended. No code path waits for a process without a limit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import KitError
from ..history import Event, RankOutcome, append_event, read_events
from ..recorded import attempt_folder
from ..scenario import Scenario
from . import hang
from .launchers import Job, RankProcess, Supervision, TorchrunRank, end_processes
from .rank import BAD_INPUT, RankSpec

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

#: How often, in seconds, the supervisor looks whether a rank raised that has not exited yet.
POLL_S = 0.25
#: The exit code that multiprocessing makes up when the forkserver cannot tell one any more.
FORKSERVER_LOST = 255
#: Seconds within which processes must start; the first start waits for the forkserver's imports.
START_S = 120.0


@contextlib.contextmanager
def _starting(cache: Path) -> Iterator[None]:
    """Around every start of a process: it gets no Ctrl-C, does not import ``__main__`` and leaves no folder behind.

    A child imports its parent's main module anew: a console script, pytest or a user's notebook, once per rank. Nothing
    that runs in a child comes from there, and a script without an ``if __name__`` guard would start itself again.
    Ctrl-C is blocked, not ignored, so that the supervisor gets it a moment later and ends its children in order;
    SIGUSR2 is for one thread of a rank (`hang.Listener`), and no other thread that a library starts may get it. torch
    makes a cache folder when it is imported; ``cache`` says where, if the environment does not.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    unset = "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    if unset:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    # Started in between, the resource tracker would unblock SIGINT again before the forkserver inherits the mask.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR2})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if unset:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_processes(processes: Sequence[RankProcess | BaseProcess], cache: Path) -> None:
    """Start processes. Raises KitError when that takes longer than START_S: the forkserver is stopped or stuck."""

    def start() -> None:
        try:
            with _starting(cache):
                for process in processes:
                    process.start()
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    failures: list[BaseException] = []
    done = threading.Event()  # not Thread.join: interrupted, CPython 3.11 takes the thread for ended
    if isinstance(processes[0], SpawnProcess | TorchrunRank):
        # Not from a thread: the kernel would take the thread's end for the death of the parent (die_with_parent).
        start()
    else:
        threading.Thread(target=start, name="deltaproof-start", daemon=True).start()
        try:
            done.wait(START_S)
        except BaseException:
            done.wait(30)  # interrupted: let the starts that are under way end, so that they can be undone
            raise
        if not done.is_set():
            _kill_forkserver()
            raise KitError(f"no process could be started within {START_S:g} s; was the forkserver stopped?")
    for failure in failures:
        if isinstance(failure, EOFError | ConnectionError):
            _kill_forkserver()
            raise KitError("the forkserver died while processes were starting") from failure
        raise failure


def _kill_forkserver() -> None:
    """End it and wait until it is dead, so that the next start makes a new one."""
    pid = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing reaps it


class Supervisor:
    """Starts the ranks of one attempt, watches them, and ends those that outstay a deadline.

    Its files lie in ``folder``: that of the run, or, after a restart, a folder of its own in it.
    """

    def __init__(
        self,
        scenario: Scenario,
        attempt: int,
        target: str,
        endpoint: str,
        folder: Path,
        make: Callable[[list[RankSpec]], Job],
        secrets: Mapping[str, str],
        supervision: Supervision = "torchrun",
    ) -> None:
        """``make``: the ranks' processes, not started yet, in order of ranks."""
        self._strict = supervision == "strict"
        self.scenario, self.attempt = scenario.of_attempt(attempt), attempt
        self.folder = attempt_folder(folder, attempt)
        self.folder.mkdir(exist_ok=True)
        (folder / "checkpoints").mkdir(exist_ok=True)
        self.events: list[Event] = []
        self.stacks: dict[int, str] = {}
        self.begin_ms = self.end_ms = 0.0
        self._ended: dict[int, str] = {}
        self._exits: set[int] = set()
        text = scenario.to_json()
        common = (target, endpoint, str(self.folder), secrets, attempt, str(folder))
        self.job = make([RankSpec(text, rank, *common) for rank in range(self.scenario.world_size)])
        self.ranks = self.job.ranks

    def start(self, cache: Path) -> None:
        self.begin_ms = time.monotonic() * 1000
        start_processes(self.ranks, cache)

    @property
    def failed(self) -> bool:
        """Whether a rank ended otherwise than well. A scenario that cannot be run is no failure of the job."""
        codes = [process.exitcode for process in self.ranks]
        return BAD_INPUT not in codes and any(code != 0 for code in codes)

    def all_events(self) -> list[Event]:
        """The supervisor's own, and what the ranks wrote."""
        ranks = range(len(self.ranks))
        return [*self.events, *(e for rank in ranks for e in read_events(self.folder / f"rank{rank}.events.jsonl"))]

    def wait(self) -> None:
        """Until every rank is gone, by itself or by us. After the first failure everybody has the grace, unless
        supervision is strict. Raises KitError when a rank does not even begin."""
        deadlines = self.scenario.deadlines
        limit = time.monotonic() + self.job.start_s
        begun = failed = False
        gone: dict[int, float] = {}
        while waiting := [rank for rank in range(len(self.ranks)) if rank not in gone]:
            if not begun and not failed and self.job.begun:
                begun, limit = True, time.monotonic() + deadlines.run_s
            left_s = limit - time.monotonic()
            sentinels: dict[Any, RankProcess] = {self.ranks[rank].sentinel: self.ranks[rank] for rank in waiting}
            sentinels.pop(None, None)
            for ready in multiprocessing.connection.wait(list(sentinels), timeout=min(max(0.0, left_s), POLL_S)):
                sentinels[ready].join()
            ended = [rank for rank in waiting if not self.ranks[rank].is_alive()]
            for rank in ended:
                gone[rank] = time.monotonic() * 1000
                self._note_exit(rank, gone[rank])
            if not failed and self._some_rank_failed(list(gone)):
                failed = True
                if not self._strict:
                    # Also where the deadline of the run is nearer: whoever fails just before it may be ending.
                    limit = time.monotonic() + deadlines.grace_s
            if not ended and time.monotonic() >= limit:
                if not begun and not failed:
                    raise KitError(f"a rank did not begin within {self.job.start_s:g} s: {self.job.last_words()}")
                self._end_rest(waiting, "ended" if failed and not self._strict else "deadline")
                break
        self.job.settle()
        for rank in gone.keys() - self._exits:
            self._note_exit(rank, gone[rank])
        self.end_ms = time.monotonic() * 1000

    def _note_exit(self, rank: int, t_ms: float) -> None:
        """Once its exit code is known; under torchrun that may be later."""
        code = self.ranks[rank].exitcode
        if code is not None:
            self._exits.add(rank)
            self._note("rank-exit", rank, t_ms, exitcode=code)

    def _some_rank_failed(self, gone: list[int]) -> bool:
        """A rank exited with an error, or raised and has not exited yet."""
        return any(self.ranks[rank].exitcode != 0 for rank in gone) or any(
            (self.folder / f"rank{rank}.failed").exists() for rank in range(len(self.ranks))
        )

    def _end_rest(self, ranks: list[int], why: str) -> None:
        # A rank that raised but lives on has a deadline of its own: it hangs, whatever its peers do.
        for rank in ranks:
            self._ended[rank] = "deadline" if (self.folder / f"rank{rank}.failed").exists() else why
        self._keep_evidence(ranks)
        for rank in ranks:
            self._note("rank-ended-by-supervisor", rank, why=self._ended[rank])
        end_processes([self.ranks[rank] for rank in ranks])

    def _keep_evidence(self, ranks: list[int]) -> None:
        """An event ``hang`` for each rank of the job: what it waits in, or that it is gone."""
        seen = hang.collect(self.folder, {rank: pid for rank in ranks if (pid := self.ranks[rank].pid) is not None})
        gone = {rank: hang.ended_as(p.exitcode) for rank, p in enumerate(self.ranks) if rank not in ranks}
        flights = {rank: hang.read_flight(self.folder / f"rank{rank}.flight.json") for rank in range(len(self.ranks))}
        raised = {rank for rank in ranks if (self.folder / f"rank{rank}.failed").exists()}
        for rank, says in hang.tell(flights, gone, raised, seen).items():
            evidence = seen.get(rank, {})
            self.stacks[rank] = evidence.pop("stacks", "")
            self._note("hang", rank, says=says, **evidence)

    def _note(self, kind: str, rank: int, t_ms: float | None = None, /, **data: Any) -> None:
        t_ms = time.monotonic() * 1000 if t_ms is None else t_ms
        event = Event(t_ms=t_ms, who="supervisor", kind=kind, rank=rank, data=data)
        self.events.append(msgspec.structs.replace(event, attempt=self.attempt))
        append_event(self.folder / "supervisor.events.jsonl", self.events[-1])

    def outcomes(self) -> list[RankOutcome]:
        """How each rank ended, from its exit code and from what it wrote before. Raises KitError when it was not the
        target that ended it."""
        result = []
        for rank, process in enumerate(self.ranks):
            code = process.exitcode
            mine = read_events(self.folder / f"rank{rank}.events.jsonl")
            error = next((e for e in mine if e.kind == "error"), None)
            if rank in self._ended:
                status = self._ended[rank]
            elif self.job.closed(rank):
                status = "ended"
            elif code is None:
                raise KitError(
                    f"rank {rank} is gone, and its launcher did not say how it ended: {self.job.last_words()}"
                )
            elif code < 0:
                status = "killed"
            elif error is not None and code:
                status = "error"
            elif code == 0 and any(e.kind == "rank-end" for e in mine):
                status = "ok"
            else:
                status = "vanished"
            text = "" if error is None else f"{error.data['type']}: {error.data['message']}"
            tail = _tail(self.folder, rank) or self.job.last_words() or "it printed nothing"
            if code == os.EX_IOERR:
                raise KitError(f"rank {rank} could not record the run: {tail}")
            if status == "vanished":
                text = text or tail
            steps = () if error is None else tuple(error.data.get("unacknowledged", ()))
            where = "" if error is None else error.data.get("where", "")
            result.append(RankOutcome(rank, status, code, text, where, steps, self.attempt))
        if all(outcome.exitcode == FORKSERVER_LOST for outcome in result):
            raise KitError("the forkserver died while the ranks were running")
        for outcome in result:
            if outcome.status == "vanished" and not (self.folder / f"rank{outcome.rank}.events.jsonl").exists():
                raise KitError(
                    f"rank {outcome.rank} ended before it could start (exit code {outcome.exitcode}): {outcome.error}"
                )
        return result


def _tail(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""

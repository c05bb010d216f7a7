"""What is known of ranks that outstay their deadline: Python stacks, the collective each waits in, and who is missing.

A rank keeps the last collective that it began in a file, so that this can be read whatever became of the rank. When its
time is over the supervisor asks it for more: for its stacks by SIGUSR1, which faulthandler answers without Python's
help, and for torch's flight recorder by SIGUSR2, which takes a thread that gets the interpreter. Of a rank that cannot
answer py-spy tells the stacks where it is installed, else the kernel what it does for the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from . import lifeline

#: Seconds that ranks have to answer.
ANSWER_S = 2.0
PY_SPY_S = 10.0
#: Pending entries of torch's flight recorder that are kept.
ENTRIES_MAX = 8


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # not time.monotonic(), which a scenario may have skewed


class Call(msgspec.Struct, frozen=True):
    """A collective of one rank: the ``number``-th that it began through Python, at ``site`` in the code outside torch,
    when the host's monotonic clock said ``since_s``."""

    number: int
    operation: str
    site: str
    since_s: float

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} at {self.site}"


class Flight(msgspec.Struct):
    """``waits``: collectives that a thread of the rank is in; ``last``: the one begun last."""

    last: Call | None = None
    waits: list[Call] = []


class FlightWriter:
    """Keeps the `Flight` of this rank in a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._size = 0
        self._flight = Flight()

    def begin(self, operation: str, site: str) -> Call:
        """A thread enters a collective: it is in it until `leave`."""
        with self._lock:
            number = 1 if self._flight.last is None else self._flight.last.number + 1
            call = self._flight.last = Call(number, operation, site, _now_s())
            self._flight.waits.append(call)
            self._write()
        return call

    def enter(self, call: Call) -> None:
        """A thread waits for the end of a collective that it left before it was over."""
        with self._lock:
            self._flight.waits.append(call)
            self._write()

    def leave(self, call: Call) -> None:
        with self._lock:
            self._flight.waits.remove(call)
            self._write()

    def _write(self) -> None:
        text = self._encoder.encode(self._flight)
        self._size = max(self._size, len(text))
        with contextlib.suppress(OSError):  # a full disk is no affair of the target's collectives
            # One write, over all that was there: a reader finds one or the other.
            os.pwrite(self._file, text.ljust(self._size), 0)

    def close(self) -> None:
        os.close(self._file)


def read_flight(path: Path) -> Flight:
    """What the file says; an empty `Flight` where a rank wrote none."""
    for _ in range(3):  # the rank may be writing
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(path.read_bytes(), type=Flight)
    return Flight()


class Listener:
    """Answers SIGUSR2 in this process with what torch's flight recorder holds. One per process, made before its other
    threads; ``where`` is the file for the answer, None while no run goes on."""

    def __init__(self) -> None:
        self.where: Path | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        threading.Thread(target=self._listen, name="deltaproof-listener", daemon=True).start()

    def _listen(self) -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            if self.where is not None:
                unfinished = self.where.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(pending()))
                os.replace(unfinished, self.where)


def pending() -> list[str]:
    """Collectives of this process that torch's flight recorder takes for unfinished, the newest first."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    entries = [] if dump is None else json.loads(dump()).get("entries", [])
    found = [
        f"{e['profiling_name']} #{e['collective_seq_id']} of {':'.join(e['process_group'])}, {e['state']}"
        for e in entries
        if not e.get("retired") and e.get("state") != "completed"
    ]
    return found[: -ENTRIES_MAX - 1 : -1]


def collect(folder: Path, pids: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Ask the ranks that run still. By rank: ``stacks`` and who told them (``stacks_from``), ``process`` (its state),
    ``flight_recorder``."""
    paths = {rank: (folder / f"rank{rank}.stacks", folder / f"rank{rank}.recorder.json") for rank in pids}
    for pid in pids.values():
        for sent in (signal.SIGUSR1, signal.SIGUSR2):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
    stopped = {rank for rank, pid in pids.items() if _state(pid).startswith("T")}
    asked = [rank for rank in pids if rank not in stopped]
    limit, sizes = _now_s() + ANSWER_S, [-1]
    while _now_s() < limit:
        # faulthandler writes piece by piece: a dump is whole when it does not grow any more.
        before, sizes = sizes, [_size(path) for rank in asked for path in paths[rank]]
        if all(sizes) and sizes == before:
            break
        wait([], timeout=0.05)
    found = {}
    for rank, pid in pids.items():
        stacks, recorder = paths[rank]
        text, source = (_of_the_run(stacks), "faulthandler") if _size(stacks) else _from_outside(pid)
        entries = json.loads(recorder.read_bytes()) if _size(recorder) else None
        found[rank] = {"stacks": text, "stacks_from": source, "process": _state(pid), "flight_recorder": entries}
    return found


def _of_the_run(stacks: Path) -> str:
    """The stacks of all threads but those that watch and listen in every rank."""
    threads = stacks.read_text(errors="replace").strip().split("\n\n")
    own = (f'"{__file__}", line ', f'"{lifeline.__file__}", line ')
    return "\n\n".join(thread for thread in threads if not any(text in thread for text in own)) + "\n"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(pid: int) -> str:
    """What the kernel calls the state of a process, such as ``T (stopped)``."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(maxsplit=1)[1]
    return "gone"


def _from_outside(pid: int) -> tuple[str, str]:
    """(stacks, who told them) of a process that does not answer."""
    py_spy = shutil.which("py-spy")
    if py_spy is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_S)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout, "py-spy"
    lines = [f"process {pid} did not answer: {_state(pid)}"]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):
            lines += [f"/proc/{pid}/{name}:", Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()]
    return "\n".join(lines) + "\n", "/proc"


def tell(
    flights: Mapping[int, Flight], gone: Mapping[int, str], raised: set[int], seen: Mapping[int, Mapping[str, Any]]
) -> dict[int, str]:
    """A phrase for each rank: ``rank 1 waits in all_reduce #14 at train.py:88 in vote, for 2.0 s``, ``rank 0 has ended
    (exit code 1)``.

    ``gone``: what became of the ranks that are; ``raised``: those that raised and live on; ``seen``: what `collect`
    found. A rank that is behind one that waits is one of the missing.
    """
    now_s = _now_s()
    awaited = max((call.number for flight in flights.values() for call in flight.waits), default=0)
    said = {}
    for rank, flight in flights.items():
        if rank in gone:
            said[rank] = f"rank {rank} has ended ({gone[rank]})"
            continue
        if flight.waits:
            call = flight.waits[-1]
            text = f"waits in {call}, for {now_s - call.since_s:.1f} s"
        elif flight.last is None:
            text = "has begun no collective"
        elif flight.last.number < awaited:
            text = f"has not come to #{awaited}; its last collective was {flight.last}"
        else:
            text = f"waits in no collective; its last one was {flight.last}"
        if rank in raised:
            text = f"raised but did not exit; it {text}"
        evidence = seen.get(rank, {})
        if not flight.waits and evidence.get("flight_recorder"):
            text += f"; torch has not finished {evidence['flight_recorder'][0]}"
        if evidence.get("process", "").startswith(("T", "D", "Z")):
            text += f"; its process is in state {evidence['process']}"
        said[rank] = f"rank {rank} {text}"
    return said


def ended_as(exitcode: int | None) -> str:
    """What became of a rank that is gone, in a few words."""
    if exitcode is None:
        return "nobody saw how"
    return f"signal {-exitcode}, {signal.strsignal(-exitcode)}" if exitcode < 0 else f"exit code {exitcode}"

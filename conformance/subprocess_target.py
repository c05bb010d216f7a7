"""Uploaders in any language: a program that reads calls on stdin and answers on stdout, as docs/protocol.md specifies.

`ProgramUploader` is the kit's end of that protocol, an uploader like any other (`target.Uploader`).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import math
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa

from ..reference.errors import redact
from ..simulator.errors import ScenarioError
from ..simulator.processes.lifeline import PR_SET_PDEATHSIG
from ..simulator.seams import CAPABILITIES
from ..simulator.target import RankContext

#: Versions of the protocol that this package speaks.
PROTOCOLS: Final = (1,)
#: Folder that gets a transcript of each rank's program, ``rank0.jsonl`` and so on; without secrets.
TRANSCRIPTS: Final = "DELTAPROOF_TRANSCRIPTS"
#: What rows of a delta are: (embedding_name, key_id, embedding).
COLUMNS: Final = ("embedding_name", "key_id", "embedding")
HELLO_S: Final = 10.0  # for the first answer, when a program is asked what it can do
EXIT_S: Final = 5.0  # for a program's end after `close`
LINE_BYTES_MAX: Final = 1 << 24
EVENTS_MAX: Final = 1000  # of a program, the last ones
STDERR_BYTES: Final = 1000  # of a program that died, quoted
_libc = ctypes.CDLL(None)


class ProgramError(RuntimeError):
    """The program's own word that something went wrong; ``unacknowledged``: the steps that it names.

    ProgramError
    ├── ProgramDied       it ended before it had answered
    ├── PrintsOnStdout    it wrote what is no message
    └── BreaksProtocol    it wrote a message that is not the one asked for
    """

    def __init__(self, what: str, unacknowledged: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.unacknowledged = unacknowledged


class ProgramDied(ProgramError):
    """The program ended before it had answered a call."""


class PrintsOnStdout(ProgramError):
    """The program wrote on stdout what is no message. Usual cause: a print for diagnosis, which belongs on stderr."""


class BreaksProtocol(ProgramError):
    """A message that is not the one that was asked for."""


def factory(command: str) -> Callable[[RankContext], ProgramUploader]:
    """What makes the uploader of a rank from the command of ``exec:COMMAND``. Raises ScenarioError for none."""
    if not _words(command):
        raise ScenarioError("target 'exec:' names no command; want exec:COMMAND, such as 'exec:node uploader.mjs'")

    def make(context: RankContext) -> ProgramUploader:
        if context.process_group is None:
            raise ScenarioError("a program runs in real time: use the process engine (--engine processes)")
        return ProgramUploader(command, context)

    make.capabilities = lambda: capabilities(command)  # type: ignore[attr-defined]  # a program is not asked before
    return make


@functools.cache
def capabilities(command: str) -> frozenset[str]:
    """What the program claims, from an answer to `hello` alone. Raises ScenarioError when it does not give one."""
    try:
        with contextlib.closing(Program(command)) as program:
            return claims_of(program.hello(HELLO_S))
    except (ProgramError, OSError) as error:
        name = type(error).__name__
        raise ScenarioError(f"target 'exec:{command}': {name}: {error} (docs/protocol.md, hello)") from None


def claims_of(told: dict[str, Any]) -> frozenset[str]:
    """Capabilities in an answer to `hello`. Raises BreaksProtocol for unknown ones."""
    found = told.get("capabilities", ["feature-store"])
    if not isinstance(found, list) or not set(map(str, found)) <= CAPABILITIES.keys():
        raise BreaksProtocol(f"hello: capabilities are {found!r}; known: {', '.join(CAPABILITIES)}")
    return frozenset(found) - {"sdk"} | {told["deltas"]}


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ScenarioError(f"target 'exec:{command}': {error}") from None


class Program:
    """A running program and the calls that go to it, one at a time.

    ``command``: split as a shell would, and run without one; ``transcript``: a file that gets every message.
    """

    def __init__(self, command: str, transcript: IO[str] | None = None) -> None:
        self._transcript, self._called, self._buffer = transcript, 0, b""
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the program lives)
        try:
            self._process = subprocess.Popen(
                _words(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                preexec_fn=_die_with_rank,
            )
        except OSError as error:
            self._stderr.close()
            raise ScenarioError(f"target 'exec:{command}': cannot be run: {error.strerror or error}") from None

    def hello(self, limit_s: float | None = None) -> dict[str, Any]:
        """Agree on a version; what the program told of itself. Raises BreaksProtocol when there is none to agree on."""
        told = self.call("hello", limit_s=limit_s, protocols=list(PROTOCOLS))
        if not isinstance(told, dict) or told.get("protocol") not in PROTOCOLS:
            raise BreaksProtocol(f"hello: want 'ok' with a 'protocol' of {list(PROTOCOLS)}, got {_short(told)}")
        if told.get("deltas") not in ("json", "arrow"):
            raise BreaksProtocol(f"hello: 'deltas' is {told.get('deltas')!r}; want json or arrow")
        return told

    def call(self, name: str, payload: bytes = b"", limit_s: float | None = None, **arguments: Any) -> Any:
        """Send one call and wait for its answer's ``ok``. Raises ProgramError; `limit_s`: seconds, then ProgramDied."""
        number, self._called = self._called, self._called + 1
        self._note("kit", {"call": name, "id": number, **arguments}, payload)
        message = json.dumps({"call": name, "id": number, **arguments}, allow_nan=False, separators=(",", ":"))
        until = math.inf if limit_s is None else time.monotonic() + limit_s
        try:
            self._write(message.encode() + b"\n" + payload)
        except BrokenPipeError:
            raise self._died(name) from None
        while True:
            answer = self._message(name, until)
            if "event" in answer:
                self.events.append(answer)
                continue
            if answer.get("reply") != number or len(answer.keys() & {"ok", "error"}) != 1:
                raise BreaksProtocol(
                    f"{name}: want a reply to {number} with either 'ok' or 'error', got {_short(answer)}"
                )
            if "ok" in answer:
                return answer["ok"]
            raise _told(name, answer["error"])

    def close(self) -> None:
        """End the program: it has until EXIT_S after the end of its stdin, then it is killed. Safe to call twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stderr.close()

    def kill(self) -> None:
        """End the program at once."""
        self._process.kill()
        self._process.wait()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _message(self, call: str, until: float) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_BYTES_MAX:
                raise BreaksProtocol(f"{call}: a line of over {LINE_BYTES_MAX} bytes")
            piece = self._read(call, until)
            if not piece:
                raise self._died(call)
            self._buffer += piece
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found.keys() & {"reply", "event"}:
            text = _short(line.decode(errors="replace"))
            raise PrintsOnStdout(f"{call}: the program wrote {text} on stdout; diagnostics go to stderr")
        self._note("program", found)
        return found

    def _read(self, call: str, until: float) -> bytes:
        assert self._process.stdout is not None
        ready, number = select.poll(), self._process.stdout.fileno()
        ready.register(number, select.POLLIN)
        wait_ms = None if until == math.inf else max(0, math.ceil((until - time.monotonic()) * 1000))
        if not ready.poll(wait_ms):
            raise ProgramDied(f"{call}: the program has not answered in time")
        return os.read(number, 1 << 16)

    def _died(self, call: str) -> ProgramDied:
        """stdout is at its end: the program is gone, or closed it, which is no better."""
        try:
            code = f"exit code {self._process.wait(EXIT_S)}"
        except subprocess.TimeoutExpired:
            code = "its stdout closed"
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - STDERR_BYTES))
        said = self._stderr.read().decode(errors="replace").strip()
        quoted = f"; its last words: {redact(said, STDERR_BYTES)}" if said else ""
        return ProgramDied(f"{call}: the program ended ({code}){quoted}")

    def _note(self, who: str, message: dict[str, Any], payload: bytes = b"") -> None:
        if self._transcript is not None:
            if "store" in message:  # its headers are a login, its address is another in every run
                message = {**message, "store": {**message["store"], "url": "URL", "headers": {}}}
            line = {who: message} | ({"payload": base64.b64encode(payload).decode()} if payload else {})
            self._transcript.write(json.dumps(line) + "\n")
            self._transcript.flush()


class ProgramUploader:
    """The uploader of one rank that is a program of its own."""

    def __init__(self, command: str, context: RankContext) -> None:
        self._command, self._context = command, context
        self._names = context.names
        self._transcript: IO[str] | None = None
        self._program: Program | None = None
        self._deltas = ""

    def __repr__(self) -> str:
        return f"the program {self._command!r}"

    def start(self) -> None:
        context = self._context
        if folder := os.environ.get(TRANSCRIPTS):
            self._transcript = (Path(folder) / f"rank{context.rank}.jsonl").open("w")
        self._program = Program(self._command, self._transcript)
        self._deltas = self._program.hello()["deltas"]
        view = context.open_view()
        url, headers = view.data_plane()
        self._program.call(
            "start",
            rank=context.rank,
            world_size=context.world_size,
            version=context.version,
            tables=[{"embedding_name": self._names[fqn], "dim": dim} for fqn, dim in context.dims.items()],
            store={"url": url, "headers": headers},
            batch_size=context.config.batch_size,
            retry_attempts_max=context.config.retry_attempts_max,
            retry_delay_ms_min=context.config.retry_delay_ms_min,
            retry_delay_ms_max=context.config.retry_delay_ms_max,
        )

    def submit(self, step: int, table: pa.Table) -> None:
        fqns = table["table_fqn"].to_pylist()
        columns = [pa.array([self._names[fqn] for fqn in fqns], pa.string()), table["key_id"], table["embedding"]]
        rows = pa.table(columns, names=list(COLUMNS))
        if self._deltas == "json":
            self._running().call("submit", step=step, rows=rows.num_rows, delta=json_rows(rows))
        else:
            payload = arrow_stream(rows)
            self._running().call("submit", payload, step=step, rows=rows.num_rows, bytes=len(payload))

    def check_error(self) -> None:
        # After `close`, which has said all that there was to say, there is nobody left to ask.
        if self._program is not None:
            self._program.call("check_error")

    def close(self, drain: bool) -> None:
        if self._program is None:
            return
        try:
            if drain:
                self._program.call("close", drain=True)
            else:
                self._program.kill()
        finally:
            self._program.close()
            self._program = None
            if self._transcript is not None:
                self._transcript.close()

    def _running(self) -> Program:
        if self._program is None:
            raise ProgramError(f"{self!r} is not running")
        return self._program


def json_rows(rows: pa.Table) -> list[list[Any]]:
    """[embedding_name, key as decimal text, [numbers]] of each row. What JSON has no number for is a text, "nan"."""
    values = [
        [float(v) if math.isfinite(v) else str(float(v)) for v in np.asarray(row, np.float64)]
        for row in rows["embedding"].to_pylist()
    ]
    names, keys = rows["embedding_name"].to_pylist(), rows["key_id"].to_pylist()
    return [[name, str(key), row] for name, key, row in zip(names, keys, values, strict=True)]


def arrow_stream(rows: pa.Table) -> bytes:
    """An Arrow IPC stream of the rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def _told(call: str, error: Any) -> ProgramError:
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"].strip():
        return BreaksProtocol(f"{call}: want an 'error' with a 'message', got {_short(error)}")
    steps = error.get("unacknowledged", [])
    if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
        return BreaksProtocol(f"{call}: 'unacknowledged' is {_short(steps)}; want a list of steps")
    return ProgramError(error["message"], tuple(steps))


def _short(value: Any) -> str:
    text = repr(value)
    return redact(text if len(text) <= 200 else text[:200] + "…")


def _die_with_rank() -> None:
    """In the child, before the program: a rank that is killed takes its program along."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

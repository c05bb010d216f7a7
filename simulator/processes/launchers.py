"""Launchers: what starts the ranks of a job. Our own are children of this process or of its forkserver; under torchrun
an agent per node starts them, and this process only watches.

Either way a rank runs `rank.perform`, writes into the same folder and is judged by the same supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from secrets import token_hex
from typing import Literal, Protocol, get_args

import msgspec
import psutil

from ..errors import ScenarioError
from ..history import Event, read_events
from .rank import BAD_INPUT, RankSpec

Launcher = Literal["own", "torchrun"]
#: What happens once a rank has failed: ``torchrun``: its peers are ended after a grace; ``strict``: each rank must end
#: by itself within the deadline of the run.
Supervision = Literal["torchrun", "strict"]
LAUNCHERS, SUPERVISIONS = get_args(Launcher), get_args(Supervision)

#: Seconds for interpreters to start and import torch, and how many more for each rank: they share the cores.
START_S, START_S_PER_RANK = 120.0, 20.0
#: Seconds that torchrun's agents have to report once every rank is gone. They look every 0.1 s.
REPORT_S = 10.0


def check_options(launcher: str, nodes: int, supervision: str) -> None:
    """Raises ScenarioError for options that are unknown or do not go together."""
    if launcher not in LAUNCHERS:
        raise ScenarioError(f"unknown launcher {launcher!r}; known launchers: {', '.join(LAUNCHERS)}")
    if supervision not in SUPERVISIONS:
        raise ScenarioError(f"unknown supervision {supervision!r}; known: {', '.join(SUPERVISIONS)}")
    if nodes < 1:
        raise ScenarioError(f"a job needs at least one node, not {nodes}")
    if launcher == "own" and nodes > 1:
        raise ScenarioError(f"{nodes} nodes are torchrun's: they need the launcher torchrun")
    if launcher == "torchrun" and supervision == "strict":
        raise ScenarioError("torchrun ends the peers of a rank that failed: strict supervision needs the launcher own")


class RankProcess(Protocol):
    """What a supervisor needs of a rank, as `multiprocessing.Process` has it. ``sentinel`` is ready when it ended; None
    where there is none yet."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int | Connection | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def start(self) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class Job:
    """The processes of one start of the job: here those that this process started itself."""

    #: Seconds within which every rank must begin, counted from `start`.
    start_s = 0.0
    nodes = 1

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = ranks
        self._ended: set[int] = set()

    @property
    def begun(self) -> bool:
        """Whether every rank has begun, so that the deadline of the run counts."""
        return True

    def settle(self) -> None:
        """Call it when all ranks are gone: lets the launcher say how they ended."""

    def end(self) -> None:
        """End every process of the job, with what it started, and reap it. Call it when the ranks are just gone or
        are to go; safe to call twice, and before the start."""
        end_processes(self.ranks)
        for pid in {rank.pid for rank in self.ranks if rank.pid is not None} - self._ended:
            self._ended.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def closed(self, rank: int) -> bool:
        """Whether the launcher ended this rank because a peer had failed."""
        return False

    def last_words(self) -> str:
        """What the launcher itself printed last."""
        return ""


def end_processes(processes: Sequence[RankProcess]) -> None:
    """SIGKILL and reap; a process that was never started is skipped."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(10)


class Torchrun(Job):
    """Ranks under real torchrun on this machine, with an agent for each of ``nodes`` nodes.

    One node: its agent makes its own store on a free port (``--standalone``). Several: they meet at a static
    rendezvous on loopback, whose port is reserved meanwhile. An agent is a session of its own, and so is each rank.
    """

    def __init__(self, specs: Sequence[RankSpec], nodes: int = 1) -> None:
        self._spec = specs[0]
        self.folder = Path(self._spec.folder)
        size, self.nodes = len(specs), min(nodes, len(specs))
        #: How many ranks each node has; torchrun numbers them node by node.
        self._sizes = [size // self.nodes + (node < size % self.nodes) for node in range(self.nodes)]
        node_of = [node for node, count in enumerate(self._sizes) for _ in range(count)]
        self._torchrun_ranks = [TorchrunRank(self, spec.rank, node_of[spec.rank]) for spec in specs]
        super().__init__(self._torchrun_ranks)
        self.start_s = START_S + START_S_PER_RANK * size
        self._agents: list[subprocess.Popen[bytes]] = []
        self._reserved: socket.socket | None = None

    def start(self) -> None:
        """Start the agents. Not from a thread that ends before the job: the kernel would take them down with it."""
        if self._agents:
            return
        spec_file = self.folder / "torchrun.spec.json"
        # The values of secrets travel in the environment, as in a real job; the folder is searched for them.
        public = dict.fromkeys(self._spec.secrets, "")
        spec = dataclasses.replace(self._spec, secrets=public, supervisor_pid=os.getpid())
        spec_file.write_bytes(msgspec.json.encode(spec))
        environment = {
            **os.environ,
            **self._spec.secrets,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONSAFEPATH": "1",  # whatever lies in the current folder
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if self.nodes == 1:
            rendezvous = ["--standalone"]
        else:
            self._reserved = _reserve_port()
            port = self._reserved.getsockname()[1]
            rendezvous = [f"--nnodes={self.nodes}", f"--rdzv-id={token_hex(8)}"]
            rendezvous += ["--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{port}"]
        for node, count in enumerate(self._sizes):
            command = [sys.executable, "-m", "deltaproof.simulator.processes.agent"]
            command += [str(self._report_file(node)), str(os.getpid()), *rendezvous]
            command += [f"--node-rank={node}"] if self.nodes > 1 else []
            command += [f"--nproc-per-node={count}", "--max-restarts=0", "--local-addr=127.0.0.1"]
            command += [f"--log-dir={self.folder / 'torchrun'}"]
            command += ["-m", "deltaproof.simulator.processes.rank", str(spec_file)]
            with open(self._log_file(node), "wb") as log:
                agent = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._agents.append(agent)

    def _report_file(self, node: int) -> Path:
        return self.folder / f"torchrun{node}.json"

    def _log_file(self, node: int) -> Path:
        return self.folder / f"torchrun{node}.log"

    @property
    def started(self) -> bool:
        return bool(self._agents)

    @property
    def begun(self) -> bool:
        return all(rank.pid is not None or not rank.is_alive() for rank in self._torchrun_ranks)

    def has_ended(self, node: int) -> bool:
        """Whether the node's agent is gone; it starts no rank any more then."""
        return self._agents[node].poll() is not None

    def report(self, node: int) -> dict[int, int] | None:
        """The ranks of a node that failed, with their exit codes. None: its agent has not said so."""
        try:
            return msgspec.json.decode(self._report_file(node).read_bytes(), type=dict[int, int])
        except FileNotFoundError:
            return None

    def settle(self) -> None:
        limit = time.monotonic() + REPORT_S
        while time.monotonic() < limit:
            left = [node for node in range(self.nodes) if not self.has_ended(node)]
            # The agent of ranks that did well waits for those of all nodes, which it would do for minutes.
            done = {rank.node for rank in self._torchrun_ranks if rank.recorded() != 0}
            if not left or (len(left) < self.nodes and not done & set(left)):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agents[left[0]].wait(0.05)

    def closed(self, rank: int) -> bool:
        """Its agent ends the other ranks of its node with SIGTERM once one of them has failed."""
        mine = self._torchrun_ranks[rank]
        report = self.report(mine.node) or {}
        failed = any(code != -signal.SIGTERM for other, code in report.items() if other != rank)
        return failed and mine.recorded() is None and report.get(rank) in (None, -signal.SIGTERM)

    def end(self) -> None:
        families = []
        for agent in (agent for agent in self._agents if agent.poll() is None):  # the number of others may be reused
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(agent.pid)
                process.suspend()  # it starts no rank between being asked for its children and its end
                families += process.children(recursive=True)
        for rank in self._torchrun_ranks:
            rank.kill()
        for process in families:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.kill()
                agent.wait(10)
        for rank in self._torchrun_ranks:
            rank.join(10)
            rank.close()
        if self._reserved is not None:
            self._reserved.close()

    def last_words(self) -> str:
        for node in range(self.nodes):
            log = self._log_file(node)
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            if lines:
                return lines[-1]
        return ""


class TorchrunRank:
    """One rank that an agent of torchrun starts, as far as it can be seen from outside: a `RankProcess`."""

    def __init__(self, job: Torchrun, rank: int, node: int) -> None:
        self.rank, self.node = rank, node
        self._job = job
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._gone = False

    def start(self) -> None:
        self._job.start()

    @property
    def pid(self) -> int | None:
        """What the rank's first record says; None until it has begun."""
        if self._pid is None:
            self._pid = next((e.data["pid"] for e in self._events() if e.kind == "rank-start"), None)
            if self._pid is not None:
                try:
                    self._pidfd = os.pidfd_open(self._pid)
                except ProcessLookupError:
                    self._gone = True
        return self._pid

    @property
    def sentinel(self) -> int | None:
        """None: not known yet, or gone before it could be known."""
        return self._pidfd if self.pid is not None else None

    def is_alive(self) -> bool:
        if self.pid is None:
            return self._job.started and not self._job.has_ended(self.node)
        if not self._gone and self._pidfd is not None:
            self._gone = bool(wait([self._pidfd], timeout=0))
        return not self._gone

    def _events(self) -> list[Event]:
        return read_events(self._job.folder / f"rank{self.rank}.events.jsonl")

    def recorded(self) -> int | None:
        """The exit code by what it wrote last; None: it wrote of no end."""
        kinds = {event.kind for event in self._events()}
        codes = {"rank-end": 0, "bad-input": BAD_INPUT, "error": 1}
        return next((code for kind, code in codes.items() if kind in kinds), None)

    @property
    def exitcode(self) -> int | None:
        """None while it runs, and when nobody knows: it left no record, and its agent said nothing."""
        if self.is_alive():
            return None
        report = self._job.report(self.node)
        # An agent without failures saw all its ranks exit with 0, those too that left no record.
        recorded, code = self.recorded(), 0 if report == {} else (report or {}).get(self.rank)
        # The agent's signal may meet a rank that was about to exit.
        return recorded if code is None or (code == -signal.SIGTERM and recorded is not None) else code

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and self._pidfd is not None:
            wait([self._pidfd], timeout)

    def kill(self) -> None:
        """Its whole session: what it started ends with it."""
        if self._pid is not None and self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget the process, when it is over."""
        if self._pidfd is not None and not self.is_alive():
            os.close(self._pidfd)
            self._pidfd = None


def _reserve_port() -> socket.socket:
    """A socket bound to a free port of loopback. As long as it is open and does not listen, only a server that binds
    this very port with SO_REUSEADDR, as TCPStore does, can have it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved

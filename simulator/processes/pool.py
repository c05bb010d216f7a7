"""Rank processes that run scenario after scenario: a fork and warm caches are paid for once.

A process is handed on only after a run in which every rank ended well (`rank.serve` undoes what a run changes), and
only to runs of the reference without faults that patch the process (`may_share`). All others get a process of their
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING

from ..scenario import Scenario
from . import rank as rank_module
from .launchers import Job, end_processes

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

#: Processes that wait for a next run; what a larger job leaves beyond that is ended.
IDLE_MAX = 8
#: Runs after which a process is ended, and the growth of its memory since the first run that ends it sooner.
RUNS_MAX = 50
GROWTH_BYTES_MAX = 256 << 20
#: Families with faults that replace functions of the whole process.
PATCHING = ("clock", "disk")


def may_share(scenario: Scenario, target: str) -> bool:
    """Whether ranks of this run may have run something before and may run something after it."""
    patched = scenario.workload.step_seconds > 0 or any(f.family in PATCHING for f in scenario.faults)
    # A process keeps the CUDA device that it has once used.
    return target == "reference" and not patched and scenario.devices != "per-rank"


class _Worker:
    """A process and the pipe over which it gets runs."""

    def __init__(self, context: BaseContext) -> None:
        self.runs = 0
        self.tasks, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            # daemon: Python must not wait for it at its own end, should nobody close the engine
            target=rank_module.serve,
            args=(theirs,),
            name="deltaproof-rank",
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """At once, and reaped."""
        self.tasks.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        with contextlib.suppress(ValueError):  # still there after ten seconds of SIGKILL: stuck in the kernel
            self.process.close()


class SharedRank:
    """One run on a process of the pool. Seems to exit with 0 when the run ended well, though the process lives on."""

    def __init__(self, pool: RankPool, spec: rank_module.RankSpec) -> None:
        self._pool, self._spec = pool, spec
        self._worker: _Worker | None = None
        self._pid: int | None = None
        self._exitcode: int | None = None
        #: Bytes by which the process has grown since its first run; None while this one goes on or has failed.
        self.grown_bytes: int | None = None

    @property
    def worker(self) -> _Worker:
        if self._worker is None:
            raise ValueError("this rank was not started, or was given back")
        return self._worker

    def start(self) -> None:
        self._worker = self._pool.take()
        try:
            self._worker.tasks.send(self._spec)
        except ConnectionError:  # it was killed while it waited
            self._worker.end()
            self._worker = _Worker(self._pool.context)
            self._worker.tasks.send(self._spec)
        self._pid = self._worker.process.pid
        self._worker.runs += 1

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def sentinel(self) -> Connection:
        return self.worker.tasks

    @property
    def exitcode(self) -> int | None:
        if self._exitcode is None and self._worker is not None:
            with contextlib.suppress(EOFError, ConnectionError):
                if self._worker.tasks.poll():
                    self.grown_bytes = self._worker.tasks.recv()
                    self._exitcode = 0
            if self._exitcode is None:
                self._exitcode = self._worker.process.exitcode
        return self._exitcode

    def is_alive(self) -> bool:
        return self._worker is not None and self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Call it after ``sentinel`` was ready, or with a ``timeout`` in seconds."""
        if self.is_alive() and self._worker is not None:
            self._worker.process.join(timeout)

    def kill(self) -> None:
        self.worker.process.kill()

    def give_back(self) -> _Worker | None:
        """The process that this was run on; remembers how it ended."""
        _ = self.exitcode
        worker, self._worker = self._worker, None
        return worker


class PooledJob(Job):
    """One start of the job on processes of a pool."""

    def __init__(self, pool: RankPool, ranks: list[SharedRank]) -> None:
        super().__init__(ranks)
        self._pool, self._shared = pool, ranks

    def end(self) -> None:
        end_processes(self.ranks)
        self._pool.settle(self._shared)


class RankPool:
    """Makes the ranks of one attempt after another. ``close`` ends every process of it."""

    def __init__(self, context: BaseContext) -> None:
        self.context = context
        self._idle: list[_Worker] = []

    def job(self, specs: Sequence[rank_module.RankSpec]) -> PooledJob:
        """Ranks that are not started yet, on processes of the pool."""
        return PooledJob(self, [SharedRank(self, spec) for spec in specs])

    def take(self) -> _Worker:
        """A process that waits, or a new one."""
        while self._idle:
            worker = self._idle.pop(0)
            if worker.process.is_alive():
                return worker
            worker.end()
        return _Worker(self.context)

    def settle(self, shared: Sequence[SharedRank]) -> None:
        """Take back the processes of an attempt that is over: to be used again if it ended well on all ranks."""
        well = all(rank.exitcode == 0 for rank in shared)
        for rank in shared:
            worker = rank.give_back()
            if worker is None:
                continue
            grown = rank.grown_bytes
            fresh = worker.runs < RUNS_MAX and grown is not None and grown < GROWTH_BYTES_MAX
            if well and fresh and len(self._idle) < IDLE_MAX:
                self._idle.append(worker)
            else:
                worker.end()

    @property
    def idle_pids(self) -> list[int]:
        """Processes that wait for a run."""
        return [pid for worker in self._idle if (pid := worker.process.pid) is not None]

    def close(self) -> None:
        """End the processes that wait; safe to call twice."""
        while self._idle:
            self._idle.pop().end()

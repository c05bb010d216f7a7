"""The process engine: real ranks, a real process group, real HTTP, and a supervisor that never waits without a
deadline.

One engine keeps a forkserver (torch and torchrec imported once) and a fake store in a process of its own, and runs one
scenario after another. Supervision has torchrun's semantics: when one rank fails, its peers get a grace period to end
by themselves and are then ended. No code path waits for a process or a socket without a limit.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from secrets import token_hex
from typing import Final, Literal, Self, TypeVar

import psutil
import pyarrow.compute as pc

from ...fakes.server.state import DEFAULT_TOKEN
from ..disk import read_shards
from ..errors import KitError, ScenarioError
from ..history import (
    Attempt,
    History,
    LedgerTable,
    append_attempt,
    build_tables,
    find_leaks,
    read_ledger,
    told_by_target,
)
from ..recorded import begin_run, folder_name
from ..scenario import Scenario
from ..target import PASSWORD, VERSION, RankContext, contents
from ..workload import Workload
from . import rank as rank_module
from .launchers import Job, Launcher, Supervision, Torchrun, check_options
from .pool import RankPool, may_share
from .store_process import StoreProcess
from .supervisor import Supervisor

#: A Unix socket's path has 107 bytes, and multiprocessing needs 33 of them for its own names.
TMPDIR_BYTES_MAX = 74
#: Set to planted values in every rank: what a trainer's own environment holds.
SECRET_VARIABLES = ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN", PASSWORD)
#: How long a target may take to say what its own store holds.
CONTENTS_S: Final = 30.0
T = TypeVar("T")
PRELOAD = "deltaproof.simulator.processes.preload"


def require_torch() -> None:
    """Raises ScenarioError (bad environment) when torch or torchrec is not installed, naming the extra that brings
    them."""
    import importlib.util

    for module in ("torch", "torchrec"):
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            raise ScenarioError(
                f"the process engine needs {module}, which is not installed: install the extra deltaproof[torch]"
            )


def require_short_tmpdir() -> None:
    """Raises ScenarioError when the temporary folder's name leaves no room for the forkserver's socket in it."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > TMPDIR_BYTES_MAX:
        raise ScenarioError(
            f"the temporary folder {folder} has a name of over {TMPDIR_BYTES_MAX} bytes, too long for a socket; "
            "set TMPDIR to a shorter one"
        )


def _sweep() -> None:
    """Remove the folders of engines whose process was killed before it could do so itself."""
    for folder in Path(tempfile.gettempdir()).glob("deltaproof-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """What a call into foreign code returns or raises. Raises ScenarioError when that takes longer."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="deltaproof-contents", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        raise ScenarioError(f"{what} did not return within {seconds:g} s") from None


class ProcessEngine:
    """Runs scenarios on real processes. A context manager; ``close`` leaves no process, port or folder behind.

    ``start_method``: ``forkserver`` (ranks fork from a process that has torch imported) or ``spawn`` (a fresh
    interpreter per rank, for comparison). ``keep``: a folder in which each run's files are kept, else they are removed
    with the run. ``launcher``: ``own`` starts the ranks as said, ``torchrun`` lets an agent on each of ``nodes`` nodes,
    all on this machine, start them (at most one node per rank). ``supervision``: see `launchers.Supervision`.
    Raises ScenarioError for options that do not go together.
    """

    def __init__(
        self,
        *,
        start_method: Literal["forkserver", "spawn"] = "forkserver",
        keep: Path | None = None,
        launcher: Launcher = "own",
        nodes: int = 1,
        supervision: Supervision = "torchrun",
    ) -> None:
        check_options(launcher, nodes, supervision)
        self._launcher, self._nodes, self._supervision = launcher, nodes, supervision
        require_torch()
        require_short_tmpdir()
        if launcher == "torchrun":
            start_method = "spawn"  # of the store: nothing here is to be forked with torch in memory
        self._context: BaseContext = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload([PRELOAD])
        self._keep = keep
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"deltaproof-{os.getpid()}-"))
        self._runs = 0
        self._job: Job | None = None
        self._pool = RankPool(self._context) if start_method == "forkserver" else None
        self._store: StoreProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process this engine started and remove its folder. Safe to call twice and after an interrupt."""
        self._end_job()
        self.release()
        if self._store is not None:
            self._store.close()
            self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def warm_up(self) -> None:
        """Start the forkserver and the store now, so that the first run does not pay for it."""
        self._ready_store()

    def release(self) -> None:
        """End the rank processes that wait for a next run."""
        if self._pool is not None:
            self._pool.close()

    def _ready_store(self) -> StoreProcess:
        if self._store is not None and not self._store.alive:
            self._store.close()
            self._store = None
        if self._store is None:
            self._store = StoreProcess(self._context, self._folder)
        return self._store

    def run(self, scenario: Scenario, target: str = "reference") -> History:
        """Run one scenario to its end. Raises ScenarioError for bad input and KitError when the harness itself
        fails."""
        scenario.checked()
        Workload(scenario)  # reads the Parquet file, so that a bad one is refused before any process starts
        manifest = scenario.manifest()
        store = self._ready_store()
        store.reset(scenario)
        folder = self._new_folder(scenario)
        begin_run(folder, scenario, target=target, engine="processes")
        started = time.monotonic()
        # As long as real ones, and found nowhere by chance.
        secrets = {name: token_hex(16) for name in SECRET_VARIABLES}
        runs: list[Supervisor] = []
        make = self._launch(scenario, target)
        try:
            for attempt in range(1 + len(scenario.restarts)):
                supervisor = Supervisor(
                    scenario, attempt, target, store.endpoint, folder, make, secrets, self._supervision
                )
                runs.append(supervisor)
                self._job = supervisor.job
                supervisor.start(self._folder / "torch")
                supervisor.wait()
                self._end_job()
                if not supervisor.failed:
                    break
        finally:
            self._end_job()
        wall_s = time.monotonic() - started
        history = self._collect(scenario, target, manifest, store, runs)
        history.wall_s = wall_s
        logins = (f"rank{rank}:{secrets[PASSWORD]}" for rank in range(max(len(run.ranks) for run in runs)))
        planted = {"datasource token": DEFAULT_TOKEN, **secrets}
        planted |= {f"login of rank {r}": base64.b64encode(who.encode()).decode() for r, who in enumerate(logins)}
        history.planted, history.leaks = tuple(planted), find_leaks(folder, planted)
        if scenario.publisher.retain:
            history.retained = read_shards(folder / "retained")
        if self._keep is not None:
            history.save(folder)
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return history

    def _new_folder(self, scenario: Scenario) -> Path:
        """For a run. What is kept is written where it stays, so that it is there when this process is killed.

        The ranks know it by a link beside the other runs, because a file's URL cannot have all names.
        """
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        if self._keep is None:
            folder.mkdir()
            return folder
        number, name = 1, folder_name(scenario.name)
        while (kept := self._keep / f"run{number}-{name}").exists():
            number += 1
        kept.mkdir(parents=True)
        folder.symlink_to(kept.resolve())
        return folder

    def _launch(self, scenario: Scenario, target: str) -> Callable[[list[rank_module.RankSpec]], Job]:
        """What makes the processes of the ranks, not started yet."""
        if self._launcher == "torchrun":
            return partial(Torchrun, nodes=self._nodes)
        if self._pool is not None and may_share(scenario, target):
            return self._pool.job
        return self._own_job

    def _own_job(self, specs: Sequence[rank_module.RankSpec]) -> Job:
        """Each rank in a process that ends with the run."""
        return Job(
            [
                self._context.Process(  # type: ignore[attr-defined]
                    target=rank_module.main, args=(spec,), name=f"deltaproof-rank{spec.rank}"
                )
                for spec in specs
            ]
        )

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.end()
        self._job = None

    def _collect(
        self, scenario: Scenario, target: str, manifest: dict[str, str], store: StoreProcess, runs: list[Supervisor]
    ) -> History:
        events = [event for run in runs for event in run.all_events()]
        refused = next((e for e in events if e.kind == "bad-input"), None)
        if refused is not None:
            raise ScenarioError(refused.data["message"])
        fired = [0] * len(scenario.faults)
        for event in events:
            if event.kind == "fault":
                fired[event.data["index"]] += 1
        final, writes, requests, store_fired = store.observed([f.kind for f in scenario.faults])
        fired = [mine + theirs for mine, theirs in zip(fired, store_fired, strict=True)]
        events += requests
        events.sort(key=lambda e: e.t_ms)
        reader = RankContext.reader(scenario, rank_module.run_name(runs[0].folder), None, store.endpoint)
        foreign = _within(CONTENTS_S, f"contents() of target {target!r}", lambda: contents(target, reader))
        if foreign is not None:
            final, writes = told_by_target(foreign, events[-1].t_ms, VERSION)
        attempts: list[Attempt] = []
        tables: dict[str, LedgerTable] = {}
        for run in runs:
            attempt = Attempt(len(run.ranks), run.outcomes(), begin_ms=run.begin_ms, end_ms=run.end_ms)
            tables = self._continue(run, attempt, attempts, manifest, tables)
            attempts.append(attempt)
        return History(
            scenario=scenario,
            target=target,
            engine="processes",
            launcher=self._launcher,
            nodes=max(run.job.nodes for run in runs),
            supervision=self._supervision,
            events=events,
            outcomes=attempts[-1].outcomes,
            tables=tables,
            manifest=manifest,
            writes=writes.filter(pc.equal(writes["version"], VERSION)),
            strays=writes.filter(pc.not_equal(writes["version"], VERSION)),
            final=final,
            fired=fired,
            stacks=runs[-1].stacks,
            attempts=attempts if len(attempts) > 1 else [],
            store_log=foreign is None,
        )

    def _continue(
        self,
        run: Supervisor,
        attempt: Attempt,
        earlier: list[Attempt],
        manifest: dict[str, str],
        tables: dict[str, LedgerTable],
    ) -> dict[str, LedgerTable]:
        """The ledger with this attempt in it; notes in ``attempt`` how its steps are counted."""
        ledgers = [read_ledger(run.folder / f"rank{rank}.ledger.arrows") for rank in range(len(run.ranks))]
        try:
            mine = build_tables(run.scenario, manifest, ledgers)
        except ValueError as error:
            raise KitError(f"the ledger of {run.scenario.name!r} contradicts itself: {error}") from error
        if not earlier:
            return mine
        restored = next((e for e in run.all_events() if e.kind == "restored"), None)
        try:
            return append_attempt(tables, mine, attempt, earlier, restored)
        except ValueError as error:
            raise KitError(f"the ledger of {run.scenario.name!r} contradicts itself: {error}") from error

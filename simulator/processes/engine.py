"""The process engine: real ranks, a real process group, real HTTP, and a supervisor that never waits without a
deadline.

One engine keeps a forkserver (torch and torchrec imported once) and a fake store in a process of its own, and runs one
scenario after another. Supervision has torchrun's semantics: when one rank fails, its peers get a grace period to end
by themselves and are then ended. No code path waits for a process or a socket without a limit.
"""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext, ForkServerProcess
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import msgspec
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import urllib3

from ...fakes.feature_store_py import FeatureStoreClient
from ...fakes.server.state import DEFAULT_TOKEN
from ..disk import read_shards
from ..errors import KitError, ScenarioError
from ..history import (
    FINAL_SCHEMA,
    WRITES_SCHEMA,
    Attempt,
    Event,
    History,
    LedgerTable,
    RankOutcome,
    append_attempt,
    build_tables,
    find_leaks,
    read_events,
    read_ledger,
)
from ..scenario import Scenario
from ..store_faults import planned
from ..target import PASSWORD, PROJECT, VERSION, VIEW
from ..workload import Workload

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

#: How often, in seconds, the supervisor looks whether a rank raised that has not exited yet.
POLL_S = 0.25
#: The exit code that multiprocessing makes up when the forkserver cannot tell one any more.
FORKSERVER_LOST = 255
#: The exit code of a rank whose scenario or target cannot be run.
BAD_INPUT = 2
#: Seconds within which processes must start; the first start waits for the forkserver's imports.
START_S = 120.0
#: A Unix socket's path has 107 bytes, and multiprocessing needs 33 of them for its own names.
TMPDIR_BYTES_MAX = 74
#: Set to planted values in every rank: what a trainer's own environment holds.
SECRET_VARIABLES = ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN", PASSWORD)
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


class ProcessEngine:
    """Runs scenarios on real processes. A context manager; ``close`` leaves no process, port or folder behind.

    ``start_method``: ``forkserver`` (ranks fork from a process that has torch imported) or ``spawn`` (a fresh
    interpreter per rank, for comparison). ``keep``: a folder in which each run's files are kept, else they are removed
    with the run.
    """

    def __init__(
        self, *, start_method: Literal["forkserver", "spawn"] = "forkserver", keep: Path | None = None
    ) -> None:
        require_torch()
        require_short_tmpdir()
        self._context: BaseContext = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload([PRELOAD])
        self._keep = keep
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"deltaproof-{os.getpid()}-"))
        self._runs = 0
        self._ranks: list[BaseProcess] = []
        self._store: _StoreProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process this engine started and remove its folder. Safe to call twice and after an interrupt."""
        _end(self._ranks)
        self._ranks = []
        if self._store is not None:
            self._store.close()
            self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def warm_up(self) -> None:
        """Start the forkserver and the store now, so that the first run does not pay for it."""
        self._ready_store()

    def _ready_store(self) -> _StoreProcess:
        if self._store is not None and not self._store.alive:
            self._store.close()
            self._store = None
        if self._store is None:
            self._store = _StoreProcess(self._context, self._folder)
        return self._store

    def run(self, scenario: Scenario, target: str = "reference") -> History:
        """Run one scenario to its end. Raises ScenarioError for bad input and KitError when the harness itself
        fails."""
        scenario.checked()
        Workload(scenario)  # reads the Parquet file, so that a bad one is refused before any process starts
        manifest = scenario.manifest()
        store = self._ready_store()
        store.reset(scenario)
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        started = time.monotonic()
        # As long as real ones, and found nowhere by chance.
        secrets = {name: token_hex(16) for name in SECRET_VARIABLES}
        runs: list[Supervisor] = []
        try:
            for attempt in range(1 + len(scenario.restarts)):
                supervisor = Supervisor(scenario, attempt, target, store.endpoint, folder, self._context, secrets)
                runs.append(supervisor)
                self._ranks = supervisor.ranks
                supervisor.start(self._folder / "torch")
                supervisor.wait()
                _end(self._ranks)
                if not supervisor.failed:
                    break
        finally:
            _end(self._ranks)
            self._ranks = []
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
            shutil.copytree(folder, self._keep / f"run{self._runs}-{scenario.name}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return history

    def _collect(
        self, scenario: Scenario, target: str, manifest: dict[str, str], store: _StoreProcess, runs: list[Supervisor]
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


@contextlib.contextmanager
def _starting(cache: Path) -> Iterator[None]:
    """Around every start of a process: it gets no Ctrl-C, does not import ``__main__`` and leaves no folder behind.

    A child imports its parent's main module anew: a console script, pytest or a user's notebook, once per rank. Nothing
    that runs in a child comes from there, and a script without an ``if __name__`` guard would start itself again.
    Ctrl-C is blocked, not ignored, so that the supervisor gets it a moment later and ends its children in order. torch
    makes a cache folder when it is imported; ``cache`` says where, if the environment does not.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    unset = "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    if unset:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    # Started in between, the resource tracker would unblock SIGINT again before the forkserver inherits the mask.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if unset:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(processes: list[BaseProcess], cache: Path) -> None:
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
    if not isinstance(processes[0], ForkServerProcess):
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
        context: BaseContext,
        secrets: Mapping[str, str],
    ) -> None:
        from . import rank as rank_module

        self.scenario, self.attempt = scenario.of_attempt(attempt), attempt
        self.folder = folder / f"attempt-{attempt}" if attempt else folder
        self.folder.mkdir(exist_ok=True)
        (folder / "checkpoints").mkdir(exist_ok=True)
        self.events: list[Event] = []
        self.stacks: dict[int, str] = {}
        self.begin_ms = self.end_ms = 0.0
        self._ended: dict[int, str] = {}
        text = scenario.to_json()
        common = (target, endpoint, str(self.folder), secrets, attempt, str(folder))
        self.ranks: list[BaseProcess] = [
            context.Process(  # type: ignore[attr-defined]
                target=rank_module.main,
                args=(rank_module.RankSpec(text, rank, *common),),
                name=f"deltaproof-rank{rank}",
            )
            for rank in range(self.scenario.world_size)
        ]

    def start(self, cache: Path) -> None:
        self.begin_ms = time.monotonic() * 1000
        _start(self.ranks, cache)

    @property
    def failed(self) -> bool:
        """Whether a rank ended otherwise than well. A scenario that cannot be run is no failure of the job."""
        return all(process.exitcode != BAD_INPUT for process in self.ranks) and any(p.exitcode for p in self.ranks)

    def all_events(self) -> list[Event]:
        """The supervisor's own, and what the ranks wrote."""
        ranks = range(len(self.ranks))
        return [*self.events, *(e for rank in ranks for e in read_events(self.folder / f"rank{rank}.events.jsonl"))]

    def wait(self) -> None:
        """Until every rank is gone, by itself or by us. The first failure shortens everybody's deadline to the
        grace."""
        deadlines = self.scenario.deadlines
        limit = time.monotonic() + deadlines.run_s
        failed = False
        waiting = {p.sentinel: rank for rank, p in enumerate(self.ranks)}
        while waiting:
            left_s = limit - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=min(max(0.0, left_s), POLL_S))
            for sentinel in ready:
                rank = waiting.pop(cast(int, sentinel))
                process = self.ranks[rank]
                process.join()
                self._note("rank-exit", rank, exitcode=process.exitcode)
            if not failed and self._some_rank_failed():
                failed = True
                limit = min(limit, time.monotonic() + deadlines.grace_s)
            if not ready and time.monotonic() >= limit:
                self._end_rest(sorted(waiting.values()), "ended" if failed else "deadline")
                break
        self.end_ms = time.monotonic() * 1000

    def _some_rank_failed(self) -> bool:
        """A rank exited with an error, or raised and has not exited yet."""
        return any(
            process.exitcode or (self.folder / f"rank{rank}.failed").exists() for rank, process in enumerate(self.ranks)
        )

    def _end_rest(self, ranks: list[int], why: str) -> None:
        # A rank that raised but lives on has a deadline of its own: it hangs, whatever its peers do.
        for rank in ranks:
            self._ended[rank] = "deadline" if (self.folder / f"rank{rank}.failed").exists() else why
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.ranks[rank].pid or -1, signal.SIGUSR1)
        self._await_stacks(ranks)
        for rank in ranks:
            self._note("rank-ended-by-supervisor", rank, why=self._ended[rank])
        _end([self.ranks[rank] for rank in ranks])
        for rank in ranks:
            path = self.folder / f"rank{rank}.stacks"
            self.stacks[rank] = path.read_text(errors="replace") if path.exists() else ""

    def _await_stacks(self, ranks: list[int]) -> None:
        """Give the ranks up to a second to print their stacks; faulthandler writes them from the signal handler."""
        limit = time.monotonic() + 1.0
        paths = [self.folder / f"rank{rank}.stacks" for rank in ranks]
        while time.monotonic() < limit and not all(p.exists() and p.stat().st_size for p in paths):
            multiprocessing.connection.wait([self.ranks[r].sentinel for r in ranks], timeout=0.02)

    def _note(self, kind: str, rank: int, **data: Any) -> None:
        event = Event(t_ms=time.monotonic() * 1000, who="supervisor", kind=kind, rank=rank, data=data)
        self.events.append(msgspec.structs.replace(event, attempt=self.attempt))

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
            elif code is not None and code < 0:
                status = "killed"
            elif error is not None and code:
                status = "error"
            elif code == 0 and any(e.kind == "rank-end" for e in mine):
                status = "ok"
            else:
                status = "vanished"
            text = "" if error is None else f"{error.data['type']}: {error.data['message']}"
            tail = _tail(self.folder, rank)
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
    return lines[-1] if lines else "it printed nothing"


def _end(processes: list[BaseProcess]) -> None:
    """SIGKILL and reap; a process that was never started is skipped."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(10)


class _StoreProcess:
    """The fake Feature Store in a process of its own, driven over its admin routes; every call has a time-out."""

    def __init__(self, context: BaseContext, folder: Path) -> None:
        from ...fakes.server import process_main

        self._pipe, child = context.Pipe()
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=process_main, args=(child,), name="deltaproof-store", daemon=True
        )
        _start([self._process], folder / "torch")
        child.close()
        if not self._pipe.poll(120):
            self.close()
            raise KitError("the fake store did not start within 120 s")
        try:
            self.port: int = self._pipe.recv()
        except EOFError:
            self.close()
            raise KitError(f"the fake store ended while starting (exit code {self._process.exitcode})") from None
        self.endpoint = f"127.0.0.1:{self.port}"
        self._http = urllib3.PoolManager(timeout=urllib3.Timeout(total=60), retries=False)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        _end([self._process])

    def _request(self, method: str, path: str, body: Any = None) -> urllib3.BaseHTTPResponse:
        try:
            return self._http.request(method, f"http://{self.endpoint}/_admin/{path}", json=body)
        except urllib3.exceptions.HTTPError as error:
            raise KitError(f"the fake store does not answer {method} /_admin/{path}: {error}") from error

    def _admin(self, method: str, path: str, body: Any = None) -> bytes:
        reply = self._request(method, path, body)
        if reply.status != 200:
            raise KitError(f"the fake store answers {method} /_admin/{path} with {reply.status}: {reply.data[:500]!r}")
        return reply.data

    def reset(self, scenario: Scenario) -> None:
        """Empty the store and plan the scenario's store faults; a fault's id is its index in the scenario."""
        self._admin("POST", "reset", {"projects": [PROJECT]})
        self._admin("PUT", "faults", msgspec.to_builtins(planned(scenario)))

    def observed(self, kinds: Sequence[str]) -> tuple[pa.Table, pa.Table, list[Event], list[int]]:
        """(final content, accepted writes, request events, firings by fault index). ``kinds``: one per fault."""
        # The content is read before the log: whatever a dead rank's last request still adds is in the log then, too.
        final = self._content()
        writes = self._log()
        fired = [0] * len(kinds)
        for entry in msgspec.json.decode(self._admin("GET", "faults"))["Faults"]:
            fired[int(entry["fault"]["id"])] = entry["fired"]
        events = []
        for request in msgspec.json.decode(self._admin("GET", "requests"))["Requests"]:
            if request["route"].startswith("admin"):
                continue
            client = str(request["client"])
            rank = int(client[4:]) if client.startswith("rank") and client[4:].isdigit() else None
            data = {k: v for k, v in request.items() if k in _REQUEST_FIELDS and v not in (None, "", [], 0)}
            events.append(Event(t_ms=request["t_ms"], who="store", kind="request", rank=rank, data=data))
            for index in map(int, request["fault_ids"]):
                struck = {"index": index, "kind": kinds[index], "client": client}
                events.append(Event(t_ms=request["t_ms"], who="store", kind="fault", rank=rank, data=struck))
        return final, writes, events, fired

    def _content(self) -> pa.Table:
        """What a reader sees, by the read path that serving uses. Empty when no view was ever made."""
        try:
            client = FeatureStoreClient(
                access_key_id="deltaproof",
                access_key_secret="deltaproof",
                region="local",
                endpoint=self.endpoint,
                featuredb_username="reader",
                featuredb_password="deltaproof",
            )
            project = client.get_project(PROJECT)
            view = None if project is None else project.get_dynamic_embedding_feature_view(VIEW)
            return FINAL_SCHEMA.empty_table() if view is None else view.scan(VERSION).select(FINAL_SCHEMA.names)
        except Exception as error:
            raise KitError(f"cannot read the fake store back: {type(error).__name__}: {error}") from error

    def _log(self) -> pa.Table:
        reply = self._request("GET", f"log?project={PROJECT}&view={VIEW}")
        if reply.status == 404:
            return WRITES_SCHEMA.empty_table()
        if reply.status != 200:
            raise KitError(f"the fake store's log cannot be read: {reply.status} {reply.data[:500]!r}")
        with pa.ipc.open_stream(reply.data) as reader:
            return reader.read_all().select(WRITES_SCHEMA.names)


#: What of the store's request log goes into the history.
_REQUEST_FIELDS = {"route", "client", "rows", "rows_applied", "version", "ts", "status", "code", "fate"}

"""A scripted view, a client around it, and a table source of NumPy arrays: no server.

And `ranks`: real processes with torch, forked from a server that has it imported.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import runpy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.reference.contract import fqn
from deltaproof.reference.delta import make_delta
from deltaproof.reference.dumper import TableInfo
from deltaproof.reference.settings import Settings

DEADLINE_S = 20
PROGRAM = Path(__file__).with_name("torch_rank.py")
RANKS_DEADLINE_S = 90
PRELOAD = ["deltaproof.simulator.processes.preload"]  # one forkserver per process: the list of the engine's


class SdkError(str):
    """An error as the SDK facade lists it: text with a verdict."""

    def __new__(cls, text: str, **verdict: Any) -> SdkError:
        error = super().__new__(cls, text)
        error.__dict__.update(verdict)
        return error


class ScriptedView:
    """A view that answers each flush by the next entry of `script` ("ok" when it is used up), and keeps what it stored.

    Entries: "ok"; "lost" (nothing stored, one retriable error); "half" (every second batch stored); "silent-half" (the
    same, but the summary names no error); "unseen" (all stored, then the connection breaks); "fatal" (403); "expired"
    (401); "write-breaks" (a write raises, the rest is stored); a callable is called with the view and returns one of
    these.
    """

    pk_field, sk_field, embedding_field = "embedding_name", "key_id", "embedding"
    embedding_field_type = "ARRAY<FLOAT>"

    def __init__(self, script: Any = (), high_water: int = 0, batch_size: int = 1000) -> None:
        self._batch_size, self._max_workers = batch_size, 4
        self.script, self.high_water = list(script), high_water
        self.pending: list[tuple[Any, int]] = []
        self.sent: list[tuple[int, int]] = []  # (ts, rows) in order of the calls
        self.windows: list[int] = []  # batches per flush
        self.stored: dict[tuple[str, int], tuple[int, tuple[float, ...]]] = {}
        self.closed = False
        self.entered, self.release = threading.Event(), threading.Event()

    def high_water_ts(self, version: str) -> int:
        assert version == "v1"
        return self.high_water

    def write_features_arrow(self, batch: pa.RecordBatch, version: str, write_mode: str, ts: int) -> None:
        assert isinstance(batch, pa.RecordBatch)
        assert batch.schema.types == [pa.string(), pa.int64(), pa.list_(pa.float32())]
        self._take(batch.to_pylist(), version, write_mode, ts)

    def write_features(self, data: list[dict[str, Any]], version: str, write_mode: str, ts: int) -> None:
        self._take(data, version, write_mode, ts)

    def _take(self, rows: list[dict[str, Any]], version: str, write_mode: str, ts: int) -> None:
        assert (version, write_mode) == ("v1", "MERGE")
        assert len(rows) <= self._batch_size
        self.sent.append((ts, len(rows)))
        if self.script and self.script[0] == "write-breaks" and not self.pending:
            self.pending.append(([], ts))
            raise ConnectionResetError("peer went away")
        self.pending.append((rows, ts))

    def write_flush(self) -> dict[str, Any]:
        batches, self.pending = self.pending, []
        self.windows.append(len(batches))
        how = self.script.pop(0) if self.script else "ok"
        if callable(how):
            how = how(self)
        kept = {"ok": batches, "unseen": batches, "half": batches[::2], "silent-half": batches[::2]}.get(how, [])
        for rows, ts in kept:
            for row in rows:
                key = (row["embedding_name"], row["key_id"])
                if ts >= self.stored.get(key, (0,))[0]:
                    self.stored[key] = (ts, tuple(row["embedding"]))
        if how == "unseen":
            raise ConnectionResetError("peer went away after the commit")
        total, good = sum(len(rows) for rows, _ in batches), sum(len(rows) for rows, _ in kept)
        errors = {
            "lost": [SdkError("busy", status=503, retriable=True, retry_after_s=0.0)],
            "half": [SdkError("some rows failed", status=207, retriable=True)],
            "fatal": [SdkError("no access", status=403, retriable=False)],
            "expired": [SdkError("InvalidToken: no longer", status=401, retriable=False)],
        }
        return {
            "total_batches": len(batches),
            "failed_batches": len(batches) - len(kept),
            "total_records": total,
            "success_records": good,
            "failed_records": total - good,
            "errors": errors.get(how, []),
        }

    def close(self, wait: bool = True) -> None:
        self.closed = True

    def hold(self, answer: str = "ok") -> Callable[[ScriptedView], str]:
        """Script entry: the flush says that it began, then waits for `release`."""

        def wait(view: ScriptedView) -> str:
            view.entered.set()
            assert view.release.wait(DEADLINE_S)
            return answer

        return wait


class ScriptedClient:
    """One project, whose view exists once somebody created it; `steps` notes what was called, in order."""

    def __init__(self, view: ScriptedView, exists: bool = False) -> None:
        self.view, self.exists, self.entities, self.steps = view, exists, set[str](), list[str]()

    def get_project(self, name: str) -> ScriptedClient | None:
        return self if name == "p" else None

    def get_entity(self, name: str) -> str | None:
        return name if name in self.entities else None

    def create_entity(self, name: str, join_id: str, parent_feature_entity_name: str | None = None) -> None:
        assert join_id == "embedding_name"
        self.entities.add(name)
        self.steps.append("create entity")

    def get_dynamic_embedding_feature_view(self, name: str) -> ScriptedView | None:
        self.steps.append("open" if self.exists else "missing")
        return self.view if self.exists else None

    def create_dynamic_embedding_feature_view(self, **how: Any) -> ScriptedView:
        assert how["entity"] in self.entities
        assert how["pk_field_type"] == "STRING"
        assert how["sk_field_type"] == "INT64"
        assert how["embedding_field_type"] == "ARRAY<FLOAT>"
        self.exists = True
        self.steps.append("create view")
        return self.view


class ArraySource:
    """Tables held in NumPy arrays; a test touches rows by hand. `tables` maps FQN parts to (rows, dim, sharding)."""

    def __init__(self, tables: dict[tuple[str, Any, str], tuple[int, int, str]]) -> None:
        self.infos = {
            fqn(*ref): TableInfo(fqn(*ref), *ref, ("f",), rows, dim, sharding, True)
            for ref, (rows, dim, sharding) in tables.items()
        }
        self.weights = {fqn(*ref): np.zeros((rows, dim), np.float32) for ref, (rows, dim, _) in tables.items()}
        self.touched: dict[str, set[int]] = {}
        self.depth = 0

    def tables(self) -> dict[str, TableInfo]:
        return self.infos

    def train(self, name: str, keys: list[int], value: float) -> None:
        if not self.depth:
            self.touched.setdefault(name, set()).update(keys)
        self.weights[name][keys] = value

    def drain(self) -> dict[str, np.ndarray]:
        touched, self.touched = self.touched, {}
        return {name: np.array(sorted(keys), np.int64) for name, keys in touched.items()}

    def gather(self, fqn: str, keys: np.ndarray) -> np.ndarray:
        return self.weights[fqn][keys]

    def hosts(self, fqn: str, keys: np.ndarray) -> np.ndarray:
        return (keys >= 0) & (keys < (self.infos[fqn].rows if fqn in self.infos else 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def settings_of(**changes: Any) -> Settings:
    defaults: dict[str, Any] = {
        "project": "p",
        "view": "v",
        "version": "v1",
        "every_steps": 5,
        "retry_delay_ms_min": 0,
        "retry_delay_ms_max": 0,
        "close_timeout_s": DEADLINE_S,
        "flush_timeout_s": DEADLINE_S,
    }
    cadence = {"every_steps": None} if "every_minutes" in changes else {}
    return Settings(**(defaults | cadence | changes))


def delta_of(step: int, keys: Any, value: float = 1.0, table: str = "m.ebc.embedding_bags.t", dim: int = 2) -> pa.Table:
    ids = np.array(keys, np.int64)
    return make_delta(step, 0, 1, "f", table, ids, np.full((len(ids), dim), value, np.float32), "dump")


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers of this file, for tests that cannot import it."""

    class Kit:
        view, client, source, settings, delta = ScriptedView, ScriptedClient, ArraySource, settings_of, delta_of
        error, deadline_s = SdkError, DEADLINE_S

    Kit.settings = staticmethod(settings_of)
    Kit.delta = staticmethod(delta_of)
    return Kit


@pytest.fixture(scope="session")
def context() -> Iterator[ForkServerContext]:
    if importlib.util.find_spec("torchrec") is None:  # looked for, not imported: only the ranks need it
        pytest.skip("the extra `torch` is not installed")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    previous = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    yield made
    if previous is None:
        del os.environ["GLOO_SOCKET_IFNAME"]


@pytest.fixture
def ranks(context: ForkServerContext, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a task of torch_rank.py on every rank and returns what each left; no rank outlives the deadline."""

    def run(task: str, world_size: int = 2) -> list[Any]:
        # By path, not by module: the forked process need not be able to import the tests.
        arguments = {"task": task, "world_size": world_size, "folder": str(tmp_path)}
        programs = [{"arguments": {**arguments, "rank": r}} for r in range(world_size)]
        processes = [context.Process(target=runpy.run_path, args=(str(PROGRAM), p, "rank")) for p in programs]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANKS_DEADLINE_S)
        stuck = [r for r, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join(RANKS_DEADLINE_S)
        errors = {path.name: path.read_text() for path in sorted(tmp_path.glob("*.error"))}
        assert not stuck, f"ranks {stuck} did not end: {errors}"
        assert not errors, "\n".join(errors.values())
        return [pickle.loads((tmp_path / f"rank{r}.pickle").read_bytes()) for r in range(world_size)]

    return run

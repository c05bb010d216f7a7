"""The fakes against a model of forty lines, over any sequence of writes, retries, reads, clock steps and restarts.

One machine drives three systems through the SDK facade: a store in process, a store kept in a folder, and the server
over HTTP with its store in a folder. The last two are restarted on the way, in order or as by kill -9.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deltaproof.fakes.durable import DurableStore
from deltaproof.fakes.errors import SnapshotNotFound
from deltaproof.fakes.feature_store_py import FeatureStoreClient, in_process_client
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import (
    AnyFault,
    DuplicateFault,
    FaultPlan,
    PartialFault,
    ResetFault,
    StatusFault,
    TruncateFault,
)
from deltaproof.fakes.store import Store, ViewSpec

from .kit import PROJECT, VIEW, Raw, make_view, sdk_rows

TTL_S = 10
DIMS = {"a": 1, "b": 2, "c": 1}
VERSIONS = st.sampled_from(["v1", "v2"])
TIMES = st.integers(1, 9)  # few, so that they are often equal
KEYS = st.sampled_from([0, 1, 2, 2**53, 2**53 + 1, -(2**63), 2**63 - 1])
ROWS = st.lists(st.tuples(st.sampled_from(sorted(DIMS)), KEYS), min_size=1, max_size=12)

Batch = list[tuple[str, int, list[float]]]
Rows = dict[tuple[str, int], tuple[list[float], int]]


class Model:
    """(version, pk, sk) -> (ts, value, written_ms): the last written of the greatest ts."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], tuple[int, list[float], int]] = {}
        self.high_water: dict[str, int] = {}
        self.log: list[tuple[str, str, int, int]] = []

    def write(self, version: str, batch: Batch, ts: int, now_ms: int) -> None:
        for pk, sk, value in batch:
            old = self.rows.get((version, pk, sk))
            if old is None or ts >= old[0]:
                self.rows[version, pk, sk] = (ts, value, now_ms)
            self.log.append((version, pk, sk, ts))
            self.high_water[version] = max(ts, self.high_water.get(version, 0))

    def visible(self, version: str, now_ms: int, after_ts: int = 0) -> Rows:
        return {
            (pk, sk): (value, ts)
            for (of, pk, sk), (ts, value, written_ms) in self.rows.items()
            if of == version and ts > after_ts and now_ms < written_ms + 1000 * TTL_S
        }


class InProcess:
    """The facade straight on a store. Subclasses: on other stores, or over HTTP."""

    restarts: ClassVar[bool] = False

    def __init__(self) -> None:
        self.now_ms = 1_000
        self._exit = contextlib.ExitStack()
        self.store = self.open_store()
        make_view(self.store, ttl_s=TTL_S)
        self.connect()

    def open_store(self) -> Store:
        return Store(lambda: self.now_ms)

    def connect(self) -> None:
        self.plan = FaultPlan()
        self.open_view(in_process_client(self.store, "rank0", self.plan))

    def open_view(self, client: FeatureStoreClient) -> None:
        self._exit.callback(client.close)
        project = client.get_project(PROJECT)
        view = project and project.get_dynamic_embedding_feature_view(VIEW)
        assert view
        self._exit.callback(view.close)
        self.view = view

    def add_fault(self, fault: AnyFault) -> None:
        self.plan.add(fault)

    def take_snapshot(self, version: str) -> Any:
        return self.store.snapshot(PROJECT, VIEW, version)

    def read_snapshot(self, taken: Any) -> pa.Table | None:
        """None: it is gone."""
        try:
            return taken.table()
        except SnapshotNotFound:
            return None

    def log(self) -> pa.Table:
        return self.store.log(PROJECT, VIEW)

    def remake_view(self) -> None:
        spec: ViewSpec = self.store.view(PROJECT, VIEW)
        self.store.drop_view(PROJECT, VIEW)
        self.store.create_view(spec)

    def restart(self, torn_bytes: int | None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._exit.close()


class InFolder(InProcess):
    """The facade on a store in a folder."""

    restarts = True

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory()
        self._folder = Path(self._root.name, "0")
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(os, "fsync", lambda fd: None)  # a kill, unlike a loss of power, leaves what was written
        super().__init__()

    def open_store(self) -> DurableStore:
        # Small segments, so that a restart reads several.
        return self._exit.enter_context(DurableStore(self._folder, lambda: self.now_ms, segment_bytes_max=4_000))

    def restart(self, torn_bytes: int | None) -> None:
        """In order, or (``torn_bytes``) as by a kill that left so many bytes of one more record behind the others."""
        if torn_bytes is None:
            self._exit.close()
        else:
            left = self._folder.with_name(f"{int(self._folder.name) + 1}")
            shutil.copytree(self._folder, left)  # what a killed process leaves is what the system has of the files
            newest = max(left.glob("segment-*"))
            newest.write_bytes(newest.read_bytes() + newest.read_bytes()[8 : 8 + torn_bytes])
            self._exit.close()
            self._folder = left
        self.store = self.open_store()
        self.connect()

    def close(self) -> None:
        super().close()
        self._patch.undo()
        self._root.cleanup()


class OverHttp(InFolder):
    """The server over HTTP."""

    def connect(self) -> None:
        self.server = self._exit.enter_context(FeatureStoreServer(store=self.store))
        self.raw = Raw(self.server)
        self._exit.callback(self.raw.close)
        client = FeatureStoreClient(
            "deltaproof",
            "deltaproof",
            endpoint=self.server.endpoint,
            featuredb_username="rank0",
            featuredb_password="any",
        )
        self.open_view(client)

    def add_fault(self, fault: AnyFault) -> None:
        self.server.add_fault(fault)

    def take_snapshot(self, version: str) -> Any:
        return json.loads(self.raw.data("POST", f"/snapshots?version={version}").data)["data"]["snapshot_id"]

    def read_snapshot(self, taken: Any) -> pa.Table | None:
        reply = self.raw.data("GET", f"/snapshots/{taken}/scan")
        if reply.status == 404:
            assert json.loads(reply.data)["Code"] == "SnapshotNotFound"
            return None
        return pa.ipc.open_stream(reply.data).read_all()

    def log(self) -> pa.Table:
        reply = self.raw("GET", f"/_admin/log?project={PROJECT}&view={VIEW}")
        return pa.ipc.open_stream(reply.data).read_all()


def as_dict(table: pa.Table) -> Rows:
    found = {(row["pk"], row["sk"]): (row["embedding"], row["ts"]) for row in table.to_pylist()}
    assert len(found) == table.num_rows, "a key came back twice"
    return found


class FakesAgainstModel(RuleBasedStateMachine):
    system_type: ClassVar[type[InProcess]]

    @initialize()
    def start(self) -> None:
        self.system = self.system_type()
        self.model = Model()
        self.cursor: dict[str, int] = {"v1": 0, "v2": 0}
        self.kept: tuple[Any, Rows | None] | None = None  # a snapshot, and its rows if it must still be there
        self.last: tuple[str, Batch] | None = None
        self.count = 0  # tells values and faults apart

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.system.close()

    # Writing

    def send(self, version: str, batch: Batch, ts: int, by_json: bool = False) -> Any:
        names, keys, values = (list(column) for column in zip(*batch, strict=True))
        view = self.system.view
        if by_json:
            fields = (view.pk_field, view.sk_field, view.embedding_field)
            view.write_features([dict(zip(fields, row, strict=True)) for row in batch], version=version, ts=ts)
        else:
            view.write_features_arrow(sdk_rows(names, keys, values), version=version, ts=ts)
        return view.write_flush()

    def apply(self, version: str, batch: Batch, ts: int) -> None:
        self.model.write(version, batch, ts, self.system.now_ms)

    @rule(version=VERSIONS, keys=ROWS, ts=TIMES)
    def write(self, version: str, keys: list[tuple[str, int]], ts: int, by_json: bool = False) -> None:
        self.count += 1
        batch = [(pk, sk, [float(self.count), float(i)][: DIMS[pk]]) for i, (pk, sk) in enumerate(keys)]
        summary = self.send(version, batch, ts, by_json)
        assert (summary["success_records"], summary["errors"]) == (len(batch), [])
        self.apply(version, batch, ts)
        self.last = (version, batch)

    @rule(version=VERSIONS, keys=ROWS, ts=TIMES)
    def write_by_json(self, version: str, keys: list[tuple[str, int]], ts: int) -> None:
        self.write(version, keys, ts, by_json=True)

    @precondition(lambda self: self.last)
    @rule(ts=TIMES)
    def retry(self, ts: int) -> None:
        assert self.last is not None
        assert self.send(*self.last, ts)["errors"] == []
        self.apply(*self.last, ts)

    @precondition(lambda self: self.last)
    @rule(
        ts=TIMES,
        fate=st.sampled_from(["lost", "unanswered", "applied, then failed", "cut", "partly", "twice"]),
    )
    def write_among_faults(self, ts: int, fate: str) -> None:
        assert self.last is not None
        version, batch = self.last
        self.count += 1
        outcomes: dict[str, tuple[AnyFault, int | None, int]] = {
            "lost": (StatusFault(id=f"f{self.count}"), 0, 1),
            "unanswered": (ResetFault(id=f"f{self.count}", when="after-commit"), None, 1),
            "applied, then failed": (StatusFault(id=f"f{self.count}", when="after-commit"), None, 1),
            "cut": (TruncateFault(id=f"f{self.count}"), None, 1),
            "partly": (PartialFault(id=f"f{self.count}", rows_failed=1), -1, 1),
            "twice": (DuplicateFault(id=f"f{self.count}"), None, 2),
        }
        fault, applied, deliveries = outcomes[fate]
        self.system.add_fault(fault)
        summary = self.send(version, batch, ts)
        assert len(summary["errors"]) == (fate != "twice")
        for _ in range(deliveries):
            self.apply(version, batch[:applied], ts)

    @rule(version=VERSIONS, flaw=st.sampled_from(["key", "nan", "dim", "type", "ts", "version"]), keys=ROWS)
    def refused_writes_change_nothing(self, version: str, flaw: str, keys: list[tuple[str, int]]) -> None:
        batch: Batch = [*((pk, sk, [0.0] * DIMS[pk]) for pk, sk in keys), ("a", 5, [0.0])]
        if flaw in ("key", "nan", "dim"):
            batch[-1] = {"key": ("a", -1, [0.0]), "nan": ("a", 5, [np.nan]), "dim": ("a", 5, [0.0, 1.0])}[flaw]
        if flaw == "dim":
            batch.insert(0, ("a", 6, [0.0]))
        if flaw == "type":
            wrong = sdk_rows(*(list(column) for column in zip(*batch, strict=True)))
            wrong = wrong.set_column(1, "key_id", pa.array([0.0] * len(batch)))
            self.system.view.write_features_arrow(wrong, version=version, ts=40)
            summary = self.system.view.write_flush()
        else:
            summary = self.send("" if flaw == "version" else version, batch, 0 if flaw == "ts" else 40)
        assert (summary["failed_records"], [error.applied for error in summary["errors"]]) == (len(batch), ["no"])

    # What happens to the store

    @rule(step_ms=st.sampled_from([1, 4_000, 10_000]))
    def time_passes(self, step_ms: int) -> None:
        self.system.now_ms += step_ms

    @rule(view_too=st.sampled_from([False, False, True]))
    def tidy(self, view_too: bool) -> None:
        self.system.store.compact()
        if view_too:
            self.system.remake_view()
            self.model = Model()
            self.cursor = {"v1": 0, "v2": 0}
            self.kept = self.kept and (self.kept[0], None)

    @precondition(lambda self: self.system_type.restarts)
    @rule(torn_bytes=st.none() | st.integers(0, 30))
    def restart(self, torn_bytes: int | None) -> None:
        self.system.restart(torn_bytes)
        # The server forgets its snapshots; one in process lives as long as whoever holds it.
        self.kept = self.kept and (self.kept[0], None) if isinstance(self.system, OverHttp) else None
        self.read_the_log()
        self.scan("v1")
        self.scan("v2")

    # Reading

    @rule(version=VERSIONS, wanted=st.lists(st.tuples(st.sampled_from(["a", "b", "c", "nobody"]), KEYS), max_size=8))
    def look_up(self, version: str, wanted: list[tuple[str, int]]) -> None:
        visible = self.model.visible(version, self.system.now_ms)
        pk, sk = pa.array([pk for pk, _ in wanted], pa.string()), pa.array([sk for _, sk in wanted], pa.int64())
        table = self.system.view.lookup_arrow(version, pk, sk)
        found = [((row["pk"], row["sk"]), (row["embedding"], row["ts"])) for row in table.to_pylist()]
        assert found == [(key, visible[key]) for key in wanted if key in visible]

    @rule(version=VERSIONS, ahead=st.sampled_from([0, 0, 50]))
    def read_incrementally(self, version: str, ahead: int) -> None:
        cursor = self.cursor[version] + ahead
        table, following = self.system.view.read_changes(version, cursor)
        assert as_dict(table) == self.model.visible(version, self.system.now_ms, cursor)
        assert following == max(cursor, self.model.high_water.get(version, 0))
        if not ahead:
            self.cursor[version] = following

    @rule(version=VERSIONS)
    def take_snapshot(self, version: str) -> None:
        self.kept = (self.system.take_snapshot(version), self.model.visible(version, self.system.now_ms))

    @precondition(lambda self: self.kept)
    @rule()
    def read_snapshot(self) -> None:
        assert self.kept is not None
        taken, expected = self.kept
        table = self.system.read_snapshot(taken)
        assert (None if table is None else as_dict(table)) == expected

    @rule(version=VERSIONS)
    def scan(self, version: str) -> None:
        table = self.system.view.scan(version)
        assert as_dict(table) == self.model.visible(version, self.system.now_ms)
        order = list(zip(table.column("pk").to_pylist(), table.column("sk").to_pylist(), strict=True))
        assert order == sorted(order)

    @rule()
    def read_the_log(self) -> None:
        log = self.system.log()
        columns = (log.column(name).to_pylist() for name in ("version", "pk", "sk", "ts"))
        assert list(zip(*columns, strict=True)) == self.model.log
        assert np.all(np.diff(log.column("arrival").to_numpy()) >= 0)
        for version in ("v1", "v2"):
            assert self.system.view.high_water_ts(version) == self.model.high_water.get(version, 0)


def machine(system: type[InProcess], examples: int) -> Any:
    kind: Any = type(f"{system.__name__}AgainstModel", (FakesAgainstModel,), {"system_type": system})
    case = kind.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return case


test_the_store_in_process_agrees_with_the_model = machine(InProcess, examples=80)
test_the_store_in_a_folder_agrees_with_the_model = machine(InFolder, examples=30)
test_the_server_over_http_agrees_with_the_model = machine(OverHttp, examples=15)

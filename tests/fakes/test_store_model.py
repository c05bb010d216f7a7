"""The store against a model of forty lines, over any sequence of writes, retries, reads, merges and clock steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaproof.fakes.errors import FakeError
from deltaproof.fakes.store import Snapshot, Store

from .kit import PROJECT, VIEW, make_view, rows

TTL_S = 10
DIMS = {"a": 1, "b": 2, "c": 1}
VERSIONS = st.sampled_from(["v1", "v2"])
KEYS = st.sampled_from([0, 1, 2, 2**53, 2**53 + 1, -(2**63), 2**63 - 1])
ROWS = st.lists(st.tuples(st.sampled_from(sorted(DIMS)), KEYS), min_size=1, max_size=12)

Row = tuple[list[float], int]


class Model:
    """(version, pk, sk) -> (ts, arrival, value, written_ms): the last written of the greatest ts."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], tuple[int, list[float], int]] = {}
        self.high_water: dict[str, int] = {}
        self.log: list[tuple[str, str, int, int]] = []

    def write(self, version: str, batch: list[tuple[str, int, list[float]]], ts: int, now_ms: int) -> None:
        for pk, sk, value in batch:
            old = self.rows.get((version, pk, sk))
            if old is None or ts >= old[0]:
                self.rows[version, pk, sk] = (ts, value, now_ms)
            self.log.append((version, pk, sk, ts))
        self.high_water[version] = max(ts, self.high_water.get(version, 0))

    def visible(self, version: str, now_ms: int, after_ts: int = 0) -> dict[tuple[str, int], Row]:
        return {
            (pk, sk): (value, ts)
            for (of, pk, sk), (ts, value, written_ms) in self.rows.items()
            if of == version and ts > after_ts and now_ms < written_ms + 1000 * TTL_S
        }


def as_dict(table: pa.Table) -> dict[tuple[str, int], Row]:
    found = {(row["pk"], row["sk"]): (row["embedding"], row["ts"]) for row in table.to_pylist()}
    assert len(found) == table.num_rows, "a key came back twice"
    return found


class StoreAgainstModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now_ms = 1_000
        self.store = Store(lambda: self.now_ms)
        make_view(self.store, ttl_s=TTL_S)
        self.model = Model()
        self.cursor: dict[str, int] = {"v1": 0, "v2": 0}
        self.kept: tuple[Snapshot, dict[tuple[str, int], Row]] | None = None
        self.last: tuple[str, list[tuple[str, int, list[float]]]] | None = None
        self.values = 0

    def write(self, version: str, batch: list[tuple[str, int, list[float]]], ts: int) -> None:
        pk, sk, embedding = (list(column) for column in zip(*batch, strict=True))
        result = self.store.write(PROJECT, VIEW, rows(pk, sk, embedding), version=version, ts=ts, client="c")
        assert result.rows == len(batch)
        self.model.write(version, batch, ts, self.now_ms)
        self.last = (version, batch)

    @rule(version=VERSIONS, batch=ROWS, ts=st.integers(1, 30))
    def write_with_any_ts(self, version: str, batch: list[tuple[str, int]], ts: int) -> None:
        self.values += 1
        self.write(
            version, [(pk, sk, [float(self.values), float(i)][: DIMS[pk]]) for i, (pk, sk) in enumerate(batch)], ts
        )

    @precondition(lambda self: self.last is not None)
    @rule(ts=st.integers(1, 30))
    def retry_the_last_write(self, ts: int) -> None:
        assert self.last is not None
        self.write(*self.last, ts)

    @rule(version=VERSIONS, flaw=st.sampled_from(["key", "nan", "dim", "type"]), batch=ROWS)
    def refused_writes_change_nothing(self, version: str, flaw: str, batch: list[tuple[str, int]]) -> None:
        pk, sk = (list(column) for column in zip(*batch, strict=True))
        good = rows([*pk, "a"], [*sk, 5], [[0.0] * DIMS[name] for name in [*pk, "a"]])
        bad = {
            "key": rows([*pk, "a"], [*sk, -1], [[0.0] * DIMS[name] for name in [*pk, "a"]]),
            "nan": rows([*pk, "a"], [*sk, 5], [*([0.0] * DIMS[name] for name in pk), [float("nan")]]),
            "dim": rows([*pk, "a", "a"], [*sk, 5, 6], [*([0.0] * DIMS[name] for name in pk), [1.0], [1.0, 2.0, 3.0]]),
            "type": good.set_column(1, "sk", pa.array([0.0] * good.num_rows)),
        }[flaw]
        with pytest.raises(FakeError):
            self.store.write(PROJECT, VIEW, bad, version=version, ts=40)

    @rule(step_ms=st.sampled_from([1, 4_000, 10_000]))
    def time_passes(self, step_ms: int) -> None:
        self.now_ms += step_ms

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule(version=VERSIONS, wanted=st.lists(st.tuples(st.sampled_from(["a", "b", "c", "nobody"]), KEYS), max_size=8))
    def look_up(self, version: str, wanted: list[tuple[str, int]]) -> None:
        visible = self.model.visible(version, self.now_ms)
        table = self.store.lookup(PROJECT, VIEW, version, [pk for pk, _ in wanted], [sk for _, sk in wanted])
        found = [((row["pk"], row["sk"]), (row["embedding"], row["ts"])) for row in table.to_pylist()]
        assert found == [(key, visible[key]) for key in wanted if key in visible]

    @rule(version=VERSIONS)
    def read_incrementally(self, version: str) -> None:
        cursor = self.cursor[version]
        table, following = self.store.changes(PROJECT, VIEW, version, cursor)
        assert as_dict(table) == self.model.visible(version, self.now_ms, cursor)
        assert following == max(cursor, self.model.high_water.get(version, 0))
        self.cursor[version] = following

    @rule(version=VERSIONS)
    def take_snapshot(self, version: str) -> None:
        self.kept = (self.store.snapshot(PROJECT, VIEW, version), self.model.visible(version, self.now_ms))

    @precondition(lambda self: self.kept is not None)
    @rule(rows_max=st.sampled_from([1, 3, 1000]))
    def read_snapshot(self, rows_max: int) -> None:
        assert self.kept is not None
        snapshot, expected = self.kept
        table = pa.Table.from_batches(snapshot.batches(rows_max), schema=snapshot.schema)
        assert as_dict(table) == expected
        assert snapshot.rows == len(expected)

    @rule(version=VERSIONS)
    def scan(self, version: str) -> None:
        table = pa.Table.from_batches(
            self.store.scan(PROJECT, VIEW, version), self.store.snapshot(PROJECT, VIEW, version).schema
        )
        assert as_dict(table) == self.model.visible(version, self.now_ms)
        order = list(zip(table.column("pk").to_pylist(), table.column("sk").to_pylist(), strict=True))
        assert order == sorted(order)

    @invariant()
    def log_and_high_water(self) -> None:
        log = self.store.log(PROJECT, VIEW)
        columns = (log.column(name).to_pylist() for name in ("version", "pk", "sk", "ts"))
        assert list(zip(*columns, strict=True)) == self.model.log
        assert np.all(np.diff(log.column("arrival").to_numpy()) >= 0)
        for version in ("v1", "v2"):
            assert self.store.high_water_ts(PROJECT, VIEW, version) == self.model.high_water.get(version, 0)


StoreAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_store_agrees_with_the_model: Any = StoreAgainstModel.TestCase

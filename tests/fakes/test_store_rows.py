"""The rows of one table under their hash table, against a dictionary: where it grows, collides and is shared."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.store import Store

from .kit import PROJECT, VERSION, VIEW, make_view

TABLE = "t"


def write(store: Store, keys: list[int], ts: int, value: float, dim: int = 1) -> None:
    embedding = pa.array(np.full(len(keys) * dim, value, dtype=np.float32))
    offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(dim))
    columns = [pa.repeat(TABLE, len(keys)), pa.array(keys, pa.int64()), pa.ListArray.from_arrays(offsets, embedding)]
    batch = pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"])
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=ts)


def content(table: pa.Table) -> dict[int, tuple[int, float]]:
    columns = [table.column("sk").to_pylist(), table.column("ts").to_pylist()]
    values = [value[0] for value in table.column("embedding").to_pylist()]
    return {key: (ts, value) for key, ts, value in zip(*columns, values, strict=True)}


def fresh_store() -> Store:
    store = Store(lambda: 1_000, history=False)
    make_view(store)
    return store


KEYS = {
    "small": range(3_000),
    "wide": [random.Random(1).randrange(-(2**63), 2**63) for _ in range(3_000)],
    "multiples of 2^48": [number << 48 for number in range(-3_000, 3_000, 2)],
    # Neighbours in the hash: 0x9E3779B97F4A7C15 times these is 1, 2, 3, ...
    "one cell for all": [
        int(np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64) * number % 2**64).astype(np.int64)) for number in range(1, 400)
    ],
}


@pytest.mark.parametrize("kind", sorted(KEYS))
def test_rows_agree_with_a_dictionary(kind: str) -> None:
    draw = random.Random(kind)
    store = fresh_store()
    expected: dict[int, tuple[int, float]] = {}
    keys = [key for key in KEYS[kind] if key != -1]
    for number in range(40):
        some = draw.choices(keys, k=draw.choice([1, 7, 400]))
        ts = draw.randint(1, 20)
        write(store, some, ts, float(number))
        for key in some:
            if ts >= expected.get(key, (0, 0.0))[0]:
                expected[key] = (ts, float(number))
        if number % 8 == 7:
            store.compact()
        asked = draw.choices(keys, k=50)
        found = store.lookup(PROJECT, VIEW, VERSION, pa.repeat(TABLE, 50), pa.array(asked, pa.int64()))
        assert found.column("sk").to_pylist() == [key for key in asked if key in expected]
        assert content(found) == {key: expected[key] for key in asked if key in expected}
    assert content(store.snapshot(PROJECT, VIEW, VERSION).table()) == expected
    assert store.rows(PROJECT, VIEW, VERSION) == len(expected)
    changed, _ = store.changes(PROJECT, VIEW, VERSION, 18)
    assert content(changed) == {key: row for key, row in expected.items() if row[0] > 18}


def test_snapshots_keep_what_they_showed() -> None:
    draw = random.Random(5)
    store, kept = fresh_store(), []
    expected: dict[int, tuple[int, float]] = {}
    for ts in range(1, 60):
        # Old rows only, new rows only, both; and room to grow, none, and just trimmed.
        keys = draw.sample(range(20 * ts), 5 + 10 * (ts % 3))
        write(store, keys, ts, float(ts))
        expected |= {key: (ts, float(ts)) for key in keys}
        if ts % 4 == 0:
            store.compact()
        kept.append((store.snapshot(PROJECT, VIEW, VERSION), dict(expected)))
        kept.append((store.snapshot(PROJECT, VIEW, VERSION, after_ts=ts - 1), {key: expected[key] for key in keys}))
    for snapshot, then in kept:
        assert content(snapshot.table()) == then


def test_a_table_takes_little_more_memory_than_its_rows() -> None:
    dim, rows = 16, 300_000
    store = fresh_store()
    for start in range(0, rows, 50_000):
        write(store, list(range(start, start + 50_000)), 1 + start, 0.5, dim)
    store.compact()
    (tables,) = (view.versions[VERSION] for view in store._views.values())
    columns = [value for value in vars(tables[TABLE]).values() if isinstance(value, np.ndarray)]
    assert sum(column.nbytes for column in columns) <= 1.5 * rows * (8 + 8 + 4 * dim)


def test_names_in_a_buffer_of_odd_length_are_read() -> None:
    offsets = np.array([0, 1, 2], dtype=np.int32).tobytes() + b"x"
    names = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"tt")])
    names.validate(full=True)
    embedding = pa.array([[1.0], [2.0]], pa.list_(pa.float32()))
    batch = pa.RecordBatch.from_arrays([names, pa.array([1, 2]), embedding], ["pk", "sk", "embedding"])
    store = fresh_store()
    store.write(PROJECT, VIEW, batch.slice(1), version=VERSION, ts=1)
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=2)
    assert store.lookup(PROJECT, VIEW, VERSION, names, batch.column("sk")).num_rows == 2

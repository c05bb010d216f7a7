"""The rows of one table under their hash table, against a dictionary: where it grows, collides and is shared."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes import store as store_module
from deltaproof.fakes.errors import BodyTooLarge, DimensionMismatch
from deltaproof.fakes.store import Store

from .kit import PROJECT, VERSION, VIEW, make_view

TABLE = "t"
WRITE_COLUMNS = ["pk", "sk", "embedding"]


def write(store: Store, keys: list[int], ts: int, value: float, dim: int = 1) -> None:
    embedding = pa.array(np.full(len(keys) * dim, value, dtype=np.float32))
    offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(dim))
    columns = [pa.repeat(TABLE, len(keys)), pa.array(keys, pa.int64()), pa.ListArray.from_arrays(offsets, embedding)]
    batch = pa.RecordBatch.from_arrays(columns, WRITE_COLUMNS)
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


def test_names_that_differ_in_length_only_are_told_apart() -> None:
    names, lengths = ["aa", "a", "aaa"], [2, 1, 3]  # as long as if they were equal
    store = fresh_store()
    embedding = [[float(length)] * length for length in lengths]
    columns = [pa.array(names), pa.array([1, 1, 1]), pa.array(embedding, pa.list_(pa.float32()))]
    store.write(PROJECT, VIEW, pa.RecordBatch.from_arrays(columns, WRITE_COLUMNS), version=VERSION, ts=1)
    found = store.lookup(PROJECT, VIEW, VERSION, columns[0], columns[1])
    assert found.column("pk").to_pylist() == names
    assert found.column("embedding").to_pylist() == embedding
    of_one_table = pa.RecordBatch.from_arrays([pa.repeat(TABLE, 3), *columns[1:]], WRITE_COLUMNS)
    with pytest.raises(DimensionMismatch, match="length 1, want 2"):
        store.write(PROJECT, VIEW, of_one_table, version=VERSION, ts=1)


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


# Keys chosen to collide, and what runs out of memory


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of the store ran: what a vectorised step costs, whatever else the machine does meanwhile."""
    count = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename == store_module.__file__ else None)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


STEP_LINES_MAX = 600  # of one write or lookup of 3,000 rows, which takes 320 lines or fewer


def odd_inverse(number: int) -> int:
    return pow(number, -1, 2**64)


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def progression(start: int, stride: int, count: int = 3_000) -> list[int]:
    return [key for key in (signed(start + stride * number) for number in range(count)) if key != -1]


HOSTILE = {
    # For a hash that keeps the top bits of the product with a known constant: 2^64 / golden ratio, and splitmix64's.
    **{
        f"products with {factor:#x} are small": progression(0, odd_inverse(factor))
        for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    },
    **{f"multiples of 2^{bits}": progression(0, 2**bits, min(3_000, 2 ** (64 - bits))) for bits in range(0, 64, 7)},
    **{f"steps of {stride}": progression(-7, stride) for stride in (3, 10**9 + 7, 2**61 - 1, 2**63 - 1)},
    "all equal": [5] * 3_000,
    "extremes": [-(2**63), 2**63 - 1, -(2**63) + 1, 2**63 - 2, 0, 1, -2] * 400,
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_no_choice_of_keys_makes_searches_long(kind: str) -> None:
    store, keys = fresh_store(), HOSTILE[kind]
    write(store, [2**40], 1, 0.0)
    asked = pa.array(keys, pa.int64())

    def look_up() -> pa.Table:
        return store.lookup(PROJECT, VIEW, VERSION, pa.repeat(TABLE, len(keys)), asked)

    def insert() -> None:
        write(store, keys, 2, 1.0)
        store.compact()

    assert lines_run(look_up) < STEP_LINES_MAX  # of keys that are not there
    assert lines_run(insert) < STEP_LINES_MAX
    assert lines_run(look_up) < STEP_LINES_MAX
    assert look_up().column("sk").to_pylist() == keys
    assert store.rows(PROJECT, VIEW, VERSION) == len({*keys, 2**40})


def test_a_hash_that_serves_badly_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [store_module._Hash(np.uint64(1), np.uint64(1))] * 3  # small keys keep their order: all in the first cell
    draw = store_module._Hash.draw
    monkeypatch.setattr(store_module._Hash, "draw", lambda: drawn.pop() if drawn else draw())
    store = fresh_store()
    keys = list(range(3_000))
    write(store, keys[:8], 1, 0.0)
    store.compact()
    assert len(drawn) == 2  # eight in one cell are no reason yet
    write(store, keys, 2, 1.0)
    assert lines_run(store.compact) < 4 * STEP_LINES_MAX  # three hashes tried
    assert not drawn
    assert content(store.snapshot(PROJECT, VIEW, VERSION).table()) == dict.fromkeys(keys, (2, 1.0))


def test_an_absent_key_among_the_longest_searches_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = store_module._Hash(np.uint64(1), np.uint64(1))  # the top bits of the key are its cell
    monkeypatch.setattr(store_module._Hash, "draw", lambda: straight)
    store = fresh_store()
    path = [step * (step + 1) // 2 % 256 for step in range(121)]  # of a search from the first of 256 cells
    write(store, [signed(cell << 56) for cell in path], 1, 0.0)
    store.compact()
    found: list[pa.Table] = []

    def look_up() -> None:
        found.append(store.lookup(PROJECT, VIEW, VERSION, pa.repeat(TABLE, 2), pa.array([5, 0])))

    assert lines_run(look_up) < STEP_LINES_MAX
    assert found[0].column("sk").to_pylist() == [0]


@pytest.mark.parametrize("rows", [20, 500])  # which the columns and cells at hand have room for, or not
@pytest.mark.parametrize("fails", ["_copy", "_insert", "_rehash", "_claim", "empty"])
def test_rows_that_did_not_fit_into_memory_are_merged_later(
    monkeypatch: pytest.MonkeyPatch, fails: str, rows: int
) -> None:
    store = fresh_store()
    write(store, list(range(100)), 1, 0.0)
    store.compact()
    owners: dict[str, Any] = {"_claim": store_module, "empty": np}
    owner = owners.get(fails, store_module._Rows)
    real, calls = getattr(owner, fails), 0

    def out_of_memory(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        if fails == "empty" and keywords.get("dtype") != np.float32:  # the embeddings take most
            return real(*arguments, **keywords)
        calls += 1
        if fails == "_claim":
            real(arguments[0], arguments[1][::2], arguments[2][::2])  # half done
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "PENDING_ROWS_MAX", rows)
        patch.setattr(owner, fails, out_of_memory)
        write(store, list(range(90, 90 + rows)), 2, 1.0)  # acknowledged: it waits
        if calls:
            with pytest.raises(BodyTooLarge, match="memory"):
                store.lookup(PROJECT, VIEW, VERSION, [TABLE], [50])
        assert calls or (fails, rows) == ("_rehash", 20)
    expected = {**dict.fromkeys(range(90), (1, 0.0)), **dict.fromkeys(range(90, 90 + rows), (2, 1.0))}
    assert content(store.snapshot(PROJECT, VIEW, VERSION).table()) == expected
    found = store.lookup(PROJECT, VIEW, VERSION, pa.repeat(TABLE, len(expected)), pa.array(expected, pa.int64()))
    assert content(found) == expected


def test_a_write_that_does_not_fit_into_memory_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = fresh_store()

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_split", out_of_memory)
        with pytest.raises(BodyTooLarge, match="write: more than memory holds"):
            write(store, [1], 1, 0.0)
    assert store.versions(PROJECT, VIEW) == []
    write(store, [1], 1, 0.0)
    assert store.rows(PROJECT, VIEW, VERSION) == 1


def test_a_sliver_does_not_keep_its_large_body_in_memory() -> None:
    store = fresh_store()
    gone: list[str] = []
    values = np.zeros((1_000, 64), dtype=np.float32)
    weakref.finalize(values, gone.append, "body")
    offsets = pa.array(np.arange(1_001, dtype=np.int32) * np.int32(64))
    embedding = pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
    batch = pa.RecordBatch.from_arrays([pa.repeat(TABLE, 1_000), pa.array(range(1_000)), embedding], WRITE_COLUMNS)
    store.write(PROJECT, VIEW, batch.slice(10, 20), version=VERSION, ts=1)
    del values, embedding, batch
    assert gone == ["body"]
    assert store.rows(PROJECT, VIEW, VERSION) == 20

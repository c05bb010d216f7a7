"""The store, one rule at a time. Interleavings are test_store_model.py's part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.fakes import store as store_module
from deltaproof.fakes.errors import (
    AlreadyExists,
    BodyTooLarge,
    DimensionMismatch,
    EntityNotFound,
    FakeError,
    InUse,
    InvalidParameter,
    InvalidTimestamp,
    InvalidVersion,
    NonFiniteValue,
    ReservedKey,
    SchemaMismatch,
    SnapshotNotFound,
    ViewNotFound,
)
from deltaproof.fakes.store import (
    DIM_MAX,
    PK_LENGTH_MAX,
    REPLY_BYTES_MAX,
    SCAN_BYTES_MAX,
    TABLES_MAX,
    EntitySpec,
    Store,
    ViewSpec,
    log_schema,
    read_schema,
)

from .kit import PROJECT, VERSION, VIEW, make_view, rows
from .test_docs import PAGE

NAN, INF = float("nan"), float("inf")


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    made = Store(clock)
    make_view(made)
    return made


def put(store: Store, pk: str, sk: int, value: list[float], ts: int, version: str = VERSION) -> None:
    store.write(PROJECT, VIEW, rows([pk], [sk], [value]), version=version, ts=ts)


def get(store: Store, pk: str, sk: int, version: str = VERSION) -> Any:
    found = store.lookup(PROJECT, VIEW, version, [pk], [sk]).to_pylist()
    return (found[0]["embedding"], found[0]["ts"]) if found else None


def test_greatest_ts_wins_whatever_the_order(store: Store) -> None:
    put(store, "t", 1, [2.0], ts=20)
    put(store, "t", 1, [1.0], ts=10)
    assert get(store, "t", 1) == ([2.0], 20)


def test_equal_ts_the_later_arrival_wins_merged_or_not(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=10)
    assert get(store, "t", 1) == ([1.0], 10)  # settles the first write into a run of its own
    put(store, "t", 1, [2.0], ts=10)
    assert get(store, "t", 1) == ([2.0], 10)
    store.compact()
    assert get(store, "t", 1) == ([2.0], 10)


def test_within_a_batch_the_later_row_of_a_key_wins(store: Store) -> None:
    batch = rows(["t", "u", "t", "t"], [1, 1, 1, 2], [[1.0], [9.0], [2.0], [3.0]])
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=5)
    assert get(store, "t", 1) == ([2.0], 5)


def test_versions_are_isolated_and_may_differ_in_dimension(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=10, version="a")
    put(store, "t", 1, [2.0, 2.0], ts=5, version="b")
    assert get(store, "t", 1, "a") == ([1.0], 10)
    assert get(store, "t", 1, "b") == ([2.0, 2.0], 5)
    assert get(store, "t", 1, "c") is None
    assert store.versions(PROJECT, VIEW) == ["a", "b"]
    assert [store.high_water_ts(PROJECT, VIEW, v) for v in "abc"] == [10, 5, 0]


def test_lookup_keeps_request_order_and_leaves_out_what_is_missing(store: Store) -> None:
    batch = rows(["t", "u", "t"], [2**63 - 1, -(2**63), 7], [[1.0, 2.0], [3.0], [5.0, 6.0]])
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=5)
    found = store.lookup(PROJECT, VIEW, VERSION, ["t", "none", "u", "t", "t", "u"], [7, 7, -(2**63), 8, 2**63 - 1, 7])
    assert found.schema.equals(read_schema("float32"))
    found.validate(full=True)
    assert found.to_pylist() == [
        {"pk": "t", "sk": 7, "embedding": [5.0, 6.0], "ts": 5},
        {"pk": "u", "sk": -(2**63), "embedding": [3.0], "ts": 5},
        {"pk": "t", "sk": 2**63 - 1, "embedding": [1.0, 2.0], "ts": 5},
    ]
    chunked = pa.chunked_array([pa.array([7])])
    assert store.lookup(PROJECT, VIEW, VERSION, pa.chunked_array([["t"]]), chunked).num_rows == 1


def test_neighbours_above_2_to_53_stay_apart(store: Store) -> None:
    for key in (2**53, 2**53 + 1, 2**62 + 1, 2**62 + 2):
        put(store, "t", key, [float(key % 7)], ts=5)
    assert store.scan(PROJECT, VIEW, VERSION).__next__().column("sk").to_pylist() == [
        2**53,
        2**53 + 1,
        2**62 + 1,
        2**62 + 2,
    ]


def test_values_come_back_bit_by_bit(store: Store) -> None:
    values = np.array([-0.0, 1e-45, 3.4028235e38, np.pi], dtype=np.float32)
    put(store, "t", 1, values.tolist(), ts=5)
    found = store.lookup(PROJECT, VIEW, VERSION, ["t"], [1]).column("embedding").combine_chunks().values
    assert found.to_numpy().tobytes() == values.tobytes()


def test_changes_follow_ts_and_the_cursor_never_falls(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=10)
    put(store, "t", 2, [1.0], ts=20)
    table, cursor = store.changes(PROJECT, VIEW, VERSION, 10)
    assert table.column("sk").to_pylist() == [2]
    assert cursor == 20
    put(store, "t", 3, [1.0], ts=20)  # S13: published with a ts that the reader has passed
    table, cursor = store.changes(PROJECT, VIEW, VERSION, cursor)
    assert (table.num_rows, cursor) == (0, 20)
    assert store.changes(PROJECT, VIEW, VERSION, 99)[1] == 99
    assert store.changes(PROJECT, VIEW, "empty", 0)[1] == 0


def test_a_snapshot_ignores_later_writes(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=10)
    snapshot = store.snapshot(PROJECT, VIEW, VERSION)
    put(store, "t", 1, [2.0], ts=20)
    put(store, "t", 2, [2.0], ts=20)
    assert (snapshot.ts, snapshot.rows) == (10, 1)
    assert snapshot.table().to_pylist() == [{"pk": "t", "sk": 1, "embedding": [1.0], "ts": 10}]
    assert store.rows(PROJECT, VIEW, VERSION) == 2


def test_scan_batches_are_bounded_and_ordered(store: Store) -> None:
    keys = list(range(100, 0, -1))
    store.write(PROJECT, VIEW, rows(["b"] * 100, keys, [[1.0]] * 100), version=VERSION, ts=5)
    store.write(PROJECT, VIEW, rows(["a"] * 3, [3, 1, 2], [[1.0, 2.0]] * 3), version=VERSION, ts=6)
    batches = list(store.snapshot(PROJECT, VIEW, VERSION).batches(rows_max=40))
    assert [batch.num_rows for batch in batches] == [3, 40, 40, 20]
    table = pa.Table.from_batches(batches)
    assert table.column("sk").to_pylist() == [1, 2, 3, *range(1, 101)]


def test_the_log_holds_every_write_in_arrival_order(store: Store, clock: Clock) -> None:
    store.write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version="a", ts=20, client="rank0", request_id="r1")
    clock.ms += 5
    store.write(PROJECT, VIEW, rows(["u", "t"], [2, 1], [[2.0], [0.5]]), version="b", ts=10, client="rank1")
    log = store.log(PROJECT, VIEW)
    assert log.schema.equals(log_schema("float32"))
    first = {"t_ms": 1_000_000.0, "version": "a", "pk": "t", "sk": 1, "ts": 20, "embedding": [1.0]}
    assert log.to_pylist()[0] == {"arrival": 0, "client": "rank0", "request_id": "r1", **first}
    assert log.column("arrival").to_pylist() == [0, 1, 1]
    assert log.column("sk").to_pylist() == [1, 2, 1]
    store.compact()
    assert store.log(PROJECT, VIEW).equals(log)


def test_writes_of_differently_named_list_items_share_one_log(store: Store) -> None:
    for key, field in enumerate((pa.field("item", pa.float32()), pa.field("element", pa.float32(), nullable=False))):
        batch = rows(["t"], [key], [[1.0]])
        column = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([1.0], pa.float32()), pa.list_(field))
        store.write(PROJECT, VIEW, batch.set_column(2, "embedding", column), version=VERSION, ts=5)
    assert store.log(PROJECT, VIEW).num_rows == 2


def test_without_history_no_log_is_kept(clock: Clock) -> None:
    store = Store(clock, history=False)
    make_view(store)
    put(store, "t", 1, [1.0], ts=5)
    assert store.log(PROJECT, VIEW).num_rows == 0
    assert get(store, "t", 1) == ([1.0], 5)


def test_rows_expire_by_the_stores_clock_not_by_ts(clock: Clock) -> None:
    store = Store(clock)
    make_view(store, ttl_s=10)
    put(store, "t", 1, [1.0], ts=1)
    clock.ms += 9_999
    assert get(store, "t", 1) is not None
    put(store, "t", 2, [2.0], ts=2)
    clock.ms += 1
    assert get(store, "t", 1) is None
    assert store.rows(PROJECT, VIEW, VERSION) == 1
    put(store, "t", 1, [0.5], ts=0 + 1)  # equal ts, later arrival: written anew
    assert get(store, "t", 1) == ([0.5], 1)


def test_a_clock_that_steps_back_expires_nothing_early(clock: Clock) -> None:
    store = Store(clock)
    make_view(store, ttl_s=10)
    put(store, "t", 1, [1.0], ts=1)
    clock.ms -= 100_000
    put(store, "t", 2, [1.0], ts=2)
    clock.ms += 100_000
    assert store.rows(PROJECT, VIEW, VERSION) == 2


@pytest.mark.parametrize(
    ("batch", "error", "names"),
    [
        (rows(["t", "t"], [5, -1], [[1.0], [1.0]]), ReservedKey, ["table t", "-1", "row 1"]),
        (rows(["t", "u"], [5, 6], [[1.0], [NAN]]), NonFiniteValue, ["table u", "key 6"]),
        (rows(["t"], [5], [[1.0, -INF]]), NonFiniteValue, ["table t", "key 5"]),
        (rows(["t", "t"], [5, 6], [[1.0], [1.0, 2.0]]), DimensionMismatch, ["table t", "key 6", "length 2", "want 1"]),
        (rows(["t"], [5], [[]]), DimensionMismatch, ["table t", "1 to 65536"]),
        (rows([None], [5], [[1.0]]), SchemaMismatch, ["pk", "null"]),  # type: ignore[list-item]
        (rows(["t"], [None], [[1.0]]), SchemaMismatch, ["sk", "null"]),  # type: ignore[list-item]
        (rows(["t"], [5], [None]), SchemaMismatch, ["embedding", "null"]),  # type: ignore[list-item]
        (rows(["t"], [5], [[None]]), SchemaMismatch, ["embedding", "null"]),  # type: ignore[list-item]
        (rows(["t" * 1025], [5], [[1.0]]), SchemaMismatch, ["want 1 to 1024 characters"]),
        (rows([""], [5], [[1.0]]), SchemaMismatch, ["want 1 to 1024 characters"]),
        (rows(["t"], [5], [[1]], pa.uint8()), SchemaMismatch, ["uint8"]),
        (rows(["t"], [5], [[1.0]], pa.float64()), SchemaMismatch, ["double"]),
        (rows(["t"], [5], [[1.0]]).drop_columns(["sk"]), SchemaMismatch, ["columns"]),
        (rows(["t"], [5], [[1.0]]).append_column("x", pa.array([1])), SchemaMismatch, ["columns"]),
        (pa.table({"pk": ["t"], "sk": [5.0], "embedding": [[1.0]]}), SchemaMismatch, ["sk", "double"]),
        (pa.table({"pk": [b"t"], "sk": [5], "embedding": [[1.0]]}), SchemaMismatch, ["pk", "binary"]),
    ],
)
def test_bad_rows_are_refused_whole_with_their_place(
    store: Store, batch: Any, error: type[FakeError], names: list[str]
) -> None:
    with pytest.raises(error) as caught:
        store.write(PROJECT, VIEW, batch, version=VERSION, ts=5)
    for name in names:
        assert name in str(caught.value)
    assert store.log(PROJECT, VIEW).num_rows == 0
    assert store.versions(PROJECT, VIEW) == []
    assert store.high_water_ts(PROJECT, VIEW, VERSION) == 0


def test_a_dimension_stays_as_first_written(store: Store) -> None:
    put(store, "t", 1, [1.0, 2.0], ts=5)
    with pytest.raises(DimensionMismatch, match="table t, key 2: embedding of length 3, want 2 as first written"):
        put(store, "t", 2, [1.0, 2.0, 3.0], ts=6)
    put(store, "u", 2, [1.0, 2.0, 3.0], ts=6)


@pytest.mark.parametrize("version", ["", "  ", None, 5, "a\n", "x" * 257])
def test_a_version_must_be_named(store: Store, version: Any) -> None:
    for act in (
        lambda: store.write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version=version, ts=5),
        lambda: store.lookup(PROJECT, VIEW, version, ["t"], [1]),
        lambda: store.snapshot(PROJECT, VIEW, version),
        lambda: store.changes(PROJECT, VIEW, version, 0),
        lambda: store.high_water_ts(PROJECT, VIEW, version),
    ):
        with pytest.raises(InvalidVersion):
            act()


@pytest.mark.parametrize("ts", [0, -5, 2**63, pytest.param(10**5000, id="huge"), 1.5, True, None, "7"])
def test_ts_must_be_a_positive_int64(store: Store, ts: Any) -> None:
    with pytest.raises(InvalidTimestamp):
        store.write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version=VERSION, ts=ts)


def test_check_write_refuses_like_write_and_writes_nothing(store: Store) -> None:
    store.check_write(PROJECT, VIEW, rows(["t"], [1], [[1.0]]), version=VERSION, ts=5)
    assert store.versions(PROJECT, VIEW) == []
    with pytest.raises(ReservedKey):
        store.check_write(PROJECT, VIEW, rows(["t"], [-1], [[1.0]]), version=VERSION, ts=5)


def test_empty_writes_and_sliced_batches(store: Store) -> None:
    assert store.write(PROJECT, VIEW, rows([], [], []), version=VERSION, ts=5).rows == 0
    assert store.versions(PROJECT, VIEW) == []
    whole = rows(["t"] * 4, [1, 2, 3, 4], [[1.0], [2.0], [3.0], [4.0]])
    assert store.write(PROJECT, VIEW, whole.slice(1, 2), version=VERSION, ts=5).rows == 2
    table = pa.Table.from_batches([whole.slice(3, 1), whole.slice(0, 1)])
    assert store.write(PROJECT, VIEW, table, version=VERSION, ts=6).rows == 2
    found = pa.Table.from_batches(store.scan(PROJECT, VIEW, VERSION))
    assert found.column("embedding").to_pylist() == [[1.0], [2.0], [3.0], [4.0]]
    mixed = rows(["t", "u", "v", "u"], [9, 1, 2, 3], [[9.0], [1.0, 2.0], [3.0], [4.0, 5.0]])
    store.write(PROJECT, VIEW, mixed.slice(1, 3), version=VERSION, ts=7)
    assert (get(store, "u", 3), get(store, "v", 2)) == (([4.0, 5.0], 7), ([3.0], 7))
    nan = rows(["t", "u", "v"], [9, 1, 2], [[NAN], [1.0, 2.0], [NAN]]).slice(1, 2)
    with pytest.raises(NonFiniteValue, match="table v, key 2"):
        store.write(PROJECT, VIEW, nan, version=VERSION, ts=8)


def test_uint8_rows(clock: Clock) -> None:
    store = Store(clock)
    make_view(store, value_type="uint8")
    store.write(PROJECT, VIEW, rows(["t"], [1], [[0, 255]], pa.uint8()), version=VERSION, ts=5)
    assert get(store, "t", 1) == ([0, 255], 5)
    with pytest.raises(SchemaMismatch):
        put(store, "t", 2, [1.0], ts=5)


@pytest.mark.parametrize(
    ("pk", "sk"),
    [(["t"], [1, 2]), ([None], [1]), (["t"], [None]), ([1], [1]), (["t"], ["x"]), (["t"], [2**63])],
)
def test_bad_lookups_are_refused(store: Store, pk: Any, sk: Any) -> None:
    with pytest.raises(SchemaMismatch):
        store.lookup(PROJECT, VIEW, VERSION, pk, sk)


def test_the_catalogue(store: Store) -> None:
    assert store.projects() == [PROJECT]
    with pytest.raises(AlreadyExists):
        store.create_project(PROJECT)
    with pytest.raises(AlreadyExists):
        make_view(store)
    with pytest.raises(EntityNotFound):
        store.create_entity(EntitySpec(PROJECT, "child", "id", parent="nobody"))
    with pytest.raises(InUse, match="view view"):
        store.drop_entity(PROJECT, "entity")
    with pytest.raises(InvalidParameter):
        store.create_project("../x")
    put(store, "t", 1, [1.0], ts=5)
    store.drop_view(PROJECT, VIEW)
    with pytest.raises(ViewNotFound):
        put(store, "t", 1, [1.0], ts=5)
    store.create_view(ViewSpec(PROJECT, VIEW, "entity"))
    assert store.rows(PROJECT, VIEW, VERSION) == 0
    store.create_view(ViewSpec("other", "v", "new_entity"))
    assert store.entity("other", "new_entity").join_id == "new_entity_id"


def test_an_entity_is_in_use_by_views_and_entities_of_its_own_project_alone(store: Store) -> None:
    store.create_view(ViewSpec("other", "view", "entity"))
    store.drop_view(PROJECT, VIEW)
    store.create_entity(EntitySpec(PROJECT, "child", "id", parent="entity"))
    with pytest.raises(InUse, match="used by entity child"):
        store.drop_entity(PROJECT, "entity")
    store.drop_entity(PROJECT, "child")
    store.drop_entity(PROJECT, "entity")
    with pytest.raises(InUse, match="project other is used by view view"):
        store.drop_entity("other", "entity")


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 300},
        {"pk": "same", "sk": "same"},
        {"value_type": "int8"},
        {"ttl_s": -1},
        {"ttl_s": True},
        {"shard_count": 0},
        {"shard_count": 21},
        {"replication_count": 4},
        pytest.param({"name": 10**5000}, id="a huge name"),  # repr() of it raises ValueError
        pytest.param({"ttl_s": 10**5000}, id="a huge ttl"),
        pytest.param({"value_type": 10**5000}, id="a huge type"),
        {"value_type": ["float32"]},
    ],
)
def test_view_settings_are_checked(store: Store, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        store.create_view(ViewSpec(**{"project": PROJECT, "name": "w", "entity": "entity", **settings}))


def test_reset_is_as_new(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=5)
    store.reset()
    assert store.projects() == [PROJECT]
    assert store.views() == []
    store.reset(["a", "b", "a"])
    assert store.projects() == ["a", "b"]
    with pytest.raises(InvalidParameter):
        store.reset(["a", "b/c"])
    assert store.projects() == ["a", "b"]  # refused before anything was dropped


def test_many_small_writes_merge_to_the_same_as_one(store: Store) -> None:
    draw = np.random.default_rng(7)
    newest: dict[int, tuple[int, float]] = {}
    for arrival in range(300):
        ts = int(draw.integers(1, 50))
        keys = draw.integers(0, 40, size=5).tolist()
        values = draw.random(5, dtype=np.float32).tolist()
        store.write(PROJECT, VIEW, rows(["t"] * 5, keys, [[v] for v in values]), version=VERSION, ts=ts)
        for key, value in zip(keys, values, strict=True):
            if ts >= newest.get(key, (0, 0.0))[0]:
                newest[key] = (ts, value)
        if arrival % 7 == 0:  # reading merges: any pattern of merges must give the same
            get(store, "t", keys[0])
    found = pa.Table.from_batches(store.scan(PROJECT, VIEW, VERSION)).to_pylist()
    assert {row["sk"]: (row["ts"], row["embedding"][0]) for row in found} == newest


# Bounds


def test_a_lookup_is_refused_before_its_reply_is_made(store: Store) -> None:
    wide, count = 2**14, 2**20
    store.write(PROJECT, VIEW, rows(["w", "n"], [1, 1], [[0.5] * wide, [0.5]]), version=VERSION, ts=5)
    for names in (pa.repeat("w", count), pa.concat_arrays([pa.repeat("w", count - 1), pa.array(["n"])])):
        with pytest.raises(BodyTooLarge, match="fewer rows"):  # 64 GiB
            store.lookup(PROJECT, VIEW, VERSION, names, pa.repeat(1, count))
    store.reply_bytes_max = 10_000
    with pytest.raises(BodyTooLarge):
        store.lookup(PROJECT, VIEW, VERSION, pa.repeat("n", 500), pa.repeat(1, 500))
    assert store.lookup(PROJECT, VIEW, VERSION, pa.repeat("w", count), pa.repeat(2, count)).num_rows == 0


def test_what_arrow_cannot_count_is_refused_whatever_the_limit(clock: Clock) -> None:
    store = Store(clock)
    make_view(store, value_type="uint8")
    store.reply_bytes_max = 2**62
    store.write(PROJECT, VIEW, rows(["t"], [1], [[7] * 2**16], pa.uint8()), version=VERSION, ts=5)
    with pytest.raises(BodyTooLarge, match=str(2**31 - 1)):
        store.lookup(PROJECT, VIEW, VERSION, pa.repeat("t", 2**15), pa.repeat(1, 2**15))


@settings(max_examples=30)
@given(
    tables=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3),
    value_type=st.sampled_from(["float32", "uint8"]),
)
def test_a_replys_bytes_are_counted_exactly(tables: list[tuple[int, int]], value_type: Any) -> None:
    store = Store(Clock())
    make_view(store, value_type=value_type)
    names: list[str] = []
    keys: list[int] = []
    for number, (dim, count) in enumerate(tables):
        name = "t" * (number + 1)
        batch = rows([name] * count, list(range(count)), [[1] * dim] * count, pa.from_numpy_dtype(value_type))
        store.write(PROJECT, VIEW, batch, version=VERSION, ts=5)
        names += [name] * count
        keys += range(count)
    snapshot = store.snapshot(PROJECT, VIEW, VERSION)
    found = store.lookup(PROJECT, VIEW, VERSION, names, keys)
    item = 4 if value_type == "float32" else 1
    assert snapshot.nbytes == sum(count * (n + 1 + 4 + 8 + 4 + 8 + item * dim) for n, (dim, count) in enumerate(tables))
    assert 0 <= found.nbytes - snapshot.nbytes < 64  # Arrow may say in a bitmap that nothing is null
    store.reply_bytes_max = snapshot.nbytes
    assert store.lookup(PROJECT, VIEW, VERSION, names, keys).equals(found)
    store.reply_bytes_max -= 1
    with pytest.raises(BodyTooLarge):
        store.lookup(PROJECT, VIEW, VERSION, names, keys)


def test_dimensions_are_bounded_and_wide_rows_scanned_in_small_batches(store: Store) -> None:
    with pytest.raises(DimensionMismatch, match=f"length {DIM_MAX + 1}, want 1 to {DIM_MAX}"):
        put(store, "t", 1, [0.0] * (DIM_MAX + 1), ts=5)
    count = 2 * SCAN_BYTES_MAX // (4 * DIM_MAX) + 1
    values = pa.ListArray.from_arrays(
        pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(DIM_MAX)),
        pa.array(np.arange(count * DIM_MAX, dtype=np.float32)),
    )
    columns = [pa.repeat("t", count), pa.array(range(count)), values]
    store.write(PROJECT, VIEW, pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"]), version=VERSION, ts=5)
    batches = list(store.scan(PROJECT, VIEW, VERSION))
    assert pa.Table.from_batches(batches).column("embedding").combine_chunks().values.equals(values.values)
    assert all(batch.nbytes <= SCAN_BYTES_MAX + 8 for batch in batches)
    assert len(batches) <= 4


def test_one_write_names_a_bounded_number_of_tables(store: Store) -> None:
    names = [f"t{number}" for number in range(TABLES_MAX + 1)]
    with pytest.raises(InvalidParameter, match=str(TABLES_MAX)):
        store.write(PROJECT, VIEW, rows(names, [1] * len(names), [[1.0]] * len(names)), version=VERSION, ts=5)
    assert store.versions(PROJECT, VIEW) == []
    store.write(PROJECT, VIEW, rows(names[1:], [1] * TABLES_MAX, [[1.0]] * TABLES_MAX), version=VERSION, ts=5)
    assert store.rows(PROJECT, VIEW, VERSION) == TABLES_MAX
    found = store.lookup(PROJECT, VIEW, VERSION, names, [1] * len(names))
    assert found.column("pk").to_pylist() == names[1:]


def test_mixed_rows_wider_than_a_window_are_told_apart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_WINDOW", 16)
    draw = np.random.default_rng(3)
    names = [["t", "u", "v"][number] for number in draw.integers(0, 3, 60)]
    dims = {"t": 3, "u": 8, "v": 20}
    values = [draw.integers(0, 99, dims[name]).astype(float).tolist() for name in names]
    store.write(PROJECT, VIEW, rows(names, list(range(60)), values), version=VERSION, ts=5)
    assert store.lookup(PROJECT, VIEW, VERSION, names, range(60)).column("embedding").to_pylist() == values


# Slices


def test_nulls_outside_a_slice_do_no_harm(store: Store) -> None:
    whole = rows(["t"] * 3, [1, 2, 3], [[None], [2.0], [3.0]])  # type: ignore[list-item]
    store.write(PROJECT, VIEW, whole.slice(1), version=VERSION, ts=5)
    assert get(store, "t", 2) == ([2.0], 5)
    assert store.log(PROJECT, VIEW).column("embedding").to_pylist() == [[2.0], [3.0]]
    with pytest.raises(SchemaMismatch, match="null elements"):
        store.write(PROJECT, VIEW, whole.slice(0, 2), version=VERSION, ts=5)


# Snapshots


def test_the_tables_of_a_snapshot_are_found_without_a_search_for_each(store: Store) -> None:
    class Names(list[str]):
        def __contains__(self, _: object) -> bool:
            raise AssertionError("searched from end to end, once for each table of the store")

    for pk in ("a", "b", "c"):
        put(store, pk, 1, [1.0], ts=5)
    found = store.snapshot(PROJECT, VIEW, VERSION, tables=Names(["c", "a", "a", "x"])).table()
    assert found.column("pk").to_pylist() == ["a", "c"]


def test_a_snapshot_goes_with_its_view(store: Store) -> None:
    put(store, "t", 1, [1.0], ts=5)
    kept = [store.snapshot(PROJECT, VIEW, VERSION), store.as_of(PROJECT, VIEW).snapshot(PROJECT, VIEW, VERSION)]
    begun = kept[0].batches(1)
    store.drop_view(PROJECT, VIEW)
    for snapshot in kept:
        with pytest.raises(SnapshotNotFound, match="dropped"):
            snapshot.batches()
    store.create_view(ViewSpec(PROJECT, VIEW, "entity"))
    put(store, "t", 1, [2.0], ts=5)
    kept.append(store.snapshot(PROJECT, VIEW, VERSION))
    assert kept[-1].table().num_rows == 1
    assert next(begun).num_rows == 1  # what has begun goes on
    store.reset()
    for snapshot in kept:
        with pytest.raises(SnapshotNotFound):
            snapshot.table()


def test_the_bounds_stand_in_the_docs() -> None:
    text = " ".join(PAGE.split())
    assert f"of more than {DIM_MAX:,} numbers" in text
    assert f"more than {TABLES_MAX:,} tables" in text
    assert f"more than {PK_LENGTH_MAX:,} characters" in text
    assert f"Lookups of over {REPLY_BYTES_MAX >> 20} MiB" in text

import io
import mmap
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltaproof.reference.delta import (
    CHUNK_ROWS,
    DELTA_SCHEMA,
    SCHEMAS,
    TRAILER_BYTES,
    DeltaError,
    constant,
    make_delta,
    quantise,
    unique,
    validate,
)

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1).filter(lambda key: key != -1), unique=True, max_size=50)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Of every size, so that scales and offsets meet the ends of fp16.
SIZED = st.builds(
    lambda number, power: number * 10.0**power, st.floats(-1, 1), st.sampled_from([-41, -12, -6, 0, 4, 6])
)
FQN = "m.ebc.embedding_bags.t"


def delta(keys: Any, rows: Any, fqn: str = FQN, kind: Any = "float32") -> pa.Table:
    return make_delta(7, 1, 4, "f", fqn, np.asarray(keys, np.int64), np.asarray(rows, np.float32), "dump", kind)


def matrix(data: st.DataObject, count: int, dim: int, numbers: st.SearchStrategy[float]) -> np.ndarray:
    return data.draw(arrays(np.float32, (count, dim), elements=numbers))


@given(KEYS, st.integers(1, 5), st.data())
def test_every_key_and_every_bit_of_a_row_survives(keys: list[int], dim: int, data: st.DataObject) -> None:
    rows = matrix(data, len(keys), dim, FINITE)
    table = delta(keys, rows)
    validate(table, {FQN: dim})
    assert table.schema == DELTA_SCHEMA
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    back = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert back["key_id"].to_pylist() == keys
    assert back["embedding"].combine_chunks().flatten().to_numpy().tobytes() == rows.tobytes()
    assert set(back["table_fqn"].to_pylist()) <= {FQN}


@given(
    arrays(np.int64, st.integers(0, 40), elements=st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1))),
    st.sampled_from([0, 1, 9, 13, 10**6]),
)
def test_unique_keys_are_those_of_a_set_in_order(keys: np.ndarray, rows: int) -> None:
    for some in (keys, keys[(keys >= 0) & (keys < rows)]):
        before = some.copy()
        assert unique(some, rows).tolist() == sorted(set(some.tolist()))
        assert unique(some, rows).dtype == np.int64
        assert some.tolist() == before.tolist()


def test_keys_and_rows_are_not_copied() -> None:
    keys, rows = np.arange(10, dtype=np.int64), np.ones((10, 3), np.float32)
    table = make_delta(1, 0, 1, "f", FQN, keys, rows, "dump")
    assert table["key_id"].chunk(0).buffers()[1].address == keys.ctypes.data
    assert table["embedding"].chunk(0).flatten().buffers()[1].address == rows.ctypes.data


def test_a_delta_of_several_chunks_keeps_order_and_shares_its_constant_columns() -> None:
    count = 2 * CHUNK_ROWS + 3
    keys = np.arange(count, dtype=np.int64)
    table = delta(keys, keys[:, None])
    validate(table, {FQN: 1})
    assert table["key_id"].to_numpy().tolist() == keys.tolist()
    assert table["embedding"].combine_chunks().flatten().to_numpy().tolist() == keys.tolist()
    assert table["table_fqn"].num_chunks == 3
    assert len({chunk.buffers()[2].address for chunk in table["table_fqn"].chunks}) == 1


def test_no_list_offset_of_a_chunk_leaves_int32() -> None:
    """Two rows that are together one float more than a chunk's offsets can say; mapped, and never read."""
    dim = 2**30
    with mmap.mmap(-1, 2 * 4 * dim, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        table = delta([1, 2], np.frombuffer(pages, np.float32).reshape(2, dim))
        offsets = [chunk.offsets.to_pylist() for chunk in table["embedding"].chunks]
        del table  # a mapping closes when nobody looks into it
    assert offsets == [[0, dim], [0, dim]]


@given(st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "用户"]), min_size=1, max_size=6), st.data())
def test_a_column_is_constant_when_all_its_strings_are_equal(strings: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(strings) - 1))
    part = strings[start:]
    found = constant(pa.array(strings).slice(start))
    assert found == (part[0] if len(set(part)) == 1 else None)
    assert constant(pa.array(["x", *[part[0]] * 3, "y"]).slice(1, 3)) == part[0]


def test_columns_say_where_the_rows_come_from() -> None:
    row = delta([5], [[1.0]]).to_pylist()[0]
    assert row == {
        "global_step": 7,
        "rank": 1,
        "world_size": 4,
        "feature_name": "f",
        "table_fqn": FQN,
        "key_id": 5,
        "embedding": [1.0],
        "source": "dump",
    }


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (np.arange(2, dtype=np.int32), np.ones((2, 2), np.float32)),
        (np.arange(2), np.ones((2, 2), np.float64)),
        (np.arange(2), np.ones((3, 2), np.float32)),
        (np.arange(2), np.ones(2, np.float32)),
    ],
)
def test_arrays_of_another_shape_or_type_are_refused(keys: np.ndarray, rows: np.ndarray) -> None:
    with pytest.raises(DeltaError, match="expected keys int64"):
        make_delta(1, 0, 1, "f", FQN, keys, rows, "dump")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_with_table_key_and_step(bad: float) -> None:
    good, table = delta([1], [[0.0, 0.0]], fqn="m.other"), delta([10, 11, 12], [[1, 1], [1, bad], [1, 1]])
    with pytest.raises(DeltaError, match=r"table 'm.ebc.embedding_bags.t', key 11, step 7") as caught:
        validate(pa.concat_tables([good, table]))
    assert (caught.value.table, caught.value.key, caught.value.step) == (FQN, 11, 7)


@given(st.lists(st.floats(width=32) | st.sampled_from([3e38, -3e38, np.nan, np.inf, -np.inf]), min_size=1))
@example([3e38, 3e38, -3e38, -3e38])  # finite, though a sum of them is not
@example([np.inf, -np.inf])
def test_a_value_is_refused_exactly_when_it_is_not_finite(values: list[float]) -> None:
    table = delta(range(len(values)), np.array(values, np.float32).reshape(-1, 1))
    bad = [key for key, value in enumerate(values) if not np.isfinite(value)]
    if not bad:
        return validate(table)
    with pytest.raises(DeltaError, match=rf"holds -?(nan|inf) .*, key {bad[0]}, step 7"):
        validate(table)
    return None


def test_the_reserved_key_is_refused_with_table_key_and_step() -> None:
    with pytest.raises(DeltaError, match=r"key -1 is reserved \(table 'm.ebc.embedding_bags.t', key -1, step 7\)"):
        validate(delta([3, -1], [[1.0], [1.0]]))


def test_a_wrong_dimension_is_refused_with_both_numbers() -> None:
    with pytest.raises(DeltaError, match=r"dimension 2, its table has 3 .*key 8, step 7"):
        validate(delta([8], [[1.0, 1.0]]), {FQN: 3})
    with pytest.raises(DeltaError, match="not in the model"):
        validate(delta([8], [[1.0, 1.0]]), {"m.other": 2})
    mixed = pa.concat_tables([delta([1, 2], np.ones((2, 2)), "m.u"), delta([3], [[1.0]])]).combine_chunks()
    validate(mixed, {"m.u": 2, FQN: 1})
    with pytest.raises(DeltaError, match=r"dimension 1, its table has 2 .*table 'm.ebc.embedding_bags.t', key 3"):
        validate(mixed, {"m.u": 2, FQN: 2})


def test_an_empty_row_of_an_unknown_table_is_refused_alone_and_among_others() -> None:
    unknown = delta([3], np.ones((1, 0)), "m.other")
    mixed = pa.concat_tables([delta([1], [[1.0]]), unknown]).combine_chunks()
    for table in (unknown, mixed):
        with pytest.raises(DeltaError, match=r"dimension 0, its table has none: it is not in the model .*key 3"):
            validate(table, {FQN: 1})


def test_offences_are_found_in_slices_and_later_chunks() -> None:
    table = pa.concat_tables([delta(range(10), np.ones((10, 2))), delta([20, 21], [[1, 1], [np.nan, 1]])])
    with pytest.raises(DeltaError, match="key 21"):
        validate(table.slice(3), {FQN: 2})
    validate(table.slice(3, 8), {FQN: 2})


@pytest.mark.parametrize("column", ["table_fqn", "key_id", "embedding"])
def test_nulls_are_refused(column: str) -> None:
    rows = delta([4, 5], [[1.0], [1.0]]).to_pylist()
    rows[1][column] = None
    table = pa.Table.from_pylist(rows, schema=pa.schema([field.with_nullable(True) for field in DELTA_SCHEMA]))
    with pytest.raises(DeltaError, match=f"{column} is null"):
        validate(table)
    rows = delta([4, 5], [[1.0], [1.0]]).to_pylist()
    rows[0]["embedding"] = [None]
    with pytest.raises(DeltaError, match="key 4"):
        validate(pa.Table.from_pylist(rows, schema=DELTA_SCHEMA))


def test_another_schema_is_refused() -> None:
    with pytest.raises(DeltaError, match="schema is"):
        validate(delta([1], [[1.0]]).drop_columns(["source"]))


@given(KEYS, st.sampled_from([2, 4, 16]), st.data())
def test_an_int8_row_gives_its_numbers_back_within_half_a_scale(keys: list[int], dim: int, data: st.DataObject) -> None:
    rows = matrix(data, len(keys), dim, st.floats(-1000, 1000, width=32))
    table = delta(keys, rows, kind="int8")
    validate(table, {FQN: dim})
    assert table.schema == SCHEMAS["int8"]
    assert table["key_id"].to_pylist() == keys
    stored = np.array(table["embedding"].to_pylist(), np.uint8).reshape(len(keys), dim + TRAILER_BYTES)
    scale, offset = stored[:, dim:].copy().view("<f2").astype(np.float64).T[..., None]
    back = stored[:, :dim] * scale + offset
    slack = np.spacing(np.abs(offset).astype(np.float16)).astype(np.float64)  # fp16 rounds offset and scale
    assert (np.abs(back - rows) <= 0.5 * np.abs(scale) + slack + 255 * np.spacing(scale.astype(np.float16))).all()


@given(st.sampled_from([2, 6, 16, 34]), st.data())
def test_int8_rows_are_those_of_fbgemm_bit_for_bit(dim: int, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu")
    rows = matrix(data, 5, dim, SIZED)
    rows[0] = rows[0, 0]  # all equal
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(torch.from_numpy(rows), 8).numpy()
    ours = quantise(rows)
    finite = np.isfinite(ours[:, dim:].view("<f2")).all(axis=1)
    assert finite.tolist() == np.isfinite(theirs[:, dim:].copy().view("<f2")).all(axis=1).tolist()
    assert ours[finite, :dim].tolist() == theirs[finite, :dim].tolist()
    # As numbers: which of 0 and -0 is the least, neither side says.
    assert ours[finite, dim:].copy().view("<f2").tolist() == theirs[finite, dim:].copy().view("<f2").tolist()


def test_int8_rows_of_several_chunks_are_quantised_each_by_its_own_numbers() -> None:
    count = CHUNK_ROWS + 2  # and some blocks, of which the last is not full
    rows = np.array([0.0, 1.0], np.float32) * np.arange(1, count + 1, dtype=np.float32)[:, None]
    table = delta(range(count), rows, kind="int8")
    validate(table, {FQN: 2})
    last = np.array(table["embedding"][-1].as_py(), np.uint8)
    assert last[:2].tolist() == [0, 255]
    assert last[2:].view("<f2").astype(np.float32) == pytest.approx([count / 255, 0], rel=1e-3)


@pytest.mark.parametrize(
    "row",
    [[0, np.nan], [np.inf, 0], [0, -np.inf], [-7e4, 0], [0, 1.7e7], [-3e38, 3e38]],
    ids=["nan", "inf", "-inf", "offset", "scale", "overflow"],
)
def test_a_row_that_int8_cannot_hold_is_refused_with_table_key_and_step(row: list[float]) -> None:
    with pytest.raises(DeltaError, match=r"fp16 scale \(table 'm.ebc.embedding_bags.t', key 11, step 7\)"):
        delta([10, 11, 12], [[0, 1], row, [2, 3]], kind="int8")


def test_int8_refuses_odd_dimensions() -> None:
    with pytest.raises(DeltaError, match=r"even dimension, not 3 .*step 7"):
        delta([1], [[1, 2, 3]], kind="int8")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([1, 2, *np.array([np.inf, 0], "<f2").tobytes()], "holds inf as its scale or offset"),
        ([1, 2, *np.array([1, np.nan], "<f2").tobytes()], "holds nan as its scale or offset"),
        ([1, 2, 3, 4, *np.array([1, 0], "<f2").tobytes()], "dimension 4, its table has 2"),
        ([1, 2, 3, *np.array([1, 0], "<f2").tobytes()], "7 bytes is not an even dimension and a trailer"),
        ([1, 2, 3, 4], "4 bytes is not an even dimension and a trailer"),
        ([1, None, *np.array([1, 0], "<f2").tobytes()], "holds nan"),
    ],
)
def test_int8_deltas_are_checked_as_they_are_stored(stored: list[int | None], message: str) -> None:
    rows = delta([4, 5, 6], np.ones((3, 2)), kind="int8").to_pylist()
    rows[1]["embedding"] = stored
    table = pa.concat_tables([delta([9], [[1, 2]], kind="int8"), pa.Table.from_pylist(rows, SCHEMAS["int8"])])
    with pytest.raises(DeltaError, match=message + r" \(table 'm.ebc.embedding_bags.t', key 5, step 7\)"):
        validate(table, {FQN: 2})
    validate(table.slice(0, 2), {FQN: 2})

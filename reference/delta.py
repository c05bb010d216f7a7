"""Deltas: the rows one rank touched since its last dump, as an Arrow table; making one and checking one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .contract import EmbeddingType

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_COLUMNS = {
    "global_step": pa.int64(),
    "rank": pa.int32(),
    "world_size": pa.int32(),
    "feature_name": pa.string(),
    "table_fqn": pa.string(),
    "key_id": pa.int64(),
    "embedding": pa.list_(pa.float32()),
    "source": pa.string(),
}
DELTA_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()])
SCHEMAS: dict[EmbeddingType, pa.Schema] = {
    "float32": DELTA_SCHEMA,
    "int8": DELTA_SCHEMA.set(
        list(_COLUMNS).index("embedding"), pa.field("embedding", pa.list_(pa.uint8()), nullable=False)
    ),
}
TRAILER_BYTES = 4  # of an int8 row: scale and offset, fp16 little-endian each
KEY_RESERVED = -1  # the store's own sentinel; every other int64 is a legal key
CHUNK_ROWS = 64_000
BLOCK_ROWS = 4096  # quantised at a time: they stay in the cache


class DeltaError(ValueError):
    """Rows that must not be sent: reserved key, NaN or Inf, wrong dimension, or a shape Arrow refuses.

    Usual causes: a diverged model, ids hashed to -1, a table resized under the publisher.
    Attributes: table (FQN), key (int or None), step (int).
    """

    def __init__(self, what: str, *, table: str, key: int | None, step: int | None) -> None:
        super().__init__(f"{what} (table {table!r}, key {key}, step {step})")
        self.what, self.table, self.key, self.step = what, table, key, step


def unique(keys: Keys, rows: int = 0) -> Keys:
    """The keys sorted, each once. `rows`: they lie in [0, rows) unless something is wrong, so a bitmap may be cheaper.

    numpy.unique hashes integers, which takes forty times as long as sorting them.
    """
    if len(keys) * 8 >= rows > 0 and keys.min() >= 0 and keys.max() < rows:
        seen = np.zeros(rows, np.bool_)
        seen[keys] = True
        return np.flatnonzero(seen)
    ordered = np.sort(keys)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def make_delta(
    step: int,
    rank: int,
    world_size: int,
    feature_name: str,
    fqn: str,
    keys: Keys,
    rows: Rows,
    source: str,
    embedding_type: EmbeddingType = "float32",
) -> pa.Table:
    """Columnar delta of one table, without a Python object per row; `keys` and float32 `rows` are not copied.

    Args:
        keys: int64, shape (n,). rows: float32, shape (n, dim), C-contiguous. source: why the rows are sent.
        embedding_type: what the delta holds; "int8" quantises the rows (see `quantise`).

    Raises:
        DeltaError: keys and rows disagree in length or type, or a row cannot be quantised.
    """
    if keys.dtype != np.int64 or rows.dtype != np.float32 or rows.ndim != 2 or keys.shape != rows.shape[:1]:
        raise DeltaError(
            f"expected keys int64 (n,) and rows float32 (n, dim), got {keys.dtype} {keys.shape} and "
            f"{rows.dtype} {rows.shape}",
            table=fqn,
            key=None,
            step=step,
        )
    values: Rows | Bytes = rows if embedding_type == "float32" else _int8_rows(step, fqn, keys, rows)
    width, schema = values.shape[1], SCHEMAS[embedding_type]
    size = min(max(1, len(keys)), CHUNK_ROWS, max(1, (2**31 - 1) // max(1, width)))  # list offsets are int32
    # One block of each constant column, which every chunk shares: filling them for all rows would cost more than rows.
    constants: list[object] = [step, rank, world_size, feature_name, fqn, source]
    names = [name for name in _COLUMNS if name not in ("key_id", "embedding")]
    blocks = {name: _repeat(value, _COLUMNS[name], size) for name, value in zip(names, constants, strict=True)}
    offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(width))
    chunks = []
    for start in range(0, len(keys), size):
        columns = {"key_id": pa.array(keys[start : start + size])}
        count = len(columns["key_id"])
        columns |= {name: block.slice(0, count) for name, block in blocks.items()}
        flat = pa.array(values[start : start + size].reshape(-1))
        columns["embedding"] = pa.ListArray.from_arrays(offsets.slice(0, count + 1), flat)
        chunks.append(pa.RecordBatch.from_arrays([columns[name] for name in _COLUMNS], schema=schema))
    return pa.Table.from_batches(chunks, schema=schema)


def _repeat(value: object, kind: pa.DataType, count: int) -> pa.Array:
    if isinstance(value, str):
        return pa.repeat(pa.scalar(value, kind), count)
    return pa.array(np.full(count, value, kind.to_pandas_dtype()))  # a third of the time


def quantise(rows: Rows) -> Bytes:
    """Rowwise int8 of float32 rows (n, dim), dim even: uint8 (n, dim + 4), a row's values and then fp16 scale, offset.

    value * scale + offset is the number again, within half a scale and the rounding of scale and offset. Layout and
    rounding are those of FBGEMM's FloatToFusedNBitRowwiseQuantizedSBHalf at 8 bits. A row that holds NaN or Inf, or
    numbers for which fp16 has no scale or offset, gets a trailer that is not finite.
    """
    dim = rows.shape[1]
    quantised = np.empty((len(rows), dim + TRAILER_BYTES), np.uint8)
    trailers = quantised[:, dim:].view("<f2")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, len(rows), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            offset = rows[part].min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
            spread = rows[part].max(axis=1, keepdims=True) - offset
            scale = (spread / np.float32(255)).astype(np.float16).astype(np.float32)
            inverse = 1 / scale
            scale[np.isinf(inverse)] = inverse[np.isinf(inverse)] = 1  # no spread, or one too small for fp16
            trailers[part] = np.concatenate([scale, offset], axis=1)
            quantised[part, :dim] = np.rint((rows[part] - offset) * inverse).clip(0, 255)
    return quantised


def _int8_rows(step: int, fqn: str, keys: Keys, rows: Rows) -> Bytes:
    if rows.shape[1] % 2 or not rows.shape[1]:
        raise DeltaError(f"int8 rows need an even dimension, not {rows.shape[1]}", table=fqn, key=None, step=step)
    quantised = quantise(rows)
    finite = np.isfinite(quantised[:, -TRAILER_BYTES:].view("<f2")).all(axis=1)
    if not finite.all():
        row = rows[place := _first(~finite)]
        what = f"the embedding's numbers, {row.min()} to {row.max()}, are not finite or too large for an fp16 scale"
        raise DeltaError(what, table=fqn, key=int(keys[place]), step=step)
    return quantised


def constant(strings: pa.StringArray) -> str | None:
    """The value that every one of the strings has (no nulls, at least one string), or None when they differ."""
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, np.int32, len(strings) + 1, 4 * strings.offset)
    length, total = int(ends[1] - ends[0]), int(ends[-1] - ends[0])
    if (np.diff(ends) != length).any():
        return None
    # Bytes that equal themselves shifted by one string are one string over and over: a memcmp, not a loop.
    text = data.slice(int(ends[0]), total) if data is not None else pa.py_buffer(b"")
    same = text.slice(0, total - length).equals(text.slice(length))
    return str(strings[0].as_py()) if same else None


def validate(table: pa.Table, dims: Mapping[str, int] | None = None) -> None:
    """Refuse a delta that the store must never see. Vectorised; linear in rows.

    Args:
        table: columns of one of SCHEMAS. dims: embedding dimension per table FQN; None leaves dimensions unchecked.

    Raises:
        DeltaError: names the first offending row's table, key and step.
    """
    if not any(table.schema.names == known.names and table.schema.types == known.types for known in SCHEMAS.values()):
        raise DeltaError(f"schema is {table.schema}, expected one of {SCHEMAS}", table="", key=None, step=None)
    for batch in table.to_batches(max_chunksize=CHUNK_ROWS):  # however large a chunk is, the masks below stay small
        if batch.num_rows and (found := _first_offender(batch, dims)):
            row, what = found
            fqn, key, step = (batch[name][row].as_py() for name in ("table_fqn", "key_id", "global_step"))
            raise DeltaError(what, table=str(fqn), key=key, step=step)


def _first_offender(batch: pa.RecordBatch, dims: Mapping[str, int] | None) -> tuple[int, str] | None:
    """Row and reason, or None when every row may be sent."""
    fqns, keys, lists = columns = [batch[name] for name in ("table_fqn", "key_id", "embedding")]
    for name, column in zip(("table_fqn", "key_id", "embedding"), columns, strict=True):
        if column.null_count:
            return _first(pc.is_null(column).to_numpy(zero_copy_only=False)), f"{name} is null"
    reserved = keys.to_numpy() == KEY_RESERVED
    if reserved.any():
        return _first(reserved), f"key {KEY_RESERVED} is reserved"
    fqn = constant(fqns) if dims is not None else None  # before there are other masks
    lengths = np.diff(lists.offsets.to_numpy())
    trailer_bytes = TRAILER_BYTES if lists.type.value_type == pa.uint8() else 0
    found_dims = lengths - trailer_bytes if trailer_bytes else lengths
    if trailer_bytes and (bad := (found_dims < 2) | (found_dims % 2 != 0)).any():
        return _first(bad), f"an int8 embedding of {lengths[_first(bad)]} bytes is not an even dimension and a trailer"
    if dims is not None:
        wanted_dims = [dims.get(each, -1) for each in fqns.to_pylist()] if fqn is None else dims.get(fqn, -1)
        if (wrong := found_dims != wanted_dims).any():
            row = _first(wrong)
            wanted = dims.get(fqns[row].as_py(), "none: it is not in the model")
            return row, f"the embedding has dimension {found_dims[row]}, its table has {wanted}"
    numbers = lists.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
    if numbers.dtype == np.uint8:
        ends = np.cumsum(lengths, dtype=np.int64)[:, None]
        numbers = numbers[ends + np.arange(-TRAILER_BYTES, 0)].view("<f2").reshape(-1)
        lengths = np.full(len(lengths), 2)
    with np.errstate(over="ignore", invalid="ignore"):
        # NaN and Inf stay in a sum of squares: one pass at the speed of memory, no mask. One that merely overflowed, as
        # squares above 1e38 do, is looked at closely.
        suspect = not np.isfinite(np.dot(numbers, numbers))
    if suspect and not (finite := np.isfinite(numbers)).all():
        place = _first(~finite)
        what = f"the embedding holds {numbers[place]}" + " as its scale or offset" * (numbers.dtype == np.float16)
        return int(np.searchsorted(np.cumsum(lengths), place, side="right")), what
    return None


def _first(mask: Mask) -> int:
    return int(np.argmax(mask))

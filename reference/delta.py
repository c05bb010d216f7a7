"""Deltas: the rows one rank touched since its last dump, as an Arrow table; making one and checking one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

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
KEY_RESERVED = -1  # the store's own sentinel; every other int64 is a legal key
CHUNK_ROWS = 64_000


class DeltaError(ValueError):
    """Rows that must not be sent: reserved key, NaN or Inf, wrong dimension, or a shape Arrow refuses.

    Usual causes: a diverged model, ids hashed to -1, a table resized under the publisher.
    Attributes: table (FQN), key (int or None), step (int).
    """

    def __init__(self, what: str, *, table: str, key: int | None, step: int | None) -> None:
        super().__init__(f"{what} (table {table!r}, key {key}, step {step})")
        self.what, self.table, self.key, self.step = what, table, key, step


def make_delta(
    step: int, rank: int, world_size: int, feature_name: str, fqn: str, keys: Keys, rows: Rows, source: str
) -> pa.Table:
    """Columnar delta of one table, without a Python object per row; `keys` and `rows` are not copied.

    Args:
        keys: int64, shape (n,). rows: float32, shape (n, dim), C-contiguous. source: why the rows are sent.

    Raises:
        DeltaError: keys and rows disagree in length or type.
    """
    if keys.dtype != np.int64 or rows.dtype != np.float32 or rows.ndim != 2 or keys.shape != rows.shape[:1]:
        raise DeltaError(
            f"expected keys int64 (n,) and rows float32 (n, dim), got {keys.dtype} {keys.shape} and "
            f"{rows.dtype} {rows.shape}",
            table=fqn,
            key=None,
            step=step,
        )
    dim = rows.shape[1]
    size = min(max(1, len(keys)), CHUNK_ROWS, max(1, (2**31 - 1) // max(1, dim)))  # list offsets are int32
    # One block of each constant column, which every chunk shares: filling them for all rows would cost more than rows.
    constants: list[object] = [step, rank, world_size, feature_name, fqn, source]
    names = [name for name in _COLUMNS if name not in ("key_id", "embedding")]
    blocks = {
        name: pa.repeat(pa.scalar(value, _COLUMNS[name]), size) for name, value in zip(names, constants, strict=True)
    }
    offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(dim))
    chunks = []
    for start in range(0, len(keys), size):
        values = pa.array(rows[start : start + size].reshape(-1))
        columns = {"key_id": pa.array(keys[start : start + size])}
        count = len(columns["key_id"])
        columns |= {name: block.slice(0, count) for name, block in blocks.items()}
        columns["embedding"] = pa.ListArray.from_arrays(offsets.slice(0, count + 1), values)
        chunks.append(pa.RecordBatch.from_arrays([columns[name] for name in _COLUMNS], schema=DELTA_SCHEMA))
    return pa.Table.from_batches(chunks, schema=DELTA_SCHEMA)


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
        table: columns of DELTA_SCHEMA. dims: embedding dimension per table FQN; None leaves dimensions unchecked.

    Raises:
        DeltaError: names the first offending row's table, key and step.
    """
    if table.schema.names != DELTA_SCHEMA.names or table.schema.types != DELTA_SCHEMA.types:
        raise DeltaError(f"schema is {table.schema}, expected {DELTA_SCHEMA}", table="", key=None, step=None)
    for batch in table.to_batches(max_chunksize=CHUNK_ROWS):  # however large a chunk is, the masks below stay small
        if batch.num_rows and (found := _first_offender(batch, dims)):
            row, what = found
            fqn, key, step = (batch[name][row].as_py() for name in ("table_fqn", "key_id", "global_step"))
            raise DeltaError(what, table=str(fqn), key=key, step=step)


def _first_offender(batch: pa.RecordBatch, dims: Mapping[str, int] | None) -> tuple[int, str] | None:
    """Row and reason, or None when every row may be sent."""
    for name in ("table_fqn", "key_id", "embedding"):
        if batch[name].null_count:
            return _first(pc.is_null(batch[name]).to_numpy(zero_copy_only=False)), f"{name} is null"
    reserved = batch["key_id"].to_numpy() == KEY_RESERVED
    if reserved.any():
        return _first(reserved), f"key {KEY_RESERVED} is reserved"
    lists = batch["embedding"]
    lengths = np.diff(lists.offsets.to_numpy())
    if dims is not None:
        fqn, fqns = constant(batch["table_fqn"]), batch["table_fqn"].to_pylist
        wrong = lengths != (dims.get(fqn, -1) if fqn is not None else [dims.get(each, -1) for each in fqns()])
        if wrong.any():
            row = _first(wrong)
            wanted = dims.get(fqns()[row], "none: it is not in the model")
            return row, f"the embedding has dimension {lengths[row]}, its table has {wanted}"
    numbers = lists.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
    with np.errstate(over="ignore", invalid="ignore"):
        # NaN and Inf stay in a sum: one reading pass, no mask. A sum that merely overflowed is looked at closely.
        suspect = not np.isfinite(np.add.reduce(numbers))
    if suspect and not (finite := np.isfinite(numbers)).all():
        place = _first(~finite)
        return int(np.searchsorted(np.cumsum(lengths), place, side="right")), f"the embedding holds {numbers[place]}"
    return None


def _first(mask: Mask) -> int:
    return int(np.argmax(mask))

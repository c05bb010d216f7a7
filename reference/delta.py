"""Deltas: the rows one rank touched since its last dump, as an Arrow table; making one and checking one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]

DELTA_SCHEMA = pa.schema(
    [
        pa.field("global_step", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field("feature_name", pa.string(), nullable=False),
        pa.field("table_fqn", pa.string(), nullable=False),
        pa.field("key_id", pa.int64(), nullable=False),
        pa.field("embedding", pa.list_(pa.field("item", pa.float32())), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)
KEY_RESERVED = -1  # the store's own sentinel; every other int64 is a legal key
_LIST_VALUES_MAX = 2**31 - 1  # Arrow list offsets are int32


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
    rows_per_chunk = max(1, _LIST_VALUES_MAX // max(1, rows.shape[1]))
    chunks = []
    for start in range(0, len(keys), rows_per_chunk):
        part, part_keys = rows[start : start + rows_per_chunk], keys[start : start + rows_per_chunk]
        count, dim = part.shape
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(dim))
        columns = [
            pa.repeat(pa.scalar(step, pa.int64()), count),
            pa.repeat(pa.scalar(rank, pa.int32()), count),
            pa.repeat(pa.scalar(world_size, pa.int32()), count),
            pa.repeat(pa.scalar(feature_name, pa.string()), count),
            pa.repeat(pa.scalar(fqn, pa.string()), count),
            pa.array(part_keys),
            pa.ListArray.from_arrays(offsets, pa.array(part.reshape(-1)), type=DELTA_SCHEMA.field("embedding").type),
            pa.repeat(pa.scalar(source, pa.string()), count),
        ]
        chunks.append(pa.RecordBatch.from_arrays(columns, schema=DELTA_SCHEMA))
    return pa.Table.from_batches(chunks, schema=DELTA_SCHEMA)


def validate(table: pa.Table, dims: Mapping[str, int] | None = None) -> None:
    """Refuse a delta that the store must never see. Vectorised; linear in rows.

    Args:
        table: columns of DELTA_SCHEMA. dims: embedding dimension per table FQN; None leaves dimensions unchecked.

    Raises:
        DeltaError: names the first offending row's table, key and step.
    """
    if table.schema.names != DELTA_SCHEMA.names or table.schema.types != DELTA_SCHEMA.types:
        raise DeltaError(f"schema is {table.schema}, expected {DELTA_SCHEMA}", table="", key=None, step=None)
    for batch in table.to_batches():
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
        fqns = batch["table_fqn"].dictionary_encode()
        expected = np.array([dims.get(fqn, -1) for fqn in fqns.dictionary.to_pylist()])[fqns.indices.to_numpy()]
        wrong = lengths != expected
        if wrong.any():
            row = _first(wrong)
            return (
                row,
                f"the embedding has dimension {lengths[row]}, its table has {expected[row]} (-1: not in the model)",
            )
    numbers = lists.flatten().to_numpy(zero_copy_only=False)  # nulls become NaN
    finite = np.isfinite(numbers)
    if not finite.all():
        place = _first(~finite)
        return int(np.searchsorted(np.cumsum(lengths), place, side="right")), f"the embedding holds {numbers[place]}"
    return None


def _first(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))

"""Replies within bounds: how much a lookup may amount to, and how much of a long reply exists at a time.

A request of a few bytes may ask for a row of megabytes a million times. So a lookup finds each row once, and is refused
before its reply is put together if that would be over ``REPLY_BYTES_MAX``. Scans and changes may be of any length: they
are sent in batches of about ``WINDOW_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import BodyTooLarge, SchemaMismatch
from ..store import SCAN_ROWS_MAX, Snapshot, Store, ViewSpec

REPLY_BYTES_MAX: Final = 64 * 2**20  # of a lookup, as Arrow counts them
WINDOW_BYTES: Final = 4 * 2**20
_LOOKUP_ROWS: Final = 4096  # asked of the store at a time


def rows_within(row_bytes: int, bytes_max: int, rows_max: int) -> int:
    """How many rows of that size go together: at least one."""
    return max(1, min(rows_max, bytes_max // max(1, row_bytes)))


def batches(snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
    """The snapshot's rows in batches of about ``WINDOW_BYTES``, or of one row if that is larger."""
    for pk, image in snapshot.parts:
        row_bytes = image.values.itemsize * image.values.shape[1] + 32
        part = snapshot._replace(parts=((pk, image),))
        yield from part.batches(rows_within(row_bytes, WINDOW_BYTES, SCAN_ROWS_MAX))


def check_reply(size: int) -> None:
    """Raise BodyTooLarge for a lookup's reply of that many bytes."""
    if size > REPLY_BYTES_MAX:
        raise BodyTooLarge(f"the reply would be over {REPLY_BYTES_MAX} bytes: ask for fewer rows at a time")


def lookup(store: Store, spec: ViewSpec, version: str, pk: pa.StringArray, sk: pa.Int64Array) -> pa.Table:
    """``Store.lookup``, of the same rows. Raises BodyTooLarge when they amount to more than ``REPLY_BYTES_MAX``,
    without ever holding more of them than are stored; SchemaMismatch for columns of other types, or nulls.
    """
    for name, column, want in (("pk", pk, pa.string()), ("sk", sk, pa.int64())):
        if column.type != want:
            raise SchemaMismatch(f"lookup: column {name} is {column.type}, want {want}")
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise SchemaMismatch(f"lookup: column {name} is null in row {row}")
    if len(np.unique(sk)) == len(sk):  # the usual case: nothing is asked for twice
        return _find(store, spec, version, pk, sk)
    asked = pa.table({"pk": pk, "sk": sk, "row": np.arange(len(sk))})
    once = asked.group_by(["pk", "sk"], use_threads=False).aggregate([]).combine_chunks()
    found = _find(store, spec, version, once["pk"].chunk(0), once["sk"].chunk(0))
    places = found.select(["pk", "sk"]).append_column("place", pa.array(np.arange(found.num_rows)))
    rows = asked.join(places, ["pk", "sk"], join_type="inner", use_threads=False).sort_by("row")["place"]
    values = found["embedding"]
    sizes = pc.list_value_length(values).to_numpy() * (values.type.value_type.bit_width // 8)
    check_reply(int(np.bincount(rows, minlength=found.num_rows) @ sizes))
    return found.take(rows)


def _find(store: Store, spec: ViewSpec, version: str, pk: pa.StringArray, sk: pa.Int64Array) -> pa.Table:
    found, size = [], 0
    for start in range(0, max(1, len(sk)), _LOOKUP_ROWS):
        window = slice(start, start + _LOOKUP_ROWS)
        found.append(store.lookup(spec.project, spec.name, version, pk[window], sk[window]))
        size += found[-1].nbytes
        check_reply(size)
    return found[0] if len(found) == 1 else pa.concat_tables(found)

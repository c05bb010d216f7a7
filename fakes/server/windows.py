"""Replies within bounds: how much a lookup may amount to, and how much of a long reply exists at a time.

The store bounds what it finds at once (``store.REPLY_BYTES_MAX``); what is sent is bounded here, closer, for both ways
to reach a store. Scans and changes may be of any length: they are read and sent ``WINDOW_BYTES`` at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from ..errors import BodyTooLarge
from ..store import SCAN_ROWS_MAX, Snapshot, Store, ViewSpec

REPLY_BYTES_MAX: Final = 64 * 2**20  # of a lookup, as Arrow columns
WINDOW_BYTES: Final = 4 * 2**20


def rows_within(row_bytes: int, rows_max: int = SCAN_ROWS_MAX) -> int:
    """How many rows of that size make a window: at least one."""
    return max(1, min(rows_max, WINDOW_BYTES // max(1, row_bytes)))


def batches(snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
    """The snapshot's rows in batches of about ``WINDOW_BYTES``, or of one row if that is larger.

    Raises SnapshotNotFound at once if the view is gone; what has begun goes on.
    """
    snapshot.batches()
    return _batches(snapshot)


def _batches(snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
    for part in snapshot.parts:
        one = snapshot._replace(parts=(part,))
        yield from one.batches(rows_within(one.nbytes // len(part[1].order)))


def lookup(store: Store, spec: ViewSpec, version: str, pk: pa.StringArray, sk: pa.Int64Array) -> pa.Table:
    """``Store.lookup``. Raises BodyTooLarge when the rows found amount to more than ``REPLY_BYTES_MAX``."""
    table = store.lookup(spec.project, spec.name, version, pk, sk)
    if table.nbytes > REPLY_BYTES_MAX:
        raise BodyTooLarge(
            f"the reply would take {table.nbytes} bytes, over {REPLY_BYTES_MAX}: ask for fewer rows at a time"
        )
    return table


def table_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """A table in batches of about ``WINDOW_BYTES``."""
    return table.to_batches(rows_within(table.nbytes // table.num_rows)) if table.num_rows else []

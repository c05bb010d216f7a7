"""Replies within bounds: how much a lookup may amount to, and how much of a long reply exists at a time.

The store bounds what a lookup finds (``store.REPLY_BYTES_MAX``). Scans and changes may be of any length: they are read
and sent ``WINDOW_BYTES`` at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from ..store import SCAN_ROWS_MAX, Snapshot

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


def table_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """A table in batches of about ``WINDOW_BYTES``."""
    return table.to_batches(rows_within(table.nbytes // table.num_rows)) if table.num_rows else []

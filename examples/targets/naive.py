"""An uploader as one writes it on the first afternoon. It works, on a good day: the kit says what is wrong with it.

    deltaproof conform examples.targets.naive:NaiveUploader

What it says, each with the smallest scenario in which it happens:

- a request that fails is not tried again, and `write_flush()` returns a summary that nobody reads: `store-error`,
  `store-reset`, `store-partial`, `store-token-revoked` and the like break **no-lost-rows** and **no-silent-loss**;
- so does an exception in the background (`rank-raise` at `sdk.write`): it is printed, and `close` says nothing;
- ts are the wall clock's. When it steps back (`clock-jump`) new rows lose against old ones: **no-lost-rows**; and a
  reader that follows the ts has passed them by then: **incremental-read-complete**.
"""

from __future__ import annotations

import queue
import threading
import time

import pyarrow as pa

from deltaproof.conformance.target import RankContext, claims


@claims("feature-store", "sdk", "json")
class NaiveUploader:
    """One thread, one queue, and hope."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._queue: queue.Queue[pa.Table | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._view = self._context.open_view()
        self._thread.start()

    def submit(self, step: int, table: pa.Table) -> None:
        self._queue.put(table)

    def check_error(self) -> None:
        pass  # the log has it

    def close(self, drain: bool) -> None:
        self._queue.put(None)
        self._thread.join(10)

    def _work(self) -> None:
        while (table := self._queue.get()) is not None:
            try:
                rows = [
                    {
                        "embedding_name": self._context.names[row["table_fqn"]],
                        "key_id": row["key_id"],
                        "embedding": row["embedding"],
                    }
                    for row in table.to_pylist()
                ]
                self._view.write_features(rows, self._context.version, "MERGE", int(time.time() * 1000))
                self._view.write_flush()
            except Exception as error:
                print(f"upload failed: {error}")

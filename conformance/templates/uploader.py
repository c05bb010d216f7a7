"""The adapter of an uploader: between your code, which sends rows to a store, and deltaproof, which asks what became of
them. As it stands it is a small uploader of its own, and holds; put a call of yours into `submit`, then run

    pytest
    deltaproof conform adapter:Adapter --report report

deltaproof's own dumper decides when rows are due, and gives `submit` those that training changed.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from ..target import RankContext, claims


# What this uploader can do (docs/conformance.md). What you leave out is reported as not tested, never as held.
@claims("feature-store", "sdk", "arrow")
class Adapter:
    """One of these is made for each rank, by calling it with a `RankContext`: rank, tables, settings, store, clock."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._config = context, context.config
        self._view: Any = None
        self._ts = 0

    def start(self) -> None:
        """Training is about to begin. Start threads here, not in `__init__`."""
        if self._context.version in ("", "default"):
            raise ValueError(f"rank {self._context.rank}: serving reads version {self._context.version!r}")
        self._view = self._context.open_view()
        self._ts = self._view.high_water_ts(self._context.version)  # new rows must win over those of an earlier run

    def submit(self, step: int, table: pa.Table) -> None:
        """Rows to send: columns table_fqn, key_id, embedding and more. May return before they are sent.

        This one sends at once, and sends the whole step again when anything went wrong.
        """
        names = pa.array([self._context.names[fqn] for fqn in table["table_fqn"].to_pylist()], pa.string())
        rows = pa.table([names, table["key_id"], table["embedding"]], ["embedding_name", "key_id", "embedding"])
        for attempt in range(1, self._config.retry_attempts_max + 1):
            what, retriable, wait_s = self._send(rows)
            if not what:
                return
            if not retriable:
                break
            backoff_s = (
                min(self._config.retry_delay_ms_max, self._config.retry_delay_ms_min * 2 ** (attempt - 1)) / 1000
            )
            time.sleep(max(wait_s, backoff_s))
        raise NotSent(f"rank {self._context.rank}, step {step}: {len(rows)} rows not acknowledged: {what}", step)

    def check_error(self) -> None:
        """Called after each step: raise here what went wrong in the background since."""

    def close(self, drain: bool) -> None:
        """The last call. With `drain`, return when everything is acknowledged, or raise; else give up at once."""
        if self._view is not None:
            self._view.close()

    def _send(self, rows: pa.Table) -> tuple[str, bool, float]:
        """One attempt: what went wrong ("": nothing), whether to try again, the seconds that the store asked for."""
        try:
            for batch in rows.to_batches(max_chunksize=self._config.batch_size):
                self._ts = max(self._ts + 1, int(time.time() * 1000))  # goes on when the wall clock goes back
                self._view.write_features_arrow(batch=batch, version=self._context.version, ts=self._ts)
            errors = self._view.write_flush()["errors"]
        except OSError as error:  # its text may quote a login: say what it is, not what it says
            return type(error).__name__, True, 0.0
        expired = [error for error in errors if error.status == 401]
        if expired:
            self._view.close()
            self._view = self._context.open_view()  # with a fresh credential
        fatal = [error for error in errors if not error.retriable and error not in expired]
        worst = str((fatal or errors or [""])[0])
        return worst, not fatal, max([error.retry_after_s or 0.0 for error in errors], default=0.0)


class NotSent(RuntimeError):
    """Rows are not in the store. An attribute ``unacknowledged`` that names the steps is shown in reports."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.unacknowledged = (step,)

"""Sends deltas to the store: one background thread per rank, and no row that is neither acknowledged nor named.

The training thread submits; the thread sends each step as windows of `max_workers` batches, and `write_flush()` closes
a window. A step is acknowledged when every one of its windows had a summary that matches rows and batches exactly.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa

from .contract import twin_of
from .delta import validate
from .settings import Settings

log = logging.getLogger("deltaproof.reference")

SECRET_VARIABLES = (
    "ALIBABA_CLOUD_ACCESS_KEY_ID",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
    "ALIBABA_CLOUD_SECURITY_TOKEN",
    "FEATUREDB_USERNAME",
    "FEATUREDB_PASSWORD",
)
ERROR_TEXT_MAX = 300


class UploadError(RuntimeError):
    """Rows were not acknowledged. Raised in the training thread, at its next call.

    Usual causes: a refused login, a changed view, an outage longer than the retries, a store slower than the deadline.
    Attributes: step (first one affected), rows (of all of them), unacknowledged (every step not acknowledged).
    """

    def __init__(self, what: str, *, rank: int, step: int, rows: int, unacknowledged: tuple[int, ...]) -> None:
        super().__init__(
            f"rank {rank}: {what}; {rows} rows of steps {list(unacknowledged)} are not acknowledged; "
            "restart from the last checkpoint to send them again"
        )
        self.step, self.rows, self.unacknowledged = step, rows, unacknowledged


class WindowError(Exception):
    """One attempt failed. `retriable` False means that trying again cannot help."""

    def __init__(self, what: str, *, retriable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retriable, self.retry_after_s = retriable, retry_after_s


class _Job(msgspec.Struct, eq=False):
    step: int
    table: pa.Table
    bytes: int


class Uploader:
    """Uploader of one rank.

    Args:
        view: a `feature_store_py` DynamicEmbedding view (facts: PROTOCOL.md).
        dims: embedding dimension per table FQN, when known: then every delta is validated again before it is sent.
        names: published name per table FQN; by default the FQN with user-side twins mapped.
        clock: a module-like object with `time()` and `monotonic()` in seconds.
    """

    def __init__(
        self,
        view: Any,
        settings: Settings,
        rank: int,
        world_size: int,
        clock: Any = time,
        *,
        names: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        self._view, self._settings, self._rank, self._clock = view, settings, rank, clock
        self._names, self._dims = names, dims
        # A write larger than the SDK's batch would be split there, and its summary would count other batches than ours.
        self._batch_size = min(settings.batch_size, int(getattr(view, "_batch_size", settings.batch_size)))
        self._random = random.Random(rank)
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # pending, the one in flight included
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._closing = self._abandoned = False
        self._window_began_s: float | None = None
        self._ts_last = 0
        self.acknowledged_step: int | None = None
        self.counters = {"steps": 0, "rows": 0, "batches": 0, "retries": 0}

    # -- the training thread's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the store's high-water mark and start the thread.

        Raises whatever the view raises when the mark cannot be read: without it old rows could win.
        """
        self._ts_last = self._high_water_ts()
        self._thread = threading.Thread(target=self._work, name=f"deltaproof-upload-{self._rank}", daemon=True)
        self._thread.start()

    def submit(self, step: int, table: pa.Table) -> None:
        """Queue one delta (DELTA_SCHEMA). Waits for room (back-pressure); two submissions of one step are both sent.

        Raises:
            UploadError: an earlier step failed, or the uploader is closed. DeltaError: a row that must not be sent.
        """
        if self._dims is not None:
            validate(table, self._dims)
        job = _Job(step=step, table=table, bytes=table.nbytes)
        with self._changed:
            while True:
                if self._thread is None or self._closing:
                    raise self._error("submit on an uploader that is not running", extra=job)
                self._raise_failure(extra=job)
                if self._has_room(job):
                    break
                self._wait_for_change()
            self._jobs.append(job)
            self._changed.notify_all()

    def check_error(self) -> None:
        """Raise UploadError when a step failed, or when a window takes longer than `flush_timeout_s`."""
        with self._changed:
            self._raise_failure()

    def pending_steps(self) -> tuple[int, ...]:
        """Steps submitted and not acknowledged, in order; one entry per submission."""
        with self._changed:
            return tuple(job.step for job in self._jobs)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything submitted is acknowledged. Default deadline: `close_timeout_s`.

        Raises:
            UploadError: something failed, or the deadline passed; names every step that is not acknowledged.
        """
        limit_s = self._settings.close_timeout_s if timeout_s is None else timeout_s
        deadline_s = self._clock.monotonic() + limit_s
        with self._changed:
            while self._jobs:
                self._raise_failure()
                if self._clock.monotonic() >= deadline_s:
                    raise self._error(f"the store did not acknowledge within {limit_s:g} s")
                self._wait_for_change(deadline_s)
            self._raise_failure()

    def close(self, drain: bool = True) -> None:
        """Stop, by default after everything is acknowledged. Idempotent.

        Raises:
            UploadError: names every step that is not acknowledged, with `drain=False` too.
        """
        with self._changed:
            self._closing = True  # from here on submit refuses: nothing can slip in behind the last wait
        try:
            if drain:
                self.drain()
        finally:
            self._stop()
        with self._changed:
            self._raise_failure()
            if self._jobs:
                raise self._error("closed before everything was sent")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(drain=error is None)

    def _has_room(self, job: _Job) -> bool:
        """A delta larger than the byte bound may enter alone."""
        if not self._jobs:
            return True
        pending_bytes = sum(pending.bytes for pending in self._jobs)
        return (
            len(self._jobs) < self._settings.queue_steps_max
            and pending_bytes + job.bytes <= self._settings.queue_bytes_max
        )

    def _wait_for_change(self, deadline_s: float | None = None) -> None:
        """Wait for the thread to report; wake in time to notice a window that hangs."""
        now_s = self._clock.monotonic()
        waits_s = [self._settings.flush_timeout_s]
        if self._window_began_s is not None:
            waits_s.append(self._window_began_s + self._settings.flush_timeout_s - now_s)
        if deadline_s is not None:
            waits_s.append(deadline_s - now_s)
        self._changed.wait(max(0.001, min(waits_s)))

    def _raise_failure(self, extra: _Job | None = None) -> None:
        if self._failure is None and self._window_began_s is not None:
            took_s = self._clock.monotonic() - self._window_began_s
            if took_s >= self._settings.flush_timeout_s:
                self._failure = f"step {self._jobs[0].step}: write_flush has not returned for {took_s:.1f} s"
        if self._failure is not None:
            raise self._error(self._failure, extra)

    def _error(self, what: str, extra: _Job | None = None) -> UploadError:
        left = [*self._jobs, *([extra] if extra else [])]
        return UploadError(
            what,
            rank=self._rank,
            step=left[0].step if left else (self.acknowledged_step or 0),
            rows=sum(job.table.num_rows for job in left),
            unacknowledged=tuple(job.step for job in left),
        )

    def _stop(self) -> None:
        with self._changed:
            self._closing = self._abandoned = True
            self._changed.notify_all()
            hung = self._window_began_s is not None
        if self._thread is not None and not hung:  # a hung SDK call cannot be interrupted; the thread is a daemon
            self._thread.join(self._settings.flush_timeout_s)

    # -- the background thread's side -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                self._upload(job)
            except Exception as error:
                self._fail(job, error)
                return
            with self._changed:
                self._jobs.popleft()
                self.acknowledged_step = job.step
                self.counters["steps"] += 1
                self._changed.notify_all()

    def _next_job(self) -> _Job | None:
        with self._changed:
            while not self._jobs and not self._abandoned:
                self._changed.wait()
            return None if self._abandoned or self._failure else self._jobs[0]

    def _fail(self, job: _Job, error: Exception) -> None:
        """Tell the training thread. The job stays pending, and everything behind it."""
        with self._changed:
            self._failure = f"step {job.step} ({job.table.num_rows} rows): {self._redact(error)}"
            self._window_began_s = None
            self._changed.notify_all()
        log.error("rank %d: %s", self._rank, self._failure)

    def _upload(self, job: _Job) -> None:
        """Send one step, whole, until it is acknowledged; raise WindowError when that cannot be had."""
        for attempt in range(1, self._settings.retry_attempts_max + 1):
            try:
                self._send(job)
                return
            except WindowError as error:
                if not error.retriable or attempt == self._settings.retry_attempts_max or self._abandoned:
                    raise
                delay_s = self._retry_delay_s(attempt, error.retry_after_s)
                self.counters["retries"] += 1
                log.warning(
                    "rank %d step %d attempt %d: %s; again in %.2f s", self._rank, job.step, attempt, error, delay_s
                )
                self._pause(delay_s)

    def _send(self, job: _Job) -> None:
        """One attempt at a whole step: every batch, from the first, under new ts.

        Batches that an earlier attempt placed go again: an incremental reader that moved past their old ts would
        otherwise see a step half old and half new, and only a whole replay needs no memory of what was placed.
        """
        batches = self._batches(job.table)
        stamps = self._reserve(job.table.num_rows, len(batches))
        width = self._settings.max_workers
        for start in range(0, len(batches), width):
            self._window(batches[start : start + width], stamps[start : start + width])

    def _batches(self, table: pa.Table) -> list[pa.RecordBatch]:
        """Slices of at most one SDK batch. Chunked tables give more of them than rows / batch size."""
        return [batch for batch in table.to_batches(max_chunksize=self._batch_size) if batch.num_rows]

    def _reserve(self, rows: int, batches: int) -> Sequence[int]:
        """One ts (ms) per batch: strictly increasing for this rank, whatever the wall clock does."""
        first = max(self._ts_last + 1, self._wall_ms())
        self._ts_last = first + batches - 1
        return range(first, first + batches)

    def _wall_ms(self) -> int:
        return int(self._clock.time() * 1000)

    def _high_water_ts(self) -> int:
        """Greatest ts the store holds for this version; 0 (the wall clock decides) for an SDK that cannot say."""
        read = getattr(self._view, "high_water_ts", None)
        return int(read(self._settings.version)) if read is not None else 0

    def _window(self, batches: Sequence[pa.RecordBatch], stamps: Sequence[int]) -> None:
        """Write up to `max_workers` batches and close the window."""
        with self._changed:
            if self._abandoned:
                raise WindowError("closed while sending", retriable=False)
            self._window_began_s = self._clock.monotonic()
        trouble: Exception | None = None
        summary: Mapping[str, Any] = {}
        try:
            for batch, ts in zip(batches, stamps, strict=True):
                self._write(batch, ts)
        except Exception as error:
            trouble = error
        try:
            summary = self._view.write_flush()  # also after a failed write: the next attempt must not meet leftovers
        except Exception as error:
            trouble = trouble or error
        with self._changed:
            self._window_began_s = None
            self._changed.notify_all()
        if trouble is not None:
            raise WindowError(
                self._redact(trouble), retriable=is_retriable(trouble), retry_after_s=_retry_after(trouble)
            )
        rows = sum(batch.num_rows for batch in batches)
        self._check_summary(summary, rows, len(batches))
        self.counters["rows"] += rows
        self.counters["batches"] += len(batches)

    def _write(self, batch: pa.RecordBatch, ts: int) -> None:
        view, version = self._view, self._settings.version
        columns = {view.pk_field: self._pk_column(batch), view.sk_field: batch["key_id"]}
        columns[view.embedding_field] = batch["embedding"]
        if self._settings.upload_format == "arrow":
            out = pa.RecordBatch.from_pydict(columns)
            view.write_features_arrow(batch=out, version=version, write_mode="MERGE", ts=ts)
        else:
            # Keys stay Python ints: a JSON float would change those above 2**53.
            data = pa.RecordBatch.from_pydict(columns).to_pylist()
            view.write_features(data=data, version=version, write_mode="MERGE", ts=ts)

    def _pk_column(self, batch: pa.RecordBatch) -> pa.Array:
        encoded = batch["table_fqn"].dictionary_encode()
        names = [self._name_of(fqn) for fqn in encoded.dictionary.to_pylist()]
        return pa.array(names, pa.string()).take(encoded.indices)

    def _name_of(self, fqn: str) -> str:
        return twin_of(fqn) if self._names is None else self._names[fqn]

    def _check_summary(self, summary: Mapping[str, Any], rows: int, batches: int) -> None:
        """Accept exactly what was sent: any other count means that some row may not be in the store."""
        expected = {
            "total_batches": batches,
            "failed_batches": 0,
            "total_records": rows,
            "success_records": rows,
            "failed_records": 0,
        }
        seen = {name: summary.get(name) for name in expected}
        errors = list(summary.get("errors") or ())
        if seen == expected and not errors:
            return
        fatal = [error for error in errors if not is_retriable(error)]
        waits_s = [wait for error in errors if (wait := _retry_after(error)) is not None]
        first = self._redact((fatal or errors or ["no error given"])[0])
        raise WindowError(
            f"flush summary {seen}, expected {expected}: {first}",
            retriable=not fatal,
            retry_after_s=max(waits_s, default=None),
        )

    def _retry_delay_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Exponential, bounded, with jitter between half and whole; not sooner than the store asked, within the bound."""
        low_ms, high_ms = self._settings.retry_delay_ms_min, self._settings.retry_delay_ms_max
        delay_ms = min(high_ms, low_ms * 2.0 ** min(attempt - 1, 32)) * self._random.uniform(0.5, 1.0)
        return max(delay_ms / 1000, min(retry_after_s or 0.0, high_ms / 1000))

    def _pause(self, delay_s: float) -> None:
        deadline_s = self._clock.monotonic() + delay_s
        with self._changed:
            while not self._abandoned and (left_s := deadline_s - self._clock.monotonic()) > 0:
                self._changed.wait(left_s)

    @staticmethod
    def _redact(error: object) -> str:
        """Text of an error, short, without a value that any credential variable holds."""
        text = str(error) or type(error).__name__
        for name in SECRET_VARIABLES:
            if secret := os.environ.get(name):
                text = text.replace(secret, "[redacted]")
        text = re.sub(r"(?i)\b(authorization|auth|token|password|secret)\b(\W{1,3})\S+", r"\1\2[redacted]", text)
        return text if len(text) <= ERROR_TEXT_MAX else text[:ERROR_TEXT_MAX] + "…"


def is_retriable(error: object) -> bool:
    """Whether another attempt can succeed: the SDK's own word, else the HTTP status, else the kind of exception."""
    said = getattr(error, "retriable", None)
    if said is not None:
        return bool(said)
    status = getattr(error, "status", None)
    if status is None and isinstance(error, str) and (found := re.search(r"\b([45]\d\d)\b", error)):
        status = int(found[1])
    if status is not None:
        return int(status) >= 500 or int(status) in (401, 408, 429)
    return not isinstance(error, (TypeError, ValueError, LookupError, AttributeError, PermissionError))


def _retry_after(error: object) -> float | None:
    wait_s = getattr(error, "retry_after_s", None)
    return float(wait_s) if wait_s is not None and np.isfinite(wait_s) and wait_s > 0 else None

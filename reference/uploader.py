"""Sends deltas to the store: one background thread per rank, and no row that is neither acknowledged nor named.

The training thread submits; the thread sends each step as windows of `max_workers` batches, and `write_flush()` closes
a window. A step is acknowledged when every one of its windows had a summary that matches rows and batches exactly.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .delta import constant, validate
from .settings import Settings

log = logging.getLogger("deltaproof.reference")

SECRET_VARIABLES = (
    "ALIBABA_CLOUD_ACCESS_KEY_ID",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
    "ALIBABA_CLOUD_SECURITY_TOKEN",
    "FEATUREDB_PASSWORD",
)
LABELLED_SECRET = re.compile(
    r"(?i)(\b(?:auth|authorization|signature|\w*(?:token|password|secret))\b\W{0,2}[:=]\W{0,2})(?:\w[\w-]* )?[^\s,;]+"
)
ERROR_TEXT_MAX = 300


class UploadError(RuntimeError):
    """Rows were not acknowledged. Raised in the training thread, at its next call.

    Usual causes: a refused login, a changed view, an outage longer than the retries, a store slower than the deadline.
    Attributes: unacknowledged (every such step, in order), step (the first of them, else None), rows (of all of them).
    """

    def __init__(self, what: str, *, rows: int, unacknowledged: tuple[int, ...]) -> None:
        super().__init__(f"{what}; not acknowledged: {rows} rows of steps {list(unacknowledged)}")
        self.step = unacknowledged[0] if unacknowledged else None
        self.rows, self.unacknowledged = rows, unacknowledged


class WindowError(Exception):
    """One attempt failed. `retriable` False means that trying again cannot help."""

    def __init__(self, what: str, *, retriable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retriable, self.retry_after_s = retriable, retry_after_s


class Keep(Protocol):
    """Where rows are kept beside the store: `shards.py` has one for acknowledged steps and one for given-up ones.

    Called with the step, the number of this submission (0, 1, … per uploader; a step may have several), its delta
    (DELTA_SCHEMA) and one ts per row, int64 (rows,), as the store has them or would have had them. An exception is a
    failure of the step: retried as an answer of the store is, then reported.
    """

    def __call__(self, step: int, seq: int, table: pa.Table, stamps: npt.NDArray[np.int64]) -> None: ...


class _Job(msgspec.Struct, eq=False):
    step: int
    seq: int
    table: pa.Table
    stamps: list[int] = []  # one per batch, of the last attempt
    spilled: bool = False  # or being spilled


class Uploader:
    """Uploader of one rank. The training thread calls the public methods, a daemon thread does the sending.

    Args:
        view: a `feature_store_py` DynamicEmbedding view (with `high_water_ts(version)` when it can).
        clock: has `time()`, the wall clock in seconds that ts are taken from.
        names: published name per table FQN; without it a table is published under its FQN.
        dims: embedding dimension per table FQN; without it dimensions are not checked here.
        reconnect: makes a view with fresh credentials; asked for one when the store says that a token expired.
        retain: gets every step after the store acknowledged all of it, and before the uploader says so.
        spill: gets every step that is given up, once, with ts above all those used before.
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
        reconnect: Callable[[], Any] | None = None,
        retain: Keep | None = None,
        spill: Keep | None = None,
    ) -> None:
        self._reconnect, self._retain, self._spill = reconnect, retain, spill
        self._view, self._settings, self._clock, self._names, self._dims = view, settings, clock, names, dims
        self._rank, self._world_size = rank, world_size
        # A write larger than the SDK's batch would be split there, and its summary would count other batches than ours.
        self._batch_size = min(settings.batch_size, int(getattr(view, "_batch_size", settings.batch_size)))
        self._random = random.Random(rank)
        self._changed = threading.Condition()  # guards everything below
        self._jobs: deque[_Job] = deque()  # not acknowledged; the first one is being sent
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._open = self._abandoned = False
        self._window_began_s: float | None = None
        self._ts_last = self._submitted = 0
        self.acknowledged_step: int | None = None
        self.counters = {"steps": 0, "rows": 0, "batches": 0, "retries": 0}

    # -- the training thread's side ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the store's high-water mark, then start the thread.

        Raises whatever the view raises when the mark cannot be read: without it old rows could win.
        """
        self.catch_up()
        self._thread = threading.Thread(target=self._work, name=f"deltaproof-upload-{self._rank}", daemon=True)
        self._open = True
        self._thread.start()

    def submit(self, step: int, table: pa.Table) -> None:
        """Queue one delta (DELTA_SCHEMA). Waits while the queue is full; two submissions of one step are both sent.

        Raises:
            DeltaError: a row that must not be sent. UploadError: an earlier step failed, or the uploader is closed.
        """
        self._check_rows(step, table)
        with self._changed:
            job = _Job(step=step, seq=self._submitted, table=table)
            self._submitted += 1
            self._wait_for_room(job)
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

    def pending(self) -> list[tuple[int, pa.Table]]:
        """Step and delta of every submission that is not acknowledged, in order. What is in flight is among them."""
        with self._changed:
            return [(job.step, job.table) for job in self._jobs]

    @property
    def ts_last(self) -> int:
        """Greatest ts (ms) that was given to a row or found in the store at the start; 0 before `start`."""
        return self._ts_last

    def catch_up(self, ts: int = 0) -> None:
        """Rule out, for rows to come, `ts` (ms) and all below it, and all up to the store's high-water mark of now."""
        mark = max(ts, self._high_water_ts())
        with self._changed:
            self._ts_last = max(self._ts_last, mark)

    def watermark_ms(self) -> int:
        """A ts above which all rows to come will be; no row of this uploader had a greater one so far.

        Rules out the wall clock's present time: otherwise an idle rank's watermark would never move.
        """
        with self._changed:
            self._ts_last = max(self._ts_last, self._wall_ms())
            return self._ts_last

    def drain(self) -> None:
        """Wait until everything submitted is acknowledged, at most `close_timeout_s`.

        Raises:
            UploadError: something failed, or the deadline passed; names every step that is not acknowledged.
        """
        deadline_s = time.monotonic() + self._settings.close_timeout_s
        with self._changed:
            self._raise_failure()
            while self._jobs:
                if time.monotonic() >= deadline_s:
                    raise self._error(f"the store did not acknowledge within {self._settings.close_timeout_s:g} s")
                self._wait(deadline_s)
                self._raise_failure()

    def close(self, drain: bool = True) -> None:
        """Stop, by default after everything is acknowledged. Idempotent.

        Raises:
            UploadError: names every step that is not acknowledged, also with `drain=False`.
        """
        with self._changed:
            self._open = False  # from here on submit refuses: nothing slips in behind the last wait
        try:
            if drain:
                self.drain()
        finally:
            self._stop()
            self._spill_rest()
        with self._changed:
            self._raise_failure()
            if self._jobs:
                raise self._error("closed before everything was sent")

    def _check_rows(self, step: int, table: pa.Table) -> None:
        validate(table, self._dims)

    def _wait_for_room(self, job: _Job) -> None:
        """Back-pressure. Every turn looks for a failure first: a dead thread never makes room."""
        while True:
            if not self._open:
                raise self._error(f"step {job.step} was submitted to an uploader that is not running", job)
            self._raise_failure(job)
            if self._has_room(job):
                return
            self._wait()

    def _has_room(self, job: _Job) -> bool:
        """Within both bounds; a delta larger than the byte bound may enter alone."""
        pending_bytes = sum(pending.table.nbytes for pending in self._jobs)
        return not self._jobs or (
            len(self._jobs) < self._settings.queue_steps_max
            and pending_bytes + job.table.nbytes <= self._settings.queue_bytes_max
        )

    def _wait(self, deadline_s: float = math.inf) -> None:
        """Wait for the thread to report, but wake in time to notice a window that hangs."""
        began_s = time.monotonic() if self._window_began_s is None else self._window_began_s
        until_s = min(deadline_s, began_s + self._settings.flush_timeout_s)
        self._changed.wait(max(0.001, until_s - time.monotonic()))

    def _raise_failure(self, refused: _Job | None = None) -> None:
        hung_s = 0.0 if self._window_began_s is None else time.monotonic() - self._window_began_s
        if self._failure is None and hung_s >= self._settings.flush_timeout_s:
            self._failure = f"step {self._jobs[0].step}: the store has not answered a flush for {hung_s:.1f} s"
        if self._failure is not None:
            raise self._error(self._failure, refused)

    def _error(self, what: str, refused: _Job | None = None) -> UploadError:
        left = [*self._jobs, refused] if refused else list(self._jobs)
        rows, steps = sum(job.table.num_rows for job in left), tuple(job.step for job in left)
        return UploadError(f"rank {self._rank}: {what}", rows=rows, unacknowledged=steps)

    def _stop(self) -> None:
        with self._changed:
            self._open, self._abandoned = False, True
            self._changed.notify_all()
            in_call = self._window_began_s is not None
        if self._thread is not None and not in_call:  # a hung call of the SDK cannot be interrupted, only left behind
            self._thread.join(self._settings.flush_timeout_s)

    # -- the background thread's side ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                self._upload(job)
                if self._retain is not None:
                    self._retain(job.step, job.seq, job.table, self._row_stamps(job))
            except Exception as error:
                self._fail(job, error)
                self._spill_rest()
            else:
                self._acknowledge(job)

    def _next_job(self) -> _Job | None:
        with self._changed:
            while not self._jobs and not self._abandoned:
                self._changed.wait()
            return None if self._abandoned or self._failure else self._jobs[0]

    def _acknowledge(self, job: _Job) -> None:
        with self._changed:
            self._jobs.popleft()
            self.acknowledged_step = job.step
            self.counters["steps"] += 1
            self._changed.notify_all()

    def _fail(self, job: _Job, error: Exception) -> None:
        """Keep the failure for the training thread. The job stays pending, and so does everything behind it."""
        with self._changed:
            self._failure = f"step {job.step} ({job.table.num_rows} rows): {self._redact(error)}"
            self._changed.notify_all()
        log.error("rank %d: %s", self._rank, self._failure)

    def _upload(self, job: _Job) -> None:
        """Send one step until it is acknowledged.

        Raises:
            WindowError: another attempt cannot help, or there were `retry_attempts_max` of them.
        """
        for attempt in itertools.count(1):
            try:
                self._send(job)
                return
            except WindowError as error:
                if not error.retriable or attempt >= self._settings.retry_attempts_max:
                    raise
                delay_s = self._retry_delay_s(attempt, error.retry_after_s)
                self.counters["retries"] += 1
                log.warning("rank %d step %d: %s; again in %.2f s", self._rank, job.step, error, delay_s)
                self._pause(delay_s)

    def _send(self, job: _Job) -> None:
        """One attempt at a whole step: every batch, from the first, under new ts.

        Batches that an earlier attempt placed go again. Which ones it placed is not known after a timeout, and an
        incremental reader may have moved past their old ts.
        """
        with self._changed:
            batches, stamps = self._batches(job.table), iter(self._stamps(job))
        job.stamps = []
        while window := list(itertools.islice(batches, self._settings.max_workers)):
            job.stamps += itertools.islice(stamps, len(window))
            self._window(window, job.stamps[-len(window) :])

    def _row_stamps(self, job: _Job) -> npt.NDArray[np.int64]:
        """The ts of each row of the job, shape (rows,)."""
        return np.repeat(np.array(job.stamps, np.int64), self._batch_rows(job.table))

    def _spill_rest(self) -> None:
        """Hand what will not be sent to `spill`, with the ts that it would have had."""
        while self._spill is not None:
            with self._changed:
                job = next((job for job in self._jobs if not job.spilled), None)
                if job is None:
                    return
                job.spilled, job.stamps = True, list(self._stamps(job))
            self._spill(job.step, job.seq, job.table, self._row_stamps(job))

    def _stamps(self, job: _Job) -> Sequence[int]:
        """One ts (ms) per batch: strictly increasing for this rank, whatever the wall clock does."""
        batches = len(self._batch_rows(job.table))
        first = max(self._ts_last + 1, self._wall_ms())
        self._ts_last = first + batches - 1
        return range(first, first + batches)

    def _batch_rows(self, table: pa.Table) -> list[int]:
        """Rows of each batch that `_batches` makes."""
        size = self._batch_size
        sizes = (chunk.num_rows for chunk in table.to_batches())
        return [min(size, rows - start) for rows in sizes for start in range(0, rows, size)]

    def _batches(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        """What goes to the store: slices of at most one SDK batch, under the view's field names. Nothing is copied.

        Chunks are not joined, so a chunked table gives more batches than rows / batch size.
        """
        view = self._view
        for chunk in table.to_batches():
            if chunk.num_rows:
                columns = [self._published(chunk["table_fqn"]), chunk["key_id"], chunk["embedding"]]
                names = [view.pk_field, view.sk_field, view.embedding_field]
                rows = pa.RecordBatch.from_arrays(columns, names=names)
                for start in range(0, rows.num_rows, self._batch_size):
                    yield rows.slice(start, self._batch_size)

    def _published(self, fqns: pa.StringArray) -> pa.StringArray:
        """Published name of each row."""
        if self._names is None:
            return fqns
        if (fqn := constant(fqns)) is not None:
            name = self._names[fqn]
            return fqns if name == fqn else pa.repeat(name, len(fqns))
        return pa.array([self._names[fqn] for fqn in fqns.to_pylist()], pa.string())

    def _wall_ms(self) -> int:
        return int(self._clock.time() * 1000)

    def _high_water_ts(self) -> int:
        """Greatest ts the store holds for this version; 0 (the wall clock decides) for an SDK that cannot say."""
        read = getattr(self._view, "high_water_ts", None)
        return 0 if read is None else int(read(self._settings.version))

    def _window(self, batches: Sequence[pa.RecordBatch], stamps: Sequence[int]) -> None:
        """Write up to `max_workers` batches and close the window.

        Raises:
            WindowError: some row of it may not be in the store.
        """
        with self._changed:
            if self._abandoned:
                raise WindowError("the uploader was closed before the step was sent", retriable=False)
            self._window_began_s = time.monotonic()
        try:
            try:
                for batch, ts in zip(batches, stamps, strict=True):
                    self._write(batch, ts)
            finally:  # also after a failed write: the next attempt must not find leftovers of this one in its summary
                summary = self._view.write_flush()
        except Exception as error:
            retriable = self._is_retriable(error)
            raise WindowError(self._redact(error), retriable=retriable, retry_after_s=_retry_after_s(error)) from None
        finally:
            with self._changed:
                self._window_began_s = None
        self._check_summary(summary, sum(batch.num_rows for batch in batches), len(batches))

    def _write(self, rows: pa.RecordBatch, ts: int) -> None:
        version = self._settings.version
        if self._settings.upload_format == "arrow":
            self._view.write_features_arrow(batch=rows, version=version, write_mode="MERGE", ts=ts)
        else:  # keys stay Python ints: a JSON float would change those above 2**53
            self._view.write_features(data=rows.to_pylist(), version=version, write_mode="MERGE", ts=ts)

    def _check_summary(self, summary: Mapping[str, Any], rows: int, batches: int) -> None:
        """Accept exactly what was sent: with any other count some row may not be in the store.

        Raises:
            WindowError: fatal as soon as one of the errors is.
        """
        counts = {"total_batches": batches, "failed_batches": 0}
        counts |= {"total_records": rows, "success_records": rows, "failed_records": 0}
        seen = {name: summary.get(name) for name in counts}
        errors = list(summary.get("errors") or ())
        if seen == counts and not errors:
            self.counters["rows"] += rows
            self.counters["batches"] += batches
            return
        fatal = [error for error in errors if not self._is_retriable(error)]
        waits_s = [wait_s for error in errors if (wait_s := _retry_after_s(error)) is not None]
        text = self._redact((fatal or errors or ["the SDK gave no error"])[0])
        what = f"{text} (flush summary {seen}, expected {counts})"
        raise WindowError(what, retriable=not fatal, retry_after_s=max(waits_s, default=None))

    def _is_retriable(self, error: object) -> bool:
        """Whether another attempt can succeed: the SDK's own word, else the HTTP status, else the kind of exception."""
        said, status = getattr(error, "retriable", None), getattr(error, "status", None)
        if said is not None:
            return bool(said)
        if status is None and isinstance(error, str) and (found := re.search(r"\b[45]\d\d\b", error)):
            status = found[0]
        if status is not None:
            return int(status) >= 500 or int(status) in (408, 429)
        return not isinstance(error, (TypeError, ValueError, LookupError, AttributeError, PermissionError))

    def _retry_delay_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Exponential, bounded, with jitter; never sooner than the store asked (within `flush_timeout_s`)."""
        low_ms, high_ms = self._settings.retry_delay_ms_min, self._settings.retry_delay_ms_max
        delay_ms = min(high_ms, low_ms * 2.0 ** min(attempt - 1, 32)) * self._random.uniform(0.5, 1.0)
        return max(delay_ms / 1000, min(retry_after_s or 0.0, self._settings.flush_timeout_s))

    def _pause(self, delay_s: float) -> None:
        deadline_s = time.monotonic() + delay_s
        with self._changed:
            while not self._abandoned and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    @staticmethod
    def _redact(error: object) -> str:
        """Text of an error, short, without a value that a credential variable holds or that bears a telling label."""
        text = str(error) or type(error).__name__
        for secret in filter(None, map(os.environ.get, SECRET_VARIABLES)):
            text = text.replace(secret, "[redacted]") if len(secret) > 3 else text
        text = LABELLED_SECRET.sub(r"\1[redacted]", text)
        return text if len(text) <= ERROR_TEXT_MAX else text[:ERROR_TEXT_MAX] + "…"


def _retry_after_s(error: object) -> float | None:
    wait_s = getattr(error, "retry_after_s", None)
    return None if wait_s is None else max(0.0, float(wait_s))

"""Sends deltas to the store: one background thread per rank, and no row that is neither acknowledged nor named.

The training thread submits; the thread sends each step as windows of `max_workers` batches, and `write_flush()` closes
a window. A step is acknowledged when every one of its windows had a summary that matches rows and batches exactly.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from . import errors
from .delta import constant, validate
from .metrics import COUNTERS
from .settings import Settings

log = logging.getLogger("deltaproof.reference")

T = TypeVar("T")
WAIT_S_MAX = 1.0  # in one piece: a signal handler may have taken the notice that a wait is for


class UploadError(RuntimeError):
    """Rows were not acknowledged. Raised in the training thread, at its next call.

    Usual causes: a refused login, a changed view, an outage longer than the retries, a store slower than the deadline.
    Attributes: unacknowledged (every such step, in order), step (the first of them, else None), rows (of all of them),
    spilled (how many of the rows were spilled so far).
    """

    def __init__(self, what: str, *, rank: int, rows: int, unacknowledged: tuple[int, ...], spilled: int = 0) -> None:
        left = f"; not acknowledged: {rows} rows of steps {list(unacknowledged)}" if unacknowledged else ""
        left += f" ({spilled} of the rows were spilled)" if spilled else ""
        super().__init__(f"rank {rank}: {what}{left}")
        self.step = unacknowledged[0] if unacknowledged else None
        self.what, self.rows, self.unacknowledged, self.spilled = what, rows, unacknowledged, spilled


class AttemptError(Exception):
    """One attempt failed. `retriable` False: trying again cannot help; `expired`: only a fresh credential can."""

    def __init__(
        self, what: str, *, retriable: bool, expired: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(what)
        self.retriable, self.expired, self.retry_after_s = retriable, expired, retry_after_s


class Keep(Protocol):
    """Where rows are kept beside the store: `shards.py` has one for acknowledged steps and one for given-up ones.

    Called with the step, the number of this submission (0, 1, … per uploader; a step may have several), its delta
    (DELTA_SCHEMA) and one ts per row, int64 (rows,), as the store has them or would have had them. An exception is a
    failure of the step: retried as an answer of the store is, then reported.
    """

    def __call__(self, step: int, seq: int, table: pa.Table, stamps: npt.NDArray[np.int64], /) -> None: ...


class _Job(msgspec.Struct, eq=False):
    step: int
    seq: int
    table: pa.Table
    bytes: int
    queued_s: float  # monotonic
    spill: Literal["no", "begun", "done", "failed"] = "no"


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
        self._batch_size = min(settings.batch_size, int(getattr(view, "_batch_size", None) or settings.batch_size))
        self._random = random.Random(rank)
        # Guards everything below. A signal handler gets in all the same: iterate over copies, look once at a thing.
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # not acknowledged; the first one is being sent
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._open = self._working = self._abandoned = self._expired = False
        self._call: tuple[str, float] | None = None  # what the thread is waiting for, and since when
        self._ts_last = self._submitted = 0
        self.acknowledged_step: int | None = None
        self.counters = dict.fromkeys(COUNTERS, 0)

    # -- the training thread's side ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the store's high-water mark, then start the thread.

        Raises:
            UploadError: the mark cannot be read, and without it old rows could win. Or it was started or closed before.
        """
        if self._thread is not None or self._abandoned:
            raise self._error("an uploader starts once; make a new one")
        self.catch_up()
        self._thread = threading.Thread(target=self._work, name=f"deltaproof-upload-{self._rank}", daemon=True)
        self._open = self._working = True
        self._thread.start()

    def submit(self, step: int, table: pa.Table) -> None:
        """Queue one delta (DELTA_SCHEMA). Waits while the queue is full; two submissions of one step are both sent.

        Raises:
            DeltaError: a row that must not be sent. UploadError: an earlier step failed, or the uploader is closed.
        """
        self._check_rows(step, table)
        with self._changed:
            job = _Job(step=step, seq=self._submitted, table=table, bytes=table.nbytes, queued_s=time.monotonic())
            self._submitted += 1
            try:
                self._wait_for_room(job)
            finally:  # a refused delta stays pending too: what was dumped is tracked nowhere else
                self._jobs.append(job)
                self._changed.notify_all()
            if self._abandoned and job in self._jobs:  # by a signal handler, between the last two lines
                raise self._error(f"step {step} was submitted while the uploader was closed")

    def check_error(self) -> None:
        """Raise UploadError when a step failed, or when a window takes longer than `flush_timeout_s`."""
        with self._changed:
            self._raise_failure()

    def pending_steps(self) -> tuple[int, ...]:
        """Steps submitted and not acknowledged, in order; one entry per submission."""
        return tuple(step for step, _ in self.pending())

    def pending(self) -> list[tuple[int, pa.Table]]:
        """Step and delta of every submission that is not acknowledged, in order. What is in flight is among them."""
        with self._changed:
            return [(job.step, job.table) for job in list(self._jobs)]

    def metrics(self) -> dict[str, int | float]:
        """Numbers of this moment under OpenMetrics names; `metrics.py` says what each means."""
        with self._changed:
            jobs, before = list(self._jobs), self.acknowledged_step
            if jobs and before is None:
                before = jobs[0].step - 1
            return {f"deltaproof_{name}_total": count for name, count in self.counters.items()} | {
                "deltaproof_queue_steps": len(jobs),
                "deltaproof_queue_bytes": sum(job.bytes for job in jobs),
                "deltaproof_lag_steps": jobs[-1].step - (before or 0) if jobs else 0,
                "deltaproof_lag_seconds": time.monotonic() - jobs[0].queued_s if jobs else 0.0,
            }

    @property
    def ts_last(self) -> int:
        """Greatest ts (ms) that was given to a row or found in the store at the start; 0 before `start`."""
        return self._ts_last

    def catch_up(self, ts: int = 0) -> None:
        """Rule out, for rows to come, `ts` (ms) and all below it, and all up to the store's high-water mark of now.

        Raises:
            UploadError: the mark cannot be read.
        """
        mark = self._inquire("the store's greatest ts", self._high_water_ts)
        with self._changed:
            self._ts_last = max(self._ts_last, ts, mark)

    def read_changes(self, ts: int) -> tuple[pa.Table, int]:
        """Rows that the store received above `ts` (ms), all or a portion, and the ts to go on with.

        Raises:
            UploadError: they cannot be read.
        """
        return self._inquire("what changed", lambda: self._view.read_changes(self._settings.version, ts))

    def _inquire(self, what: str, call: Callable[[], T]) -> T:
        """The store's answer, for the training thread, asked for as patiently as rows are sent."""
        try:
            return self._persist(what, call)
        except AttemptError as error:
            failure = self._error(f"{what} cannot be read: {error}")
        raise failure  # from here, so that it drags no other error along

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
            self._changed.notify_all()  # a signal handler may have come between a submission and its notice
            while self._jobs or self._failure:
                self._raise_failure()
                if self._thread is None or self._abandoned:
                    raise self._error("nothing is sent any more")
                if time.monotonic() >= deadline_s:
                    raise self._error(f"the store did not acknowledge within {self._settings.close_timeout_s:g} s")
                self._wait(deadline_s)

    def close(self, drain: bool = True) -> None:
        """Stop, by default after everything is acknowledged. Idempotent.

        Raises:
            UploadError: names every step that is not acknowledged, also with `drain=False`.
        """
        with self._changed:
            self._open = False  # from here on submit refuses: nothing slips in behind the last wait
        why = "closed before everything was sent"
        try:
            if drain:
                self.drain()
        except UploadError as error:
            why = error.what
        finally:
            self._stop()
            self._spill_rest()
        with self._changed:
            if self._jobs:
                raise self._error(self._failure or why)

    def _check_rows(self, step: int, table: pa.Table) -> None:
        validate(table, self._dims)

    def _wait_for_room(self, job: _Job) -> None:
        """Back-pressure. Every turn looks for a failure first: a dead thread never makes room."""
        self._changed.notify_all()  # as in `drain`
        while True:
            if not self._open:
                raise self._error(f"step {job.step} was submitted to an uploader that is not running", job)
            self._raise_failure(job)
            if self._has_room(job):
                return
            self._wait()

    def _has_room(self, job: _Job) -> bool:
        """Within both bounds; a delta larger than the byte bound may enter alone."""
        jobs, settings = list(self._jobs), self._settings
        total_bytes = sum(pending.bytes for pending in [*jobs, job])
        return not jobs or (len(jobs) < settings.queue_steps_max and total_bytes <= settings.queue_bytes_max)

    def _wait(self, deadline_s: float = math.inf) -> None:
        """Wait for the thread to report, but wake in time to notice a call that hangs."""
        _, began_s = self._call or ("", time.monotonic())
        until_s = min(deadline_s, began_s + self._settings.flush_timeout_s)
        self._changed.wait(min(max(0.001, until_s - time.monotonic()), WAIT_S_MAX))

    def _raise_failure(self, refused: _Job | None = None) -> None:
        what, began_s = self._call or ("", math.inf)
        if self._failure is None and (hung_s := time.monotonic() - began_s) >= self._settings.flush_timeout_s:
            self._failure = f"{what} has not returned for {hung_s:.1f} s"
        if self._failure is not None:
            raise self._error(self._failure, refused)

    def _error(self, what: str, refused: _Job | None = None) -> UploadError:
        left = [*self._jobs, refused] if refused else list(self._jobs)
        rows, steps = sum(job.table.num_rows for job in left), tuple(job.step for job in left)
        spilled = sum(job.table.num_rows for job in left if job.spill == "done")
        return UploadError(what, rank=self._rank, rows=rows, unacknowledged=steps, spilled=spilled)

    def _stop(self) -> None:
        """Have the thread end, and wait for that unless it hangs in a call, which can only be left behind.

        By the condition, not by `join`: a signal handler may have interrupted a frame that holds the lock, and only
        a wait lets go of it altogether.
        """
        deadline_s = time.monotonic() + self._settings.flush_timeout_s
        with self._changed:
            self._open, self._abandoned = False, True
            self._changed.notify_all()
            while self._working and self._call is None and time.monotonic() < deadline_s:
                self._changed.wait(WAIT_S_MAX)
        if self._thread is not None and not self._working:
            self._thread.join()

    # -- the background thread's side ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                try:
                    self._upload(job)
                except BaseException as error:  # SystemExit too, which would end the thread without a word
                    self._fail(job, error)
                    self._spill_rest()
                else:
                    self._acknowledge(job)
        finally:  # also after an error of the spill or of a log handler: `_stop` must not wait for this thread
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._abandoned)
            return None if self._abandoned or self._failure else self._jobs[0]

    def _acknowledge(self, job: _Job) -> None:
        with self._changed:
            self._jobs.popleft()
            self.acknowledged_step = job.step
            self.counters["steps"] += 1
            self.counters["bytes"] += job.bytes
            self._changed.notify_all()

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Keep the failure for the training thread. The job stays pending, and so does everything behind it."""
        text = str(error) if isinstance(error, AttemptError) else f"{type(error).__name__}: {self._redact(error)}"
        with self._changed:
            self._failure = f"step {job.step} ({job.table.num_rows} rows): {text}"
            self._changed.notify_all()
        log.error("rank %d: %s", self._rank, self._failure)

    def _upload(self, job: _Job) -> None:
        """Send one step until it is acknowledged, then have it retained.

        Raises:
            AttemptError: another attempt cannot help, or there were `retry_attempts_max` of them.
        """
        stamps = self._persist(f"step {job.step}", functools.partial(self._send, job))
        if self._retain is not None:
            keep = self._watched("retain()")(functools.partial(self._keep, job, stamps, self._retain))
            self._persist(f"step {job.step}, to be retained", keep, online=False)

    def _persist(self, what: str, call: Callable[[], T], *, online: bool = True) -> T:
        """What `call` returns, after as many attempts as the settings allow. `online`: it talks to the store.

        Raises:
            AttemptError: the last attempt's. Neither it nor its `__context__` holds an error of the SDK.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                if online:
                    self._renew()
                return call()
            except Exception as error:
                failure = error if isinstance(error, AttemptError) else self._judge([error])
            self.counters["failures"] += 1
            self._expired |= online and failure.expired  # not when it is the place for shards that has another login
            if not failure.retriable or attempt >= self._settings.retry_attempts_max:
                raise failure
            delay_s = self._retry_delay_s(attempt, failure.retry_after_s)
            self.counters["retries"] += 1
            log.warning("rank %d, %s: %s; again in %.2f s", self._rank, what, failure, delay_s)
            self._pause(delay_s)

    def _renew(self) -> None:
        """Another view, made with a fresh credential, when the store called the last one's expired."""
        if self._expired and self._reconnect is not None:
            with self._watched("reconnect()"):
                self._view = self._reconnect()
            self._expired = False
            self.counters["reconnects"] += 1
            log.info("rank %d: connected again with a fresh credential", self._rank)

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """While this lasts, the training thread can see what is being waited for, and give up. Needs no lock."""
        self._call = what, time.monotonic()
        try:
            yield
        finally:
            self._call = None

    def _send(self, job: _Job) -> Sequence[int]:
        """One attempt at a whole step: every batch, from the first, under new ts; returns them, one per batch.

        Batches that an earlier attempt placed go again. Which ones it placed is not known after a timeout, and an
        incremental reader may have moved past their old ts.
        """
        with self._changed:
            stamps = self._stamps(job)
        batches, sent, rows = self._batches(job.table), 0, 0
        began_s = told_s = time.monotonic()
        while window := list(itertools.islice(batches, self._settings.max_workers)):
            self._window(window, stamps[sent : sent + len(window)])
            sent += len(window)
            rows += sum(batch.num_rows for batch in window)
            if (now_s := time.monotonic()) - told_s >= self._settings.progress_s:
                done, took_s, told_s = f"{rows} of {job.table.num_rows} rows", now_s - began_s, now_s
                log.info(
                    "rank %d, step %d: %s in %.0f s, %.0f rows/s", self._rank, job.step, done, took_s, rows / took_s
                )
        return stamps

    def _keep(self, job: _Job, stamps: Sequence[int], keep: Keep) -> None:
        """Hand a job over, with the ts of each row. `stamps`: of each batch."""
        rows = self._batch_rows(job.table)
        keep(job.step, job.seq, job.table, np.repeat(np.array(stamps[: len(rows)], np.int64), rows))

    def _spill_rest(self) -> None:
        """Spill what will not be sent, each job once, with the ts that it would have had."""
        while (spill := self._spill) is not None:
            with self._changed:
                job = next((job for job in list(self._jobs) if job.spill == "no"), None)
                if job is None:
                    return
                job.spill, stamps = "begun", self._stamps(job)
            try:
                keep = functools.partial(self._keep, job, stamps, spill)
                self._persist(f"step {job.step}, to be spilled", keep, online=False)
            except AttemptError as error:
                job.spill = "failed"
                log.error("rank %d, step %d: %d rows not spilled: %s", self._rank, job.step, job.table.num_rows, error)
            else:
                job.spill = "done"
                self.counters["spilled_rows"] += job.table.num_rows

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
        names = [self._view.pk_field, self._view.sk_field, self._view.embedding_field]
        columns = table.select(["table_fqn", "key_id", "embedding"]).rename_columns(names)
        for window in columns.to_batches(max_chunksize=self._batch_size * self._settings.max_workers):
            window = window.set_column(0, names[0], self._published(window.column(0)))
            yield from (window.slice(first, self._batch_size) for first in range(0, len(window), self._batch_size))

    def _published(self, fqns: pa.StringArray) -> pa.StringArray:
        """Published name of each row."""
        if self._names is None or not len(fqns):
            return fqns
        if (fqn := constant(fqns)) is None:
            return pa.array([self._names[each] for each in fqns.to_pylist()], pa.string())
        return fqns if self._names[fqn] == fqn else pa.repeat(self._names[fqn], len(fqns))

    def _wall_ms(self) -> int:
        return int(self._clock.time() * 1000)

    def _high_water_ts(self) -> int:
        """Greatest ts the store holds for this version; 0 (the wall clock decides) for an SDK that cannot say."""
        read = getattr(self._view, "high_water_ts", None)
        return 0 if read is None else int(read(self._settings.version))

    def _window(self, batches: Sequence[pa.RecordBatch], stamps: Sequence[int]) -> None:
        """Write up to `max_workers` batches and close the window.

        Raises:
            AttemptError: some row of it may not be in the store.
        """
        with self._changed:
            if self._abandoned:
                raise AttemptError("the uploader was closed before the step was sent", retriable=False)
        with self._watched("write_flush()"):
            try:
                for batch, ts in zip(batches, stamps, strict=True):
                    self._write(batch, ts)
            finally:  # also after a failed write: the next attempt must not find leftovers of this one in its summary
                summary = self._view.write_flush()
        self._check_summary(summary, sum(batch.num_rows for batch in batches), len(batches))

    def _write(self, rows: pa.RecordBatch, ts: int) -> None:
        how: Any = {"version": self._settings.version, "write_mode": "MERGE", "ts": ts}
        if self._settings.upload_format == "arrow":
            self._view.write_features_arrow(batch=rows, **how)
        else:  # keys stay Python ints: a JSON float would change those above 2**53
            self._view.write_features(data=rows.to_pylist(), **how)

    def _check_summary(self, summary: Mapping[str, Any], rows: int, batches: int) -> None:
        """Accept exactly what was sent: with any other count some row may not be in the store.

        Raises:
            AttemptError: fatal as soon as one of the errors is.
        """
        counts = {"total_batches": batches, "failed_batches": 0}
        counts |= {"total_records": rows, "success_records": rows, "failed_records": 0}
        if not isinstance(summary, Mapping):
            raise self._judge([f"the flush summary is {type(summary).__name__}, not a dict"])
        seen = {name: summary.get(name) for name in counts}
        reported = list(summary.get("errors") or ())
        if seen != counts or reported:
            raise self._judge(reported or ["the SDK gave no error"], f" (flush summary {seen}, expected {counts})")
        self.counters["rows"] += rows
        self.counters["batches"] += batches

    def _judge(self, reported: Sequence[object], detail: str = "") -> AttemptError:
        """One failed attempt from all the errors it met: fatal as soon as one of them is."""
        expired = [error for error in reported if self._reconnect is not None and self._is_expired(error)]
        fatal = [error for error in reported if error not in expired and not self._is_retriable(error)]
        waits_s = [wait_s for error in reported if (wait_s := errors.retry_after_s(error)) is not None]
        worst, name = (fatal or expired or list(reported))[0], ""
        text, wait_s = self._redact(worst), max(waits_s, default=None)
        if isinstance(worst, BaseException) and text != type(worst).__name__:
            name = f"{type(worst).__name__}: "
        what = f"{name}{text}{detail}"
        return AttemptError(what, retriable=not fatal, expired=bool(expired), retry_after_s=wait_s)

    _is_retriable = staticmethod(errors.is_retriable)
    _is_expired = staticmethod(errors.is_expired)
    _redact = staticmethod(errors.redact)

    def _retry_delay_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Exponential, bounded, with jitter; never sooner than the store asked (within `flush_timeout_s`)."""
        low_ms, high_ms = self._settings.retry_delay_ms_min, self._settings.retry_delay_ms_max
        delay_ms = min(high_ms, low_ms * 2.0 ** min(attempt - 1, 32)) * self._random.uniform(0.5, 1.0)
        return max(delay_ms / 1000, min(retry_after_s or 0.0, self._settings.flush_timeout_s))

    def _pause(self, delay_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned, delay_s)

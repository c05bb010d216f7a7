"""Whatever the store answers, whenever somebody drains or closes: every row is acknowledged or named, once."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltaproof.reference import errors
from deltaproof.reference import uploader as module
from deltaproof.reference.errors import PublisherError
from deltaproof.reference.uploader import Uploader, UploadError

T = "m.ebc.embedding_bags.t"
ANSWERS = ["ok", "lost", "half", "silent-half", "unseen", "write-breaks", "fatal", "expired"]
SCRIPTS = st.lists(st.sampled_from(ANSWERS), max_size=8)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 6), max_size=6, unique=True)), max_size=6)


class Kept:
    """A `retain` or `spill`: what it was given, after failing as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.calls = failures, list[tuple[int, int, list[int], list[int]]]()

    def __call__(self, step: int, seq: int, table: pa.Table, stamps: npt.NDArray[np.int64]) -> None:
        assert stamps.dtype == np.int64
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is full")
        self.calls.append((step, seq, table["key_id"].to_pylist(), stamps.tolist()))


@settings(max_examples=200)
@given(SCRIPTS, STEPS, st.integers(1, 4), st.booleans(), st.integers(0, 5), st.integers(0, 3))
@example(["expired"] * 3, [(1, [1])], 3, True, 0, 0)
def test_every_row_is_acknowledged_and_retained_or_named_and_spilled(
    kit: Any,
    script: list[str],
    steps: list[tuple[int, list[int]]],
    attempts: int,
    drain: bool,
    retain_failures: int,
    spill_failures: int,
) -> None:
    view, retained, spilled = kit.view(script), Kept(retain_failures), Kept(spill_failures)
    reconnects: list[Any] = []

    def reconnect() -> Any:
        reconnects.append(view)
        return view

    uploader = Uploader(
        view,
        kit.settings(batch_size=2, max_workers=2, retry_attempts_max=attempts),
        0,
        1,
        reconnect=reconnect,
        retain=retained,
        spill=spilled,
    )
    uploader.start()
    submitted: list[tuple[int, list[int]]] = []
    error: UploadError | None = None
    try:
        for position, (step, keys) in enumerate(steps):
            submitted.append((step, keys))
            uploader.submit(step, kit.delta(step, keys, float(position)))
    except UploadError:
        pass  # close says it again
    try:
        uploader.close(drain)
    except UploadError as caught:
        error = caught
    named = error.unacknowledged if error else ()
    acknowledged = len(submitted) - len(named)
    assert list(named) == [step for step, _ in submitted[acknowledged:]]
    assert [(step, table["key_id"].to_pylist()) for step, table in uploader.pending()] == submitted[acknowledged:]
    # The store holds every acknowledged row, under the ts that its step was retained with.
    expected = [(step, position, keys) for position, (step, keys) in enumerate(submitted)]
    assert [call[:3] for call in retained.calls[:acknowledged]] == expected[:acknowledged]
    assert len(retained.calls) <= acknowledged + (not drain)  # the last one may end while the uploader is closed
    newest = {
        key: (ts, float(seq)) for _, seq, keys, stamps in retained.calls for key, ts in zip(keys, stamps, strict=True)
    }
    for key, (ts, value) in newest.items():
        if all(key not in keys for _, keys in submitted[acknowledged:]):  # an unacknowledged row may be there too
            assert view.stored[T, key] == (ts, (value, value))
    # What was given up is spilled, with ts above all that went out; what could not be is counted as not spilled.
    assert error is None or error.spilled == sum(len(keys) for _, _, keys, _ in spilled.calls)
    assert {call[1] for call in spilled.calls} <= set(range(acknowledged, len(submitted)))
    assert len({call[1] for call in spilled.calls}) == len(spilled.calls)
    if spill_failures < attempts:
        assert sorted(call[:3] for call in spilled.calls) == sorted(expected[acknowledged:])
    last_sent = max((ts for ts, _ in view.sent), default=0)
    assert all(ts > last_sent for *_, stamps in spilled.calls for ts in stamps) or not drain
    assert len(reconnects) == uploader.counters["reconnects"] <= script.count("expired")


CALLS = ("start", "submit", "submit", "submit", "drain", "close", "give up", "check", "metrics")


@settings(max_examples=100)
@given(SCRIPTS, st.lists(st.sampled_from(CALLS), max_size=12))
def test_drain_and_close_in_any_order_end_and_forget_nothing(kit: Any, script: list[str], order: list[str]) -> None:
    view = kit.view(script)
    uploader = Uploader(view, kit.settings(batch_size=2, retry_attempts_max=2, queue_steps_max=2), 0, 1)
    calls = {
        "drain": uploader.drain,
        "close": uploader.close,
        "give up": lambda: uploader.close(drain=False),
        "check": uploader.check_error,
        "metrics": uploader.metrics,
    }
    submitted: list[int] = []
    named: list[int] = []
    for step, name in enumerate([*order, "close"]):
        named = []
        try:
            if name == "start":
                if "start" not in order[:step]:
                    uploader.start()
            elif name == "submit":
                submitted.append(step)
                uploader.submit(step, kit.delta(step, [step]))
            else:
                calls[name]()
        except UploadError as error:
            named = list(error.unacknowledged)
            assert named == submitted[len(submitted) - len(named) :]
    assert list(uploader.pending_steps()) == named or "give up" in order  # then the last flush may yet be answered
    assert all((T, step) in view.stored for step in submitted if step not in named)
    assert uploader._thread is None or not uploader._thread.is_alive() or "give up" in order


class Interruption:
    """Calls `handler` at the n-th line that this thread executes in the uploader or waits at, as a signal may."""

    def __init__(self, line: int, handler: Any) -> None:
        self.left, self.handler = line, handler

    def __enter__(self) -> Interruption:
        self.before = sys.gettrace()
        sys.settrace(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _frame(self, frame: FrameType, event: str, argument: object) -> Any:
        ours = frame.f_code.co_filename == module.__file__ or frame.f_code is threading.Condition.wait.__code__
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.handler()
        return self._line


@pytest.mark.parametrize("in_handler", ["close", "drain", "give up"])
@pytest.mark.parametrize("script", [[], ["lost"], ["fatal"]], ids=["sound", "busy", "refusing"])
def test_a_signal_handler_may_close_or_drain_at_any_line(
    kit: Any, monkeypatch: pytest.MonkeyPatch, in_handler: str, script: list[str]
) -> None:
    """At every line of submit, drain and close, one after the other, until the handler no longer runs."""
    monkeypatch.setattr(module, "WAIT_S_MAX", 0.005)
    line, interrupted = 0, True
    while interrupted:
        line += 1
        interrupted = False
        view = kit.view(script)
        uploader = Uploader(view, kit.settings(queue_steps_max=1, retry_attempts_max=2), 0, 1)
        uploader.start()
        errors: list[UploadError] = []

        def handle() -> None:
            nonlocal interrupted
            interrupted = True
            try:
                uploader.drain() if in_handler == "drain" else uploader.close(in_handler == "close")  # noqa: B023
            except UploadError as error:
                errors.append(error)  # noqa: B023

        began: list[int] = []
        with Interruption(line, handle):
            try:
                for step in (1, 2):
                    began.append(step)
                    uploader.submit(step, kit.delta(step, [step]))
                    accepted = uploader._abandoned and step in uploader.pending_steps()
                    assert not accepted or any(step in error.unacknowledged for error in errors)
                uploader.drain()
            except UploadError as error:
                errors.append(error)
            try:
                uploader.close()
            except UploadError as error:
                errors.append(error)
        named = errors[-1].unacknowledged if errors else ()
        acknowledged = [step for step in began if step not in named]
        assert list(named) == began[len(acknowledged) :]
        assert all((T, step) in view.stored for step in acknowledged), f"line {line}: {errors}"
        assert not uploader._thread or not uploader._thread.is_alive()
    assert line > 40


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 30_000),
    st.lists(st.sampled_from(["ok", "lost"]), max_size=6),
)
def test_the_queue_stays_within_its_bounds(
    kit: Any, sizes: list[int], steps_max: int, bytes_max: int, script: list[str]
) -> None:
    uploader = Uploader(kit.view(script), kit.settings(queue_steps_max=steps_max, queue_bytes_max=bytes_max), 0, 1)
    uploader.start()
    for step, size in enumerate(sizes):
        uploader.submit(step, kit.delta(step, range(size)))
        with uploader._changed:  # no job leaves while we count
            tables = [table for _, table in uploader.pending()]
            metrics = uploader.metrics()
        bytes_pending = sum(table.nbytes for table in tables)
        assert len(tables) <= steps_max
        assert bytes_pending <= bytes_max or len(tables) == 1
        assert (metrics["deltaproof_queue_steps"], metrics["deltaproof_queue_bytes"]) == (len(tables), bytes_pending)
    uploader.close()
    assert uploader.acknowledged_step == len(sizes) - 1


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x17F), min_size=12, max_size=40)
PLACES = ("write", "flush", "summary", "mark", "reconnect", "retain", "spill")


class LeakyView:
    """Answers with errors that quote secrets, at the places of `leaks`; good after `failures` of them."""

    pk_field, sk_field, embedding_field = "embedding_name", "key_id", "embedding"
    _batch_size, _max_workers = 1000, 4

    def __init__(self, leaks: set[str], secrets: list[str], failures: int, kind: Any) -> None:
        self.leaks, self.secrets, self.failures, self.kind, self.rows = leaks, secrets, failures, kind, 0

    def leak(self, place: str) -> None:
        if place in self.leaks and self.failures:
            self.failures -= 1
            quoted = " ".join([f"login {self.secrets!r}", *self.secrets, json.dumps({"x": self.secrets})])
            try:
                raise ConnectionError(quoted)
            except ConnectionError as cause:
                raise self.kind(f"{place} failed: {quoted}") from cause

    def high_water_ts(self, version: str) -> int:
        self.leak("mark")
        return 0

    def write_features_arrow(self, batch: pa.RecordBatch, version: str, write_mode: str, ts: int) -> None:
        self.rows = batch.num_rows
        self.leak("write")

    def write_flush(self) -> dict[str, Any]:
        self.leak("flush")
        rows, self.rows = self.rows, 0
        counts = dict.fromkeys(("total_records", "success_records"), rows) | {"total_batches": min(rows, 1)}
        summary = counts | {"failed_batches": 0, "failed_records": 0, "errors": []}
        try:
            self.leak("summary")
        except Exception as error:
            summary |= {"errors": [error, str(error)], "failed_batches": 1}
        return summary


def chained(error: BaseException | None) -> Iterator[BaseException]:
    if error is not None:
        yield error
        yield from chained(error.__cause__)
        yield from chained(error.__context__)


@settings(max_examples=150)
@given(
    st.lists(WORDS, min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([*errors.SECRET_VARIABLES, None]), min_size=3, max_size=3),
    st.sets(st.sampled_from(PLACES), min_size=1),
    st.integers(1, 12),
    st.sampled_from([RuntimeError, OSError, ValueError, PermissionError, KeyError, PublisherError]),
)
def test_no_planted_secret_shows_in_anything_the_uploader_emits(
    kit: Any, secrets: list[str], variables: list[str | None], leaks: set[str], failures: int, kind: Any
) -> None:
    view = LeakyView(leaks, secrets, failures, kind)
    log, records = logging.getLogger("deltaproof.reference"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    raised: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "_remembered", type(errors._remembered)(maxlen=64))
        for secret, variable in zip(secrets, variables, strict=False):
            patch.setenv(variable, secret) if variable else errors.remember(secret)
        known = [secret for secret in secrets if secret in {*os.environ.values(), *errors._remembered}]

        def reconnect() -> LeakyView:
            view.leak("reconnect")
            return view

        uploader = Uploader(
            view,
            kit.settings(retry_attempts_max=4),
            0,
            1,
            reconnect=reconnect,
            retain=lambda *job: view.leak("retain"),
            spill=lambda *job: view.leak("spill"),
        )
        uploader._expired = "reconnect" in leaks
        log.addHandler(handler)
        try:
            for call in (
                uploader.start,
                lambda: uploader.submit(1, kit.delta(1, [1, 2])),
                uploader.drain,
                uploader.close,
            ):
                try:
                    call()
                except UploadError as error:
                    raised.append(error)
        finally:
            log.removeHandler(handler)
    shown = [repr(uploader), repr(uploader.metrics()), repr(uploader.pending_steps()), repr(uploader._settings)]
    for record in records:
        shown += [record.getMessage(), repr(record.args), logging.Formatter().format(record)]
    for failure in raised:
        shown += traceback.format_exception(failure)
        for link in chained(failure):
            shown += [str(link), repr(link), repr(vars(link))]
            frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
            shown += [repr(frame.f_locals) for frame in frames if frame.f_code.co_filename == module.__file__]
    everything = "\n".join(shown)
    assert raised or uploader.acknowledged_step == 1
    for secret in known:
        for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], secret[:10]):
            assert form not in everything

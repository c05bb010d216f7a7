import inspect
import itertools
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.reference import uploader as uploader_module
from deltaproof.reference.delta import DeltaError
from deltaproof.reference.uploader import AttemptError, Uploader, UploadError

T = "m.ebc.embedding_bags.t"


class WallClock:
    """Returns the given seconds one after another, then the last one for ever."""

    def __init__(self, *times_s: float) -> None:
        self.times_s = list(times_s)

    def time(self) -> float:
        return self.times_s.pop(0) if len(self.times_s) > 1 else self.times_s[0]


@pytest.fixture
def run(kit: Any) -> Callable[..., Uploader]:
    def make(view: Any, clock: Any = WallClock(1.0), names: Any = None, dims: Any = None, **changes: Any) -> Uploader:  # noqa: B008
        uploader = Uploader(view, kit.settings(**changes), 0, 1, clock, names=names, dims=dims)
        uploader.start()
        return uploader

    return make


def when_submit_waits(uploader: Uploader, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Call `then` each time the training thread is about to wait for room."""
    wait = uploader._wait

    def announced(*args: float) -> None:
        then()
        wait(*args)

    monkeypatch.setattr(uploader, "_wait", announced)


def raises_here(call: Callable[[], Any]) -> BaseException | None:
    """What `call` raised in this thread, which may hold the uploader's lock."""
    try:
        call()
    except UploadError as error:
        return error
    return None


def raises_within(kit: Any, call: Callable[[], Any]) -> BaseException | None:
    """What `call` raised in a thread of its own; fails when it takes too long."""
    caught: list[BaseException | None] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)
        else:
            caught.append(None)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(kit.deadline_s)
    assert caught, "the call is still waiting"
    return caught[0]


@pytest.mark.parametrize("upload_format", ["arrow", "json"])
def test_every_row_reaches_the_store_in_either_format(kit: Any, run: Any, upload_format: str) -> None:
    keys = [0, -2, 2**53 + 1, 2**63 - 1, -(2**63)]
    view = kit.view()
    uploader = run(view, upload_format=upload_format, batch_size=2, names={T: "published"})
    uploader.submit(5, kit.delta(5, keys, 0.1))
    uploader.close()
    assert set(view.stored) == {("published", key) for key in keys}
    assert view.stored["published", 2**53 + 1][1] == pytest.approx((0.1, 0.1))
    assert uploader.acknowledged_step == 5
    counted = {name: n for name, n in uploader.counters.items() if name != "bytes"}
    nothing = {"failures": 0, "retries": 0, "reconnects": 0, "spilled_rows": 0}
    assert counted == {"steps": 1, "rows": 5, "batches": 3} | nothing
    assert uploader._thread is not None
    assert not uploader._thread.is_alive()


def test_the_format_counts_by_its_text_and_not_by_its_identity(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view()
    monkeypatch.setattr(view, "write_features", None)  # the JSON way
    uploader = run(view, upload_format="".join(["arr", "ow"]))  # as a parser makes it: equal to the literal, not it
    uploader.submit(1, kit.delta(1, [1]))
    uploader.close()
    assert len(view.stored) == 1


@pytest.mark.parametrize("upload_format", ["arrow", "json"])
def test_tables_mixed_in_one_chunk_keep_their_own_names(kit: Any, run: Any, upload_format: str) -> None:
    view = kit.view()
    uploader = run(view, upload_format=upload_format, names={T: "one", "m.u": "two"}, batch_size=2)
    mixed = pa.concat_tables([kit.delta(1, [1]), kit.delta(1, [1, 2], table="m.u"), kit.delta(1, [2])])
    uploader.submit(1, mixed.combine_chunks())
    uploader.close()
    assert set(view.stored) == {("one", 1), ("two", 1), ("two", 2), ("one", 2)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), min_size=1, max_size=8), st.integers(1, 4))
def test_every_row_bears_the_name_of_its_own_table(kit: Any, chunks: list[tuple[str, int]], batch_size: int) -> None:
    """Chunks of several tables in any order, batches of any size, renamed tables and one that keeps its name."""
    names, view, keys = {"a": "one", "b": "b", "c": "three"}, kit.view(), itertools.count()
    tables = [kit.delta(1, [next(keys) for _ in range(size)], table=table) for table, size in chunks]
    uploader = Uploader(view, kit.settings(batch_size=batch_size, max_workers=2), 0, 1, names=names)
    uploader.start()
    uploader.submit(1, pa.concat_tables(tables))
    uploader.close()
    expected = zip(*(pa.concat_tables(tables)[name].to_pylist() for name in ("table_fqn", "key_id")), strict=True)
    assert list(view.stored) == [(names[table], key) for table, key in expected]


def test_windows_hold_at_most_max_workers_batches_of_at_most_the_sdks_size(kit: Any, run: Any) -> None:
    view = kit.view(batch_size=10)
    uploader = run(view, batch_size=1000, max_workers=3)
    uploader.submit(1, kit.delta(1, range(45)))
    uploader.close()
    assert [rows for _, rows in view.sent] == [10, 10, 10, 10, 5]
    assert view.windows == [3, 2]


def test_each_batch_has_a_ts_of_its_own_also_when_chunks_make_more_batches(kit: Any, run: Any) -> None:
    view = kit.view()
    uploader = run(view, batch_size=10)
    chunked = pa.concat_tables([kit.delta(1, [n]) for n in range(7)])
    uploader.submit(1, chunked)
    uploader.submit(2, kit.delta(2, range(3)))
    uploader.close()
    assert [ts for ts, _ in view.sent] == list(range(1000, 1008))


def test_ts_start_above_what_the_store_holds_although_the_clock_is_behind(kit: Any, run: Any) -> None:
    view = kit.view(high_water=77_000)
    uploader = run(view, WallClock(5.0))
    uploader.submit(1, kit.delta(1, [1]))
    uploader.close()
    assert view.sent == [(77_001, 1)]


def test_an_sdk_without_a_high_water_mark_falls_back_to_the_wall_clock(kit: Any, run: Any) -> None:
    view = kit.view(high_water=77_000)
    view.high_water_ts = None
    uploader = run(view, WallClock(5.0))
    uploader.submit(1, kit.delta(1, [1]))
    uploader.close()
    assert view.sent == [(5000, 1)]


CLOCKS = st.lists(st.floats(0, 2e9) | st.integers(0, 3), min_size=1, max_size=12)
ANSWERS = ["ok", "lost", "half", "silent-half", "unseen", "write-breaks", "fatal"]
SCRIPTS = st.lists(st.sampled_from(ANSWERS), max_size=8)


@settings(max_examples=60)
@given(CLOCKS, st.integers(0, 2**41), SCRIPTS, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_ts_strictly_increase_under_any_clock_and_any_failure(
    kit: Any, times_s: list[float], high_water: int, script: list[str], sizes: list[int]
) -> None:
    view = kit.view(script, high_water)
    uploader = Uploader(view, kit.settings(batch_size=2, max_workers=2), 0, 1, WallClock(*times_s))
    uploader.start()
    try:
        for step, size in enumerate(sizes):
            uploader.submit(step, kit.delta(step, range(size)))
        uploader.close()
    except UploadError:
        pass
    stamps = [ts for ts, _ in view.sent]
    assert all(before < after for before, after in zip([high_water, *stamps], stamps, strict=False))


def test_a_retry_sends_the_whole_step_again_under_newer_ts(kit: Any, run: Any) -> None:
    view = kit.view(["ok", "half"])
    uploader = run(view, batch_size=1, max_workers=2)
    uploader.submit(1, kit.delta(1, range(6)))
    uploader.close()
    assert view.windows == [2, 2, 2, 2, 2]  # two of the first attempt, three of the second
    assert [ts for ts, _ in view.sent] == [1000, 1001, 1002, 1003, *range(1006, 1012)]
    assert min(ts for ts, _ in view.stored.values()) == 1006
    assert uploader.counters["retries"] == 1


@pytest.mark.parametrize("answer", ["lost", "half", "silent-half"])
def test_a_summary_that_does_not_match_is_never_an_acknowledgement(kit: Any, run: Any, answer: str) -> None:
    view = kit.view([answer] * 3)
    uploader = run(view, retry_attempts_max=3, batch_size=2)
    uploader.submit(4, kit.delta(4, range(5)))
    with pytest.raises(UploadError, match=r"rank 0: step 4 .*not acknowledged: 5 rows of steps \[4\]") as caught:
        uploader.close()
    assert (caught.value.step, caught.value.rows, caught.value.unacknowledged) == (4, 5, (4,))
    assert len(view.windows) == 3
    assert uploader.acknowledged_step is None


@pytest.mark.parametrize(
    "change",
    [{"total_batches": 2}, {"total_records": 2}, {"success_records": 0}, {"failed_records": 1}, {"failed_batches": 1}],
)
def test_each_count_of_a_summary_matters(kit: Any, run: Any, change: dict[str, int]) -> None:
    view = kit.view()
    honest = view.write_flush
    view.write_flush = lambda: honest() | change
    uploader = run(view, retry_attempts_max=1)
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError, match="flush summary"):
        uploader.close()


def test_a_fatal_error_is_not_retried_and_stops_what_follows(kit: Any, run: Any) -> None:
    view = kit.view()
    view.script = [view.hold("fatal")]
    uploader = run(view)
    uploader.submit(1, kit.delta(1, [1]))
    uploader.submit(2, kit.delta(2, [2, 3]))
    view.release.set()
    with pytest.raises(UploadError, match="no access") as caught:
        uploader.drain()
    assert caught.value.unacknowledged == (1, 2)
    assert caught.value.rows == 3
    assert len(view.windows) == 1
    for call in (uploader.check_error, lambda: uploader.submit(3, kit.delta(3, [4])), uploader.close):
        with pytest.raises(UploadError, match="no access"):
            call()
    assert not view.stored


def test_a_refused_step_is_named_too(kit: Any, run: Any) -> None:
    uploader = run(kit.view(["fatal"]))
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError):
        uploader.drain()
    with pytest.raises(UploadError) as caught:
        uploader.submit(9, kit.delta(9, [1, 2]))
    assert caught.value.unacknowledged == (1, 9)
    assert caught.value.rows == 3


def test_submit_waits_for_room_and_a_failure_ends_the_wait(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view()
    view.script = [view.hold("fatal")]
    uploader = run(view, queue_steps_max=1)
    uploader.submit(1, kit.delta(1, [1]))
    assert view.entered.wait(kit.deadline_s)
    when_submit_waits(uploader, monkeypatch, view.release.set)
    error = raises_within(kit, lambda: uploader.submit(2, kit.delta(2, [2])))
    assert isinstance(error, UploadError)
    assert error.unacknowledged == (1, 2)


def test_submit_goes_on_when_there_is_room_again(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view()
    view.script = [view.hold()]
    uploader = run(view, queue_steps_max=1)
    uploader.submit(1, kit.delta(1, [1]))
    assert view.entered.wait(kit.deadline_s)
    when_submit_waits(uploader, monkeypatch, view.release.set)
    assert raises_within(kit, lambda: uploader.submit(2, kit.delta(2, [2]))) is None
    uploader.close()
    assert len(view.stored) == 2


@pytest.mark.parametrize(("bound", "fits"), [({"queue_steps_max": 3}, 3), ({"queue_bytes_max": 200}, 2)])
def test_the_queue_is_bounded_in_steps_and_in_bytes(
    kit: Any, run: Any, monkeypatch: Any, bound: dict[str, int], fits: int
) -> None:
    view = kit.view()
    view.script = [view.hold()]
    uploader = run(view, **bound)
    assert 200 / 3 < kit.delta(0, [0]).nbytes <= 200 / 2
    queued: list[int] = []

    def count() -> None:
        queued.append(len(uploader.pending_steps()))
        view.release.set()

    when_submit_waits(uploader, monkeypatch, count)
    for step in range(fits + 1):
        assert raises_within(kit, partial(uploader.submit, step, kit.delta(step, [step]))) is None
    assert queued[0] == fits
    uploader.close()
    assert uploader.acknowledged_step == fits


def test_a_delta_over_the_byte_bound_enters_alone(kit: Any, run: Any) -> None:
    uploader = run(kit.view(), queue_bytes_max=1)
    for step in range(3):
        assert raises_within(kit, partial(uploader.submit, step, kit.delta(step, range(50)))) is None
    uploader.close()
    assert uploader.acknowledged_step == 2


def test_a_flush_that_never_returns_is_reported_at_the_next_call(kit: Any, run: Any) -> None:
    view = kit.view()
    view.script = [view.hold()]
    uploader = run(view, flush_timeout_s=0.05, queue_steps_max=1)
    uploader.submit(3, kit.delta(3, [1, 2]))
    assert view.entered.wait(kit.deadline_s)
    for call in (lambda: uploader.submit(4, kit.delta(4, [1])), uploader.drain, uploader.check_error, uploader.close):
        error = raises_within(kit, call)
        assert isinstance(error, UploadError)
        assert re.search(r"write_flush\(\) has not returned for 0\.\d s", str(error))
        assert error.unacknowledged[0] == 3
    view.release.set()


def test_close_keeps_its_deadline_and_names_every_step(kit: Any, run: Any) -> None:
    view = kit.view()
    view.script = [view.hold()]
    uploader = run(view, close_timeout_s=0.05)
    uploader.submit(1, kit.delta(1, [1]))
    uploader.submit(2, kit.delta(2, [2]))
    uploader.submit(2, kit.delta(2, [3]))
    error = raises_within(kit, uploader.close)
    assert isinstance(error, UploadError)
    assert error.unacknowledged == (1, 2, 2)
    assert "did not acknowledge within 0.05 s" in str(error)
    view.release.set()


def test_close_without_drain_names_what_was_left(kit: Any, run: Any) -> None:
    view = kit.view()
    view.script = [view.hold("lost")]
    uploader = run(view, retry_delay_ms_min=60_000, retry_delay_ms_max=60_000)
    uploader.submit(1, kit.delta(1, [1]))
    uploader.submit(2, kit.delta(2, [1]))
    assert view.entered.wait(kit.deadline_s)
    view.release.set()
    error = raises_within(kit, lambda: uploader.close(drain=False))
    assert isinstance(error, UploadError)
    assert error.unacknowledged == (1, 2)


def test_submit_after_close_is_an_error_not_a_drop(kit: Any, run: Any) -> None:
    uploader = run(kit.view())
    uploader.close()
    with pytest.raises(UploadError, match="not running") as caught:
        uploader.submit(8, kit.delta(8, [1]))
    assert caught.value.unacknowledged == (8,)
    with pytest.raises(UploadError, match=r"rows of steps \[8\]"):
        uploader.close()
    never = Uploader(kit.view(), kit.settings(), 0, 1)
    with pytest.raises(UploadError, match="not running"):
        never.submit(8, kit.delta(8, [1]))


def test_nothing_slips_in_while_close_waits_for_what_was_sent(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view()
    view.script = [view.hold()]
    uploader = run(view)
    uploader.submit(1, kit.delta(1, [1]))
    assert view.entered.wait(kit.deadline_s)
    refused: list[Any] = []

    def submit_meanwhile() -> None:
        if not view.release.is_set():
            refused.append(raises_here(lambda: uploader.submit(2, kit.delta(2, [2]))))
        view.release.set()

    when_submit_waits(uploader, monkeypatch, submit_meanwhile)
    uploader.close()
    [error] = refused
    assert isinstance(error, UploadError)
    assert "step 2 was submitted to an uploader that is not running" in str(error)


def test_two_submissions_of_one_step_are_both_sent(kit: Any, run: Any) -> None:
    view = kit.view()
    uploader = run(view)
    uploader.submit(5, kit.delta(5, [1], 1.0))
    uploader.submit(5, kit.delta(5, [1, 2], 2.0))
    uploader.close()
    assert {key: row[1][0] for key, row in view.stored.items()} == {(T, 1): 2.0, (T, 2): 2.0}


def test_rows_that_must_not_be_sent_are_refused_at_submit(kit: Any, run: Any) -> None:
    view = kit.view()
    uploader = run(view, dims={T: 2})
    for keys, value, dim in (([-1], 1.0, 2), ([1], float("nan"), 2), ([1], 1.0, 3)):
        with pytest.raises(DeltaError, match=r"table 'm.ebc.embedding_bags.t', key -?1, step 6"):
            uploader.submit(6, kit.delta(6, keys, value, dim=dim))
    uploader.close()
    assert not view.sent


def test_an_empty_delta_is_acknowledged_without_a_request(kit: Any, run: Any) -> None:
    view = kit.view()
    uploader = run(view)
    uploader.submit(5, kit.delta(5, []))
    uploader.close()
    assert (uploader.acknowledged_step, view.windows) == (5, [])


def test_an_error_nobody_foresaw_reaches_the_training_thread(kit: Any, run: Any, monkeypatch: Any) -> None:
    uploader = run(kit.view())
    monkeypatch.setattr(uploader, "_batches", lambda table: 1 / 0)
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError, match="division by zero"):
        uploader.close()


def test_waits_grow_stay_bounded_and_respect_retry_after(kit: Any) -> None:
    uploader = Uploader(
        kit.view(), kit.settings(retry_delay_ms_min=100, retry_delay_ms_max=5000, flush_timeout_s=60.0), 0, 1
    )
    for attempt, most_s in ((1, 0.1), (2, 0.2), (3, 0.4), (20, 5.0), (5000, 5.0)):
        waits_s = {uploader._retry_delay_s(attempt, None) for _ in range(50)}
        assert most_s / 2 <= min(waits_s) < max(waits_s) <= most_s
    assert uploader._retry_delay_s(1, 30.0) == 30.0
    assert uploader._retry_delay_s(1, 1e9) == 60.0


def test_a_wait_doubles_32_times_at_most_whatever_the_longest_one_is(kit: Any) -> None:
    uploader = Uploader(kit.view(), kit.settings(retry_delay_ms_min=1, retry_delay_ms_max=2**40), 0, 1)
    for attempt in (33, 34, 100, 10**6):
        assert all(uploader._retry_delay_s(attempt, None) < 2**32 / 1000 for _ in range(50))


def test_of_several_errors_the_one_that_says_what_to_do_is_named(kit: Any) -> None:
    uploader = Uploader(kit.view(), kit.settings(), 0, 1, reconnect=kit.view)
    busy, denied = kit.error("busy", status=503), kit.error("no access", status=403)
    expired = kit.error("InvalidToken: no longer", status=401)
    for errors, said, verdict in (
        ([busy], "busy", (True, False)),
        ([busy, denied], "no access", (False, False)),
        ([busy, expired], "InvalidToken: no longer", (True, True)),
        ([busy, expired, denied], "no access", (False, True)),
        ([ConnectionError("gone")], "ConnectionError: gone", (True, False)),
        ([TimeoutError()], "TimeoutError", (True, False)),  # its kind, once
    ):
        failure = uploader._judge(errors)
        assert (str(failure), (failure.retriable, failure.expired)) == (said, verdict)


@pytest.mark.parametrize(
    ("call", "flags"),
    [(AttemptError, ["retriable", "expired", "retry_after_s"]), (Uploader._persist, ["online"])],
)
def test_the_flags_of_an_attempt_are_named_where_they_are_given(call: Any, flags: list[str]) -> None:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(call).parameters.items()}
    assert [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY] == flags


def test_a_batch_without_a_ts_is_a_mistake_and_no_answer_of_the_store(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view()
    uploader = run(view, batch_size=2, retry_attempts_max=3)
    monkeypatch.setattr(uploader, "_stamps", lambda job: range(1000, 1001))
    uploader.submit(1, kit.delta(1, range(4)))
    with pytest.raises(UploadError, match=r"step 1 .*ValueError: zip"):
        uploader.close()
    assert len(view.windows) == 1  # the next attempt would be as wrong


def test_the_longest_retry_after_of_a_flush_is_the_one_kept(kit: Any, run: Any, monkeypatch: Any) -> None:
    view = kit.view(["lost"])
    honest = view.write_flush

    def two_errors() -> Any:
        summary = honest()
        if summary["errors"]:
            summary["errors"] = [kit.error("a", status=429, retry_after_s=wait_s) for wait_s in (0.001, 0.03, 0.002)]
        return summary

    view.write_flush = two_errors
    uploader = run(view)
    paused: list[float] = []
    monkeypatch.setattr(uploader, "_pause", paused.append)
    uploader.submit(1, kit.delta(1, [1]))
    uploader.close()
    assert paused == [0.03]


def test_no_credential_is_repeated_in_an_error(kit: Any, run: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("FEATUREDB_PASSWORD", "planted-password")
    monkeypatch.setenv("ALIBABA_CLOUD_SECURITY_TOKEN", "planted-token")
    view = kit.view()

    def leak() -> None:
        raise ConnectionError("login planted-password failed; token: other-value; x planted-token" + "y" * 999)

    view.write_flush = leak
    uploader = run(view, retry_attempts_max=2)
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError) as caught:
        uploader.close()
    for text in (str(caught.value), repr(caught.value), caplog.text):
        assert "[redacted]" in text
        assert "planted" not in text
        assert "other-value" not in text
        assert len(text) < 1000
    assert caught.value.__cause__ is None


def test_a_thread_that_is_told_to_exit_says_so(kit: Any, run: Any) -> None:
    view = kit.view()

    def leave() -> None:
        raise SystemExit("the SDK gave up")

    view.write_flush = leave
    uploader = run(view)
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError, match="SystemExit: the SDK gave up"):
        uploader.close()


def test_an_empty_chunk_is_passed_over(kit: Any) -> None:
    view, name = kit.view(), "m.ebc.embedding_bags.t"
    uploader = Uploader(view, kit.settings(), 0, 1, names={name: "renamed"})
    uploader.start()
    one = kit.delta(1, [7])
    empty = one.slice(0, 0).combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], one.schema)]
    uploader.submit(1, pa.Table.from_batches([*empty, *one.to_batches(), *empty]))
    uploader.close()
    assert set(view.stored) == {("renamed", 7)}


def test_a_submission_that_a_signal_handler_broke_off_does_not_stop_those_behind_it(
    kit: Any, run: Any, monkeypatch: Any
) -> None:
    def interrupted(job: Any) -> None:
        raise KeyboardInterrupt

    view = kit.view()
    uploader = run(view, queue_steps_max=1)
    deadline_s = time.monotonic() + kit.deadline_s
    while not uploader._changed._waiters:  # until the thread waits for work
        assert time.monotonic() < deadline_s
    with monkeypatch.context() as patch:
        patch.setattr(uploader, "_wait_for_room", interrupted)
        with pytest.raises(KeyboardInterrupt):
            uploader.submit(1, kit.delta(1, [1]))
    assert raises_within(kit, lambda: uploader.submit(2, kit.delta(2, [2]))) is None
    uploader.close()
    assert set(view.stored) == {(T, 1), (T, 2)}


def test_an_uploader_starts_once(kit: Any, run: Any) -> None:
    uploader = run(kit.view())
    with pytest.raises(UploadError, match="starts once"):
        uploader.start()
    uploader.close()
    with pytest.raises(UploadError, match="starts once"):
        uploader.start()


def test_the_high_water_mark_is_asked_for_again_and_then_missed(kit: Any) -> None:
    view = kit.view(high_water=5000)
    answers: list[Any] = [kit.error("busy", status=503), kit.error("busy", status=503), 7000]

    def high_water_ts(version: str) -> int:
        if isinstance(answer := answers.pop(0), int):
            return answer
        raise ConnectionError(answer)

    view.high_water_ts = high_water_ts
    uploader = Uploader(view, kit.settings(retry_attempts_max=3), 4, 8)
    uploader.start()
    assert uploader.ts_last == 7000
    uploader.close()
    answers[:] = [kit.error("busy", status=503)] * 3
    with pytest.raises(UploadError, match=r"rank 4: the store's greatest ts cannot be read: ConnectionError: busy$"):
        Uploader(view, kit.settings(retry_attempts_max=3), 4, 8).start()
    assert not answers


def test_an_expired_token_is_renewed_once_per_attempt_and_the_step_goes_to_the_new_view(kit: Any) -> None:
    views = [kit.view(["ok", "expired"]), kit.view(["expired"]), kit.view()]
    left = views[1:]
    uploader = Uploader(views[0], kit.settings(batch_size=1, max_workers=1), 0, 1, reconnect=lambda: left.pop(0))
    uploader.start()
    uploader.submit(1, kit.delta(1, [1, 2, 3]))
    uploader.submit(2, kit.delta(2, [4]))
    uploader.close()
    assert [len(view.windows) for view in views] == [2, 1, 4]
    assert {key for _, key in views[2].stored} == {1, 2, 3, 4}
    assert {name: uploader.counters[name] for name in ("reconnects", "retries", "rows")} == {
        "reconnects": 2,
        "retries": 2,
        "rows": 5,
    }


def test_without_reconnect_an_expired_token_is_fatal(kit: Any, run: Any) -> None:
    view = kit.view(["expired"])
    uploader = run(view)
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError, match="InvalidToken"):
        uploader.close()
    assert len(view.windows) == 1


@pytest.mark.parametrize(("error", "attempts"), [(ConnectionError("down"), 3), (PermissionError("revoked"), 1)])
def test_a_reconnect_that_fails_is_an_attempt_that_failed(kit: Any, error: Exception, attempts: int) -> None:
    def reconnect() -> Any:
        raise error

    view, spilled = kit.view(["expired"]), list[int]()
    uploader = Uploader(
        view,
        kit.settings(retry_attempts_max=1 + attempts),
        0,
        1,
        reconnect=reconnect,
        spill=lambda step, *job: spilled.append(step),
    )
    uploader.start()
    uploader.submit(7, kit.delta(7, [1]))
    with pytest.raises(UploadError, match=f"step 7 .*{type(error).__name__}: {error}"):
        uploader.close()
    assert len(view.windows) == 1
    assert uploader.counters["failures"] == 1 + attempts
    assert spilled == [7]  # which needs no connection


def test_a_step_is_retained_with_the_ts_of_the_store_before_it_counts_as_acknowledged(kit: Any) -> None:
    view, seen = kit.view(["half"]), list[Any]()

    def retain(step: int, seq: int, table: pa.Table, stamps: Any) -> None:
        seen.append((step, seq, table, stamps.tolist(), uploader.acknowledged_step, len(view.stored)))

    uploader = Uploader(view, kit.settings(batch_size=2), 0, 1, WallClock(1.0), retain=retain)
    uploader.start()
    mixed = pa.concat_tables([kit.delta(3, range(5)), kit.delta(3, [7])])
    uploader.submit(3, mixed)
    uploader.submit(3, kit.delta(3, []))
    uploader.close()
    (step, seq, table, stamps, acknowledged, stored), empty = seen
    assert (step, seq, acknowledged, stored) == (3, 0, None, 6)
    assert table.equals(mixed)
    assert stamps == [1004, 1004, 1005, 1005, 1006, 1007]  # of the second attempt
    assert stamps == [view.stored[T, key][0] for key in mixed["key_id"].to_pylist()]
    assert (empty[:2], empty[3]) == ((3, 1), [])


def test_retaining_is_tried_again_without_sending_again(kit: Any) -> None:
    failures, retained = [TimeoutError(), OSError()], list[int]()

    def retain(step: int, *job: Any) -> None:
        if failures:
            raise failures.pop()
        retained.append(step)

    view = kit.view()
    uploader = Uploader(view, kit.settings(retry_attempts_max=3), 0, 1, retain=retain)
    uploader.start()
    uploader.submit(3, kit.delta(3, [1]))
    uploader.close()
    assert (retained, len(view.windows), uploader.acknowledged_step) == ([3], 1, 3)


def test_a_place_whose_token_expired_does_not_have_the_store_connected_again(kit: Any) -> None:
    failures, retained, view = [OSError("ExpiredToken: of the bucket")], list[tuple[int, int]](), kit.view()

    def retain(step: int, *job: Any) -> None:
        if failures:
            raise failures.pop()
        retained.append((step, uploader.counters["reconnects"]))

    uploader = Uploader(view, kit.settings(), 0, 1, reconnect=kit.view, retain=retain)
    uploader.start()
    uploader.submit(3, kit.delta(3, [1]))
    uploader.submit(4, kit.delta(4, [1]))
    uploader.close()
    assert (retained, len(view.windows), uploader.counters["retries"]) == ([(3, 0), (4, 0)], 2, 1)


def test_a_step_that_cannot_be_retained_is_named_and_spilled(kit: Any) -> None:
    def retain(*job: Any) -> None:
        raise OSError("no space left")

    spilled: list[Any] = []
    view = kit.view()
    uploader = Uploader(
        view,
        kit.settings(retry_attempts_max=2),
        0,
        1,
        WallClock(1.0),
        retain=retain,
        spill=lambda step, seq, table, stamps: spilled.append((step, seq, table.num_rows, stamps.tolist())),
    )
    uploader.start()
    uploader.submit(3, kit.delta(3, [1, 2]))
    with pytest.raises(
        UploadError, match=r"OSError: no space left.* 2 rows of steps \[3\] \(2 of the rows were"
    ) as caught:
        uploader.close()
    assert caught.value.spilled == uploader.counters["spilled_rows"] == 2
    assert len(view.windows) == 1  # sent once: retaining alone is tried again
    assert spilled == [(3, 0, 2, [1001, 1001])]
    with pytest.raises(UploadError):
        uploader.close()
    assert len(spilled) == 1


def test_a_retain_that_hangs_is_reported(kit: Any) -> None:
    release = threading.Event()

    def retain(*job: Any) -> None:
        release.wait(kit.deadline_s)

    uploader = Uploader(kit.view(), kit.settings(flush_timeout_s=0.05), 0, 1, retain=retain)
    uploader.start()
    uploader.submit(1, kit.delta(1, [1]))
    error = raises_within(kit, uploader.drain)
    assert isinstance(error, UploadError)
    assert "retain() has not returned" in str(error)
    release.set()


def test_what_failed_is_spilled_although_nobody_closes(kit: Any) -> None:
    done = threading.Event()
    uploader = Uploader(kit.view(["fatal"]), kit.settings(), 0, 1, spill=lambda *job: done.set())
    uploader.start()
    uploader.submit(1, kit.delta(1, [1]))
    assert done.wait(kit.deadline_s)
    with pytest.raises(UploadError):
        uploader.close()


def test_what_a_failed_uploader_refused_is_pending_and_spilled_too(kit: Any) -> None:
    spilled: list[int] = []
    uploader = Uploader(kit.view(["fatal"]), kit.settings(), 0, 1, spill=lambda step, *job: spilled.append(step))
    uploader.start()
    uploader.submit(1, kit.delta(1, [1]))
    with pytest.raises(UploadError):
        uploader.drain()
    with pytest.raises(UploadError) as caught:
        uploader.submit(2, kit.delta(2, [2, 3]))
    assert caught.value.unacknowledged == uploader.pending_steps() == (1, 2)
    with pytest.raises(UploadError) as caught:
        uploader.close(drain=False)
    assert (caught.value.unacknowledged, caught.value.rows, caught.value.spilled) == ((1, 2), 3, 3)
    assert spilled == [1, 2]


def test_one_job_that_cannot_be_spilled_does_not_keep_the_others_from_it(kit: Any, caplog: Any) -> None:
    def spill(step: int, *job: Any) -> None:
        if step == 1:
            raise PermissionError("read-only")

    view = kit.view()
    view.script = [view.hold("fatal")]
    uploader = Uploader(view, kit.settings(), 0, 1, spill=spill)
    uploader.start()
    uploader.submit(1, kit.delta(1, [1]))
    uploader.submit(2, kit.delta(2, [2, 3]))
    view.release.set()
    with pytest.raises(UploadError) as caught:
        uploader.close()
    assert (caught.value.rows, caught.value.spilled) == (3, 2)
    assert "step 1: 1 rows not spilled: PermissionError: read-only" in caplog.text


def test_a_long_upload_says_how_far_it_is_and_a_short_one_nothing(kit: Any, run: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    uploader = run(kit.view(), batch_size=10, max_workers=1)
    uploader.submit(1, kit.delta(1, range(45)))
    uploader.close()
    assert not caplog.records
    uploader = run(kit.view(), batch_size=10, max_workers=2, progress_s=1e-9)
    uploader.submit(2, kit.delta(2, range(45)))
    uploader.close()
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    done = [re.match(r"rank 0, step 2: (\d+) of 45 rows in \d+ s, \d+ rows/s", text) for text in caplog.messages]
    assert [match and match[1] for match in done] == ["20", "40", "45"]


def test_progress_is_told_each_time_that_progress_s_went_by_with_the_rows_per_second(
    kit: Any, run: Any, monkeypatch: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    now_s, view = [100.0], kit.view()
    flush = view.write_flush

    def flush_in_2_s() -> Any:
        now_s[0] += 2
        return flush()

    view.write_flush = flush_in_2_s
    monkeypatch.setattr(uploader_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    uploader = run(view, batch_size=10, max_workers=1, progress_s=3.0)
    uploader.submit(2, kit.delta(2, range(50)))
    uploader.close()
    assert caplog.messages == [
        "rank 0, step 2: 20 of 50 rows in 4 s, 5 rows/s",
        "rank 0, step 2: 40 of 50 rows in 8 s, 5 rows/s",
    ]


@pytest.mark.parametrize("summary", [None, "ok", 7])
def test_an_answer_that_is_no_summary_is_an_attempt_that_failed(kit: Any, run: Any, summary: Any) -> None:
    view = kit.view()
    answers, honest = [summary], view.write_flush
    view.write_flush = lambda: answers.pop() if answers and honest() else honest()
    uploader = run(view, retry_attempts_max=2)
    uploader.submit(1, kit.delta(1, [1]))
    uploader.close()
    assert (uploader.counters["failures"], uploader.acknowledged_step, len(view.windows)) == (1, 1, 2)


class Mute(Exception):
    """An error of an SDK that fails to say what it is."""

    def __str__(self) -> str:
        raise AttributeError("response")


@pytest.mark.parametrize("raised", [True, False])
def test_an_error_that_cannot_be_told_is_reported_by_its_kind(kit: Any, run: Any, raised: bool) -> None:
    view = kit.view()
    honest = view.write_flush

    def flush() -> dict[str, Any]:
        summary: dict[str, Any] = honest()
        if raised:
            raise Mute
        return summary | {"errors": [Mute()]}

    view.write_flush = flush
    uploader = run(view, retry_attempts_max=2)
    uploader.submit(1, kit.delta(1, [1]))
    assert "step 1 (1 rows): Mute" in str(raises_within(kit, uploader.close))
    assert len(view.windows) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_its_spill_is_not_waited_for(kit: Any) -> None:
    def spill(*job: Any) -> None:
        raise SystemExit

    uploader = Uploader(kit.view(["fatal"]), kit.settings(flush_timeout_s=10 * kit.deadline_s), 0, 1, spill=spill)
    uploader.start()
    uploader.submit(1, kit.delta(1, [1]))
    assert "no access" in str(raises_within(kit, uploader.close))


@pytest.mark.parametrize("size", [None, 0])
def test_an_sdk_that_names_no_batch_size_gets_that_of_the_settings(kit: Any, run: Any, size: int | None) -> None:
    view = kit.view()
    view._batch_size = size
    view._take = lambda rows, *how: view.pending.append((rows, 1))
    uploader = run(view, batch_size=2)
    uploader.submit(1, kit.delta(1, range(5)))
    uploader.close()
    assert view.windows == [3]

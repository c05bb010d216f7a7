"""The faults that act on time, connections, replies, reads, views and tokens: each does what it says, over HTTP and,
where there is a difference to see, in process. What a client is told to conclude is compared with what happened.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.fakes.errors import ERRORS, InvalidParameter
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import (
    AnyFault,
    DelayFault,
    DuplicateFault,
    FaultPlan,
    OutageFault,
    PartialFault,
    ReorderFault,
    ResetFault,
    SchemaChangedFault,
    SlowBodyFault,
    StaleReadFault,
    StatusFault,
    TokenRevokedFault,
    TruncateFault,
    Turns,
    ViewDeletedFault,
)
from deltaproof.fakes.store import Store

from .kit import PROJECT, VERSION, VIEW, Backend, Raw, ipc, make_view, rows, sdk_rows

WAIT_S = 20
BATCH = ipc(rows(["t"] * 4, [1, 2, 3, 4], [[1.0]] * 4))
WRITE = f"/write_arrow?version={VERSION}&ts=7"


class Clock:
    def __init__(self) -> None:
        self.ms = 1000.0

    def __call__(self) -> float:
        return self.ms


# The plan: windows, probability, outages


def strikes(plan: FaultPlan, count: int = 1, route: str = "write_arrow", group: str = "write") -> list[list[str]]:
    return [plan.strike(route, group, "rank0").ids for _ in range(count)]


def test_a_window_is_kept_by_the_plans_own_clock() -> None:
    clock = Clock()
    plan = FaultPlan(clock)
    clock.ms = 5000.0
    plan.set([StatusFault(id="f", count=100, from_ms=10, until_ms=20)])
    found = {}
    for since_ms in (0, 9.99, 10, 15, 19.99, 20, 1e6):
        clock.ms = 5000.0 + since_ms
        found[since_ms] = strikes(plan) == [["f"]]
    assert found == {0: False, 9.99: False, 10: True, 15: True, 19.99: True, 20: False, 1e6: False}
    (entry,) = plan.fired()
    assert (entry.seen, entry.fired) == (3, 3)  # what came outside the window was not seen: skip counts inside it


def test_a_fault_added_later_has_its_own_window() -> None:
    clock = Clock()
    plan = FaultPlan(clock)
    plan.set([])
    clock.ms += 100
    plan.add(StatusFault(id="f", until_ms=50))
    clock.ms += 49
    assert strikes(plan) == [["f"]]


@given(st.integers(0, 2**32), st.floats(0.1, 0.9), st.integers(1, 40))
def test_the_same_seed_strikes_the_same_requests(seed: int, probability: float, count: int) -> None:
    def run(*others: AnyFault, route: str = "write_arrow") -> list[bool]:
        plan = FaultPlan(Clock())
        plan.set([*others, StatusFault(id="f", probability=probability, seed=seed, count=count)])
        return ["f" in ids for ids in strikes(plan, 100)]

    first = run()
    assert first == run()
    assert sum(first) <= count
    # Other faults that do not compete for the outcome change nothing.
    assert first == run(DelayFault(id="slow", delay_ms=1, count=30, probability=0.5, seed=seed))


def test_another_seed_strikes_other_requests_and_the_probability_is_met() -> None:
    runs = []
    for seed in range(20):
        plan = FaultPlan(Clock())
        plan.set([StatusFault(id="f", probability=0.3, seed=seed, count=1000)])
        runs.append(tuple(bool(ids) for ids in strikes(plan, 200)))
    assert len(set(runs)) == 20
    assert 0.25 < sum(map(sum, runs)) / 4000 < 0.35


def test_an_outage_strikes_everything_until_it_is_over_and_fires_once() -> None:
    clock = Clock()
    plan = FaultPlan(clock)
    plan.set([OutageFault(id="out", duration_ms=100, skip=2, count=2), StatusFault(id="other", code=500)])
    assert strikes(plan, 2) == [["other"], []]
    assert strikes(plan, 3) == [["out"]] * 3
    assert plan.strike("health", "health", "").ids == ["out"]
    clock.ms += 99
    assert strikes(plan) == [["out"]]
    assert plan.fired()[0].fired == 1
    clock.ms += 1
    assert strikes(plan) == [["out"]]  # the second outage
    clock.ms += 100
    assert strikes(plan, 2) == [[], []]
    assert plan.fired()[0].fired == 2


@pytest.mark.parametrize(
    "fault",
    [
        StatusFault(id="f", probability=0),
        StatusFault(id="f", probability=1.1),
        StatusFault(id="f", probability=float("nan")),
        StatusFault(id="f", from_ms=-1),
        StatusFault(id="f", from_ms=float("inf")),
        StatusFault(id="f", from_ms=5, until_ms=5),
        StatusFault(id="f", until_ms=float("nan")),
        TruncateFault(id="f", bytes_kept=-1),
        SlowBodyFault(id="f", bytes_per_s=0),
        SlowBodyFault(id="f", bytes_per_s=float("nan")),
        DuplicateFault(id="f", delay_ms=-1),
        DuplicateFault(id="f", route="scan"),
        ReorderFault(id="f", hold_ms_max=1e9),
        StaleReadFault(id="f"),
        StaleReadFault(id="f", writes=1, age_ms=1),
        StaleReadFault(id="f", writes=-1),
        StaleReadFault(id="f", writes=1, route="write"),
        StaleReadFault(id="f", writes=1, route="scan_snapshot"),
        OutageFault(id="f", duration_ms=-1),
        OutageFault(id="f", duration_ms=1, code=200),
        ViewDeletedFault(id="f", route="control"),
        SchemaChangedFault(id="f", route="health"),
        TokenRevokedFault(id="f", route="list_views"),
    ],
)
def test_impossible_faults_are_refused(fault: AnyFault) -> None:
    with pytest.raises(InvalidParameter, match="fault f"):
        FaultPlan().add(fault)


KINDS: list[AnyFault] = [
    TruncateFault(id="f", bytes_kept=3, probability=0.5, seed=3, from_ms=1, until_ms=2.5),
    SlowBodyFault(id="f", bytes_per_s=100),
    DuplicateFault(id="f", delay_ms=5),
    ReorderFault(id="f"),
    StaleReadFault(id="f", writes=2),
    OutageFault(id="f", duration_ms=5, code=None),
    ViewDeletedFault(id="f"),
    SchemaChangedFault(id="f"),
    TokenRevokedFault(id="f"),
]


@pytest.mark.parametrize("fault", KINDS, ids=lambda fault: fault.__struct_config__.tag)
def test_every_kind_survives_json_and_names_its_row_of_the_errors_table(fault: AnyFault) -> None:
    assert msgspec.json.decode(msgspec.json.encode([fault]), type=list[AnyFault]) == [fault]
    assert fault.outcome is None or fault.outcome in ERRORS


# What the client is told, against what happened

OUTCOMES: list[tuple[AnyFault, int]] = [
    (StatusFault(id="f", code=429), 0),
    (StatusFault(id="f", code=503), 0),
    (StatusFault(id="f", code=503, when="after-commit"), 1),
    (ResetFault(id="f"), 0),
    (ResetFault(id="f", when="after-commit"), 1),
    (ResetFault(id="f", when="mid-reply"), 1),
    (PartialFault(id="f", rows_failed=1), 0),
    (TruncateFault(id="f", bytes_kept=0), 1),
    (TruncateFault(id="f", bytes_kept=7), 1),
    (TruncateFault(id="f", bytes_kept=10**6), 1),
    (SlowBodyFault(id="f", bytes_per_s=2000), 1),
    (DuplicateFault(id="f"), 2),
    (ReorderFault(id="f", hold_ms_max=5), 1),
    (OutageFault(id="f", duration_ms=0), 0),
    (OutageFault(id="f", duration_ms=0, code=None), 0),
    (ViewDeletedFault(id="f"), 0),
    (SchemaChangedFault(id="f"), 0),
    (TokenRevokedFault(id="f"), 0),
]


@pytest.mark.parametrize(
    ("fault", "writes"), OUTCOMES, ids=[f"{fault.__struct_config__.tag}-{n}" for n, (fault, _) in enumerate(OUTCOMES)]
)
def test_what_the_sdk_says_about_a_write_is_what_the_fault_declares_and_true(
    backend: Backend, fault: AnyFault, writes: int
) -> None:
    view = backend.view()
    backend.add_fault(fault)
    view.write_features_arrow(batch=sdk_rows(["t"], [1], [[1.0]]), version=VERSION, write_mode="MERGE", ts=5)
    errors = view.write_flush()["errors"]
    assert backend.fired() == {"f": 1}
    try:
        kept = backend.store.log(PROJECT, VIEW).num_rows
    except Exception:  # the view is gone, as planned
        kept = 0
    assert kept == writes
    assert len(errors) == (fault.outcome is not None)
    for error in errors:
        assert error.applied == fault.applied
        assert error.retriable == ERRORS[fault.outcome or ""].retriable
        assert error.applied == "unknown" or (error.applied == "yes") == (writes > 0)
    if not errors:
        assert fault.applied == "yes"
    # The fault has had its fill: the next write meets none, except that view and token stay as they were left.
    if not isinstance(fault, ViewDeletedFault | SchemaChangedFault | TokenRevokedFault):
        view.write_features_arrow(batch=sdk_rows(["t"], [2], [[1.0]]), version=VERSION, write_mode="MERGE", ts=6)
        assert view.write_flush()["errors"] == []
        assert backend.fired() == {"f": 1}


# One by one


@pytest.fixture
def view(server: FeatureStoreServer) -> None:
    make_view(server.store)


def write(raw: Raw, ts: int = 7, value: float = 1.0, **headers: str) -> int:
    body = ipc(rows(["t"], [1], [[value]]))
    return raw.data("POST", f"/write_arrow?version={VERSION}&ts={ts}", body, **headers).status


def lookup(raw: Raw) -> list[Any]:
    request = pa.RecordBatch.from_arrays([pa.array(["t"]), pa.array([1], pa.int64())], ["pk", "sk"])
    reply = raw.data("POST", f"/lookup_arrow?version={VERSION}", ipc(request))
    assert reply.status == 200, reply.data
    found: list[Any] = pa.ipc.open_stream(reply.data).read_all().column("embedding").to_pylist()
    return found


def log_of(server: FeatureStoreServer) -> list[Any]:
    return [entry for entry in server.requests() if entry.route == "write_arrow"]


def on_socket(server: FeatureStoreServer, raw: Raw, path: str, body: bytes) -> tuple[bytes, bool]:
    """Send one request on a bare socket: (all bytes of the answer, was the connection reset)."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        head = f"POST {raw.table}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sock.sendall((head + "".join(f"{k}: {v}\r\n" for k, v in raw.login.items()) + "\r\n").encode() + body)
        received = b""
        while True:
            try:
                part = sock.recv(65536)
            except ConnectionResetError:
                return received, True
            if not part:
                return received, False
            received += part


@pytest.mark.usefixtures("view")
@pytest.mark.parametrize("kept", [0, 7, 10**6])
def test_a_truncated_reply_announces_more_than_it_sends_and_closes(
    server: FeatureStoreServer, raw: Raw, kept: int
) -> None:
    server.add_fault(TruncateFault(id="f", bytes_kept=kept))
    answer, was_reset = on_socket(server, raw, WRITE, BATCH)
    head, _, body = answer.partition(b"\r\n\r\n")
    announced = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    assert head.startswith(b"HTTP/1.1 200")
    assert not was_reset
    assert len(body) == min(kept, announced - 1)
    (entry,) = log_of(server)
    assert (entry.status, entry.code, entry.fate, entry.fault_ids) == (200, "ReplyTruncated", "yes", ["f"])


@pytest.mark.usefixtures("view")
def test_a_reset_in_the_middle_of_the_reply_comes_after_half_of_it(server: FeatureStoreServer, raw: Raw) -> None:
    server.add_fault(ResetFault(id="f", when="mid-reply"))
    answer, was_reset = on_socket(server, raw, WRITE, BATCH)
    head, _, body = answer.partition(b"\r\n\r\n")
    announced = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    assert was_reset
    assert head.startswith(b"HTTP/1.1 200")
    assert len(body) == announced // 2
    assert log_of(server)[0].code == "ReplyTruncated"


@pytest.mark.usefixtures("view")
def test_a_streamed_reply_is_cut_too(server: FeatureStoreServer, raw: Raw) -> None:
    assert raw.data("POST", WRITE, BATCH).status == 200
    snapshot = json.loads(raw.data("POST", f"/snapshots?version={VERSION}").data)["data"]["snapshot_id"]
    server.add_fault(TruncateFault(id="f", route="scan_snapshot", bytes_kept=50))
    with pytest.raises(urllib3.exceptions.ProtocolError):
        raw.data("GET", f"/snapshots/{snapshot}/scan")
    whole = pa.ipc.open_stream(raw.data("GET", f"/snapshots/{snapshot}/scan").data).read_all()
    assert whole.num_rows == 4


@pytest.mark.usefixtures("view")
def test_a_slow_body_keeps_its_rate_and_arrives_whole(server: FeatureStoreServer, raw: Raw) -> None:
    plain = raw.data("POST", WRITE, BATCH).data
    server.add_fault(SlowBodyFault(id="f", bytes_per_s=200))
    begun = time.monotonic()
    slow = raw.data("POST", WRITE, BATCH)
    assert time.monotonic() - begun >= 0.9 * len(slow.data) / 200
    assert json.loads(slow.data).keys() == json.loads(plain).keys()


@pytest.mark.usefixtures("view")
def test_a_duplicate_comes_after_its_delay_with_the_same_ts_and_is_logged(server: FeatureStoreServer, raw: Raw) -> None:
    """A write, a newer one, then the first again: the newer stays, for its ts is greater."""
    server.add_fault(DuplicateFault(id="f", delay_ms=150))
    assert write(raw, ts=5, value=1.0) == 200
    assert write(raw, ts=6, value=2.0) == 200
    deadline = time.monotonic() + WAIT_S
    while server.log(PROJECT, VIEW).num_rows < 3:
        assert time.monotonic() < deadline
    kept = server.log(PROJECT, VIEW)
    assert kept.column("ts").to_pylist() == [5, 6, 5]
    ids = kept.column("request_id").to_pylist()
    assert ids[0] == ids[2] != ids[1]
    assert kept.column("t_ms").to_pylist()[2] - kept.column("t_ms").to_pylist()[0] >= 140
    assert lookup(raw) == [[2.0]]
    with server.state.lock:
        entries = log_of(server)
    assert [(entry.delivery, entry.fate, entry.status) for entry in entries] == [
        (1, "yes", 200),
        (1, "yes", 200),
        (2, "yes", None),
    ]
    assert entries[2].request_id == entries[0].request_id
    assert entries[2].rows_applied == 1


@pytest.mark.usefixtures("view")
def test_a_duplicate_does_not_reach_a_store_that_was_reset(server: FeatureStoreServer, raw: Raw) -> None:
    server.add_fault(DuplicateFault(id="f", delay_ms=100))
    assert write(raw) == 200
    server.reset()
    make_view(server.store)
    server.add_fault(DelayFault(id="g", delay_ms=200, route="health"))
    assert raw("GET", "/health").status == 200  # by now the duplicate's time has come
    assert server.log(PROJECT, VIEW).num_rows == 0


@pytest.mark.usefixtures("view")
def test_a_held_request_is_overtaken_by_another_connection_of_its_client(server: FeatureStoreServer, raw: Raw) -> None:
    server.add_fault(ReorderFault(id="f", hold_ms_max=15_000))
    first = threading.Thread(target=write, args=(raw, 5))
    begun = time.monotonic()
    first.start()
    deadline = time.monotonic() + WAIT_S
    while not server.faults()[0].fired:
        assert time.monotonic() < deadline
    assert write(raw, 6, Auth="cmFuazE6eA==") == 200  # rank1: another client sets nobody free
    assert lookup(raw) == [[1.0]]
    assert [entry.ts for entry in log_of(server)] == [6]
    assert write(raw, 7) == 200
    first.join(WAIT_S)
    assert not first.is_alive()
    assert time.monotonic() - begun < 14
    assert server.log(PROJECT, VIEW).column("ts").to_pylist() == [6, 7, 5]


@pytest.mark.usefixtures("view")
def test_a_held_request_that_nobody_overtakes_goes_on_after_its_time(server: FeatureStoreServer, raw: Raw) -> None:
    server.add_fault(ReorderFault(id="f", hold_ms_max=100))
    begun = time.monotonic()
    assert write(raw) == 200
    assert 0.09 <= time.monotonic() - begun < WAIT_S


def test_only_another_connection_releases() -> None:
    turns, released = Turns(), []
    with turns.waiting(ReorderFault(id="f"), "rank0", 1, lambda: released.append("f")):
        turns.passed("write_arrow", "write", "rank0", 1)
        turns.passed("write_arrow", "write", "rank1", 2)
        turns.passed("lookup_arrow", "lookup", "rank0", 2)
        assert released == []
        turns.passed("write_arrow", "write", "rank0", 2)
        turns.passed("write_arrow", "write", "rank0", 3)
    assert released == ["f"]


def test_stale_reads_see_the_past(backend: Backend) -> None:
    view = backend.view()
    for ts in (5, 6, 7):
        batch = sdk_rows(["t", "t"], [1, ts], [[float(ts)], [0.0]])
        view.write_features_arrow(batch=batch, version=VERSION, write_mode="MERGE", ts=ts)
        assert view.write_flush()["errors"] == []

    def first_row() -> list[list[float]]:
        found: list[list[float]] = (
            view.lookup_arrow(VERSION, pa.array(["t"]), pa.array([1])).column("embedding").to_pylist()
        )
        return found

    for writes, expected in ((1, [[6.0]]), (2, [[5.0]]), (3, []), (9, [])):
        backend.add_fault(StaleReadFault(id=f"w{writes}", writes=writes))
        assert first_row() == expected
        assert first_row() == [[7.0]]
    backend.add_fault(StaleReadFault(id="old", age_ms=600_000))
    assert first_row() == []
    backend.add_fault(StaleReadFault(id="scan", route="scan", writes=1))
    assert sorted(view.scan(VERSION).column("sk").to_pylist()) == [1, 5, 6]
    assert sorted(view.scan(VERSION).column("sk").to_pylist()) == [1, 5, 6, 7]
    backend.add_fault(StaleReadFault(id="changes", route="changes", writes=1, count=2))
    changed, next_ts = view.read_changes(VERSION, 5)
    assert (sorted(changed.column("sk").to_pylist()), next_ts) == ([1, 6], 6)
    assert view.high_water_ts(VERSION) == 6
    assert view.high_water_ts(VERSION) == 7
    assert all(backend.fired()[name] for name in ("w1", "old", "scan", "changes"))


@pytest.mark.usefixtures("view")
def test_an_outage_is_over_when_its_time_is(server: FeatureStoreServer, raw: Raw) -> None:
    clock = Clock()
    server.state.fault_clock_ms = clock
    server.set_faults([OutageFault(id="out", duration_ms=1000, code=503, retry_after_s=2)])
    reply = raw.data("POST", WRITE, BATCH)
    assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
    assert raw("GET", "/health").status == 503
    clock.ms += 999
    assert write(raw) == 503
    clock.ms += 1
    assert write(raw) == 200
    assert raw("GET", "/health").status == 200
    assert server.faults()[0].fired == 1
    assert server.log(PROJECT, VIEW).num_rows == 1


@pytest.mark.usefixtures("view")
def test_a_deleted_view_stays_deleted(server: FeatureStoreServer, raw: Raw) -> None:
    assert write(raw) == 200
    server.add_fault(ViewDeletedFault(id="f"))
    assert [write(raw) for _ in range(2)] == [404, 404]
    assert server.store.views() == []
    assert [entry.fate for entry in log_of(server)] == ["yes", "no", None]


def test_a_second_delivery_that_finds_no_view_changes_nothing_for_the_client(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = backend.view()
    backend.add_fault(DuplicateFault(id="f"))
    write = Store.write
    seen: list[int] = []

    def once(store: Store, *where: Any, **what: Any) -> Any:
        seen.append(what["ts"])
        if len(seen) == 2:
            store.drop_view(PROJECT, VIEW)
        return write(store, *where, **what)

    monkeypatch.setattr(Store, "write", once)
    view.write_features_arrow(sdk_rows(["t"], [1], [[1.0]]), VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    assert seen == [5, 5]
    assert backend.fired() == {"f": 1}


@pytest.mark.usefixtures("view")
def test_a_changed_schema_refuses_the_old_type_and_takes_the_new(server: FeatureStoreServer, raw: Raw) -> None:
    assert write(raw) == 200
    server.add_fault(SchemaChangedFault(id="f"))
    reply = raw.data("POST", WRITE, BATCH)
    assert (reply.status, json.loads(reply.data)["Code"]) == (400, "SchemaMismatch")
    assert write(raw) == 400
    assert raw.data("POST", WRITE, ipc(rows(["t"], [1], [[1.0]], pa.uint8()))).status == 200
    assert server.store.view(PROJECT, VIEW).value_type == "uint8"


@pytest.mark.usefixtures("view")
def test_a_revoked_token_is_refused_until_the_new_one_is_read(server: FeatureStoreServer, raw: Raw) -> None:
    old = server.state.token
    server.add_fault(TokenRevokedFault(id="f"))
    replies = [raw.data("POST", WRITE, BATCH) for _ in range(2)]
    assert [(reply.status, json.loads(reply.data)["Code"]) for reply in replies] == [(401, "InvalidToken")] * 2
    config = json.loads(server.state.datasource("1", server.endpoint)["Config"])
    assert config["token"] != old
    assert write(raw, Authorization=config["token"]) == 200
    for secret in (old, config["token"]):
        assert all(secret.encode() not in reply.data for reply in replies)
        assert secret not in json.dumps(msgspec.to_builtins(server.requests()))
    server.reset()
    assert server.state.token == old

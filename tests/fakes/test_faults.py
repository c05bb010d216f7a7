"""Planned faults over the wire: each fires as often as planned, does what it says, and the request log tells."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import msgspec
import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.fakes.errors import InvalidParameter
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import (
    ROUTES,
    AnyFault,
    DelayFault,
    Fault,
    FaultPlan,
    PartialFault,
    ResetFault,
    StatusFault,
)
from deltaproof.fakes.server.routes import GROUPS

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

BATCH = ipc(rows(["t"] * 4, [1, 2, 3, 4], [[1.0]] * 4))
WRITE = f"/write_arrow?version={VERSION}&ts=7"
WAIT_S = 10


@pytest.fixture(autouse=True)
def view(server: FeatureStoreServer) -> None:
    make_view(server.store)


def plan(raw: Raw, *faults: dict[str, Any]) -> None:
    reply = raw("PUT", "/_admin/faults", body=json.dumps(faults))
    assert (reply.status, json.loads(reply.data)["Count"]) == (200, len(faults)), reply.data


def fired(raw: Raw) -> dict[str, tuple[int, int]]:
    found = json.loads(raw("GET", "/_admin/faults").data)["Faults"]
    return {entry["fault"]["id"]: (entry["seen"], entry["fired"]) for entry in found}


def requests(raw: Raw) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(raw("GET", "/_admin/requests").data)["Requests"]
    return found


def write(raw: Raw, **headers: str) -> int | None:
    """The status of one write, None for a broken connection."""
    try:
        return raw.data("POST", WRITE, BATCH, **headers).status
    except urllib3.exceptions.ProtocolError:
        return None


@pytest.mark.parametrize(
    ("fault", "status", "applied", "fate", "code"),
    [
        ({"kind": "status", "code": 503, "when": "before-commit"}, 503, 0, "no", "ServiceUnavailable"),
        ({"kind": "status", "code": 500, "when": "after-commit"}, 500, 4, "yes", "InternalError"),
        ({"kind": "status", "code": 429, "retry_after_s": 3}, 429, 0, "no", "Throttling"),
        ({"kind": "reset", "when": "before-commit"}, None, 0, "no", ""),
        ({"kind": "reset", "when": "after-commit"}, None, 4, "yes", ""),
        ({"kind": "partial", "rows_failed": 1}, 207, 3, "partly", "PartialFailure"),
        ({"kind": "partial", "rows_failed": 9}, 207, 0, "no", "PartialFailure"),
        ({"kind": "delay", "delay_ms": 1, "when": "before-commit"}, 200, 4, "yes", ""),
        ({"kind": "delay", "delay_ms": 1, "when": "after-commit"}, 200, 4, "yes", ""),
    ],
)
@pytest.mark.parametrize(("skip", "count"), [(0, 1), (1, 2)])
def test_each_kind_strikes_as_planned(
    server: FeatureStoreServer,
    raw: Raw,
    fault: dict[str, Any],
    status: int | None,
    applied: int,
    fate: str,
    code: str,
    skip: int,
    count: int,
) -> None:
    plan(raw, {"id": "f", "skip": skip, "count": count, **fault})
    statuses = [write(raw) for _ in range(5)]
    expected = [status if skip <= number < skip + count else 200 for number in range(5)]
    assert statuses == expected
    assert fired(raw) == {"f": (5, count)}
    log = [entry for entry in requests(raw) if entry["route"] == "write_arrow"]
    assert [entry["seq"] for entry in log] == sorted(entry["seq"] for entry in log)
    for number, entry in enumerate(log):
        struck = skip <= number < skip + count
        assert entry["fault_ids"] == (["f"] if struck else [])
        assert entry["fault"] == (0 if struck else None)
        assert entry["status"] == expected[number]
        assert entry["fate"] == (fate if struck else "yes")
        assert entry["code"] == (code if struck else "")
        assert (entry["client"], entry["rows"], entry["version"], entry["ts"]) == ("rank0", 4, VERSION, 7)
        assert entry["rows_applied"] == (applied if struck else 4)
        assert entry["t_ms"] <= entry["end_ms"] <= time.monotonic() * 1000
    kept = server.store.log(PROJECT, VIEW)
    assert kept.num_rows == sum(applied if skip <= n < skip + count else 4 for n in range(5))
    # Every applied write is traceable from the log to its request.
    assert set(kept.column("request_id").to_pylist()) == {e["request_id"] for e in log if e["rows_applied"]}


def test_retry_after_is_sent(raw: Raw) -> None:
    plan(raw, {"id": "f", "kind": "status", "code": 429, "retry_after_s": 0.5})
    reply = raw.data("POST", WRITE, BATCH)
    assert reply.headers["Retry-After"] == "0.5"
    body = json.loads(reply.data)
    assert set(body) == {"Code", "Message", "RequestId"}
    assert body["RequestId"] == reply.headers["x-acs-request-id"] == requests(raw)[-1]["request_id"]


def test_a_reset_is_a_tcp_reset(raw: Raw) -> None:
    plan(raw, {"id": "f", "kind": "reset"})
    with pytest.raises(urllib3.exceptions.ProtocolError, match="Connection reset by peer"):
        raw.data("POST", WRITE, BATCH)


def test_delays_hold_the_commit_or_only_the_reply(server: FeatureStoreServer, raw: Raw) -> None:
    for when in ("before-commit", "after-commit"):
        server.reset()
        make_view(server.store)
        plan(raw, {"id": "f", "kind": "delay", "delay_ms": 300, "when": when})
        begun = time.monotonic()
        assert write(raw) == 200
        assert time.monotonic() - begun >= 0.29
        (entry,) = [entry for entry in requests(raw) if entry["route"] == "write_arrow"]
        committed_ms = server.store.log(PROJECT, VIEW).column("t_ms").to_pylist()[0]
        waited_ms = committed_ms - entry["t_ms"]
        assert waited_ms >= 290 if when == "before-commit" else waited_ms < 150


def test_a_slow_request_holds_up_no_other(raw: Raw) -> None:
    plan(raw, {"id": "f", "kind": "delay", "delay_ms": 5000, "client": "rank0"})
    slow = threading.Thread(target=write, args=(raw,))
    slow.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while fired(raw)["f"] == (0, 0):
            assert time.monotonic() < deadline
        assert write(raw, Auth="cmFuazE6eA==") == 200  # rank1
        assert [entry["client"] for entry in requests(raw) if entry["route"] == "write_arrow"] == ["rank1"]
    finally:
        raw("POST", "/_admin/reset")  # breaks the slow request's connection
        slow.join(WAIT_S)
    assert not slow.is_alive()


def test_delays_add_up_with_one_other_fault(raw: Raw) -> None:
    plan(
        raw,
        {"id": "slow", "kind": "delay", "delay_ms": 1, "count": 100},
        {"id": "first", "kind": "status", "code": 503},
        {"id": "second", "kind": "status", "code": 500},
    )
    assert [write(raw) for _ in range(3)] == [503, 500, 200]
    log = [entry for entry in requests(raw) if entry["route"] == "write_arrow"]
    assert [(entry["fault"], entry["fault_ids"]) for entry in log] == [
        (1, ["slow", "first"]),
        (2, ["slow", "second"]),
        (0, ["slow"]),
    ]


def test_faults_match_route_group_name_or_any(raw: Raw) -> None:
    plan(
        raw,
        {"id": "json", "route": "write_json", "kind": "status", "code": 500},
        {"id": "scan", "route": "scan", "kind": "status", "code": 502},
        {"id": "changes", "route": "changes", "kind": "status", "code": 504},
        {"id": "health", "route": "health", "kind": "status", "code": 503},
        {"id": "views", "route": "list_views", "kind": "status", "code": 503},
        {"id": "other", "client": "rank9", "kind": "status", "code": 503},
    )
    assert write(raw) == 200
    row = {"embedding_name": "t", "key_id": 1, "embedding": [1.0]}
    body = json.dumps({"content": [row], "version": VERSION, "ts": 5})
    assert [raw.data("POST", "/write", body).status for _ in range(2)] == [500, 200]
    assert [raw.data("POST", f"/snapshots?version={VERSION}").status for _ in range(2)] == [502, 200]
    assert [raw.data("GET", f"/iterate_get_kv?version={VERSION}").status for _ in range(2)] == [504, 200]
    assert [raw("GET", "/health").status for _ in range(2)] == [503, 200]
    assert [raw.control("GET", "/featurestore-cn-deltaproof/featureviews").status for _ in range(2)] == [503, 200]
    counts = fired(raw)
    assert {name: count for name, (_, count) in counts.items()} == {
        "json": 1,
        "scan": 1,
        "changes": 1,
        "health": 1,
        "views": 1,
        "other": 0,
    }
    plan(raw, {"id": "any", "route": "*", "kind": "status", "code": 503, "count": 2})
    assert [write(raw), raw("GET", "/health").status, write(raw)] == [503, 503, 200]


def test_a_malformed_request_uses_up_no_fault(raw: Raw) -> None:
    plan(raw, {"id": "f", "kind": "status", "code": 503})
    assert raw.data("POST", WRITE, b"no arrow").status == 400
    assert raw.data("POST", WRITE, BATCH, Authorization="wrong").status == 401
    assert fired(raw) == {"f": (0, 0)}
    assert write(raw) == 503


def test_a_partial_fault_on_an_invalid_batch_refuses_it_whole(server: FeatureStoreServer, raw: Raw) -> None:
    plan(raw, {"id": "f", "kind": "partial", "rows_failed": 1})
    bad = ipc(rows(["t", "t"], [1, -1], [[1.0], [1.0]]))
    assert raw.data("POST", WRITE, bad).status == 400
    assert server.store.log(PROJECT, VIEW).num_rows == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "code": 200},
        {"kind": "status", "code": 600},
        {"kind": "status", "code": 429, "when": "after-commit"},
        {"kind": "status", "code": 403, "when": "after-commit"},
        {"kind": "status", "when": "later"},
        {"kind": "status", "retry_after_s": -1},
        {"kind": "status", "count": 0},
        {"kind": "status", "skip": -1},
        {"kind": "status", "id": ""},
        {"kind": "status", "route": ""},
        {"kind": "status", "route": "wrte"},
        {"kind": "partial", "rows_failed": 1, "route": "scan"},
        {"kind": "status", "typo": 1},
        {"kind": "delay", "delay_ms": -1},
        {"kind": "delay", "delay_ms": 1e12},
        {"kind": "delay"},
        {"kind": "partial", "rows_failed": 0},
        {"kind": "unknown"},
        {},
    ],
)
def test_wrong_plans_are_refused_and_the_old_one_stays(raw: Raw, fault: dict[str, Any]) -> None:
    plan(raw, {"id": "old", "kind": "status"})
    reply = raw("PUT", "/_admin/faults", body=json.dumps([{"id": "f", **fault}]))
    assert (reply.status, json.loads(reply.data)["Code"]) == (400, "InvalidParameter")
    assert set(fired(raw)) == {"old"}


def test_two_faults_of_one_id_are_refused(raw: Raw) -> None:
    body = json.dumps([{"id": "f", "kind": "status"}, {"id": "f", "kind": "reset"}])
    assert raw("PUT", "/_admin/faults", body=body).status == 400
    faults = FaultPlan()
    faults.add(ResetFault(id="f"))
    with pytest.raises(InvalidParameter, match="'f'"):
        faults.add(ResetFault(id="f"))


def test_the_routes_that_faults_know_are_those_served() -> None:
    served = {group: tuple(name for _, _, name, _ in table) for group, table in GROUPS.items() if group != "admin"}
    assert served == ROUTES


FAULTS: st.SearchStrategy[AnyFault] = st.one_of(
    *(
        st.builds(
            kind,
            id=st.uuids().map(str),
            route=st.sampled_from(["write", "write_arrow", "*"] + ["scan"] * (kind is not PartialFault)),
            client=st.sampled_from([None, "rank0", "rank1"]),
            skip=st.integers(0, 3),
            count=st.integers(1, 3),
            **extra,
        )
        for kind, extra in (
            (StatusFault, {"code": st.sampled_from([500, 503])}),
            (ResetFault, {"when": st.sampled_from(["before-commit", "after-commit"])}),
            (DelayFault, {"delay_ms": st.floats(0, 10)}),
            (PartialFault, {"rows_failed": st.integers(1, 3)}),
        )
    )
)


@given(st.lists(FAULTS, max_size=5, unique_by=lambda fault: fault.id))
def test_given_enough_requests_every_fault_fires_exactly_count_times(faults: list[AnyFault]) -> None:
    made = FaultPlan()
    made.set(faults)
    names: list[str] = []
    for _ in range(20):
        for client in ("rank0", "rank1"):
            for route, group in (("write_arrow", "write"), ("scan_snapshot", "scan")):
                strike = made.strike(route, group, client)
                assert sum(not isinstance(f, DelayFault) for f in faults if f.id in strike.ids) <= 1
                for fault in faults:
                    if fault.id in strike.ids:
                        assert fault.client in (None, client)
                        assert fault.route in (route, group, "*")
                names += strike.ids
    assert {fault.id: names.count(fault.id) for fault in faults} == {fault.id: fault.count for fault in faults}
    assert {entry.fault.id: entry.fired for entry in made.fired()} == {fault.id: fault.count for fault in faults}


@given(FAULTS)
def test_faults_survive_json(fault: AnyFault) -> None:
    assert msgspec.json.decode(msgspec.json.encode([fault]), type=list[AnyFault]) == [fault]
    assert isinstance(fault, Fault)

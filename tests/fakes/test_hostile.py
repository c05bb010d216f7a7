"""Wrong and hostile input on every route: 4xx with Code, Message and RequestId; never a 500, a hang or a crash."""

from __future__ import annotations

import gzip
import json
import logging
import random
import socket
import struct
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaproof.fakes.errors import ERRORS, AccessDenied
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.routes import CONTROL_BYTES_MAX, GROUPS, identify
from deltaproof.fakes.server.state import CLIENT_HEADER, check_loopback

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

GOOD = ipc(rows(["t", "u"], [1, 2**60], [[1.0, 2.0], [3.0]]))
WRITE = f"/write_arrow?version={VERSION}&ts=7"
INSTANCE = "featurestore-cn-deltaproof"
SMALL = 1_000_000


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer(body_bytes_max=SMALL, body_timeout_s=1.5) as running:
        yield running


@pytest.fixture
def server(hostile_server: FeatureStoreServer) -> FeatureStoreServer:
    """One server for the module, reset for each test: what one request left behind must not hurt the next."""
    hostile_server.reset()
    make_view(hostile_server.store)
    return hostile_server


@pytest.fixture(autouse=True)
def nothing_logged_as_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def refused(reply: Any, *codes: str, status: int | None = None) -> dict[str, Any]:
    """The error of a reply, checked against the service's error shape and our table."""
    assert 400 <= reply.status < 500, (reply.status, reply.data)
    assert reply.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = json.loads(reply.data)
    assert set(error) == {"Code", "Message", "RequestId"}
    assert all(error.values())
    assert not codes or error["Code"] in codes, error
    assert ERRORS[error["Code"]].applied == "no"
    assert status in (None, reply.status)
    return error


def untouched(server: FeatureStoreServer) -> None:
    assert server.store.log(PROJECT, VIEW).num_rows == 0


# Bodies


def crafted() -> dict[str, bytes]:
    compressed = pa.BufferOutputStream()
    batch = rows(["t"] * 100, list(range(100)), [[0.0] * 8] * 100)
    with pa.ipc.new_stream(compressed, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    dictionary = pa.BufferOutputStream()
    encoded = batch.set_column(0, "pk", batch.column("pk").dictionary_encode())
    with pa.ipc.new_stream(dictionary, encoded.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(encoded)
    bad = [None, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")]
    bad_utf8 = pa.Array.from_buffers(pa.string(), 1, bad)
    # Offsets that no library would write: patched into the bytes, the only place of that pattern.
    far = ipc(rows(["abcde"], [1], [[1.0]])).replace(struct.pack("<ii", 0, 5), struct.pack("<ii", 0, 2**30))
    back = ipc(rows(["abcde", "f"], [1, 2], [[1.0]] * 2))
    back = back.replace(struct.pack("<iii", 0, 5, 6), struct.pack("<iii", 0, 5, 1))
    one = rows(["t"], [1], [[1.0]])
    return {
        "empty": b"",
        "text": b"hello",
        "json": b'{"content": []}',
        "zeros": bytes(64),
        "huge length": b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(16),
        "negative length": b"\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(16),
        "schema only": ipc(one)[: -len(ipc(one)) // 2],
        "truncated": ipc(one)[:-20],
        "arrow file, not stream": b"ARROW1\x00\x00" + ipc(one),
        "compressed": compressed.getvalue().to_pybytes(),
        "compressed dictionary": dictionary.getvalue().to_pybytes(),
        "bad utf-8": ipc(one.set_column(0, "pk", bad_utf8)),
        "string offset far out": far,
        "string offsets going back": back,
        "no columns": ipc(pa.RecordBatch.from_arrays([], [])),
        "no rows": ipc(one.slice(0, 0)),
        "duplicate columns": ipc(one.append_column("pk", one.column("pk"))),
        "nested lists": ipc(one.set_column(2, "embedding", pa.array([[[1.0]]], pa.list_(pa.list_(pa.float32()))))),
        "dictionary": ipc(one.set_column(0, "pk", one.column("pk").dictionary_encode())),
        "fixed size list": ipc(one.set_column(2, "embedding", pa.array([[1.0]], pa.list_(pa.float32(), 1)))),
        "null type": ipc(one.set_column(1, "sk", pa.nulls(1))),
        "uint64 keys": ipc(one.set_column(1, "sk", pa.array([2**63], pa.uint64()))),
    }


@pytest.mark.parametrize("name", sorted(crafted()))
def test_crafted_arrow_bodies_are_refused(server: FeatureStoreServer, raw: Raw, name: str) -> None:
    body = crafted()[name]
    refused(raw.data("POST", WRITE, body), "MalformedBody", "SchemaMismatch", "InvalidParameter")
    refused(raw.data("POST", f"/lookup_arrow?version={VERSION}", body), "MalformedBody", "SchemaMismatch")
    refused(raw.data("POST", "/write", body), "MalformedBody", "InvalidVersion")
    untouched(server)


def test_mutated_arrow_bodies_never_fail_the_server(server: FeatureStoreServer, raw: Raw) -> None:
    draw = random.Random(11)
    lookup = ipc(pa.RecordBatch.from_pydict({"pk": ["t"], "sk": [1]}))
    statuses = set()
    for _ in range(600):
        path, body = draw.choice(((WRITE, bytearray(GOOD)), (f"/lookup_arrow?version={VERSION}", bytearray(lookup))))
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(body))
            match draw.randrange(4):
                case 0:
                    body[place] = draw.randrange(256)
                case 1:
                    body[place] ^= 1 << draw.randrange(8)
                case 2:
                    body[place : place + 8] = struct.pack("<q", draw.choice([-1, 2**31 - 1, 2**40, -(2**63), 0]))
                case _:
                    del body[place:]
                    body += b"\x00"
        reply = raw.data("POST", path, bytes(body))
        statuses.add(reply.status)
        assert reply.status in (200, 400), reply.data
    assert statuses == {200, 400}
    found = raw.data("POST", f"/snapshots?version={VERSION}")
    assert found.status == 200  # whatever was accepted can be read


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**63, -1, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "embedding_name": JSON | st.just("t"),
        "key_id": JSON | st.integers(-(2**63), 2**63 - 1),
        "embedding": JSON | st.lists(st.floats(width=32), max_size=3),
        "x": JSON,
    },
)
WRITE_BODY = st.fixed_dictionaries(
    {},
    optional={
        "content": JSON | st.lists(ROW, max_size=3),
        "version": JSON | st.just(VERSION),
        "ts": JSON | st.integers(1, 100),
        "write_mode": JSON | st.just("MERGE"),
    },
)
FIELD = st.fixed_dictionaries(
    {},
    optional={
        "Name": JSON | st.sampled_from(["p", "s"]),
        "Type": JSON | st.sampled_from(["STRING", "INT64", "ARRAY<FLOAT>"]),
        "Attributes": JSON | st.sampled_from([["PrimaryKey"], ["SecondaryKey"]]),
    },
)
CONTROL_BODY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "Name": JSON | st.just("x"),
        "ProjectId": JSON | st.just("1"),
        "FeatureEntityId": JSON | st.just("1"),
        "ParentFeatureEntityId": JSON | st.just("1"),
        "JoinId": JSON | st.just("j"),
        "Type": JSON | st.just("DynamicEmbedding"),
        "Config": JSON | st.sampled_from(["", "{}", '{"ttl": null}', "["]),
        "TTL": JSON,
        "Fields": JSON | st.lists(FIELD, max_size=4),
        "OnlineDatasourceId": JSON,
    },
)
FAULTS_BODY = JSON | st.lists(
    st.dictionaries(st.sampled_from(["id", "kind", "route", "client", "skip", "count", "code", "delay_ms"]), JSON),
    max_size=2,
)
FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def sent(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")  # json writes NaN and Infinity: not JSON, and so refused


@FUZZ
@given(WRITE_BODY | JSON)
def test_fuzzed_json_writes(server: FeatureStoreServer, raw: Raw, body: Any) -> None:
    reply = raw.data("POST", "/write", sent(body))
    if reply.status != 200:
        refused(reply)


@FUZZ
@given(CONTROL_BODY)
def test_fuzzed_control_plane_bodies(server: FeatureStoreServer, raw: Raw, body: Any) -> None:
    for method, path in (
        ("POST", "/projects"),
        ("POST", "/featureentities"),
        ("POST", "/featureviews"),
        ("PUT", "/featureviews/1"),
    ):
        reply = raw.control(method, f"/{INSTANCE}{path}", sent(body))
        if reply.status != 200:
            assert refused(reply)["Code"] != "SignatureDoesNotMatch"  # or nothing else was fuzzed


@FUZZ
@given(FAULTS_BODY)
def test_fuzzed_fault_plans(server: FeatureStoreServer, raw: Raw, body: Any) -> None:
    reply = raw("PUT", "/_admin/faults", body=sent(body))
    if reply.status != 200:
        refused(reply)
    assert raw("GET", "/_admin/faults").status == 200
    server.set_faults([])


@FUZZ
@given(
    st.sampled_from(
        [(method, path) for table in GROUPS.values() for method, path, _, _ in table if "admin" not in path]
    ),
    st.lists(
        st.sampled_from(["%00", "..", "%2e%2e%2f", "%ff", "%ed%a0%80", "x" * 300, "%F0%9F%92%A9", "'", "1", VIEW, "é"]),
        min_size=5,
        max_size=5,
    ),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "version",
                    "ts",
                    "PageSize",
                    "PageNumber",
                    "Order",
                    "SortBy",
                    "JoinIds",
                    "Config",
                    "Name",
                    "ProjectIds",
                ]
            ),
            st.sampled_from(
                ["", "-1", "0", "9" * 30, "NaN", "%00", "%ff", "%ed%a0%80", "[", "{}", "1.5", "%C2%B2", VERSION]
            ),
        ),
        max_size=3,
    ),
)
def test_fuzzed_paths_and_queries(
    server: FeatureStoreServer, raw: Raw, route: tuple[str, str], parts: list[str], query: list[tuple[str, str]]
) -> None:
    method, path = route
    names = iter(parts)
    filled = "/".join(next(names) if piece.startswith("{") else piece for piece in path.split("/"))
    text = "&".join(f"{key}={value}" for key, value in query)
    target = f"{filled}?{text}"
    is_text = not any(bad in target for bad in ("%ff", "%ed%a0%80"))
    login = raw.signed(method, target) if is_text and path.startswith("/api/v1/instances") else raw.login
    reply = raw(method, target, headers=login)
    if not is_text:
        refused(reply, "InvalidParameter", "RouteNotFound")
    elif reply.status not in (200, 207):
        assert refused(reply)["Code"] != "SignatureDoesNotMatch"  # or nothing else was fuzzed


def test_json_keys_are_exact_or_refused(server: FeatureStoreServer, raw: Raw) -> None:
    for text, accepted in (
        ("9007199254740993", True),
        ("-9223372036854775808", True),
        ("9223372036854775808", False),
        ("9007199254740993.0", False),
        ("9e15", False),
        ('"5"', False),
        ("-1", False),
    ):
        row = '{"embedding_name": "t", "embedding": [1], "key_id": ' + text + "}"
        reply = raw.data("POST", "/write", '{"version": "v1", "ts": 5, "content": [' + row + "]}")
        assert (reply.status == 200) == accepted, text
        if not accepted:
            refused(reply)
    assert sorted(server.store.log(PROJECT, VIEW).column("sk").to_pylist()) == [-(2**63), 2**53 + 1]


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_json_is_refused(raw: Raw, depth: int) -> None:
    refused(raw.data("POST", "/write", b"[" * depth))
    refused(raw.data("POST", "/write", b'{"a":' * depth + b"1" + b"}" * depth))
    refused(raw("PUT", "/_admin/faults", body=b"[" * depth))


# Sizes


def test_bodies_over_the_limit_are_refused(server: FeatureStoreServer, raw: Raw) -> None:
    refused(raw.data("POST", WRITE, bytes(SMALL + 1)), "BodyTooLarge", status=413)
    chunks = (bytes(100_000) for _ in range(20))  # no Content-Length: counted as it comes
    refused(raw.data("POST", WRITE, chunks), "BodyTooLarge", status=413)
    refused(raw.control("POST", f"/{INSTANCE}/projects", bytes(CONTROL_BYTES_MAX + 1)), "BodyTooLarge", status=413)
    untouched(server)


def test_a_small_gzip_body_may_not_grow_over_the_limit(server: FeatureStoreServer, raw: Raw) -> None:
    bomb = gzip.compress(bytes(50 * SMALL))
    assert len(bomb) < SMALL
    refused(raw.data("POST", WRITE, bomb, **{"Content-Encoding": "gzip"}), "BodyTooLarge", status=413)
    refused(raw.data("POST", WRITE, b"not gzip", **{"Content-Encoding": "gzip"}), "MalformedBody", "BadRequest")
    untouched(server)


def test_a_body_that_never_ends_is_given_up(server: FeatureStoreServer, raw: Raw) -> None:
    head = f"POST {raw.table}{WRITE} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head.encode() + b"\r\nonly this")
        reply = sock.recv(65536)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b'"Code":"RequestTimeout"' in reply


def test_a_client_that_leaves_early_harms_nobody(server: FeatureStoreServer, raw: Raw) -> None:
    head = f"POST {raw.table}{WRITE} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    for rest in ("", "\r\n", "\r\nsome bytes"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall((head + rest).encode())
    deadline = time.monotonic() + 10
    while len(server.requests()) < 2:  # the first never became a request
        assert time.monotonic() < deadline
    assert [(entry.status, entry.fate) for entry in server.requests()] == [(None, None)] * 2
    assert raw.data("POST", WRITE, GOOD).status == 200


# Below HTTP


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /_admin/reset HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_400_and_the_line_is_closed(server: FeatureStoreServer, raw: Raw, text: bytes) -> None:
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(text)
        try:
            while chunk := sock.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass  # closed while the rest of an oversized head was still on its way
    if received:
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), received
        assert set(json.loads(body)) == {"Code", "Message", "RequestId"}
    assert raw("GET", "/health").status == 200


@pytest.mark.parametrize(
    "query", [b"Order=\xff\xfe", b"SortBy=\xed\xa0\x80", b"PageSize=\xff", b"\xff=1", b"Order=ASC#x"]
)
def test_raw_bytes_in_the_target(server: FeatureStoreServer, raw: Raw, query: bytes) -> None:
    for path in (b"/api/v1/instances?", raw.table.encode() + b"/high_water_ts?version=v1&"):
        head = b"GET " + path + query + b" HTTP/1.1\r\nConnection: close\r\n"
        headers = {**raw.login, "Host": "x"}
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode() + b"\r\n"
        received = b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(head)
            while chunk := sock.recv(65536):
                received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.split()[1] == b"400", received
        assert json.loads(body)["Code"] in ("InvalidParameter", "BadRequest")


# Who may ask


@pytest.mark.parametrize(
    ("headers", "code", "status"),
    [
        ({"Authorization": ""}, "MissingAuthorization", 401),
        ({"Auth": ""}, "MissingAuthorization", 401),
        ({"Authorization": "wrong"}, "InvalidToken", 401),
        ({"Authorization": "Bearer deltaproof-featuredb-token"}, "InvalidToken", 401),
        ({"Auth": "%%%"}, "MissingAuthorization", 401),
        ({"Auth": "/////w=="}, "MissingAuthorization", 401),  # no UTF-8
        ({"Auth": "cmFuazA="}, "AccessDenied", 403),  # no colon
        ({"Auth": "cmFuazA6"}, "AccessDenied", 403),  # no password
        ({"Auth": "OnB3"}, "AccessDenied", 403),  # no username
        ({"Auth": "YQpiOnB3"}, "AccessDenied", 403),  # a line break in the username
    ],
)
def test_the_data_plane_wants_token_and_login(
    server: FeatureStoreServer, raw: Raw, headers: dict[str, str], code: str, status: int
) -> None:
    for method, path, body in (("POST", WRITE, GOOD), ("GET", f"/iterate_get_kv?version={VERSION}", None)):
        error = refused(raw.data(method, path, body, **headers), code, status=status)
        assert server.state.token not in error["Message"]
    untouched(server)


@pytest.mark.parametrize(
    "authorization",
    ["", "Basic abc", "ACS3-HMAC-SHA256", "ACS3-HMAC-SHA256 Credential=,SignedHeaders=x,Signature=" + "0" * 64],
)
def test_the_control_plane_wants_a_signed_request(raw: Raw, authorization: str) -> None:
    refused(raw.control("GET", "", Authorization=authorization), "MissingAuthorization", status=401)


@pytest.mark.parametrize("name", ["", "%ff", "a%0Ab", "%ed%a0%80", "x" * 257])
def test_odd_client_names_do_not_reach_the_log(server: FeatureStoreServer, raw: Raw, name: str) -> None:
    refused(raw.control("GET", "", **{CLIENT_HEADER: name}), "InvalidParameter", status=400)
    assert server.requests()[-1].client == ""


def test_unknown_routes_and_methods(raw: Raw) -> None:
    refused(raw("GET", "/nowhere"), "RouteNotFound", status=404)
    refused(raw("GET", "/api/v1/../../etc/passwd"), "RouteNotFound", status=404)
    refused(raw("GET", "/api/v1/instances//projects"), "RouteNotFound", status=404)
    refused(raw.data("PATCH", "/write"), "MethodNotAllowed", status=405)
    reply = raw("DELETE", "/health")
    refused(reply, "MethodNotAllowed", status=405)
    assert "GET" in reply.headers["Allow"]
    refused(raw.data("POST", "/write", b"x", Expect="200-maybe"), status=417)
    assert raw("HEAD", "/health").status == 405


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/v1/tables/other/deltaproof/view", "InstanceNotFound"),
        (f"/api/v1/tables/{INSTANCE}/other/view", "ProjectNotFound"),
        (f"/api/v1/tables/{INSTANCE}/deltaproof/other", "ViewNotFound"),
        (f"/api/v1/tables/{INSTANCE}/deltaproof/..%2fview", "ViewNotFound"),
        (f"/api/v1/tables/{INSTANCE}/deltaproof/view%00", "ViewNotFound"),
    ],
)
def test_unknown_tables(server: FeatureStoreServer, raw: Raw, path: str, code: str) -> None:
    for method, route, body in (
        ("POST", WRITE, GOOD),
        ("POST", "/write", b"{}"),
        ("POST", f"/lookup_arrow?version={VERSION}", GOOD),
        ("POST", f"/snapshots?version={VERSION}", None),
        ("GET", "/snapshots/abc/scan", None),
        ("GET", f"/iterate_get_kv?version={VERSION}", None),
        ("GET", f"/high_water_ts?version={VERSION}", None),
    ):
        refused(raw(method, path + route, body=body, headers=raw.login), code, status=404)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "InvalidVersion"),
        ("version=%ff", "InvalidParameter"),
        ("version=", "InvalidVersion"),
        ("version=%20", "InvalidVersion"),
        ("version=%0a", "InvalidVersion"),
        ("version=v1&version=v2", "InvalidParameter"),
        ("version=" + "x" * 257, "InvalidVersion"),
        ("version=v1&ts=0", "InvalidTimestamp"),
        ("version=v1&ts=-5", "InvalidTimestamp"),
        ("version=v1&ts=1e3", "InvalidTimestamp"),
        ("version=v1&ts=9223372036854775808", "InvalidTimestamp"),
        ("version=v1&ts=%C2%B2", "InvalidTimestamp"),  # a digit to str.isdigit, none to int()
        ("version=v1&ts=5&write_mode=REPLACE", "InvalidParameter"),
    ],
)
def test_wrong_write_parameters(server: FeatureStoreServer, raw: Raw, query: str, code: str) -> None:
    refused(raw.data("POST", f"/write_arrow?{query}", GOOD), code, status=400)
    untouched(server)


@pytest.mark.parametrize("ts", ["0", "-5", "1e3", "9223372036854775808", '"7"', "true", "null", "1.5"])
def test_a_wrong_ts_beside_json_rows_has_the_code_of_one(server: FeatureStoreServer, raw: Raw, ts: str) -> None:
    body = f'{{"content": [], "version": "{VERSION}", "ts": {ts}}}'.encode()
    refused(raw.data("POST", "/write", body), "InvalidTimestamp", status=400)


@pytest.mark.parametrize("ts", ["-1", "1e3", "9223372036854775808"])
def test_a_wrong_cursor_has_the_code_of_a_wrong_ts(raw: Raw, ts: str) -> None:
    refused(raw.data("GET", f"/iterate_get_kv?version={VERSION}&ts={ts}"), "InvalidTimestamp", status=400)


def test_snapshots_belong_to_their_table_and_are_bounded(server: FeatureStoreServer, raw: Raw) -> None:
    assert raw.data("POST", WRITE, GOOD).status == 200
    first = json.loads(raw.data("POST", f"/snapshots?version={VERSION}").data)["data"]["snapshot_id"]
    server.store.create_view(type(server.store.view(PROJECT, VIEW))(PROJECT, "second", "entity"))
    other = raw.table.replace("/view", "/second")
    refused(raw("GET", f"{other}/snapshots/{first}/scan", headers=raw.login), "SnapshotNotFound", status=404)
    assert raw.data("GET", f"/snapshots/{first}/scan").status == 200
    for _ in range(70):
        raw.data("POST", f"/snapshots?version={VERSION}")
    refused(raw.data("GET", f"/snapshots/{first}/scan"), "SnapshotNotFound", status=404)


def test_admin_answers_on_loopback_only(server: FeatureStoreServer, raw: Raw) -> None:
    for remote in ("127.0.0.1", "::1", "127.3.2.1"):
        check_loopback(remote)
    elsewhere: list[str | None] = ["10.0.0.1", "8.8.8.8", "::ffff:8.8.8.8", "fe80::1%eth0", "", None, "localhost"]
    for peer in elsewhere:
        with pytest.raises(AccessDenied):
            check_loopback(peer)
        with pytest.raises(AccessDenied):
            identify(server.state, cast(web.Request, SimpleNamespace(remote=peer)), "admin")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/_admin/reset"), ("GET", "/_admin/requests")])
def test_a_web_page_of_another_origin_cannot_use_the_admin_routes(
    server: FeatureStoreServer, raw: Raw, method: str, path: str, headers: dict[str, str]
) -> None:
    refused(raw(method, path, headers=headers), "AccessDenied", status=403)
    assert server.store.view(PROJECT, VIEW).name == VIEW


def test_a_page_of_the_server_itself_may_use_the_admin_routes(raw: Raw) -> None:
    for headers in (
        {"Origin": raw.base},
        {"Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:1"},
        {"Host": "[::1]"},
    ):
        assert raw("GET", "/_admin/requests", headers=headers).status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [('{"projects": 5}', "InvalidParameter"), ('{"projects": ["a/b"]}', "InvalidParameter"), ("[]", "MalformedBody")],
)
def test_a_refused_reset_changes_nothing(server: FeatureStoreServer, raw: Raw, body: str, code: str) -> None:
    refused(raw("POST", "/_admin/reset", body=body), code, status=400)
    assert server.store.view(PROJECT, VIEW).name == VIEW


def test_wrong_admin_parameters(raw: Raw) -> None:
    refused(raw("GET", "/_admin/log"), "InvalidParameter", status=400)
    refused(raw("GET", "/_admin/log?project=x&view=y"), "ViewNotFound", status=404)
    refused(raw("GET", "/_admin/requests?since=-1"), "InvalidParameter", status=400)
    refused(raw("GET", "/_admin/requests?since=x"), "InvalidParameter", status=400)
    refused(raw("PUT", "/_admin/faults", body=b"\xff"), "InvalidParameter", status=400)


def test_random_bytes_as_values_come_back_as_sent(server: FeatureStoreServer, raw: Raw) -> None:
    """Any finite bit pattern is a legal value, denormals included."""
    bits = np.random.default_rng(3).integers(0, 2**32, size=4096, dtype=np.uint32).view(np.float32)
    values = bits[np.isfinite(bits)][:4000]
    batch = rows(["t"], [1], [values.tolist()])
    assert raw.data("POST", WRITE, ipc(batch)).status == 200
    request = ipc(pa.RecordBatch.from_pydict({"pk": ["t"], "sk": [1]}))
    reply = raw.data("POST", f"/lookup_arrow?version={VERSION}", request)
    found = pa.ipc.open_stream(reply.data).read_all().column("embedding").combine_chunks().values.to_numpy()
    assert found.tobytes() == values.tobytes()

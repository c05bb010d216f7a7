"""Broken Arrow streams and broken HTTP, systematically and at random: refused with 4xx, in little time and memory."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from urllib3.util import wait_for_read

from deltaproof.fakes.errors import FakeError
from deltaproof.fakes.server import FeatureStoreServer, wire
from deltaproof.fakes.server.serve import wall_store

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

MIB = 2**20
WAIT_S = 20.0
TWO = rows(["t", "u"], [1, 2**60], [[1.0, 2.0], [3.0]])
KEYS = pa.RecordBatch.from_arrays([pa.array(["t", "u"]), pa.array([1, 2], pa.int64())], ["pk", "sk"])

# One column of every kind that Arrow has, two rows each, where a table's name, its key or its embedding should stand.
COLUMNS: dict[str, list[Any]] = {
    "pk": [
        pa.array(["t", "u"], kind)
        for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))
    ]
    + [
        pa.array([b"t", b"u"], kind)
        for kind in (
            pa.binary(),
            pa.large_binary(),
            pa.binary_view(),
            pa.binary(1),
            pa.dictionary(pa.int8(), pa.binary()),
        )
    ]
    + [pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(["t", "u"])), pa.nulls(2)],
    "sk": [
        pa.array([1, 2], kind)
        for kind in (
            *(pa.int8(), pa.uint64(), pa.float64(), pa.decimal128(9, 2), pa.decimal256(9, 2)),
            *(pa.timestamp("ms", "UTC"), pa.date64(), pa.time64("ns"), pa.duration("s")),
        )
    ]
    + [pa.array([True, False]), pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())],
    "embedding": [
        pa.array([[1.0], [2.0]], kind)
        for kind in (
            *(pa.large_list(pa.float32()), pa.list_view(pa.float32()), pa.large_list_view(pa.float32())),
            *(pa.list_(pa.float64()), pa.list_(pa.float32(), 1), pa.list_(pa.dictionary(pa.int8(), pa.float32()))),
        )
    ]
    + [
        pa.array([[[1.0]], [[2.0]]], pa.list_(pa.list_(pa.float32()))),
        pa.array([{"a": 1.0}] * 2),
        pa.array([[("a", 1.0)]] * 2, pa.map_(pa.string(), pa.float32())),
        pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1.0]), pa.array(["x"])]
        ),
        pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1.0] * 2), pa.array(["x"] * 2)]),
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 2), np.float32)),
    ],
}
ODD = [TWO.set_column(TWO.schema.get_field_index(name), name, column) for name in COLUMNS for column in COLUMNS[name]]


def several() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TWO.schema) as writer:
        for _ in range(3):
            writer.write_batch(TWO)
    return sink.getvalue().to_pybytes()


def schema_alone(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    return sink.getvalue().to_pybytes()


SEEDS = [ipc(TWO), several(), ipc(KEYS), schema_alone(TWO.schema), *map(ipc, ODD)]
STORE = wall_store()
make_view(STORE)


def take(body: bytes) -> str:
    """What both Arrow routes do with a body, short of the socket. What it raises but FakeError would be a 500."""
    try:
        batch = wire.read_arrow(pa.py_buffer(body))
        batch.validate(full=True)
        with suppress(FakeError):
            STORE.check_write(PROJECT, VIEW, batch, version=VERSION, ts=1)
        STORE.lookup(PROJECT, VIEW, VERSION, *wire.key_columns(batch))
    except FakeError as error:
        return error.code
    return "taken"


def test_whole_streams_are_taken() -> None:
    assert [take(ipc(KEYS)), take(schema_alone(KEYS.schema))] == ["taken"] * 2
    assert take(ipc(TWO)) == "SchemaMismatch"  # a write is no lookup
    STORE.check_write(PROJECT, VIEW, wire.read_arrow(several()).slice(0, 1), version=VERSION, ts=1)


@pytest.mark.parametrize("batch", ODD, ids=[str(n) for n in range(len(ODD))])
def test_columns_of_every_other_kind_are_refused(server: FeatureStoreServer, raw: Raw, batch: pa.RecordBatch) -> None:
    make_view(server.store)
    for body in (ipc(batch), schema_alone(batch.schema)):
        for path in (f"/write_arrow?version={VERSION}&ts=1", f"/lookup_arrow?version={VERSION}"):
            reply = raw.data("POST", path, body)
            assert reply.status == 400, reply.data
            assert json.loads(reply.data)["Code"] in ("SchemaMismatch", "MalformedBody", "InvalidParameter")


EXTREMES = (-1, 0, 1, 7, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))


@pytest.mark.parametrize("seed", range(4))
def test_every_number_of_a_stream_may_be_any_other(seed: int) -> None:
    """Lengths, offsets, counts and types, one by one, each as 2, 4 or 8 bytes: memory follows the bytes that are there,
    whatever they declare.
    """
    body, slowest, usual = SEEDS[seed], 0.0, pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        for size, form in ((2, "<H"), (4, "<I"), (8, "<Q")):
            for at in range(0, len(body) - size + 1, min(size, 4)):
                for number in {extreme % 256**size for extreme in EXTREMES}:
                    before = time.monotonic()
                    take(body[:at] + struct.pack(form, number) + body[at + size :])
                    slowest = max(slowest, time.monotonic() - before)
    finally:
        pa.set_memory_pool(usual)
    assert slowest < WAIT_S / 4
    assert pool.bytes_allocated() == 0
    assert pool.max_memory() < MIB


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(["flip", "number", "cut", "insert", "move"]),
        st.integers(0, 2**64 - 1) | st.sampled_from([extreme % 2**64 for extreme in EXTREMES]),
    ),
    min_size=1,
    max_size=8,
)


def edited(body: bytes, edits: list[tuple[float, str, int]]) -> bytes:
    data = bytearray(body)
    for place, kind, number in edits:
        at = int(place * len(data))
        match kind:
            case "flip":
                data[at] ^= 1 << number % 8
            case "number":
                at &= ~3
                data[at : at + 4 * (1 + number % 2)] = struct.pack("<Q", number)[: 4 * (1 + number % 2)]
            case "cut":
                del data[at : at + 1 + number % 64]
            case "insert":
                data[at:at] = struct.pack("<Q", number)
            case _:
                data[at : at + 16] = data[number % len(data) :][:16]
        data = data or bytearray(b"\0")
    return bytes(data)


@settings(max_examples=700, deadline=None)
@given(st.sampled_from(SEEDS), EDITS)
def test_edited_streams_are_refused_or_taken(body: bytes, edits: list[tuple[float, str, int]]) -> None:
    take(edited(body, edits))


def nested(kind: str, depth: int) -> pa.Schema:
    inner = pa.float32()
    for _ in range(depth):
        inner = pa.list_(inner) if kind == "list" else pa.struct([("a", inner)])
    return pa.schema([("embedding", inner)])


def repeated(schema: pa.Schema) -> bytes:
    """Two batches without rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(2):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((schema_alone(nested(kind, depth)), "") for kind in ("list", "struct") for depth in (60, 100, 1000)),
        (schema_alone(pa.schema([(f"c{number}", pa.int8()) for number in range(100_000)])), "schema of over"),
        (repeated(pa.schema([(f"c{number}", pa.null()) for number in range(17)])), "over 16 fields"),
        (repeated(nested("struct", 16)), "over 16 fields"),
        (repeated(nested("struct", 15)), "columns"),
        (schema_alone(TWO.schema.with_metadata({b"x": b"y" * 30 * MIB})), "schema of over"),
        (ipc(rows([f"n{number}" for number in range(100_000)], list(range(100_000)), [[1.0]] * 100_000)), "columns"),
        (ipc(pa.RecordBatch.from_arrays([pa.nulls(2**31 - 2)] * 2, ["pk", "sk"])), "columns"),
    ],
    ids=[
        *("60 lists", "100 lists", "1000 lists", "60 structs", "100 structs", "1000 structs"),
        *("100,000 columns", "17 columns twice", "16 structs twice", "15 structs twice"),
        *("30 MiB of metadata", "100,000 names", "2^31 nulls"),
    ],
)
def test_large_and_deep_streams_are_refused(server: FeatureStoreServer, raw: Raw, body: bytes, words: str) -> None:
    make_view(server.store)
    for path in (f"/write_arrow?version={VERSION}&ts=1", f"/lookup_arrow?version={VERSION}"):
        reply = raw.data("POST", path, body)
        assert reply.status == 400
    assert words.replace("columns", "column") in json.loads(reply.data)["Message"]
    assert server.store.versions(PROJECT, VIEW) == []


# Below and around HTTP


@pytest.fixture(scope="module")
def impatient() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer(body_timeout_s=1.0) as running:
        make_view(running.store)
        yield running


def ask(server: FeatureStoreServer, request: bytes, *more: bytes) -> tuple[int, bytes]:
    """Status and body of the first reply to these bytes, ``more`` of which come a moment later; (0, …) when the line is
    closed or reset without one.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock, suppress(ConnectionError):
        with suppress(ConnectionError):  # whoever is refused early, and slow, may be answered and cut off by now
            for part in (request, *more):
                sock.sendall(part)
                wait_for_read(sock, 0.1 if more else 0)
        while True:
            head, end, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            if end and length and len(body) >= int(length[1]):
                return int(head.split()[1]), body[: int(length[1])]
            chunk = sock.recv(65536)
            if not chunk:
                break
            received += chunk
    return 0, received


def check(server: FeatureStoreServer, request: bytes, *allowed: int) -> None:
    status, body = ask(server, request)
    assert status in allowed, (status, body[:300])
    if status >= 400:
        assert set(json.loads(body)) == {"Code", "Message", "RequestId"}
        assert len(body) < 2000
    assert ask(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        *("*", "?a=b", "http://", "://", "https://x:99999/health", "http://[::1/health", "/health\x00", "/hea\tlth"),
        *("/../../etc/passwd", "//api/v1/instances", "/api/v1/instances/..%2f..", "/api/v1/instances;x=1"),
        *("/api/v1/instances/", "/API/v1/instances", "/%", "/%zz", "/\\..\\x", "/api/v1/instances/" + "%41" * 2000),
        *("http://evil.example/_admin/requests", "//127.0.0.1/_admin/requests", "/_admin/..%2f_admin/requests"),
        *("/_admin/requests#", "/health#", "/health?" + "a" * 9000, "/" + "a/" * 4000),
    ],
)
def test_odd_targets(impatient: FeatureStoreServer, target: str) -> None:
    for method in ("GET", "POST", "CONNECT"):
        check(impatient, f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400, 403, 404, 405)


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PRI", "get", "G" * 5000, "", " ", "GET GET", "PURGE", "\x00"])
def test_odd_methods(impatient: FeatureStoreServer, method: str) -> None:
    check(impatient, f"{method} /health HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400, 405)


@pytest.mark.parametrize(
    "host",
    ["", "\x00", "a" * 5000, "[::1", "127.0.0.1:-1", "127.0.0.1.", "127.0.0.1%x.example", "é", "x\r\nHost: 127.0.0.1"],
)
def test_odd_hosts_do_not_open_the_admin_routes(impatient: FeatureStoreServer, host: str) -> None:
    check(impatient, f"GET /_admin/requests HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), 400, 403)


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"X%d: y\r\n" % number for number in range(20_000)),
        b"X: " + b"y" * 3_000_000 + b"\r\n",
        b"y" * 3_000_000 + b": x\r\n",
        b"X: a\r\n b\r\n",
        b"X: a\rb\r\n",
        b": x\r\n",
        b"X\x00: x\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length: 9223372036854775807\r\n",
    ],
    ids=lambda headers: repr(headers[:40]),
)
def test_odd_and_oversized_headers(impatient: FeatureStoreServer, raw: Raw, headers: bytes) -> None:
    login = "".join(f"{name}: {value}\r\n" for name, value in raw.login.items()).encode()
    head = f"POST {raw.table}/write_arrow?version=v1&ts=1 HTTP/1.1\r\nHost: x\r\n".encode()
    check(impatient, head + login + headers + b"\r\n", 0, 400, 413)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", zlib.compress(bytes(100 * MIB), wbits=31)),
        ("deflate", zlib.compress(bytes(100 * MIB))),
        ("gzip", zlib.compress(zlib.compress(bytes(60 * MIB), wbits=31), wbits=31)),
        ("gzip, gzip", zlib.compress(zlib.compress(bytes(60 * MIB), wbits=31), wbits=31)),
        ("gzip", zlib.compress(ipc(TWO), wbits=31)[:-30]),
        ("gzip", zlib.compress(ipc(TWO), wbits=31) + b"x" * 100),
        ("gzip", b"\x1f\x8b" + bytes(100)),
        ("gzip", b""),
        ("deflate", b"0"),
        ("deflate", b"\x00\x00\xc0\x7f"),
        ("deflate", zlib.compress(ipc(TWO))[:-30]),
        ("br", b"\xff" * 50),
        ("zstd", b"\xff" * 50),
        ("identity, gzip", b"\xff" * 50),
    ],
    ids=[
        *("bomb", "deflated bomb", "bomb in a bomb", "bomb twice", "cut off", "more behind", "no gzip", "empty"),
        *("one byte", "no deflate", "deflated and cut off", "no brotli", "no zstd", "unknown"),
    ],
)
def test_compressed_bodies(impatient: FeatureStoreServer, raw: Raw, encoding: str, body: bytes) -> None:
    for path in ("/write_arrow?version=v1&ts=1", "/write", "/lookup_arrow?version=v1", "/batch_get_kv2?version=v1"):
        head = f"POST {raw.table}{path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
        allowed = (413,) if len(body) > 50_000 else (400,)  # and no 408: nobody waits for what cannot come
        head += f"Content-Length: {len(body)}\r\n\r\n"
        check(impatient, head.encode() + body, *allowed)
        assert ask(impatient, head.encode(), body[:1], body[1:])[0] in allowed


@pytest.mark.parametrize(
    "body",
    [
        b"5;" + b"x" * MIB + b"\r\nabcde\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\nabc",
        b"7fffffffffffffff\r\n" + b"x" * MIB,
        b"-5\r\nabcde\r\n",
        b"5 \r\nabcde\r\n0\r\n\r\n",
        b"5\nabcde\n0\n\n",
        b"5\r\nabcdefgh\r\n0\r\n\r\n",
        b"5\r\nabcde\r\n0\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
        b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n",
        b"0\r\n\r\n",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_odd_chunks(impatient: FeatureStoreServer, raw: Raw, body: bytes) -> None:
    head = f"POST {raw.table}/write_arrow?version=v1&ts=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    check(impatient, f"{head}\r\n".encode() + body, 0, 400, 408)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "TLS/1.0"])
def test_no_upgrade_is_made(impatient: FeatureStoreServer, upgrade: str) -> None:
    head = (
        f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\nSec-WebSocket-Version: 13\r\n"
    )
    check(impatient, head.encode() + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n" + b"\x81\x85" * 50, 200)

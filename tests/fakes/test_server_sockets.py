"""Clients that trickle, rest, or do not read, seen from a socket: each wait has an end, and the honest are served."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from urllib3.util import wait_for_read

from deltaproof.fakes.server import FeatureStoreServer, connection
from deltaproof.fakes.server.connection import REPLY_BYTES_MIN
from deltaproof.fakes.store import write_schema

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

TIMEOUT_S = 0.5  # the server server's
WAIT_S = 20.0  # a deadline of the tests: far longer than the server waits
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
PIECES = [
    b"G",
    b"GET /health HT",
    b"GET /health HTTP/1.1\r\nHost: x",
    b"GET /health HTTP/1.1\r\nHost: x\r\n",
    b"\r\nGET",
]


@pytest.fixture
def server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer(body_timeout_s=TIMEOUT_S) as running:
        make_view(running.store)
        yield running


@pytest.fixture
def sock(server: FeatureStoreServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as made:
        yield made


def read_reply(sock: socket.socket) -> bytes:
    """One reply with Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = sock.recv(65536)
        assert chunk, data
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += sock.recv(65536)
    assert len(body) == length
    return head


def closed_after(sock: socket.socket, trickle: Callable[[], bytes] = lambda: b"", reads: bool = True) -> float:
    """Send trickles until the server closes the connection; how long that took."""
    begun = time.monotonic()
    while (taken := time.monotonic() - begun) < WAIT_S:
        try:
            if data := trickle():
                sock.sendall(data)
            if wait_for_read(sock, 0.05) and reads and sock.recv(65536) == b"":
                return taken
        except ConnectionError:
            return taken
    raise AssertionError(f"still open after {WAIT_S:g} s")


def is_open(sock: socket.socket, for_s: float) -> bool:
    return not wait_for_read(sock, for_s)


def post(raw: Raw, body: bytes, chunked: bool = False) -> bytes:
    head = f"POST {raw.table}/write_arrow?version={VERSION}&ts=7 HTTP/1.1\r\nHost: x\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    if chunked:
        return f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def firsts(raw: Raw) -> dict[str, bytes]:
    body = ipc(rows(["t"], [1], [[1.0]]))
    return {
        "no body": WHOLE,
        "a body": post(raw, body),
        "a chunked body": post(raw, body, chunked=True),
        "a refused one": WHOLE.replace(b"health", b"nothing"),
    }


# Heads


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("first", ["no body", "a body", "a chunked body", "a refused one"])
def test_a_piece_of_a_head_in_one_segment_with_the_request_before_it(
    server: FeatureStoreServer, raw: Raw, sock: socket.socket, first: str, piece: bytes
) -> None:
    sock.sendall(firsts(raw)[first] + piece)
    read_reply(sock)
    assert TIMEOUT_S / 2 < closed_after(sock) < WAIT_S


@pytest.mark.parametrize("first", ["no body", "a body", "a chunked body", "a refused one"])
def test_silence_between_requests_may_last(
    server: FeatureStoreServer, raw: Raw, sock: socket.socket, first: str
) -> None:
    for rest in (b"", b"\r\n", b"", b"\r\n\r\n"):  # empty lines between requests mean nothing
        request = firsts(raw)[first] + rest
        sock.sendall(request[:-9])
        assert is_open(sock, 0.1 * TIMEOUT_S)  # so that the rest comes by itself
        sock.sendall(request[-9:])
        read_reply(sock)
        assert is_open(sock, 3 * TIMEOUT_S)
    sock.sendall(WHOLE)
    assert read_reply(sock).startswith(b"HTTP/1.1 200")


def test_a_head_may_take_its_time_after_a_rest(server: FeatureStoreServer, sock: socket.socket) -> None:
    for pause_s in (0.0, 0.8 * TIMEOUT_S, 1.2 * TIMEOUT_S, 2.5 * TIMEOUT_S):
        sock.sendall(WHOLE)
        read_reply(sock)
        assert is_open(sock, pause_s)
        for part in (WHOLE[:5], WHOLE[5:20]):
            sock.sendall(part)
            assert is_open(sock, 0.3 * TIMEOUT_S)
        sock.sendall(WHOLE[20:])
        assert read_reply(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("first", [b"", WHOLE])
def test_a_head_that_trickles_after_one_segment(server: FeatureStoreServer, sock: socket.socket, first: bytes) -> None:
    sock.sendall(first + b"GET /health HTTP/1.1\r\nX: ")
    assert closed_after(sock, lambda: b"y") < WAIT_S / 2


def test_a_piece_that_came_while_a_request_was_handled(
    server: FeatureStoreServer, raw: Raw, sock: socket.socket
) -> None:
    plan = b'[{"id": "slow", "kind": "delay", "route": "health", "delay_ms": %d}]' % (2500 * TIMEOUT_S)
    assert raw("PUT", "/_admin/faults", body=plan).status == 200
    sock.sendall(WHOLE)
    sock.sendall(b"GET /he")
    assert read_reply(sock).startswith(b"HTTP/1.1 200"), "a request under way was cut off"
    assert closed_after(sock) < WAIT_S


def test_pipelined_requests_are_all_answered(server: FeatureStoreServer, sock: socket.socket) -> None:
    sock.sendall(WHOLE * 100 + b"GET /he")
    received = b""
    while received.count(b"HTTP/1.1 200") < 100:
        chunk = sock.recv(65536)
        assert chunk
        received += chunk
    assert closed_after(sock) < WAIT_S


# Replies


def fill(server: FeatureStoreServer, megabytes: int) -> None:
    count, dim = 16 * megabytes, 2**14
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * dim)
    values = pa.array(np.zeros(count * dim, dtype=np.float32))
    columns = [pa.array(["t"] * count), pa.array(np.arange(count)), pa.ListArray.from_arrays(offsets, values)]
    batch = pa.RecordBatch.from_arrays(columns, schema=write_schema("float32"))
    server.store.write(PROJECT, VIEW, batch, version=VERSION, ts=1)


def narrow(server: FeatureStoreServer) -> socket.socket:
    """A connection whose client keeps little of what it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    return sock


def request_of_much(raw: Raw, what: str) -> bytes:
    """A request whose reply is tens of MiB. Made before the connection: it takes its time."""
    login = "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    head = f" HTTP/1.1\r\nHost: x\r\n{login}"
    if what == "a stream":
        return f"GET {raw.table}/iterate_get_kv?version={VERSION}{head}\r\n".encode()
    if what == "many small ones":
        # Not very small: on a busy machine it takes long until some hundred bytes each fill what waits to be read.
        return f"GET / HTTP/1.1\r\nHost: localhost\r\nX: {'y' * 4000}\r\n\r\n".encode() * 30_000
    count = 60 if what == "one body" else 640
    keys = ipc(pa.RecordBatch.from_arrays([pa.array(["t"] * count), pa.array(np.arange(count))], ["pk", "sk"]))
    lookup = f"POST {raw.table}/lookup_arrow?version={VERSION}{head}Content-Length: {len(keys)}\r\n\r\n"
    return lookup.encode() + keys


@pytest.mark.parametrize("what", ["a stream", "one body", "a long lookup", "many small ones"])
def test_a_client_that_never_reads_its_reply_is_cut_off(server: FeatureStoreServer, raw: Raw, what: str) -> None:
    fill(server, 40)
    request = request_of_much(raw, what)
    with narrow(server) as sock:
        sender = threading.Thread(target=_send_all, args=(sock, request), daemon=True)
        sender.start()
        deadline = time.monotonic() + WAIT_S
        while not _is_reset(sock):
            assert time.monotonic() < deadline, "still open"
        sender.join(WAIT_S)
    assert not sender.is_alive()
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as other:
        other.sendall(WHOLE)
        assert read_reply(other).startswith(b"HTTP/1.1 200")


def _send_all(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        sock.sendall(data)


def _is_reset(sock: socket.socket) -> bool:
    """Whether the peer has reset the connection, without reading from it."""
    poll = select.poll()
    poll.register(sock, select.POLLERR | select.POLLHUP)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(50))


def test_a_client_that_reads_slowly_gets_it_all(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than the reply's timeout in all, but never less than the minimum within it."""
    monkeypatch.setattr(connection, "REPLY_BYTES_MIN", REPLY_BYTES_MIN // 4)
    fill(server, 40)
    request = request_of_much(raw, "a stream")
    begun = time.monotonic()
    received = 0
    with narrow(server) as sock:
        sock.sendall(request)
        while received < 40 * 2**20:
            chunk = sock.recv(2**20)
            assert chunk, f"cut off after {received} bytes, {time.monotonic() - begun:.1f} s"
            received += len(chunk)
            ahead_s = begun + received / (8 * 2**20) - time.monotonic()  # of 8 MiB/s, many times the minimum
            if received < 16 * 2**20 and ahead_s > 0.02:
                time.sleep(ahead_s)
    assert time.monotonic() - begun > 2 * TIMEOUT_S


def test_a_client_that_reads_drop_by_drop_is_cut_off(server: FeatureStoreServer, raw: Raw) -> None:
    fill(server, 40)
    request = request_of_much(raw, "a long lookup")
    with narrow(server) as sock:
        sock.sendall(request)
        begun = time.monotonic()
        try:
            while sock.recv(1000):
                assert time.monotonic() - begun < WAIT_S
                time.sleep(0.02)  # 50 kB/s
            raise AssertionError("an orderly end")
        except ConnectionResetError:
            pass


def test_a_closing_connection_does_not_wait_for_a_reader(server: FeatureStoreServer, raw: Raw) -> None:
    fill(server, 40)
    request = request_of_much(raw, "one body").replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    with narrow(server) as sock:
        sock.sendall(request)
        deadline = time.monotonic() + WAIT_S
        while not _is_reset(sock):
            assert time.monotonic() < deadline, "still open"


@pytest.mark.parametrize("what", ["a stream", "one body", "a long lookup"])
def test_a_stopped_server_has_closed_what_nobody_read(what: str) -> None:
    with FeatureStoreServer() as patient:
        make_view(patient.store)
        fill(patient, 40)
        raw = Raw(patient)
        request = request_of_much(raw, what)
        with narrow(patient) as sock:
            sock.sendall(request)
            assert sock.recv(1)
            patient.stop()
            assert _is_reset(sock)
        raw.close()

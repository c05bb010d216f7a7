"""Large uploads go through in windows, and clients that trickle are cut off."""

from __future__ import annotations

import itertools
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from deltaproof.fakes.feature_store_py import FeatureStoreClient, transport
from deltaproof.fakes.feature_store_py.transport import WINDOW_BYTES, to_ipc, to_ipc_windows
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.store import write_schema

from .kit import PROJECT, VERSION, VIEW, Backend, Raw, make_view

MIB = 2**20


def large(count: int, dim: int) -> pa.RecordBatch:
    values = np.arange(count * dim, dtype=np.float32)
    offsets = np.arange(count + 1, dtype=np.int32) * dim
    columns = [
        pa.array(["t"]).take(pa.array(np.zeros(count, np.int64))),
        pa.array(np.arange(count)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=write_schema("float32"))


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_windows_add_up_to_the_batch(count: int) -> None:
    batch = large(count, 16)
    for window_bytes in (1, 500, 10**9):
        length, chunks = to_ipc_windows(batch.slice(count // 2), window_bytes)
        parts = list(chunks)
        assert sum(map(len, parts)) == length
        table = pa.ipc.open_stream(b"".join(parts)).read_all()
        assert table.equals(pa.Table.from_batches([batch.slice(count // 2)]))
        if window_bytes == 500:
            assert max(map(len, parts)) < 500 + 1000


def test_a_large_upload_leaves_few_python_objects(
    server: FeatureStoreServer, connect: Callable[..., FeatureStoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_view(server.store)
    view = Backend("http", server.store, connect, server).view()
    view._batch_size = 10**9
    batch = large(100_000, 128)
    assert batch.nbytes > 48 * MIB
    named = batch.rename_columns(["embedding_name", "key_id", "embedding"])
    view.write_features_arrow(named.slice(0, 10), VERSION, ts=1)  # warm up
    assert not view.write_flush()["errors"]
    write, peaks = server.store.write, []

    def observed(*arguments: Any, **keywords: Any) -> Any:
        peaks.append(
            tracemalloc.get_traced_memory()[1]
        )  # all of client, transport and decoding, before the store's own
        return write(*arguments, **keywords)

    def whole(batch: pa.RecordBatch) -> pa.Buffer:
        assert batch.nbytes <= WINDOW_BYTES, "a large batch was encoded in one piece"
        return to_ipc(batch)

    monkeypatch.setattr(transport, "to_ipc", whole)
    monkeypatch.setattr(server.store, "write", observed)
    rss = psutil.Process().memory_info().rss
    tracemalloc.start()  # client and server both run in this process
    try:
        view.write_features_arrow(named, VERSION, ts=2)
        assert not view.write_flush()["errors"]
    finally:
        tracemalloc.stop()
    assert len(peaks) == 1
    assert peaks[0] < 5 * WINDOW_BYTES < batch.nbytes / 2
    # One copy as it came, one joined, the store's own two: all columnar.
    assert psutil.Process().memory_info().rss - rss < 6 * batch.nbytes
    assert server.store.rows(PROJECT, VIEW, VERSION) == 100_000
    found = view.lookup_arrow(VERSION, pa.array(["t"]), pa.array([99_999]))
    assert found.column("embedding")[0].as_py()[-1] == batch.column("embedding")[99_999].as_py()[-1]


def test_a_body_over_the_limit_is_refused_by_its_length() -> None:
    def connect(username: str) -> FeatureStoreClient:
        return FeatureStoreClient("deltaproof", "deltaproof", None, server.endpoint, None, username, "password")

    with FeatureStoreServer(body_bytes_max=5 * MIB) as server:
        make_view(server.store)
        view = Backend("http", server.store, connect, server).view()
        view._batch_size = 10**9
        batch = large(20_000, 128).rename_columns(["embedding_name", "key_id", "embedding"])
        view.write_features_arrow(batch, VERSION, ts=2)
        (error,) = view.write_flush()["errors"]
        assert error.code in ("BodyTooLarge", "ConnectionLost")  # the refusal may come while the body is being sent
        assert server.requests()[-1].code == "BodyTooLarge"
        assert server.store.rows(PROJECT, VIEW, VERSION) == 0


# Slow clients


@pytest.fixture
def impatient() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer(body_timeout_s=0.4) as running:
        yield running


def open_until(sock: socket.socket, trickle: Callable[[], bytes]) -> float:
    """Send one trickle after another until the server hangs up; how long that took (at most 20 s)."""
    started = time.monotonic()
    sock.settimeout(0.05)
    while time.monotonic() < started + 20:
        try:
            if data := trickle():
                sock.sendall(data)
            if sock.recv(100) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_trickles_is_cut_off(impatient: FeatureStoreServer, start: bytes) -> None:
    numbers = itertools.count()
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as sock:
        if start:
            sock.sendall(start)
        assert open_until(sock, lambda: b"X-%d: y\r\n" % next(numbers) if start else b"") < 15


def test_a_second_head_is_timed_too_but_rest_between_is_allowed(impatient: FeatureStoreServer) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as sock:
        sock.sendall(whole)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.settimeout(1.0)
        with pytest.raises(TimeoutError):  # longer than the time for a head: still open
            sock.recv(1)
        sock.sendall(whole)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(whole[:10])
        assert open_until(sock, lambda: b"") < 15


def test_many_slow_clients_do_not_stop_the_others(impatient: FeatureStoreServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", impatient.port), timeout=10) for _ in range(200)]
    try:
        for sock in slow:
            sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        raw = Raw(impatient)
        assert raw("GET", "/health").status == 200
        raw.close()
        assert open_until(slow[-1], lambda: b"") < 15
        deadline = time.monotonic() + 15
        while not all(_is_closed(sock) for sock in slow):
            assert time.monotonic() < deadline
    finally:
        for sock in slow:
            sock.close()


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.05)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True

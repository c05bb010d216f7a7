"""Reads and requests larger than memory: in bounded batches, whole or with an error, and the connection used again."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import urllib3
from urllib3.connection import HTTPConnection

from deltaproof.fakes.errors import BodyTooLarge
from deltaproof.fakes.feature_store_py import (
    Batches,
    DynamicEmbeddingFeatureView,
    FeatureStoreClient,
    TransportError,
    in_process_client,
)
from deltaproof.fakes.feature_store_py import transport as transports
from deltaproof.fakes.server import FeatureStoreServer, windows
from deltaproof.fakes.server.faults import ResetFault, SlowBodyFault, TruncateFault
from deltaproof.fakes.store import Store, read_schema, write_schema

from .kit import PROJECT, VERSION, VIEW, Backend, make_view, sdk_rows

MIB = 2**20
READS: dict[str, Callable[[DynamicEmbeddingFeatureView], Batches]] = {
    "scan": lambda view: view.scan_batches(VERSION),
    "changes": lambda view: view.read_changes_batches(VERSION, 0),
}


def fill(store: Store, count: int, dim: int, ts: int = 5, pk: str = "t") -> None:
    values = np.arange(count * dim, dtype=np.float32)
    offsets = np.arange(count + 1, dtype=np.int32) * dim
    columns = [
        pa.repeat(pk, count),
        pa.array(np.arange(count)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=write_schema("float32"))
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=ts)


@pytest.fixture(params=sorted(READS))
def read(request: pytest.FixtureRequest) -> Callable[[DynamicEmbeddingFeatureView], Batches]:
    return READS[request.param]


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (windows, transports):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1000)
    return 1000


def test_batches_are_small_and_add_up(
    backend: Backend, read: Callable[[DynamicEmbeddingFeatureView], Batches], small_windows: int
) -> None:
    fill(backend.store, 100, 4, pk="a")
    fill(backend.store, 50, 40, pk="b")
    view = backend.view()
    found = read(view)
    assert found.schema == read_schema("float32")
    parts = list(found)
    assert len(parts) > 10
    assert max(part.nbytes for part in parts) <= small_windows
    table = pa.Table.from_batches(parts)
    assert table.equals(view.scan(VERSION))
    assert table.equals(view.read_changes(VERSION, 0)[0])
    assert table.column("sk").to_pylist() == [*range(100), *range(50)]
    assert list(found) == []


def test_nothing_has_a_schema_too(backend: Backend, read: Callable[[DynamicEmbeddingFeatureView], Batches]) -> None:
    with read(backend.view()) as found:
        assert found.schema == read_schema("float32")
        assert found.read_all().num_rows == 0


def test_what_is_written_meanwhile_is_not_read(backend: Backend, small_windows: int) -> None:
    view = backend.view()
    fill(backend.store, 100, 4)
    scan, changes = view.scan_batches(VERSION), view.read_changes_batches(VERSION, 4)
    first = next(scan).num_rows, next(changes).num_rows
    fill(backend.store, 200, 4, ts=9)
    assert [rows + found.read_all().num_rows for rows, found in zip(first, (scan, changes), strict=True)] == [100] * 2
    assert (scan.next_ts, changes.next_ts) == (None, 5)
    later = view.read_changes_batches(VERSION, 5)
    assert (later.read_all().num_rows, later.next_ts) == (200, 9)
    assert view.read_changes_batches(VERSION, 50).next_ts == 50


def test_a_scan_of_any_size_takes_a_few_windows_of_memory(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer
) -> None:
    make_view(server.store)
    view = Backend("http", server.store, connect, server).view()
    view.scan(VERSION)  # warm up
    fill(server.store, 200_000, 128)
    for read in READS.values():
        rows = arrow_bytes = 0
        before = pa.total_allocated_bytes()
        tracemalloc.start()  # client and server both run in this process
        try:
            for batch in read(view):
                rows += batch.num_rows
                arrow_bytes = max(arrow_bytes, pa.total_allocated_bytes() - before)
                del batch
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert rows == 200_000
        assert peak + arrow_bytes < 40 * MIB < 200_000 * 128 * 4 / 2


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[HTTPConnection]:
    """Those that were opened since."""
    opened: list[HTTPConnection] = []
    real = HTTPConnection.connect

    def connect(self: HTTPConnection) -> None:
        opened.append(self)
        real(self)

    monkeypatch.setattr(HTTPConnection, "connect", connect)
    return opened


def test_a_connection_is_used_again_after_a_whole_read_and_broken_off_after_part_of_one(
    connect: Callable[..., FeatureStoreClient],
    server: FeatureStoreServer,
    connections: list[HTTPConnection],
) -> None:
    make_view(server.store)
    fill(server.store, 30_000, 128)
    view = Backend("http", server.store, connect, server).view()
    connections.clear()  # those of the control plane
    for _ in range(3):
        assert view.scan(VERSION).num_rows == view.read_changes(VERSION, 0)[0].num_rows == 30_000
        view.lookup_arrow(VERSION, ["t"], [1])
        view.write_features([{"embedding_name": "u", "key_id": -1, "embedding": [1.0]}], VERSION, ts=5)
        assert view.write_flush()["failed_batches"] == 1  # a refusal is read to its end too
    assert len(connections) == 1
    with view.scan_batches(VERSION) as found:
        next(found)
    assert list(found) == []
    assert view.high_water_ts(VERSION) == 5
    assert len(connections) == 2
    abandoned = view.scan_batches(VERSION)
    next(abandoned)
    assert view.high_water_ts(VERSION) == 5  # over another connection
    abandoned.close()
    abandoned.close()
    assert len(connections) == 3
    assert view.scan(VERSION).num_rows == 30_000


def whole_reply_bytes(view: DynamicEmbeddingFeatureView) -> int:
    sink = pa.BufferOutputStream()
    found = view.scan_batches(VERSION)
    with pa.ipc.new_stream(sink, found.schema) as writer:
        for batch in found:
            writer.write_batch(batch)
    return len(sink.getvalue())


@pytest.mark.parametrize("route", ["scan_snapshot", "iterate_changes"])
def test_a_reply_cut_off_at_any_place_is_never_taken_for_a_whole_one(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer, route: str, small_windows: int
) -> None:
    make_view(server.store)
    fill(server.store, 60, 10)
    view = Backend("http", server.store, connect, server).view()
    read = READS["scan" if route == "scan_snapshot" else "changes"]
    size = whole_reply_bytes(view)
    got = set()
    for kept in itertools.chain(range(0, size, 97), range(size - 20, size)):
        server.set_faults([TruncateFault(id="f", route=route, bytes_kept=kept)])
        parts: list[pa.RecordBatch] = []
        with pytest.raises(TransportError) as caught:
            parts.extend(read(view))
        assert (caught.value.code, caught.value.status) == ("ReplyTruncated", 200)
        got.add(sum(part.num_rows for part in parts))
    assert max(got) == 60, "cut off behind the last batch"
    assert min(got) == 0
    assert len(got) > 3
    assert read(view).read_all().num_rows == 60


@pytest.mark.parametrize("fault", [TruncateFault(id="f", route="*"), ResetFault(id="f", route="*", when="mid-reply")])
def test_a_broken_reply_is_an_error_of_every_read(backend: Backend, fault: Any) -> None:
    fill(backend.store, 60, 10)
    view = backend.view()
    backend.add_fault(msgspec.structs.replace(fault, id="g", route="scan_snapshot"))
    with pytest.raises(TransportError, match="ReplyTruncated"):
        view.scan(VERSION)
    for act in (
        lambda: view.scan_batches(VERSION).read_all(),
        lambda: view.read_changes(VERSION, 0),
        lambda: view.lookup_arrow(VERSION, ["t"], [1]),
        lambda: view.high_water_ts(VERSION),
    ):
        backend.add_fault(msgspec.structs.replace(fault, id=str(id(act))))
        with pytest.raises(TransportError, match="ReplyTruncated"):
            act()
    assert view.scan(VERSION).num_rows == 60


def test_a_slow_scan_arrives_batch_by_batch(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer, small_windows: int
) -> None:
    make_view(server.store)
    fill(server.store, 60, 40)
    view = Backend("http", server.store, lambda name: connect(name, read_timeout_s=5.0), server).view()
    server.add_fault(SlowBodyFault(id="f", route="scan_snapshot", bytes_per_s=20_000))
    found = view.scan_batches(VERSION)
    next(found)  # half a second before the end of the reply
    assert server.requests()[-1].route != "scan_snapshot"
    assert found.read_all().num_rows > 50


# Requests


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the pieces of each body that a client sends."""
    sent: list[list[int]] = []
    real = urllib3.PoolManager.request

    def request(self: Any, method: str, url: str, body: Any = None, **arguments: Any) -> Any:
        sizes: list[int] = []
        sent.append(sizes)
        if isinstance(body, bytes | memoryview):
            sizes.append(len(body))
        elif body is not None:
            body = (sizes.append(len(piece)) or piece for piece in body)  # type: ignore[func-returns-value]
        return real(self, method, url, body=body, **arguments)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return sent


def test_large_requests_are_sent_in_pieces_and_arrive_whole(
    connect: Callable[..., FeatureStoreClient],
    server: FeatureStoreServer,
    small_windows: int,
    bodies: list[list[int]],
) -> None:
    make_view(server.store)
    view = Backend("http", server.store, connect, server).view()
    keys = list(range(300))
    view.write_features(
        [{"embedding_name": "t", "key_id": key, "embedding": [key / 7, float(key)]} for key in keys], VERSION, ts=5
    )
    assert view.write_flush()["errors"] == []
    view.write_features_arrow(sdk_rows(["u"] * 300, keys, [[float(key)] for key in keys]), VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    assert view.lookup_arrow(VERSION, ["t"] * 300, keys).column("sk").to_pylist() == keys
    values = view.lookup_arrow(VERSION, ["t"] * 300, keys).column("embedding").to_pylist()
    assert values == pa.array([[key / 7, float(key)] for key in keys], pa.list_(pa.float32())).to_pylist()
    assert view.scan(VERSION).num_rows == 600
    large = [sizes for sizes in bodies if sum(sizes) > 2 * small_windows]
    assert len(large) == 4
    assert all(max(sizes) < 2 * small_windows for sizes in large)


def test_a_small_request_is_sent_at_once(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer, bodies: list[list[int]]
) -> None:
    make_view(server.store)
    view = Backend("http", server.store, connect, server).view()
    view.write_features([{"embedding_name": "t", "key_id": 1, "embedding": [1.0]}], VERSION)
    view.write_features_arrow(sdk_rows(["u"], [1], [[1.0]]), VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    view.lookup_arrow(VERSION, ["t"], [1])
    assert [len(sizes) for sizes in bodies] == [1, 1, 1]


@pytest.mark.parametrize(
    ("said", "meant"), [("2.5", 2.5), ("0", 0.0), ("-1", None), ("nan", None), ("inf", None), ("soon", None)]
)
def test_a_retry_after_that_is_no_time_is_none(said: str, meant: float | None) -> None:
    error = transports._refusal("POST x", 503, {"Retry-After": said}, b'{"Code": "ServiceUnavailable", "Message": ""}')
    assert (error.retry_after_s, error.code) == (meant, "ServiceUnavailable")
    assert transports._refusal("POST x", 503, {}, b"<html>").retry_after_s is None


@pytest.mark.soak
def test_a_table_of_more_than_one_batch_can_hold_is_sent_whole_or_refused() -> None:
    """Arrow joins chunks until its 32-bit offsets are full, then begins another: 2.2 GB of names here."""
    store = Store(lambda: 0)
    make_view(store)
    chunk, chunks, rows = 100_000, 22, 2_200_000
    embedding = pa.ListArray.from_arrays(
        pa.array(np.arange(chunk + 1, dtype=np.int32)), pa.array(np.zeros(chunk, "f4"))
    )
    columns = [pa.repeat("x" * 1000, chunk), pa.array(np.arange(chunk)), embedding]
    table = pa.Table.from_arrays([pa.chunked_array([column] * chunks) for column in columns], ["pk", "sk", "embedding"])
    with pytest.raises(BodyTooLarge, match="2200000 rows hold more than one Arrow batch can"):
        store.write(PROJECT, VIEW, table, version=VERSION, ts=5)
    view = Backend("in-process", store, lambda name: in_process_client(store, name), None).view()
    sent = []
    view._transport.write_arrow = lambda _, batch, *__: sent.append(batch.num_rows)  # type: ignore[method-assign]
    view._batch_size = chunk
    view.write_features_arrow(table.rename_columns(["embedding_name", "key_id", "embedding"]), VERSION, ts=5)
    assert view.write_flush()["success_records"] == sum(sent) == rows

"""The SDK's interface, the same tests over HTTP and in process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes import feature_store_py
from deltaproof.fakes.errors import ERRORS
from deltaproof.fakes.feature_store_py import FeatureStoreClient, TransportError, WriteError
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import DelayFault, PartialFault, ResetFault, StatusFault, When
from deltaproof.fakes.server.signature import Verifier

from .kit import PROJECT, VERSION, VIEW, Backend, make_view, sdk_rows

NAMES = ["embedding_name", "key_id", "embedding"]
CLEAN = {"failed_batches": 0, "failed_records": 0, "errors": []}


def many(count: int, dim: int = 2) -> pa.RecordBatch:
    keys = list(range(count))
    return sdk_rows(["t"] * count, keys, [[float(key)] * dim for key in keys])


def test_absent_things_are_none(backend: Backend) -> None:
    client = backend.client("rank0")
    assert client.get_project("nobody") is None
    project = client.get_project(PROJECT)
    assert project is not None
    assert project.get_entity("nobody") is None
    assert project.get_dynamic_embedding_feature_view("nobody") is None
    assert project.name == PROJECT


def test_entity_and_view_are_created_and_opened(backend: Backend) -> None:
    project = backend.client("rank0").get_project(PROJECT)
    assert project is not None
    entity = project.create_entity("parent", join_id="parent_id")
    child = project.create_entity("child", "child_id", parent_feature_entity_name="parent")
    assert (entity.name, entity.feature_entity_name, entity.join_id) == ("parent", "parent", "parent_id")
    found = project.get_entity("child")
    assert found is not None
    assert vars(found) == vars(child)
    made = project.create_dynamic_embedding_feature_view(
        name="w",
        entity="child",
        pk_field_name="p",
        sk_field_name="s",
        embedding_field_name="e",
        pk_field_type="STRING",
        sk_field_type="INT64",
        ttl=77,
        shard_count=3,
        replication_count=2,
        embedding_field_type="ARRAY<UINT8>",
    )
    opened = project.get_dynamic_embedding_feature_view("w")
    assert opened is not None
    for view in (made, opened):
        assert (view.pk_field, view.sk_field, view.embedding_field) == ("p", "s", "e")
        assert (view.embedding_field_type, view.ttl, view.shard_count, view.replication_count) == (
            "ARRAY<UINT8>",
            77,
            3,
            2,
        )
        assert (view._batch_size, view._max_workers) == (1000, 4)


def test_creating_twice_or_on_nothing_says_so(backend: Backend) -> None:
    project = backend.client("rank0").get_project(PROJECT)
    assert project is not None
    for act, code in (
        (lambda: project.create_entity("entity", "id"), "AlreadyExists"),
        (lambda: project.create_entity("x", "id", "nobody"), "EntityNotFound"),
        (lambda: project.create_entity("../x", "id"), "InvalidParameter"),
        (lambda: project.create_dynamic_embedding_feature_view(VIEW, "entity"), "AlreadyExists"),
        (lambda: project.create_dynamic_embedding_feature_view("w", "nobody"), "EntityNotFound"),
        (lambda: project.create_dynamic_embedding_feature_view("w", "entity", shard_count=99), "InvalidParameter"),
    ):
        with pytest.raises(TransportError) as caught:
            act()
        assert caught.value.code == code
        assert (caught.value.retriable, caught.value.applied) == (False, "no")
    with pytest.raises(ValueError, match="field type"):
        project.create_dynamic_embedding_feature_view("w", "entity", embedding_field_type="STRING")


def test_arrow_writes_are_split_and_read_back_bit_by_bit(backend: Backend) -> None:
    view = backend.view()
    view._batch_size = 7
    values = np.random.default_rng(1).standard_normal((20, 3), dtype=np.float32)
    keys = np.arange(20, dtype=np.int64) + 2**60
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 3).cast(pa.list_(pa.float32()))
    batch = pa.RecordBatch.from_arrays([pa.repeat("t", 20), pa.array(keys), embedding], [*NAMES])
    view.write_features_arrow(batch=batch, version=VERSION, write_mode="MERGE", ts=50)
    assert view.write_flush() == {"total_batches": 3, "total_records": 20, "success_records": 20, **CLEAN}
    found = view.lookup_arrow(VERSION, pa.repeat("t", 20), pa.array(keys[::-1]))
    assert found.column("sk").to_pylist() == keys[::-1].tolist()
    got = found.column("embedding").combine_chunks().values.to_numpy().reshape(20, 3)
    assert got.tobytes() == values[::-1].tobytes()
    assert set(found.column("ts").to_pylist()) == {50}


def test_json_writes_equal_arrow_writes(backend: Backend) -> None:
    view = backend.view()
    view._batch_size = 2
    values = np.random.default_rng(2).standard_normal((5, 2), dtype=np.float32)
    keys = [2**53 + 1, -(2**63), 2**63 - 1, 0, -2]
    data = [{"embedding_name": "t", "key_id": key, "embedding": v} for key, v in zip(keys, values, strict=True)]
    data[0]["embedding"] = values[0].tolist()
    view.write_features(data=data, version=VERSION, write_mode="MERGE", ts=9)
    assert view.write_flush()["total_batches"] == 3
    found = view.get_online_features(feature_name="t", keys=keys, version=VERSION)
    assert [row["sk"] for row in found] == keys
    assert np.array([row["embedding"] for row in found], dtype=np.float32).tobytes() == values.tobytes()
    assert found[0]["embedding_name"] == "t"


def test_a_flush_with_nothing_to_do_and_a_reset_after_each(backend: Backend) -> None:
    view = backend.view()
    empty = {"total_batches": 0, "total_records": 0, "success_records": 0, **CLEAN}
    assert view.write_flush() == empty
    view.write_features_arrow(many(3), VERSION, ts=5)
    view.write_features_arrow(many(0), VERSION, ts=5)
    view.write_features([], VERSION, ts=5)
    assert view.write_flush()["total_batches"] == 1
    assert view.write_flush() == empty


def test_a_flush_that_is_interrupted_leaves_its_batches_to_the_next_one(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = backend.view()
    view.write_features_arrow(many(3), VERSION, ts=5)
    view.write_features_arrow(sdk_rows(["t"], [-1], [[1.0]]), VERSION, ts=5)
    waits = []

    def interrupted(future: Future[None], timeout: float | None = None) -> None:
        waits.append(future)
        if len(waits) == 2:
            raise KeyboardInterrupt
        return result(future, timeout)

    result = Future.result
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        view.write_flush()
    monkeypatch.undo()
    view.write_features_arrow(many(2), VERSION, ts=6)
    summary = view.write_flush()
    assert (summary["total_batches"], summary["failed_batches"]) == (3, 1)
    assert (summary["success_records"], summary["failed_records"]) == (5, 1)


@pytest.mark.parametrize(
    ("version", "ts", "batch", "code"),
    [
        (None, 5, many(1), "InvalidVersion"),
        ("", 5, many(1), "InvalidVersion"),
        (VERSION, 0, many(1), None),
        (VERSION, 5, sdk_rows(["t"], [-1], [[1.0]]), "ReservedKey"),
        (VERSION, 5, sdk_rows(["t"], [1], [[float("inf")]]), "NonFiniteValue"),
        (VERSION, 5, sdk_rows(["t"], [1], [[]]), "DimensionMismatch"),
    ],
)
def test_refusals_come_with_the_flush(
    backend: Backend, version: str | None, ts: int, batch: pa.RecordBatch, code: str | None
) -> None:
    view = backend.view()
    view.write_features_arrow(batch, version, ts=ts)
    summary = view.write_flush()
    (error,) = summary["errors"]
    assert (summary["failed_batches"], summary["failed_records"], summary["success_records"]) == (1, 1, 0)
    assert isinstance(error, WriteError)
    assert isinstance(error, str)
    assert (error.status, error.retriable, error.applied, error.rows) == (400, False, "no", 1)
    assert code is None or error.code == code
    assert code is None or code in error
    assert backend.store.log(PROJECT, VIEW).num_rows == 0


def test_json_refusals_come_with_the_flush(backend: Backend) -> None:
    view = backend.view()
    for row in (
        {"embedding_name": "t", "key_id": "5", "embedding": [1.0]},
        {"embedding_name": "t", "key_id": 5.0, "embedding": [1.0]},
        {"embedding_name": "t", "key_id": 2**63, "embedding": [1.0]},
        {"embedding_name": "t", "key_id": True, "embedding": [1.0]},
        {"embedding_name": 5, "key_id": 5, "embedding": [1.0]},
        {"embedding_name": "t", "key_id": 5, "embedding": ["x"]},
        {"embedding_name": "t", "key_id": 5, "embedding": None},
        {"embedding_name": "t", "key_id": 5},
        {"embedding_name": "t", "key_id": 5, "embedding": [1.0], "more": 1},
        {"embedding_name": "t", "key_id": 5, "embedding": [10**400]},
    ):
        view.write_features([row], VERSION, ts=5)
        (error,) = view.write_flush()["errors"]
        assert (error.code, error.applied) in (("SchemaMismatch", "no"), ("MalformedBody", "no")), row
    view.write_features([{"embedding_name": "t", "key_id": 5, "embedding": [1e39]}], VERSION, ts=5)
    assert view.write_flush()["errors"][0].code == "NonFiniteValue"
    with pytest.raises(TypeError, match="object"):
        view.write_features([{"embedding_name": "t", "key_id": 5, "embedding": object()}], VERSION, ts=5)


def test_misuse_is_refused_at_the_call(backend: Backend) -> None:
    view = backend.view()
    with pytest.raises(ValueError, match="write_mode"):
        view.write_features_arrow(many(1), VERSION, "REPLACE", 5)
    with pytest.raises(ValueError, match="columns"):
        view.write_features_arrow(many(1).drop_columns(["key_id"]), VERSION, ts=5)
    for view._batch_size in (0, -1):  # with which a loop would send nothing
        with pytest.raises(ValueError, match=f"_batch_size {view._batch_size}, want 1 or more"):
            view.write_features_arrow(many(1), VERSION, ts=5)
        with pytest.raises(ValueError, match=f"_batch_size {view._batch_size}, want 1 or more"):
            view.write_features([{"embedding_name": "t", "key_id": 1, "embedding": [1.0]}], VERSION, ts=5)
    view._batch_size = 1000
    view.close(wait=True)
    with pytest.raises(RuntimeError, match="after close"):
        view.write_features_arrow(many(1), VERSION, ts=5)
    view.close()


def test_close_waits_for_what_is_queued(backend: Backend) -> None:
    view = backend.view()
    view._batch_size, view._max_workers = 1, 2
    view.write_features_arrow(many(10), VERSION, ts=5)
    view.close(wait=True)
    assert backend.store.rows(PROJECT, VIEW, VERSION) == 10
    assert view.write_flush()["success_records"] == 10


def test_close_without_waiting_names_what_was_never_sent(backend: Backend) -> None:
    backend.add_fault(DelayFault(id="slow", delay_ms=300))
    view = backend.view()
    view._batch_size, view._max_workers = 1, 1
    view.write_features_arrow(many(3), VERSION, ts=5)
    view.close(wait=False)
    summary = view.write_flush()
    assert summary["total_batches"] == 3
    assert 2 <= summary["failed_batches"] <= 3  # the first may have begun
    assert {(e.code, e.applied, e.retriable, e.rows) for e in summary["errors"]} == {("NotSent", "no", True, 1)}
    assert backend.store.rows(PROJECT, VIEW, VERSION) == 3 - summary["failed_batches"]


def test_later_changes_of_the_callers_memory_do_not_reach_the_store(backend: Backend) -> None:
    view = backend.view()
    keys, values = np.array([1, 2], dtype=np.int64), np.array([1.0, 2.0], dtype=np.float32)
    embedding = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(values))
    batch = pa.RecordBatch.from_arrays([pa.repeat("t", 2), pa.array(keys), embedding], NAMES)
    view.write_features_arrow(batch, VERSION, ts=5)
    assert view.write_flush()["failed_batches"] == 0
    keys[:], values[:] = 99, 99.0
    assert view.scan(VERSION).to_pydict()["embedding"] == [[1.0], [2.0]]
    assert backend.store.log(PROJECT, VIEW).column("sk").to_pylist() == [1, 2]


def test_our_reads(backend: Backend) -> None:
    view = backend.view()
    assert view.high_water_ts(VERSION) == 0
    assert view.scan(VERSION).num_rows == 0
    view.write_features_arrow(many(3), VERSION, ts=10)
    view.write_flush()
    table, cursor = view.read_changes(VERSION, 0)
    assert (table.num_rows, cursor) == (3, 10)
    view.write_features_arrow(many(1), VERSION, ts=20)
    view.write_flush()
    table, cursor = view.read_changes(VERSION, cursor)
    assert (table.to_pydict(), cursor) == ({"pk": ["t"], "sk": [0], "embedding": [[0.0, 0.0]], "ts": [20]}, 20)
    assert view.high_water_ts(VERSION) == 20
    assert view.scan(VERSION).column("ts").to_pylist() == [20, 10, 10]
    with pytest.raises(TransportError, match="InvalidVersion"):
        view.scan("")


def test_without_ts_the_stores_clock_is_taken(backend: Backend) -> None:
    view = backend.view()
    view.write_features_arrow(many(1), VERSION)
    view.write_features([{"embedding_name": "u", "key_id": 1, "embedding": [1.0]}], VERSION)
    assert view.write_flush()["failed_batches"] == 0
    assert abs(view.high_water_ts(VERSION) - backend.store.now_ms()) < 60_000


def test_the_log_names_the_user(backend: Backend) -> None:
    for rank in range(2):
        view = backend.view(f"rank{rank}")
        view.write_features_arrow(many(1), VERSION, ts=5)
        view.write_flush()
    assert backend.store.log(PROJECT, VIEW).column("client").to_pylist() == ["rank0", "rank1"]


def test_a_view_that_is_dropped_fails_writes_for_good(backend: Backend) -> None:
    view = backend.view()
    backend.store.drop_view(PROJECT, VIEW)
    view.write_features_arrow(many(2), VERSION, ts=5)
    (error,) = view.write_flush()["errors"]
    assert (error.code, error.status, error.retriable, error.applied) == ("ViewNotFound", 404, False, "no")


@pytest.mark.parametrize("status", [403, 429, 500, 503, 504])
def test_status_faults_reach_the_summary_as_the_table_says(backend: Backend, status: int) -> None:
    backend.add_fault(StatusFault(id="f", code=status, retry_after_s=2.5))
    view = backend.view()
    view._batch_size = 1
    view._max_workers = 1
    view.write_features_arrow(many(3), VERSION, ts=5)
    summary = view.write_flush()
    (error,) = summary["errors"]
    row = ERRORS[error.code]
    assert (error.status, error.applied, error.retriable) == (status, row.applied, row.retriable)
    assert error.retry_after_s == 2.5
    assert (summary["failed_records"], summary["success_records"]) == (1, 2)
    assert backend.store.rows(PROJECT, VIEW, VERSION) == 2
    assert backend.fired() == {"f": 1}


@pytest.mark.parametrize("when", ["before-commit", "after-commit"])
@pytest.mark.parametrize("kind", ["status", "reset"])
def test_faults_around_the_commit(backend: Backend, kind: str, when: When) -> None:
    backend.add_fault(StatusFault(id="f", when=when) if kind == "status" else ResetFault(id="f", when=when))
    view = backend.view()
    view.write_features_arrow(many(3), VERSION, ts=5)
    summary = view.write_flush()
    (error,) = summary["errors"]
    assert (error.applied, error.retriable, error.rows) == ("unknown", True, 3)
    assert error.code == ("ServiceUnavailable" if kind == "status" else "ConnectionLost")
    assert backend.store.rows(PROJECT, VIEW, VERSION) == (3 if when == "after-commit" else 0)
    view.write_features_arrow(many(3), VERSION, ts=6)  # a replay with a newer ts settles it
    assert view.write_flush()["failed_batches"] == 0
    assert view.scan(VERSION).column("ts").to_pylist() == [6, 6, 6]


@pytest.mark.parametrize("failed", [1, 2, 5, 99])
def test_partial_faults_drop_the_tail(backend: Backend, failed: int) -> None:
    backend.add_fault(PartialFault(id="f", rows_failed=failed))
    view = backend.view()
    view.write_features_arrow(many(5), VERSION, ts=5)
    summary = view.write_flush()
    (error,) = summary["errors"]
    lost = min(failed, 5)
    assert (error.code, error.status, error.applied, error.rows) == ("PartialFailure", 207, "no", lost)
    assert (summary["failed_batches"], summary["failed_records"], summary["success_records"]) == (1, lost, 5 - lost)
    assert view.scan(VERSION).column("sk").to_pylist() == list(range(5 - lost))


def test_faults_strike_one_client_and_reads_too(backend: Backend) -> None:
    backend.add_fault(StatusFault(id="write", client="rank1"))
    backend.add_fault(StatusFault(id="read", route="lookup", code=500))
    backend.add_fault(StatusFault(id="create", route="create_view"))
    for rank, failed in ((0, 0), (1, 1), (1, 0)):
        view = backend.view(f"rank{rank}")
        view.write_features_arrow(many(1), VERSION, ts=5)
        assert view.write_flush()["failed_batches"] == failed
    with pytest.raises(TransportError, match="InternalError"):
        view.get_online_features("t", [0], VERSION)
    assert len(view.get_online_features("t", [0], VERSION)) == 1
    project = backend.client("rank0").get_project(PROJECT)
    assert project is not None
    with pytest.raises(TransportError) as caught:
        project.create_dynamic_embedding_feature_view("w", "entity")
    assert (caught.value.status, caught.value.retriable, caught.value.applied) == (503, True, "unknown")
    project.create_dynamic_embedding_feature_view("w", "entity")
    assert backend.fired() == {"write": 1, "read": 1, "create": 1}


def test_many_threads_share_a_view(backend: Backend) -> None:
    view = backend.view()
    view._batch_size = 10

    def work(number: int) -> None:
        for step in range(5):
            keys = list(range(number * 100, number * 100 + 20))
            view.write_features_arrow(sdk_rows(["t"] * 20, keys, [[float(step)]] * 20), VERSION, ts=step + 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    summary = view.write_flush()
    assert (summary["total_batches"], summary["success_records"], summary["errors"]) == (40, 400, [])
    table = view.scan(VERSION)
    assert (table.num_rows, set(table.column("ts").to_pylist())) == (80, {5})


def test_install_registers_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "feature_store_py", sys)
    monkeypatch.delitem(sys.modules, "feature_store_py")
    feature_store_py.install()
    feature_store_py.install()
    import feature_store_py as found

    assert found.FeatureStoreClient is FeatureStoreClient
    monkeypatch.setitem(sys.modules, "feature_store_py", sys)
    with pytest.raises(RuntimeError, match="another feature_store_py"):
        feature_store_py.install()


# HTTP only


def test_no_server_means_nothing_was_sent() -> None:
    with FeatureStoreServer() as server:
        endpoint = server.endpoint
    with pytest.raises(TransportError) as caught:
        FeatureStoreClient("id", "secret", "local", endpoint, None, "rank0", "password")
    assert (caught.value.code, caught.value.applied, caught.value.retriable) == ("ConnectFailed", "no", True)
    assert str(caught.value).startswith(f"ConnectFailed: control plane: no connection to {endpoint} ([Errno ")


def test_a_server_that_stops_fails_writes_as_retriable(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer
) -> None:
    backend = Backend("http", server.store, connect, server)
    make_view(server.store)
    view = backend.view()
    server.stop()
    view.write_features_arrow(many(1), VERSION, ts=5)
    (error,) = view.write_flush()["errors"]
    assert (error.code, error.applied, error.retriable, error.status) == ("ConnectFailed", "no", True, None)


def test_a_reply_later_than_the_timeout_leaves_the_fate_unknown(
    connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer
) -> None:
    make_view(server.store)
    view = Backend("http", server.store, lambda name: connect(name, read_timeout_s=0.2), server).view()
    server.add_fault(DelayFault(id="slow", delay_ms=500, when="before-commit"))
    view.write_features_arrow(many(3), VERSION, ts=5)
    (error,) = view.write_flush()["errors"]
    assert (error.code, error.applied, error.retriable) == ("ReadTimeout", "unknown", True)
    assert server.store.rows(PROJECT, VIEW, VERSION) == 0
    # The client has gone; the store commits all the same.
    patient = Backend("http", server.store, connect, server).view()
    server.add_fault(DelayFault(id="slower", route="scan", delay_ms=600))
    assert patient.scan(VERSION).num_rows == 3


@pytest.mark.parametrize(
    "arguments",
    [{"access_key_id": ""}, {"access_key_secret": None}, {"featuredb_password": ""}, {"username": ""}],
)
def test_missing_credentials_are_refused_at_once(
    connect: Callable[..., FeatureStoreClient], arguments: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="needed"):
        connect(**arguments)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ftp://h:1",
        "http://h:1/x",
        "h:x",
        "h:65536",
        "::1:1",
        " ",
        "http://",
        "me:secret@h:1",
        "h?x",
        "\udcff",
        "a b",
        5,
    ],
)
def test_what_is_no_endpoint_is_refused_at_once(connect: Callable[..., FeatureStoreClient], endpoint: object) -> None:
    with pytest.raises(ValueError, match="endpoint is not host, host:port or") as caught:
        connect(endpoint=endpoint)
    assert "secret" not in str(caught.value)


def test_a_proxy_of_the_machine_is_not_asked_for_loopback(
    connect: Callable[..., FeatureStoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert connect().get_project(PROJECT) is not None


def test_no_error_carries_a_secret(connect: Callable[..., FeatureStoreClient], server: FeatureStoreServer) -> None:
    make_view(server.store)
    server.state.verifier = Verifier({"AKID-1234": "SECRET-5678"})
    client = connect(access_key_id="AKID-1234", access_key_secret="SECRET-5678", featuredb_password="PASS-9012")
    view = Backend("http", server.store, lambda _: client, server).view()
    texts = []
    for fault in (
        StatusFault(id="a"),
        StatusFault(id="b", code=403),
        ResetFault(id="c"),
        PartialFault(id="d", rows_failed=1),
    ):
        server.set_faults([fault])
        view.write_features_arrow(many(2), VERSION, ts=5)
        texts += view.write_flush()["errors"]
    server.state.token = "TOKEN-rotated"
    view.write_features_arrow(many(2), VERSION, ts=5)
    texts += view.write_flush()["errors"]
    server.set_faults([StatusFault(id="e", route="control", code=500, count=9)])
    with pytest.raises(TransportError) as caught:
        client.get_project(PROJECT)
    texts.append(str(caught.value))
    texts.append(repr(server.requests()))
    assert "InvalidToken" in texts[4]
    for secret in ("SECRET-5678", "PASS-9012", "TOKEN-rotated", "deltaproof-featuredb-token", "AKID-1234"):
        assert not any(secret in text for text in texts), secret

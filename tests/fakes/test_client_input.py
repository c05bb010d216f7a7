"""What the SDK's facade makes of odd input: it is used as it is meant or refused by name, never bent or cut.

That both transports do so alike is looked at, with drawn input, in test_parity.py.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.durable import DurableStore
from deltaproof.fakes.feature_store_py import FeatureStoreClient, TransportError, in_process_client
from deltaproof.fakes.store import Store

from .kit import PROJECT, VERSION, VIEW, Backend, make_view, sdk_rows

ROW = {"embedding_name": "t", "key_id": 1, "embedding": [1.0, 2.0]}
INT64_MAX = 2**63 - 1


class Release(str, enum.Enum):  # noqa: UP042
    """Its str() is "Release.FIRST"."""

    FIRST = "first"


class Huge(int):
    """Whose digits Python refuses to print; pytest, too, wants to print what it runs a test with."""

    def __str__(self) -> str:
        return "huge"


HUGE = Huge(10**5000)


def refused(code: str, act: Callable[[], Any]) -> str:
    with pytest.raises(TransportError) as caught:
        act()
    error = caught.value
    assert (error.code, error.applied, error.retriable) == (code, "no", False)
    return str(error)


@pytest.mark.parametrize("ts", [1, np.int64(7), np.uint8(7), np.int32(7), INT64_MAX])
def test_a_ts_may_be_any_integer(backend: Backend, ts: Any) -> None:
    view = backend.view()
    view.write_features([ROW], VERSION, ts=ts)
    view.write_features_arrow(sdk_rows(["u"], [1], [[1.0]]), VERSION, ts=ts)
    assert view.write_flush()["errors"] == []
    assert backend.store.log(PROJECT, VIEW).column("ts").to_pylist() == [int(ts)] * 2
    assert view.read_changes(VERSION, ts)[1] == view.high_water_ts(VERSION) == int(ts)


@pytest.mark.parametrize("ts", [0, -1, 2**63, True, np.bool_(True), 5.0, np.float64(5), "5", pa.scalar(5), HUGE])
def test_a_ts_that_is_no_positive_int64_is_refused_by_that_name(backend: Backend, ts: Any) -> None:
    view = backend.view()
    view.write_features([ROW], VERSION, ts=ts)
    view.write_features_arrow(sdk_rows(["u"], [1], [[1.0]]), VERSION, ts=ts)
    errors = view.write_flush()["errors"]
    assert [(e.code, e.status, e.applied, e.retriable) for e in errors] == [("InvalidTimestamp", 400, "no", False)] * 2
    assert backend.store.log(PROJECT, VIEW).num_rows == 0
    if ts != 0 or isinstance(ts, bool):
        refused("InvalidTimestamp", lambda: view.read_changes(VERSION, ts))


def test_a_cursor_may_be_0_and_the_greatest_ts(backend: Backend) -> None:
    view = backend.view()
    view.write_features([ROW], VERSION, ts=INT64_MAX)
    assert view.write_flush()["errors"] == []
    for cursor, count in ((0, 1), (np.int64(0), 1), (INT64_MAX - 1, 1), (INT64_MAX, 0)):
        table, cursor_next = view.read_changes(VERSION, cursor)
        assert (table.num_rows, cursor_next) == (count, INT64_MAX)


def test_a_version_is_what_the_string_holds(backend: Backend) -> None:
    view = backend.view()
    version: Any
    for version in (Release.FIRST, np.str_("second")):
        view.write_features([ROW], version, ts=5)
        view.write_features_arrow(sdk_rows(["u"], [1], [[1.0]]), version, ts=5)
    assert view.write_flush()["errors"] == []
    assert sorted(backend.store.versions(PROJECT, VIEW)) == ["first", "second"]
    assert view.scan(Release.FIRST).num_rows == view.scan("first").num_rows == 2
    for version in (5, b"first", None, "", " ", "a\nb", "\ud800", "x" * 257, ["first"]):
        refused("InvalidVersion", lambda version=version: view.scan(version))  # type: ignore[misc]


GOOD_KEYS = [
    [1, 3],
    (1, 3),
    range(1, 4, 2),
    iter([1, 3]),
    [np.int32(1), np.uint64(3)],
    np.array([1, 3], np.uint8),
    np.array([1, 3], object),
    pa.array([1, 3], pa.int16()),
    pa.chunked_array([[1], [3]]),
]


@pytest.mark.parametrize("number", range(len(GOOD_KEYS)))
def test_keys_may_be_any_integers(backend: Backend, number: int) -> None:
    view = backend.view()
    view.write_features([{**ROW, "key_id": key} for key in (1, 2, 3)], VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    keys = GOOD_KEYS[number] if number != 3 else iter([1, 3])
    assert [row["sk"] for row in view.get_online_features("t", keys, VERSION)] == [1, 3]
    assert view.get_online_features("t", np.array([]), VERSION) == view.get_online_features("t", [], VERSION) == []


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([1, 1.9], "key 1.9 (number 1)"),
        ([1.0], "key 1.0 (number 0)"),
        (["1"], "key '1' (number 0)"),
        ([True], "key True (number 0)"),
        ([None], "key None (number 0)"),
        ([2**63], "key 9223372036854775808 (number 0)"),
        ([-(2**63) - 1], "key -9223372036854775809 (number 0)"),
        ([HUGE], "key a Huge (number 0)"),
        ("12", "keys '12'"),
        (12, "keys 12"),
        ({1: 2}, "keys {1: 2}"),
        (np.array([1.9]), "want one column of integers, got f"),
        (np.array([True]), "want one column of integers, got b"),
        (np.ones((2, 2), np.int64), "want one column of integers"),
        (np.array([2**64 - 1], np.uint64), "beyond int64"),
        (np.array([1.5], object), "key 1.5 (number 0)"),
        (pa.array([2**64 - 1], pa.uint64()), "beyond int64"),
        (pa.array([1, None]), "null"),
        (pa.array([1.0]), "got double"),
    ],
)
def test_a_key_that_is_no_int64_is_refused_and_named(backend: Backend, keys: Any, named: str) -> None:
    view = backend.view()
    view.write_features([ROW], VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    assert named in refused("SchemaMismatch", lambda: view.get_online_features("t", keys, VERSION))
    assert named in refused("SchemaMismatch", lambda: view.lookup_arrow(VERSION, ["t"], keys))


@pytest.mark.parametrize("name", ["\ud800", 5, None, b"t", ["t"]])
def test_a_table_that_cannot_be_is_refused(backend: Backend, name: Any) -> None:
    view = backend.view()
    refused("SchemaMismatch", lambda: view.get_online_features(name, [1], VERSION))
    refused("SchemaMismatch", lambda: view.get_online_features(name, [], VERSION))
    refused("SchemaMismatch", lambda: view.lookup_arrow(VERSION, [name], [1]))
    refused("SchemaMismatch", lambda: view.lookup_arrow(VERSION, ["t", "t"], [1]))


@pytest.mark.parametrize("data", [{}, {"embedding_name": "t"}, "rows", b"rows", None, 5, iter([ROW]), {1: ROW}])
def test_what_is_no_list_of_rows_is_refused_at_the_call(backend: Backend, data: Any) -> None:
    view = backend.view()
    with pytest.raises(TypeError, match=f"data is a {type(data).__name__}; want a list of rows"):
        view.write_features(data, VERSION, ts=5)
    with pytest.raises(TypeError, match=f"batch is a {type(data).__name__}; want a pyarrow"):
        view.write_features_arrow(data, VERSION, ts=5)
    assert view.write_flush()["total_batches"] == 0


@pytest.mark.parametrize("odd", [{"embedding_name": "\ud800"}, {"key_id": HUGE}, {"\udfff": 1}])
def test_a_row_without_a_json_form_fails_its_request_only(backend: Backend, odd: dict[str, Any]) -> None:
    view = backend.view()
    view._batch_size = 2
    view.write_features([ROW, {**ROW, **odd}, {**ROW, "key_id": 2}], VERSION, ts=5)
    summary = view.write_flush()
    (error,) = summary["errors"]
    assert (error.code, error.applied, error.retriable, error.rows) == ("MalformedBody", "no", False, 2)
    assert (summary["total_batches"], summary["success_records"]) == (2, 1)
    assert error.encode(), "it can be printed"
    assert view.scan(VERSION).column("sk").to_pylist() == [2]


def test_a_row_of_another_kind_at_the_end_queues_nothing(backend: Backend) -> None:
    view = backend.view()
    view._batch_size = 1
    with pytest.raises(TypeError, match="a row holds a object"):
        view.write_features([ROW, {**ROW, "embedding": object()}], VERSION, ts=5)
    assert view.write_flush()["total_batches"] == 0


@pytest.mark.parametrize("name", ["\ud800", "a/b", "", "x" * 257, 5, None, b"a", ["a"]])
def test_a_name_that_cannot_be_is_absent_and_cannot_be_made(backend: Backend, name: Any) -> None:
    client = backend.client("rank0")
    project = client.get_project(PROJECT)
    assert project is not None
    assert client.get_project(name) is None
    assert project.get_entity(name) is None
    assert project.get_dynamic_embedding_feature_view(name) is None
    refused("InvalidParameter", lambda: project.create_entity(name, "id"))
    refused("InvalidParameter", lambda: project.create_entity("new", name))
    refused("InvalidParameter", lambda: project.create_dynamic_embedding_feature_view(name, "entity"))
    refused("InvalidParameter", lambda: project.create_dynamic_embedding_feature_view("new", name))
    refused("InvalidParameter", lambda: project.create_dynamic_embedding_feature_view("new", "entity", name))
    if name:
        refused("EntityNotFound", lambda: project.create_entity("new", "id", name))
    assert [spec.name for spec in backend.store.entities()] == ["entity"]


def test_settings_may_be_numpys_integers_and_nothing_else(backend: Backend) -> None:
    project = backend.client("rank0").get_project(PROJECT)
    assert project is not None
    made = project.create_dynamic_embedding_feature_view(
        "new", "entity", ttl=np.int64(7), shard_count=np.int8(2), replication_count=np.uint8(3)
    )
    opened = project.get_dynamic_embedding_feature_view("new")
    assert opened is not None
    for view in (made, opened):
        assert (view.ttl, view.shard_count, view.replication_count) == (7, 2, 3)
    for wrong in (True, 7.0, "7", None):
        refused(
            "InvalidParameter",
            lambda wrong=wrong: project.create_dynamic_embedding_feature_view("other", "entity", ttl=wrong),  # type: ignore[misc]
        )


@pytest.mark.parametrize("name", ["a:b", "a\nb", "\ud800", "x" * 257, 5, b"me"])
def test_a_username_that_a_login_cannot_carry_is_refused_at_once(name: Any) -> None:
    with pytest.raises(ValueError, match="featuredb_username"):
        FeatureStoreClient("id", "secret", endpoint="127.0.0.1:1", featuredb_username=name, featuredb_password="x")
    with pytest.raises(ValueError, match="featuredb_username"):
        in_process_client(Store(lambda: 1), name)


def test_a_password_that_a_login_cannot_carry_is_refused_and_not_quoted() -> None:
    with pytest.raises(ValueError, match="no valid Unicode") as caught:
        FeatureStoreClient(
            "id", "secret", endpoint="127.0.0.1:1", featuredb_username="me", featuredb_password="hush\ud800"
        )
    assert "hush" not in repr(caught.value)
    assert caught.value.__suppress_context__


def test_a_lookup_beyond_the_bound_of_replies_is_refused(backend: Backend) -> None:
    view = backend.view()
    view.write_features([{**ROW, "key_id": key} for key in range(100)], VERSION, ts=5)
    assert view.write_flush()["errors"] == []
    backend.store.reply_bytes_max = 1000
    refused("BodyTooLarge", lambda: view.get_online_features("t", range(100), VERSION))
    assert len(view.get_online_features("t", range(10), VERSION)) == 10


def test_a_full_disk_is_as_unknown_in_process_as_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DurableStore(tmp_path) as store:
        make_view(store)
        view = Backend("in-process", store, lambda name: in_process_client(store, name), None).view()

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.writev", full)
        view.write_features([ROW], VERSION, ts=5)
        (error,) = view.write_flush()["errors"]
        monkeypatch.undo()
    assert (error.code, error.status, error.applied, error.retriable) == ("InternalError", 500, "unknown", True)
    assert "No space left on device" in error
    assert str(tmp_path) not in error

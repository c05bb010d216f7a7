"""The SDK's interface, and nothing but it: the same tests on the facade (in process, over HTTP), on the real SDK
against the fake, and on the real service. What is not run is reported as skipped with the reason;
docs/feature-store.md keeps the date of the last agreement.

The real service is asked only when DELTAPROOF_REAL_PROJECT names a scratch project (an entity and two views named
``deltaproof_parity…`` are made there and kept), with DELTAPROOF_REAL_REGION, _ACCESS_KEY_ID, _ACCESS_KEY_SECRET,
_FEATUREDB_USERNAME, _FEATUREDB_PASSWORD and perhaps _ENDPOINT and _SECURITY_TOKEN: ``pytest -m real``.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from deltaproof.fakes import feature_store_py as facade
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.serve import wall_store

ENTITY = VIEW = "deltaproof_parity"
READ_WITHIN_S = 30.0
KINDS = {"float": ("ARRAY<FLOAT>", pa.float32()), "uint8": ("ARRAY<UINT8>", pa.uint8())}


def real_sdk() -> Any:
    """The real SDK's module; the test is skipped where there is none."""
    try:
        module = importlib.import_module("feature_store_py")
    except ImportError:
        pytest.skip("not run: the real feature_store_py is not installed")
    if module is facade:
        pytest.skip("not run: feature_store_py is this project's own, by install()")
    return module


def real_setting(name: str, default: str | None = None) -> str:
    value = os.environ.get(f"DELTAPROOF_REAL_{name}", default)
    if value is None:
        pytest.skip(f"not run: DELTAPROOF_REAL_{name} is not set, so there is no scratch project of the real service")
    return value


@pytest.fixture(
    params=["in-process", "http", "real-sdk", pytest.param("real-service", marks=pytest.mark.real)],
)
def project(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "in-process":
        yield facade.in_process_client(wall_store(), "parity").get_project("deltaproof")
        return
    if request.param == "real-service":
        name = real_setting("PROJECT")
        client = real_sdk().FeatureStoreClient(
            access_key_id=real_setting("ACCESS_KEY_ID"),
            access_key_secret=real_setting("ACCESS_KEY_SECRET"),
            region=real_setting("REGION"),
            endpoint=real_setting("ENDPOINT", "") or None,
            security_token=real_setting("SECURITY_TOKEN", "") or None,
            featuredb_username=real_setting("FEATUREDB_USERNAME"),
            featuredb_password=real_setting("FEATUREDB_PASSWORD"),
        )
        found = client.get_project(name)
        assert found is not None, "DELTAPROOF_REAL_PROJECT names no project"
        yield found
        return
    module = facade if request.param == "http" else real_sdk()
    with FeatureStoreServer() as server:
        client = module.FeatureStoreClient(
            access_key_id="deltaproof",
            access_key_secret="deltaproof",
            region="cn-hangzhou",
            endpoint=server.endpoint,
            featuredb_username="parity",
            featuredb_password="parity",
        )
        yield client.get_project("deltaproof")


def open_view(project: Any, kind: str = "float") -> Any:
    name, type_name = f"{VIEW}_{kind}", KINDS[kind][0]
    if project.get_entity(ENTITY) is None:
        project.create_entity(name=ENTITY, join_id="deltaproof_parity_id", parent_feature_entity_name=None)
    view = project.get_dynamic_embedding_feature_view(name)
    if view is None:
        view = project.create_dynamic_embedding_feature_view(
            name=name,
            entity=ENTITY,
            pk_field_name="embedding_name",
            sk_field_name="key_id",
            embedding_field_name="embedding",
            pk_field_type="STRING",
            sk_field_type="INT64",
            ttl=1_296_000,
            shard_count=1,
            replication_count=1,
            embedding_field_type=type_name,
        )
    return view


@pytest.fixture
def view(project: Any) -> Iterator[Any]:
    opened = open_view(project)
    yield opened
    opened.close(wait=True)


@pytest.fixture
def version() -> str:
    """A version of this test's own: runs on the real service do not see each other."""
    return f"parity_{uuid.uuid4().hex}"


def now() -> int:
    return time.time_ns() // 1_000_000


def batch(keys: Sequence[int], values: Sequence[Sequence[float]], kind: str = "float", pk: str = "t") -> pa.RecordBatch:
    columns = [
        pa.array([pk] * len(keys), pa.string()),
        pa.array(keys, pa.int64()),
        pa.array(values, pa.list_(KINDS[kind][1])),
    ]
    return pa.RecordBatch.from_arrays(columns, ["embedding_name", "key_id", "embedding"])


def clean(summary: dict[str, Any], batches: int, rows: int) -> None:
    counts = {name: summary[name] for name in summary if name != "errors"}
    assert counts == {
        "total_batches": batches,
        "failed_batches": 0,
        "total_records": rows,
        "success_records": rows,
        "failed_records": 0,
    }
    assert not summary["errors"]


def read(view: Any, keys: Sequence[int], version: str, pk: str = "t") -> dict[int, list[float]]:
    rows = view.get_online_features(feature_name=pk, keys=list(keys), version=version)
    return {int(row["sk"] if "sk" in row else row["key_id"]): list(row["embedding"]) for row in rows}


def eventually(view: Any, want: dict[int, list[float]], version: str, pk: str = "t") -> None:
    """A read must agree within ``READ_WITHIN_S``: a real store may need a moment, the fake none."""
    deadline = time.monotonic() + READ_WITHIN_S
    while (got := read(view, list(want), version, pk)) != want:
        assert time.monotonic() < deadline, got
        time.sleep(0.2)


def test_absent_things_are_none(project: Any) -> None:
    nobody = f"nobody_{uuid.uuid4().hex}"
    assert project.get_entity(nobody) is None
    assert project.get_dynamic_embedding_feature_view(nobody) is None


def test_a_view_says_what_it_was_made_with(project: Any, view: Any) -> None:
    opened = project.get_dynamic_embedding_feature_view(f"{VIEW}_float")
    for one in (view, opened):
        assert (one.pk_field, one.sk_field, one.embedding_field) == ("embedding_name", "key_id", "embedding")
        assert getattr(one, "embedding_field_type", "ARRAY<FLOAT>") in ("ARRAY<FLOAT>", "FS_ARRAY_FLOAT")
        assert (one._batch_size, one._max_workers) == (1000, 4)
    opened.close(wait=True)


def test_arrow_rows_are_read_back(view: Any, version: str) -> None:
    want = {1: [0.5, -0.25], 2: [3.4028234663852886e38, 1e-45], 2**53 + 1: [1.0, 2.0], -(2**63): [-0.0, 4.0]}
    view.write_features_arrow(batch=batch([*want], [*want.values()]), version=version, write_mode="MERGE", ts=now())
    clean(view.write_flush(), 1, 4)
    want[2] = pa.array(want[2], pa.float32()).to_pylist()
    eventually(view, want, version)


def test_json_rows_are_read_back(view: Any, version: str) -> None:
    want = {1: [0.5, -0.25], 2**53 + 1: [1.0, 2.0]}
    rows = [{"embedding_name": "t", "key_id": key, "embedding": value} for key, value in want.items()]
    view.write_features(data=rows, version=version, write_mode="MERGE", ts=now())
    clean(view.write_flush(), 1, 2)
    eventually(view, want, version)


def test_uint8_rows_are_read_back(project: Any, version: str) -> None:
    view = open_view(project, "uint8")
    want = {7: [0.0, 255.0, 128.0, 1.0]}
    view.write_features_arrow(batch=batch([7], [[0, 255, 128, 1]], "uint8"), version=version, ts=now())
    clean(view.write_flush(), 1, 1)
    eventually(view, want, version)
    view.close(wait=True)


def test_a_flush_sums_up_since_the_last_one(view: Any, version: str) -> None:
    clean(view.write_flush(), 0, 0)
    view.write_features_arrow(batch=batch([1], [[1.0]]), version=version, ts=now())
    view.write_features_arrow(batch=batch([2, 3], [[1.0], [1.0]]), version=version, ts=now())
    clean(view.write_flush(), 2, 3)
    clean(view.write_flush(), 0, 0)


def test_batches_over_the_batch_size_are_split(view: Any, version: str) -> None:
    keys = list(range(2001))
    view.write_features_arrow(batch=batch(keys, [[float(key)] for key in keys]), version=version, ts=now())
    clean(view.write_flush(), 3, 2001)
    eventually(view, {0: [0.0], 1000: [1000.0], 2000: [2000.0]}, version)


@pytest.mark.parametrize(("step_ms", "winner"), [(1, 2.0), (-1, 1.0), (0, 2.0)])
def test_the_greater_ts_wins_and_of_equal_ones_the_later_write(
    view: Any, version: str, step_ms: int, winner: float
) -> None:
    ts = now()
    for value, stamp in ((1.0, ts), (2.0, ts + step_ms)):
        view.write_features_arrow(batch=batch([5], [[value]]), version=version, ts=stamp)
        clean(view.write_flush(), 1, 1)
    eventually(view, {5: [winner]}, version)


def test_versions_and_tables_do_not_see_each_other(view: Any, version: str) -> None:
    view.write_features_arrow(batch=batch([5], [[1.0]]), version=version, ts=now())
    view.write_features_arrow(batch=batch([5], [[2.0]]), version=version + "b", ts=now())
    view.write_features_arrow(batch=batch([5], [[3.0, 3.0]], pk="u"), version=version, ts=now())
    clean(view.write_flush(), 3, 3)
    eventually(view, {5: [1.0]}, version)
    eventually(view, {5: [2.0]}, version + "b")
    eventually(view, {5: [3.0, 3.0]}, version, "u")


def test_absent_keys_are_left_out(view: Any, version: str) -> None:
    view.write_features_arrow(batch=batch([5], [[1.0]]), version=version, ts=now())
    clean(view.write_flush(), 1, 1)
    eventually(view, {5: [1.0]}, version)
    assert read(view, [4, 5, 6], version) == {5: [1.0]}
    assert read(view, [5], version, "nobody") == {}

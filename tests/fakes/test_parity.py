"""The SDK's interface, and nothing but it: the same tests on the facade (in process, over HTTP), on the real SDK
against the fake, and on the real service. What is not run is reported as skipped with the reason;
docs/feature-store.md keeps the date of the last agreement.

The real service is asked only when DELTAPROOF_REAL_PROJECT names a scratch project (an entity and two views named
``deltaproof_parity…`` are made there and kept), with DELTAPROOF_REAL_REGION, _ACCESS_KEY_ID, _ACCESS_KEY_SECRET,
_FEATUREDB_USERNAME, _FEATUREDB_PASSWORD and perhaps _ENDPOINT and _SECURITY_TOKEN: ``pytest -m real``.

At the end: whatever a caller hands in, the facade's two transports answer alike.
"""

from __future__ import annotations

import enum
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltaproof.fakes import feature_store_py as facade
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import (
    AnyFault,
    FaultPlan,
    OutageFault,
    PartialFault,
    ResetFault,
    SchemaChangedFault,
    StaleReadFault,
    StatusFault,
    TokenRevokedFault,
    TruncateFault,
    ViewDeletedFault,
)
from deltaproof.fakes.server.serve import wall_store
from deltaproof.fakes.store import Store

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


# Both transports of the facade at once: the same input, the same outcome


class Word(enum.StrEnum):
    VERSION = "an enum's"


class OldWord(str, enum.Enum):  # noqa: UP042
    """Whose str() is not its value."""

    VERSION = "another enum's"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


MS = 1_700_000_000_000
EDGES = [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, 10**5000]
SCALARS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(),
    st.integers(-5, 5).map(np.int64),
    st.sampled_from([np.uint64(2**64 - 1), np.int8(-1), np.uint8(7), np.array(3), np.bool_(True), np.float64(2.0)]),
    st.booleans(),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=3),
    st.sampled_from([None, b"5", "5", Fraction(5), Unprintable(), pa.scalar(5), [], {}, Word.VERSION]),
)


def usually(good: st.SearchStrategy[Any], *odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly good, so that one odd thing at a time is looked at."""
    return st.integers(0, 3).flatmap(lambda number: good if number else st.one_of(*odd))


TS = usually(st.integers(1, 50), st.none(), st.integers(1, 50).map(np.int64), SCALARS)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=4)  # lone surrogates too
VERSIONS = usually(
    st.sampled_from(["v1", "v2", "v3"]),
    TEXTS,
    st.sampled_from(
        ["", " ", "a b", "ü ", "a\u2028b", "%2F/?&=+#", "..", "x" * 256, "x" * 257, "🙂" * 256, np.str_("v1")]
    ),
    st.sampled_from([Word.VERSION, OldWord.VERSION]),
    SCALARS,
)
KEYS = usually(
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.one_of(st.integers(0, 9), SCALARS), max_size=4),
    st.sampled_from(["uint8", "int64", "uint64", "float64", "bool", "object"]).map(lambda kind: np.ones(2, dtype=kind)),
    st.sampled_from(
        [
            np.array([]),
            np.ones((2, 2), dtype=np.int64),
            np.array([2**64 - 1], dtype=np.uint64),
            pa.array([1, 2], pa.int8()),
            pa.array([2**64 - 1], pa.uint64()),
            pa.array([1, None]),
            pa.array([1.0]),
            pa.chunked_array([[1], [2]]),
            pa.chunked_array([], pa.int64()),
            range(3),
            {1: 2},
            "12",
        ]
    ),
    SCALARS,
)
NAMES = usually(st.sampled_from(["t", "u"]), TEXTS, SCALARS)
VALUES = usually(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
    st.lists(st.one_of(st.floats(), SCALARS), max_size=3),
    st.sampled_from([np.ones(2, np.float32), np.ones(2, np.int8), np.ones((2, 1)), [[1.0, 2.0]], [1e39, 1.0]]),
    SCALARS,
)
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"embedding_name": st.just("t"), "key_id": st.integers(0, 9), "embedding": VALUES}),
        st.fixed_dictionaries({"embedding_name": NAMES, "key_id": SCALARS, "embedding": VALUES}),
        st.dictionaries(st.one_of(st.sampled_from(["embedding_name", "key_id", "embedding"]), TEXTS), SCALARS),
        SCALARS,
    ),
    max_size=3,
)
DATA = st.one_of(ROWS, ROWS.map(tuple), st.just({}), st.just({"embedding_name": "t"}), SCALARS)


@st.composite
def arrow_batches(draw: st.DrawFn) -> Any:
    count = draw(st.integers(0, 4))
    keys = draw(st.lists(st.integers(-1, 9), min_size=count, max_size=count))
    matrix = [[draw(st.sampled_from([0.5, 1.0, float("nan")])) for _ in range(2)] for _ in keys]
    pk_type = draw(st.sampled_from([pa.string()] * 4 + [pa.large_string(), pa.dictionary(pa.int32(), pa.string())]))
    sk_type = draw(st.sampled_from([pa.int64()] * 4 + [pa.int32(), pa.float64(), pa.string()]))
    value_types = [pa.list_(pa.float32())] * 4 + [pa.list_(pa.float64()), pa.list_(pa.float32(), 2)]
    value_type = draw(st.sampled_from([*value_types, pa.large_list(pa.float32()), pa.string()]))
    pks = draw(st.lists(st.sampled_from(["t", "t", "u", "", None]), min_size=count, max_size=count))
    texts = [str(row) for row in matrix]
    columns = [
        pa.array(pks, pa.string()).cast(pk_type),
        pa.array(keys, pa.int64()).cast(sk_type),
        pa.array(texts if value_type == pa.string() else matrix, value_type),
    ]
    made = pa.RecordBatch.from_arrays(columns, ["embedding_name", "key_id", "embedding"])
    made = made.slice(draw(st.integers(0, 2)))
    if draw(st.booleans()):
        made = made.select(draw(st.permutations(made.schema.names)))
    if draw(st.booleans()):
        return pa.Table.from_batches([made, made])
    return made


# One call of the SDK, named by its first item.
CALLS = st.one_of(
    st.tuples(st.just("write_features"), DATA, VERSIONS, TS),
    st.tuples(st.just("write_features_arrow"), usually(arrow_batches(), SCALARS), VERSIONS, TS),
    st.tuples(st.just("get_online_features"), NAMES, KEYS, VERSIONS),
    st.tuples(st.just("lookup_arrow"), VERSIONS, st.one_of(st.lists(NAMES, max_size=3), NAMES), KEYS),
    st.tuples(st.just("scan"), VERSIONS),
    st.tuples(st.just("read_changes"), VERSIONS, TS),
    st.tuples(st.just("high_water_ts"), VERSIONS),
)


class Pair:
    """The facade over HTTP and in process, each in front of an empty store of its own, on one standing clock."""

    def __init__(self) -> None:
        self.server = FeatureStoreServer(store=Store(lambda: MS)).start()
        self.store, self.plan = Store(lambda: MS), FaultPlan()
        self.clients = [
            facade.FeatureStoreClient(
                "deltaproof",
                "deltaproof",
                endpoint=self.server.endpoint,
                featuredb_username="p",
                featuredb_password="p",
            ),
            facade.in_process_client(self.store, "p", self.plan),
        ]
        self.projects = [client.get_project("deltaproof") for client in self.clients]
        self.views = [open_view(project) for project in self.projects]
        for view in self.views:
            view._max_workers = 1  # so that writes arrive in order

    def close(self) -> None:
        for view in self.views:
            view.close()
        for client in self.clients:
            client.close()
        self.server.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def plain(result: Any) -> Any:
    """Comparable, bit for bit: NaN equals itself, 1.0 is not 1."""
    if isinstance(result, tuple):
        return [plain(part) for part in result]
    if isinstance(result, pa.Table):
        result = (result.schema, result.to_pylist())
    if isinstance(result, facade.Entity | facade.Project):
        result = {name: value for name, value in vars(result).items() if name != "_transport"}
    if isinstance(result, facade.DynamicEmbeddingFeatureView):
        result = result._spec
    return repr(result)


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return plain(act())
    except facade.TransportError as error:
        return "TransportError", error.code, error.status, error.applied, error.retriable
    except (TypeError, ValueError, RuntimeError) as error:
        refused = error
    ours = ("view ", "data is a ", "batch is a ", "a row holds a ", "Only dicts with str-like")
    assert type(refused) in (TypeError, ValueError), f"a bare {refused!r}"
    assert str(refused).startswith(ours), f"a bare {refused!r}"
    return type(refused).__name__, str(refused)


def flushed(view: Any) -> Any:
    summary = view.write_flush()
    assert all(error.code != "ClientBug" for error in summary["errors"]), summary["errors"]
    summary["errors"] = [(e.code, e.status, e.applied, e.retriable, e.retry_after_s, e.rows) for e in summary["errors"]]
    return summary


def perform(view: Any, call: tuple[Any, ...]) -> Any:
    name, *arguments = call
    if name.startswith("write"):
        data, version, ts = arguments
        return outcome(lambda: getattr(view, name)(data, version, ts=ts)), flushed(view)
    return outcome(lambda: getattr(view, name)(*arguments))


ROW = {"embedding_name": "t", "key_id": 1, "embedding": [1.0, 2.0]}


# What went different ways once.
ODD_TS: list[Any] = [np.int64(5), True, -1, 0, 2**63, 5.0, "5", None]
ODD_KEYS: list[Any] = [1.9, "1", True, None, 2**63, np.int32(1), 10**5000]
ODD_DATA: list[Any] = [{}, "x", None, [{**ROW, "embedding_name": "\ud800"}], [{**ROW, "key_id": 10**5000}]]
ODD_VERSIONS: list[Any] = [OldWord.VERSION, "another enum's", Word.VERSION, "\ud800", 5, None, "\x00"]


@settings(max_examples=400)
@given(calls=st.lists(CALLS, min_size=1, max_size=5))
@example(calls=[("write_features", [ROW], "v1", ts) for ts in ODD_TS])
@example(calls=[("read_changes", "v1", ts) for ts in [*ODD_TS, 2**63 - 1]])
@example(calls=[("get_online_features", "t", [key], "v1") for key in ODD_KEYS])
@example(calls=[("write_features", data, "v1", 5) for data in ODD_DATA])
@example(calls=[("write_features", [ROW], version, 5) for version in ODD_VERSIONS])
@example(calls=[("scan", version) for version in ODD_VERSIONS])
def test_any_call_has_the_same_outcome_on_both_transports(pair: Pair, calls: list[tuple[Any, ...]]) -> None:
    for call in calls:
        over_http, in_process = (perform(view, call) for view in pair.views)
        assert over_http == in_process, call


OBJECT_NAMES = st.one_of(TEXTS, st.sampled_from(["a", "deltaproof", "x" * 256, "x" * 257, "a/b", ".."]), SCALARS)


@settings(max_examples=150)
@given(name=OBJECT_NAMES, other=OBJECT_NAMES, number=SCALARS)
@example(name="a", other="a", number=5)
@example(name="b", other="deltaproof_parity", number=np.int64(7))
def test_any_name_has_the_same_outcome_on_both_transports(pair: Pair, name: Any, other: Any, number: Any) -> None:
    for act in (
        lambda client, _: client.get_project(name),
        lambda _, project: project.get_entity(name),
        lambda _, project: project.get_dynamic_embedding_feature_view(name),
        lambda _, project: project.create_entity(name, other),
        lambda _, project: project.create_entity(other, "id", name),
        lambda _, project: project.create_dynamic_embedding_feature_view(name, other, ttl=number),
        lambda _, project: project.create_dynamic_embedding_feature_view(name, other, other, shard_count=number),
        lambda _, project: project.create_dynamic_embedding_feature_view(name, other, embedding_field_type=other),
        lambda _, project: project.get_entity(name),
        lambda _, project: project.get_dynamic_embedding_feature_view(name),
    ):
        over_http, in_process = map(outcome, map(partial(partial, act), pair.clients, pair.projects))
        assert over_http == in_process


FAULTS: list[AnyFault] = [
    StatusFault(id="f", code=503, retry_after_s=2.5),
    StatusFault(id="f", code=401),
    StatusFault(id="f", code=500, when="after-commit"),
    ResetFault(id="f"),
    ResetFault(id="f", when="mid-reply"),
    PartialFault(id="f", rows_failed=1),
    TruncateFault(id="f", bytes_kept=3),
    OutageFault(id="f", duration_ms=600_000, code=429),
    ViewDeletedFault(id="f"),
    SchemaChangedFault(id="f"),
    TokenRevokedFault(id="f"),
    StaleReadFault(id="f", writes=1),
]
SCRIPT: list[tuple[Any, ...]] = [
    ("write_features", [ROW, {**ROW, "key_id": 2}], "v1", 5),
    ("write_features", [ROW, {**ROW, "key_id": 3}], "v1", 6),
    ("write_features", [{**ROW, "key_id": -1}], "v1", 7),
    ("write_features", [{**ROW, "key_id": "1"}], "v1", 7),
    ("get_online_features", "t", [1, 2, 3], "v1"),
    ("get_online_features", "t", ["1"], "v1"),
    ("lookup_arrow", "v1", ["t"], [3]),
    ("scan", "v1"),
    ("read_changes", "v1", 5),
    ("read_changes", "v1", -5),
    ("high_water_ts", "v1"),
]


@st.composite
def planned_faults(draw: st.DrawFn) -> AnyFault:
    fault = draw(st.sampled_from(FAULTS))
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__}
    routes = [route for route in ("write", "lookup", "scan", "changes") if fault.strikes(route, route)]
    return type(fault)(**fields | {"route": draw(st.sampled_from(routes)), "skip": draw(st.integers(0, 3))})


@settings(max_examples=40)
@given(fault=planned_faults())
def test_any_fault_has_the_same_outcome_on_both_transports(fault: AnyFault) -> None:
    """At whichever request of the script it strikes, in those behind it, and once clients have been refreshed."""
    pair = Pair()
    try:
        pair.server.set_faults([fault])
        pair.plan.set([fault])
        for refresh in (False, True):
            for client in pair.clients if refresh else ():
                client.refresh()
            for call in SCRIPT:
                over_http, in_process = (perform(view, call) for view in pair.views)
                assert over_http == in_process, (refresh, call)
        assert [entry.fired for entry in pair.server.faults()] == [entry.fired for entry in pair.plan.fired()] == [1]
    finally:
        pair.close()

"""What a request can make the server hold, or say: replies, Python objects of a body, messages. All within bounds."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import urllib3
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.fakes.errors import MESSAGE_CHARS_MAX, FakeError, SchemaMismatch
from deltaproof.fakes.server import FeatureStoreServer, routes, wire
from deltaproof.fakes.server.handlers import ONLINE_BYTES_MAX, ONLINE_ROWS_MAX, Call
from deltaproof.fakes.server.routes import GROUPS, JSON_BYTES_MAX
from deltaproof.fakes.server.windows import WINDOW_BYTES
from deltaproof.fakes.store import DIM_MAX, REPLY_BYTES_MAX, Snapshot, ViewSpec, write_schema

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, make_view, rows

MIB = 2**20
INSTANCE = "featurestore-cn-deltaproof"
LOOKUP = f"/lookup_arrow?version={VERSION}"


def refused(reply: Any, code: str, status: int) -> str:
    error = json.loads(reply.data)
    assert (reply.status, error["Code"], set(error)) == (status, code, {"Code", "Message", "RequestId"}), error
    return str(error["Message"])


def wide(count: int, dim: int, pk: str = "t") -> pa.RecordBatch:
    """Rows of keys 1 to ``count``."""
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * dim)
    values = pa.array(np.repeat(np.arange(1, count + 1, dtype=np.float32), dim))
    keys = pa.array(np.arange(1, count + 1))
    columns = [pa.array([pk] * count), keys, pa.ListArray.from_arrays(offsets, values)]
    return pa.RecordBatch.from_arrays(columns, schema=write_schema("float32"))


def keys_request(pk: list[str], sk: list[int]) -> bytes:
    return ipc(pa.RecordBatch.from_arrays([pa.array(pk, pa.string()), pa.array(sk, pa.int64())], ["pk", "sk"]))


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


# Lookups


def test_a_wide_row_asked_for_very_often_is_refused(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, wide(1, DIM_MAX), version=VERSION, ts=1)
    assert raw.data("POST", LOOKUP, keys_request(["t"] * 3, [1, 1, 2])).status == 200
    before = rss()
    times = 100_000  # 26 GB
    message = refused(raw.data("POST", LOOKUP, keys_request(["t"] * times, [1] * times)), "BodyTooLarge", 413)
    assert "ask for fewer rows" in message
    body = json.dumps({"keys": ["t\x1d1"] * 300})
    refused(raw.data("POST", f"/batch_get_kv2?version={VERSION}", body), "BodyTooLarge", 413)
    assert rss() - before < 3 * REPLY_BYTES_MAX
    assert raw.data("POST", LOOKUP, keys_request(["t"], [1])).status == 200


def test_a_long_lookup_is_sent_in_windows(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, wide(100, DIM_MAX), version=VERSION, ts=1)
    server.store.write(PROJECT, VIEW, wide(9, 3, "u"), version=VERSION, ts=1)
    pk, sk = [*["t"] * 100, *["u"] * 9, "none"], [*range(1, 101), *range(1, 10), 1]
    batches = list(pa.ipc.open_stream(raw.data("POST", LOOKUP, keys_request(pk, sk)).data))
    assert max(batch.nbytes for batch in batches) < WINDOW_BYTES + MIB
    want = server.store.lookup(PROJECT, VIEW, VERSION, pk, pa.array(sk, pa.int64()))
    assert pa.Table.from_batches(batches).equals(want)


def test_a_lookup_s_columns_are_named_when_they_are_wrong(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    text, number = pa.array(["t", None], pa.string()), pa.array([1, 2], pa.int64())
    for columns, want in (
        ([text, number], "column pk is null in row 1"),
        ([text.fill_null("t"), pa.array([None, 1], pa.int64())], "column sk is null in row 0"),
        ([text.fill_null("t"), text], "column sk is string, want int64"),
        ([pa.nulls(2), number], "column pk is null, want string"),
    ):
        body = ipc(pa.RecordBatch.from_arrays(columns, ["pk", "sk"]))
        assert want in refused(raw.data("POST", LOOKUP, body), "SchemaMismatch", 400)


# Longer replies: in windows


def test_online_features_are_bounded_in_bytes_too(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, wide(17, DIM_MAX), version=VERSION, ts=1)
    server.store.write(PROJECT, VIEW, wide(2, 5, "u"), version=VERSION, ts=1)
    view_id = server.state.id_of("view", PROJECT, VIEW)

    def ask(table: str) -> Any:
        query = f"JoinIds=%5B%22{table}%22%5D&Config=%7B%22version%22%3A%22{VERSION}%22%7D"
        return raw.control("GET", f"/{INSTANCE}/featureviews/{view_id}/onlinefeatures?{query}")

    assert str(ONLINE_BYTES_MAX) in refused(ask("t"), "BodyTooLarge", 413)
    assert len(json.loads(ask("u").data)["OnlineFeatures"]) == 2


def test_wide_rows_are_sent_in_windows(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, wide(100, DIM_MAX), version=VERSION, ts=1)  # 26 MB
    server.store.write(PROJECT, VIEW, wide(300, 4, "u"), version=VERSION, ts=2)
    snapshot = json.loads(raw.data("POST", f"/snapshots?version={VERSION}").data)["data"]["snapshot_id"]
    want = pa.Table.from_batches(server.store.scan(PROJECT, VIEW, VERSION))
    for path in (f"/snapshots/{snapshot}/scan", f"/iterate_get_kv?version={VERSION}&ts=0"):
        reply = raw.data("GET", path)
        batches = list(pa.ipc.open_stream(reply.data))
        assert max(batch.nbytes for batch in batches) <= WINDOW_BYTES + MIB
        assert pa.Table.from_batches(batches).combine_chunks() == want.combine_chunks()
    assert reply.headers["Next-Ts"] == "2"
    assert raw.data("GET", f"/iterate_get_kv?version={VERSION}&ts=9").headers["Next-Ts"] == "9"
    blocks = raw.data("POST", f"/batch_get_kkv?version={VERSION}", '{"pks": ["t", "u"]}').data
    at, sizes = 0, []
    while at < len(blocks):
        sizes.append(int.from_bytes(blocks[at : at + 4], "little"))
        at += 4 + sizes[-1]
    assert len(sizes) > 7
    assert max(sizes) <= WINDOW_BYTES + MIB


# Memory that is not there


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


PLACES = {"instance": INSTANCE, "db": INSTANCE, "schema": PROJECT, "table": VIEW}
REQUESTS: dict[str, tuple[str, bytes]] = {
    "create_project": ("", b'{"Name": "p"}'),
    "create_entity": ("", b'{"Name": "e", "JoinId": "j", "ProjectId": "1"}'),
    "write_json": ("", b'{"version": "v1", "content": [{"embedding_name": "t", "key_id": 1, "embedding": [1]}]}'),
    "write_arrow": ("", ipc(rows(["t"], [1], [[1.0]]))),
    "lookup_arrow": ("", keys_request(["t"], [1])),
    "batch_get_kkv": ("", b'{"pks": ["t"]}'),
    "batch_get_kv2": ("", b'{"keys": ["t\x1d1"]}'.replace(b"\x1d", b"\\u001d")),
    "online_features": ("JoinIds=%5B%5D&Config=%7B%22version%22%3A%22v1%22%7D", b""),
}


@pytest.mark.parametrize(
    ("method", "path", "name", "group"),
    [
        (method, path, name, group)
        for group, routes in GROUPS.items()
        for method, path, name, _ in routes
        if group != "admin" and name != "create_view"
    ],
)
def test_a_handler_without_memory_refuses_the_request(
    server: FeatureStoreServer,
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    name: str,
    group: str,
) -> None:
    make_view(server.store)
    query, body = REQUESTS.get(name, ("", b""))
    places = {**dict.fromkeys(("project", "entity", "view", "datasource", "snapshot"), "1"), **PLACES}
    target = path.format(**places) + f"?{query or 'version=v1'}"
    headers = raw.signed(method, target, body) if group == "control" else raw.login
    monkeypatch.setattr(Call, "commit", no_memory)
    message = refused(raw(method, target, body=body, headers=headers), "BodyTooLarge", 413)
    assert "no memory" in message
    monkeypatch.undo()
    assert raw("GET", "/health").status == 200


def test_memory_that_ends_in_the_middle_of_a_reply_ends_the_reply(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_view(server.store)
    server.store.write(PROJECT, VIEW, wide(10, 4), version=VERSION, ts=1)
    whole = Snapshot.batches

    def broken(snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
        yield from whole(snapshot)
        raise MemoryError

    monkeypatch.setattr(Snapshot, "batches", broken)
    head = f"GET {raw.table}/iterate_get_kv?version={VERSION} HTTP/1.1\r\nHost: x\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head.encode() + b"\r\n")
        received = b""
        with suppress(ConnectionResetError):
            while chunk := sock.recv(65536):
                received += chunk
    assert received.count(b"HTTP/1.1") <= 1, "a second reply within the first"
    assert not received.endswith(b"0\r\n\r\n"), "it looks complete"
    monkeypatch.undo()
    assert raw.data("GET", f"/iterate_get_kv?version={VERSION}").status == 200


def test_memory_that_ends_after_the_commit_is_no_refusal(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_view(server.store)
    monkeypatch.setattr(wire, "to_json", no_memory)
    with pytest.raises(urllib3.exceptions.ProtocolError):
        raw.data("POST", f"/write_arrow?version={VERSION}&ts=1", ipc(rows(["t"], [1], [[1.0]])))
    monkeypatch.undo()
    assert server.store.rows(PROJECT, VIEW, VERSION) == 1
    (entry,) = server.requests()
    assert (entry.status, entry.fate) == (None, "yes")


def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODIES_BYTES_MAX", 1000)
    body = ipc(rows(["t"], [1], [[1.0]]))
    with FeatureStoreServer(body_timeout_s=1.0) as server:
        make_view(server.store)
        raw = Raw(server)
        head = f"POST {raw.table}/write_arrow?version={VERSION}&ts=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in raw.login.items())
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
            slow.sendall(head.encode() + b"\r\n" + b"x" * 800)
            codes: list[str] = []
            deadline = time.monotonic() + 20
            while codes[-1:] != ["Throttling"]:  # at first the slow one's bytes may still be on their way
                assert time.monotonic() < deadline
                reply = raw.data("POST", f"/write_arrow?version={VERSION}&ts=1", body)
                codes.append(json.loads(reply.data).get("Code", ""))
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
            assert raw("GET", "/health").status == 200
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as quick:  # head and body at once
                quick.sendall(head.replace(": 900", f": {len(body)}").encode() + b"\r\n" + body)
                assert quick.recv(100).startswith(b"HTTP/1.1 429")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        for chunks in (body, [body[:100], body[100:]]):  # in one piece, and chunked
            for _ in range(5):  # what was taken is given back
                sent = iter(chunks) if isinstance(chunks, list) else chunks
                assert raw.data("POST", f"/write_arrow?version={VERSION}&ts=1", sent).status == 200
        raw.close()


# JSON in windows


SPEC = ViewSpec(PROJECT, VIEW, "entity", "p.1", "s-2", "v")
TEXTS = st.text(max_size=4) | st.sampled_from(['"', "\\", "},{", "[", "ü"])
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.lists(st.tuples(TEXTS, st.integers(-(2**63), 2**63 - 1), st.lists(NUMBERS, max_size=5)), max_size=8)


@given(ROWS, st.integers(1, 60), st.sampled_from([None, 1]))
def test_json_rows_are_the_same_in_windows_of_any_size(
    content: list[tuple[str, int, list[float]]], window: int, indent: int | None
) -> None:
    text = json.dumps([dict(zip((SPEC.pk, SPEC.sk, SPEC.value), row, strict=True)) for row in content], indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "JSON_WINDOW_BYTES", window)
        batch = wire.rows_to_batch(text.encode(), SPEC)
    assert batch.schema == write_schema("float32")
    assert batch.column("pk").to_pylist() == [pk for pk, _, _ in content]
    assert batch.column("sk").to_pylist() == [sk for _, sk, _ in content]
    assert batch.column("embedding").to_pylist() == [
        np.array(v, np.float64).astype(np.float32).tolist() for *_, v in content
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**65) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.sampled_from(["p.1", "s-2", "v"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(JSON, st.integers(1, 40))
def test_what_is_no_list_of_rows_is_refused_in_windows_of_any_size(content: Any, window: int) -> None:
    """The windows are cut by looks: what they let through must be what a single one lets through."""

    def outcome() -> Any:
        try:
            return wire.rows_to_batch(json.dumps(content).encode(), SPEC).to_pydict()
        except FakeError:
            return "refused"

    whole = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "JSON_WINDOW_BYTES", window)
        assert outcome() == whole


def test_the_number_of_a_wrong_row_counts_from_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "JSON_WINDOW_BYTES", 100)
    good: dict[str, Any] = {SPEC.pk: "t", SPEC.sk: 1, SPEC.value: [1]}
    for wrong in ({SPEC.sk: "x"}, {SPEC.sk: 2**63}, {SPEC.value: ["x"]}, {SPEC.value: [True]}, {"more": 1}):
        text = json.dumps([*[good] * 1000, {**good, **wrong}, good]).encode()
        with pytest.raises(SchemaMismatch, match=r"row 1000\b"):
            wire.rows_to_batch(text, SPEC)


def one_row(numbers: bytes, more: bytes = b"") -> bytes:
    return b'[{"p":"t","s":1,"v":[' + numbers + b"1]" + more + b"}]"


@pytest.mark.parametrize(
    ("content", "times"),
    [
        (b"[" + b'{"p":"","s":1,"v":[1]},' * 40_000 + b"{}]", 4),
        (one_row(b"1," * 500_000), 9),  # float32: twice the text, and once more to join them
        (one_row(b"0.5," * 250_000), 7),
        (b"[" + b"{}," * 300_000 + b"{}]", 4),
        (b"[" + b"[]," * 300_000 + b"[]]", 4),
        (one_row(b"[]," * 300_000), 4),
        (one_row(b"", b',"x":[' + b"[]," * 300_000 + b"[]]"), 4),
    ],
    ids=["rows", "integers", "floats", "empty objects", "empty lists", "lists for numbers", "an unknown field"],
)
def test_a_json_body_is_never_whole_as_python_objects(
    server: FeatureStoreServer, raw: Raw, monkeypatch: pytest.MonkeyPatch, content: bytes, times: int
) -> None:
    """Counted is all that Python holds at once, in multiples of the text: the client's and the server's copies of it,
    NumPy's numbers, and a window's objects. All of it as objects would take twice as much, or much more.
    """
    monkeypatch.setattr(wire, "JSON_WINDOW_BYTES", 2**14)
    monkeypatch.setattr(wire, "_NUMBERS_MAX", 2**12)
    make_view(server.store, pk="p", sk="s", value="v")
    body = b'{"version": "v1", "x": ' + content + b', "content": ' + content + b"}"
    raw.data("POST", "/write", b"{}")  # warm up
    tracemalloc.start()
    try:
        reply = raw.data("POST", "/write", body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.status in (200, 400)
    assert peak < times * len(content), f"{peak / len(content):.1f} times the content"


@pytest.mark.parametrize("path", ["/batch_get_kkv?version=v1", "/batch_get_kv2?version=v1"])
def test_other_json_bodies_are_bounded(server: FeatureStoreServer, raw: Raw, path: str) -> None:
    make_view(server.store)
    refused(raw.data("POST", path, b"[" + b"{}," * (JSON_BYTES_MAX // 3) + b"{}]"), "BodyTooLarge", 413)


def test_an_arrow_stream_has_a_bounded_number_of_batches(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store)
    empty = rows([], [], [])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, empty.schema) as writer:
        for _ in range(wire.BATCHES_MAX + 1):
            writer.write_batch(empty)
    body = sink.getvalue().to_pybytes()
    assert "batches" in refused(raw.data("POST", "/write_arrow?version=v1&ts=1", body), "MalformedBody", 400)


# Messages


@given(st.text(st.sampled_from("a\n\0\ud800\udfffü\U0001f4a9"), max_size=40), st.integers(1, 3000))
def test_messages_are_short_and_valid_unicode(text: str, times: int) -> None:
    message = str(FakeError(text * times))
    assert len(message) <= 6 * MESSAGE_CHARS_MAX  # half of a surrogate pair is shown as six characters
    assert message.encode().decode() == message
    if len(text) * times <= MESSAGE_CHARS_MAX and "\ud800" not in text and "\udfff" not in text:
        assert message == text * times


def long_names(text: str) -> dict[str, Callable[[Raw], Any]]:
    named = rows(["t"], [1], [[1.0]]).rename_columns([text, "sk", "embedding"])
    typed = pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([pa.array([1])], [text])], ["pk"])
    row = {"embedding_name": "t", "key_id": 1, "embedding": [1.0]}
    write = "/write_arrow?version=v1&ts=1"

    def sent(content: Any) -> bytes:
        return json.dumps({"version": "v1", "ts": 1, "content": content}).encode()

    return {
        "a column's name": lambda raw: raw.data("POST", write, ipc(named)),
        "a column's type": lambda raw: raw.data("POST", write, ipc(typed)),
        "a lookup's column": lambda raw: raw.data("POST", LOOKUP, ipc(named)),
        "an embedding name": lambda raw: raw.data("POST", write, ipc(rows([text], [1], [[1.0]]))),
        "a reserved key's name": lambda raw: raw.data("POST", write, ipc(rows([text], [-1], [[1.0]]))),
        "an infinite value's name": lambda raw: raw.data("POST", write, ipc(rows([text], [1], [[float("inf")]]))),
        "a field of JSON": lambda raw: raw.data("POST", "/write", sent([{**row, text: 1}])),
        "a value of JSON": lambda raw: raw.data("POST", "/write", sent([{**row, "key_id": text}])),
        "a name of JSON": lambda raw: raw.data("POST", "/write", sent([{**row, "embedding_name": text, "key_id": -1}])),
        "a version of JSON": lambda raw: raw.data("POST", "/write", json.dumps({"version": text}).encode()),
        "a fault's id": lambda raw: raw(
            "PUT", "/_admin/faults", body=json.dumps([{"id": text, "kind": "status", "code": 1}]).encode()
        ),
        "a fault's route": lambda raw: raw(
            "PUT", "/_admin/faults", body=json.dumps([{"id": "f", "kind": "status", "route": text}]).encode()
        ),
        "a project to reset": lambda raw: raw("POST", "/_admin/reset", body=json.dumps({"projects": [text]}).encode()),
    }


@pytest.mark.parametrize("name", sorted(long_names("x")))
def test_no_reply_repeats_a_client_s_text_at_length(server: FeatureStoreServer, raw: Raw, name: str) -> None:
    make_view(server.store)
    for text in ("x" * 1_000_000, "\n" * 1_000_000, "\U0001f4a9" * 200_000):
        reply = long_names(text)[name](raw)
        assert 400 <= reply.status < 500
        assert len(reply.data) < 7000
        assert json.loads(reply.data)["Message"]
    assert all(len(entry.code) < 60 for entry in server.requests())


@pytest.mark.parametrize(
    ("version", "problem"),
    [(5, "`int`"), (None, "`null`"), (["v1"], "`array`"), ({}, "`object`"), (True, "`bool`"), ("", "empty")],
)
def test_a_version_of_another_type_is_named(server: FeatureStoreServer, raw: Raw, version: Any, problem: str) -> None:
    make_view(server.store)
    reply = raw.data("POST", "/write", json.dumps({"version": version, "content": []}).encode())
    assert problem in refused(reply, "InvalidVersion", 400)


@pytest.mark.parametrize("half", ["\ud800", "\ud800x", "x\udc00"])
def test_half_a_surrogate_pair_is_named(server: FeatureStoreServer, raw: Raw, half: str) -> None:
    make_view(server.store)
    content = [{"embedding_name": half, "key_id": 1, "embedding": [1.0]}]
    for path, body in (
        ("/write", {"version": "v1", "content": content}),
        ("/write", {"version": half, "content": []}),
        ("/batch_get_kkv?version=v1", {"pks": [half]}),
    ):
        reply = raw.data("POST", path, json.dumps(body).encode())
        assert "half of a surrogate pair" in refused(reply, "MalformedBody", 400)


def test_the_limits_stand_in_the_docs() -> None:
    from .test_docs import PAGE

    for limit in (REPLY_BYTES_MAX, WINDOW_BYTES, JSON_BYTES_MAX):
        assert f"{limit // MIB} MiB" in PAGE
    assert f"{ONLINE_ROWS_MAX:,} rows or {ONLINE_BYTES_MAX // MIB} MiB" in PAGE
    assert f"cut at {MESSAGE_CHARS_MAX:,} characters" in PAGE
    assert f"together {routes.BODIES_BYTES_MAX >> 30} GiB" in PAGE

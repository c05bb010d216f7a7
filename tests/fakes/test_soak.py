"""Minutes of everything at once, against a server in its own process: `make soak` (DELTAPROOF_SOAK_S=20 shortens it).

- Requests of every shape on every route, valid, nearly valid and broken, some while faults are planned: no 5xx that no
  fault explains, no crash, no growth of the process beyond ``GROWTH_BYTES_MAX``.
- 200 SDK clients at once, 5% of whose writes meet a connection reset: what was acknowledged is there, and nothing was
  applied twice, or otherwise than it was sent.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
import urllib3

from deltaproof.fakes.feature_store_py import DynamicEmbeddingFeatureView, FeatureStoreClient, preload
from deltaproof.fakes.plan import COUNT_MAX
from deltaproof.fakes.server import process_main
from deltaproof.fakes.server.faults import ROUTES, AnyFault, ResetFault
from deltaproof.fakes.server.routes import GROUPS
from deltaproof.fakes.server.state import DEFAULT_TOKEN, INSTANCE_ID

from .kit import PROJECT, VERSION, VIEW, Raw, ipc, rows

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

CLIENTS: Final = 200
RESETS: Final = 0.05
SHARED_KEYS: Final = 50
# Of the idle, reset server over its size after the first episode. A reset keeps the nonces of signed requests (at most
# 100,000 of about 350 bytes); what else stays is room that allocators keep.
GROWTH_BYTES_MAX: Final = 96 * 2**20
PEAK_BYTES_MAX: Final = 400 * 2**20  # of the busy server over the same: 4 bodies under way, one episode's rows and log
EPISODE_S: Final = 5.0
WORKERS: Final = 4
DEADLINE_S: Final = 60.0


def soak_s(default_s: float) -> float:
    return float(os.environ.get("DELTAPROOF_SOAK_S") or default_s)


class Server(NamedTuple):
    """A server in its own process, as ``kit.Raw`` and the SDK see it."""

    endpoint: str
    process: psutil.Process
    state: Any = SimpleNamespace(token=DEFAULT_TOKEN)

    def rss_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def admin(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url = f"http://{self.endpoint}/_admin/{path}"
        reply = urllib3.request(method, url, body=body, timeout=DEADLINE_S, retries=False)
        assert reply.status == 200, reply.data[:500]
        return reply.data


@pytest.fixture
def own_process() -> Iterator[Server]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=process_main, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S), "the server did not start"
        yield Server(f"127.0.0.1:{ours.recv()}", psutil.Process(process.pid))
        assert process.is_alive(), f"the server died with exit code {process.exitcode}"
    finally:
        ours.close()
        process.join(DEADLINE_S)
        process.kill()


@contextmanager
def threads(targets: list[Callable[[], None]], deadline_s: float) -> Iterator[None]:
    """Run the targets beside the block, wait for them, and raise what the first of them to fail raised."""
    failures: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    ends = time.monotonic() + deadline_s
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(max(0.0, ends - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in running), f"still busy {deadline_s:g} s later"


# Requests of every shape


class Shape(NamedTuple):
    """One request: ``parts`` fill the path's places, ``query`` is a list so that names may come twice."""

    method: str
    path: str
    parts: dict[str, str]
    query: list[tuple[str, str]]
    body: bytes
    headers: dict[str, str]


HOSTILE_TEXTS: Final = (
    "",
    " ",
    "..",
    "../../etc/passwd",
    "%00",
    "\x00",
    "a" * 300,
    "a" * 5000,
    "💥",
    "\ud7ff",
    "-1",
    "0",
    "9" * 25,
    str(2**63),
    "1e3",
    "NaN",
    "null",
    "{}",
    "[]",
    '{"a":',
    "' OR 1=1",
    "<b>",
    "a,b,,",
)
HOSTILE_JSON: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**40,
    1.5,
    "",
    "x" * 3000,
    [],
    {},
    [[[[[]]]]],
    {"a": {"b": None}},
    ["", None, 3],
)


WIDE: Final = "wide"  # a table of long rows, asked for often


PKS: Final = ("t", "u", "a.b.c", "ü", "t" * 100)


def _pk(draw: random.Random) -> str:
    return draw.choice((*PKS, WIDE))


def _some_rows(draw: random.Random) -> list[tuple[str, int, list[float]]]:
    """Rows that the view takes, mostly: length 2 for every table but one in a hundred."""
    if draw.random() < 0.02:
        return [(WIDE, draw.randrange(9), [0.5] * 20_000)]
    dim = 2 if draw.random() < 0.99 else draw.choice((0, 1, 500))
    return [
        (
            draw.choice(PKS),
            draw.choice((draw.randrange(100), draw.getrandbits(62))),
            [draw.random() for _ in range(dim)],
        )
        for _ in range(draw.choice((1, 3, 50, 400)))
    ]


def _arrow_rows(draw: random.Random) -> bytes:
    pk, sk, embedding = (list(column) for column in zip(*_some_rows(draw), strict=True))
    return ipc(rows(pk, sk, embedding))


def _arrow_keys(draw: random.Random) -> bytes:
    pk, sk, _ = (list(column) for column in zip(*_some_rows(draw), strict=True))
    if draw.random() < 0.05:  # the same few rows again and again: gigabytes, if they were sent
        pk, sk = [WIDE] * 50_000, [number % 5 for number in range(50_000)]
    return ipc(pa.RecordBatch.from_arrays([pa.array(pk), pa.array(sk, pa.int64())], ["pk", "sk"]))


def _content(draw: random.Random) -> bytes:
    content = [{"embedding_name": pk, "key_id": sk, "embedding": value} for pk, sk, value in _some_rows(draw)]
    return json.dumps({"content": content, "write_mode": "MERGE", "version": VERSION, "ts": _ts(draw)}).encode()


def _ts(draw: random.Random) -> int:
    return draw.choice((1, draw.randrange(1, 1000), draw.randrange(1, 2**62)))


def _new_view(draw: random.Random) -> bytes:
    fields = [
        {"Name": "embedding_name", "Type": "STRING", "Attributes": ["PrimaryKey"]},
        {"Name": "key_id", "Type": "INT64", "Attributes": ["SecondaryKey"]},
        {"Name": "embedding", "Type": draw.choice(("ARRAY<FLOAT>", "ARRAY<UINT8>")), "Attributes": []},
    ]
    name = draw.choice((VIEW, f"v{draw.randrange(50)}"))
    view = {"Name": name, "ProjectId": "1", "FeatureEntityId": "1", "Type": "DynamicEmbedding", "TTL": 1000}
    return json.dumps({**view, "Config": '{"shard_count": 3}', "Fields": fields}).encode()


def _faults(draw: random.Random) -> bytes:
    """A valid plan whose faults end soon: the episode must go on."""
    kind = draw.choice(("status", "delay", "reset", "partial", "truncate", "slow-body", "duplicate", "reorder"))
    options: dict[str, dict[str, Any]] = {
        "status": {"code": draw.choice((429, 500, 503))},
        "delay": {"delay_ms": draw.randrange(20)},
        "reset": {"when": draw.choice(("before-commit", "after-commit", "mid-reply"))},
        "partial": {"rows_failed": draw.choice((1, 10**6))},
        "truncate": {"bytes_kept": draw.randrange(100)},
        "slow-body": {"bytes_per_s": 5e7},
        "reorder": {"hold_ms_max": 20},
    }
    more = options.get(kind, {})
    if kind not in ("partial", "duplicate"):
        more["route"] = draw.choice(("*", *ROUTES))
    window = {"probability": draw.choice((1.0, 0.3)), "seed": 3, "count": draw.randrange(1, 20)}
    return json.dumps([{"id": "f", "kind": kind, **window, **more}]).encode()


def _json(value: Any) -> Callable[[random.Random], bytes]:
    return lambda draw: json.dumps(value(draw) if callable(value) else value).encode()


KEYS2: Final = lambda draw: [f"{_pk(draw)}\x1d{draw.randrange(9)}" for _ in range(draw.choice((5, 5, 5, 9000)))]  # noqa: E731
# Bodies and queries that the routes take. Routes not named here take neither.
BODIES: Final[dict[str, Callable[[random.Random], bytes]]] = {
    "create_project": _json(lambda draw: {"Name": f"p{draw.randrange(50)}"}),
    "create_entity": _json(lambda draw: {"Name": f"e{draw.randrange(50)}", "JoinId": "id", "ProjectId": "1"}),
    "create_view": _new_view,
    "update_view": _new_view,
    "write_json": _content,
    "write_arrow": _arrow_rows,
    "lookup_arrow": _arrow_keys,
    "batch_get_kkv": _json(lambda draw: {"pks": [_pk(draw)], "length": draw.randrange(9), "with_value": True}),
    "batch_get_kv2": _json(lambda draw: {"keys": KEYS2(draw)}),
    "admin_set_faults": _faults,
}
QUERIES: Final[dict[str, Callable[[random.Random], list[tuple[str, str]]]]] = {
    **{
        name: lambda draw: [("PageNumber", "1"), ("PageSize", "5"), ("Order", draw.choice(("ASC", "DESC")))]
        for name in ("list_instances", "list_projects", "list_entities", "list_views", "list_datasources")
    },
    "online_features": lambda draw: [("JoinIds", json.dumps([_pk(draw)])), ("Config", '{"version": "v1"}')],
    "write_arrow": lambda draw: [("version", VERSION), ("write_mode", "MERGE"), ("ts", str(_ts(draw)))],
    "iterate_changes": lambda draw: [("version", VERSION), ("ts", str(_ts(draw)))],
    "batch_get_kv2": lambda draw: [("version", VERSION), ("batch_size", "2")],
    "admin_requests": lambda draw: [("since", str(draw.randrange(10**6)))],
    "admin_log": lambda draw: [("project", PROJECT), ("view", VIEW)],
    **{name: lambda draw: [("version", VERSION)] for name in (
        "lookup_arrow", "batch_get_kkv", "create_snapshot", "high_water_ts")},
}  # fmt: skip


class Fuzzer:
    """Draws requests, sends them, judges the replies. One per worker thread; ``snapshots`` is shared."""

    def __init__(self, server: Server, seed: int, counts: collections.Counter[str], snapshots: list[str]) -> None:
        self.server, self.counts, self.snapshots = server, counts, snapshots
        self.draw = random.Random(seed)
        self.raw = Raw(server)  # type: ignore[arg-type]  # it wants an endpoint and a token
        self.routes = [(group, *route[:3]) for group, routes in GROUPS.items() for route in routes]
        self.faulty = False

    def _places(self, path: str) -> dict[str, str]:
        draw = self.draw
        snapshot = draw.choice(self.snapshots) if self.snapshots else "0" * 32
        number = str(draw.choice((1, 1, 1, draw.randrange(60))))
        known = {"instance": INSTANCE_ID, "db": INSTANCE_ID, "schema": PROJECT, "table": VIEW, "snapshot": snapshot}
        known |= {"project": "1", "view": number, "entity": number, "datasource": draw.choice(("1", "2"))}
        if "/projects/" in path and path.endswith("{entity}"):
            known["entity"] = "entity"
        return {name: known.get(name, "1") for name in re.findall(r"{(\w+)}", path)}

    def valid(self, group: str, method: str, path: str, name: str) -> Shape:
        draw = self.draw
        parts = self._places(path)
        if name in ("delete_view", "delete_entity"):
            parts[name.removeprefix("delete_")] = str(draw.randrange(2, 60))  # 1 is the episode's
        query = QUERIES[name](draw) if name in QUERIES else []
        body = BODIES[name](draw) if name in BODIES else b""
        return Shape(method, path, parts, query, body, {} if group == "control" else dict(self.raw.login))

    def spoil(self, shape: Shape) -> Shape:
        """One thing about the request becomes another, sensible or not."""
        draw = self.draw
        text = draw.choice(HOSTILE_TEXTS)
        match draw.randrange(8):
            case 0:
                return shape._replace(method=draw.choice(("GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "FOO")))
            case 1 if shape.parts:
                return shape._replace(parts={**shape.parts, draw.choice(sorted(shape.parts)): text})
            case 2 if shape.query:
                at = draw.randrange(len(shape.query))
                return shape._replace(query=[(k, text if i == at else v) for i, (k, v) in enumerate(shape.query)])
            case 3 if shape.query:
                query = list(shape.query)
                query.append(query.pop(draw.randrange(len(query)))) if draw.random() < 0.5 else query.pop()
                return shape._replace(query=[*query, *draw.choices(query, k=1)] if query else query)
            case 4:
                header = draw.choice(("Authorization", "Auth", "Content-Encoding", "Expect", "Content-Type", "X-Any"))
                value = draw.choice(("", "gzip", "100-continue", "deflate", "x" * 9000, "=" * 7, "cmFuazA6"))
                return shape._replace(headers={**shape.headers, header: value})
            case 5:
                return shape._replace(
                    body=draw.choice((b"", b"[", b"\xff" * 50, b"{}" * 9, bytes(2**20), text.encode()))
                )
            case _:
                return shape._replace(body=self._spoil_body(shape.body))

    def _spoil_body(self, body: bytes) -> bytes:
        draw = self.draw
        value = None
        with suppress(ValueError):
            value = json.loads(body)
        holder = value[0] if isinstance(value, list) and value else value
        if isinstance(holder, dict):
            holder[draw.choice((*holder, "more"))] = draw.choice(HOSTILE_JSON)
            if isinstance(holder.get("content"), list) and holder["content"] and draw.random() < 0.5:
                row = draw.choice(holder["content"])
                if isinstance(row, dict):
                    row[draw.choice((*row, "x"))] = draw.choice(HOSTILE_JSON)
            return json.dumps(value).encode()
        data = bytearray(body or b"x")
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    data[at : at + 8] = struct.pack("<q", draw.choice((-1, 2**31 - 1, 2**40, -(2**63), 0)))
                case 2:
                    data[at : at + 4] = struct.pack("<f", draw.choice((float("nan"), float("inf"), 1e30)))
                case _:
                    data = data[: at + 1]
        return bytes(data)

    def step(self) -> None:
        if self.draw.random() < 0.02:
            self.speak_badly()
            return
        group, method, path, name = self.draw.choice(self.routes)
        if name == "admin_reset" or (name == "admin_set_faults" and not self.faulty):
            # A valid one would break the other workers' connections, or explain away their failures.
            shape = self.valid(group, method, path, name)._replace(body=b'{"projects": 3')
        else:
            shape = self.valid(group, method, path, name)
            while self.draw.random() < 0.5 and name != "admin_set_faults":
                shape = self.spoil(shape)
        self.send(group, name, shape)

    def send(self, group: str, name: str, shape: Shape) -> None:
        places = {key: quote(value, safe="") for key, value in shape.parts.items()}
        path = shape.path.format(**places)
        if shape.query:
            path += "?" + urlencode(shape.query)
        headers = shape.headers
        if group == "control":
            headers = {**self.raw.signed(shape.method, path, shape.body), **headers}
        reply = self.ask(shape, path, headers)
        if reply is None:
            self.counts[f"{name} broken"] += 1
            return
        self.counts[f"{name} {reply.status // 100}xx"] += 1
        if reply.status == 413:
            self.counts[f"{name} too large"] += 1
        if name == "create_snapshot" and reply.status == 200:
            self.snapshots.append(json.loads(reply.data)["data"]["snapshot_id"])
            del self.snapshots[:-20]
        if reply.status >= 500 and not (self.faulty and b"planned fault" in reply.data):
            raise AssertionError(
                f"{shape.method} {path} with {shape.headers}, body {shape.body[:300]!r}: "
                f"{reply.status} {reply.data[:300]!r}"
            )

    def ask(self, shape: Shape, path: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse | None:
        """The reply, or None for a connection that broke for a reason."""
        problem = ""
        for _ in range(2):  # again: a pooled connection may be closed by the server just as it is used once more
            try:
                return self.raw(shape.method, path, body=shape.body, headers=headers)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = repr(error)
            # A server that answers before a large body has come may have its answer lost to a reset.
            if self.faulty or len(shape.body) > 2**16:
                return None
            self.raw.close()
        raise AssertionError(f"{shape.method} {path}: {problem} twice")

    def speak_badly(self) -> None:
        """What no HTTP library sends: bytes on a socket, then perhaps silence, an end, or a reset."""
        draw = self.draw
        head = f"POST {self.raw.table}/write_arrow?version=v1 HTTP/1.1\r\nHost: x\r\n"
        login = "".join(f"{key}: {value}\r\n" for key, value in self.raw.login.items())
        bodies = ("Content-Length: 99999999\r\n\r\nabc", "Content-Length: -5\r\n\r\n", "Content-Length: 1e3\r\n\r\n")
        chunked = "Transfer-Encoding: chunked\r\n\r\n"
        texts = [
            "\r\n\r\n",
            "GET\r\n\r\n",
            "GET / HTTP/9.9\r\n\r\n",
            "\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            f"GET /{'x' * 20_000} HTTP/1.1\r\n\r\n",
            f"GET / HTTP/1.1\r\n{'A: b' * 9000}\r\n\r\n",
            head + login,
            *(head + login + body for body in bodies),
            head + login + chunked + "zz\r\n",
            head + login + chunked + "5\r\nabcde\r\n0\r\n\r\n",
            head + login + chunked + "fffffffffffffff\r\nabc",
        ]
        self.counts["bad HTTP"] += 1
        host, port = self.server.endpoint.split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock, suppress(OSError):
            sock.sendall(draw.choice(texts).encode("latin-1"))
            match draw.randrange(3):
                case 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                case 1:
                    sock.shutdown(socket.SHUT_WR)
                    answer = sock.recv(4000)
                    assert not re.match(rb"HTTP/1.\d 5", answer), answer
                case _:
                    pass


def begin_episode(server: Server, raw: Raw) -> None:
    server.admin("POST", "reset")
    raw.close()  # the reset broke its connections
    for path, body in (
        ("featureentities", {"Name": "entity", "JoinId": "id", "ProjectId": "1"}),
        ("featureviews", json.loads(_new_view(random.Random(0))) | {"Name": VIEW}),
    ):
        text = json.dumps(body).replace("UINT8", "FLOAT")
        reply = raw.control("POST", f"/{INSTANCE_ID}/{path}", text)
        assert reply.status == 200, reply.data


def test_every_route_survives_every_shape(own_process: Server) -> None:
    server, counts = own_process, collections.Counter[str]()
    raw = Raw(server)  # type: ignore[arg-type]  # it wants an endpoint and a token
    snapshots: list[str] = []
    fuzzers = [Fuzzer(server, seed, counts, snapshots) for seed in range(WORKERS)]
    ends = time.monotonic() + soak_s(300)
    idle: list[int] = []
    peak: list[int] = []
    wide = ipc(rows([WIDE] * 5, list(range(5)), [[0.5] * 20_000] * 5))
    while time.monotonic() < ends or len(idle) < 3:
        begin_episode(server, raw)
        idle.append(server.rss_bytes())
        assert raw.data("POST", f"/write_arrow?version={VERSION}&ts=1", wide).status == 200
        episode_ends = min(time.monotonic() + EPISODE_S, max(ends, time.monotonic() + 1))
        for fuzzer in fuzzers:
            fuzzer.faulty = len(idle) % 2 == 0

        def work(fuzzer: Fuzzer, until: float = episode_ends) -> None:
            while time.monotonic() < until:
                fuzzer.step()

        with threads([lambda fuzzer=fuzzer: work(fuzzer) for fuzzer in fuzzers], DEADLINE_S):  # type: ignore[misc]
            pass
        peak.append(server.rss_bytes())
        server.admin("PUT", "faults", b"[]")
        assert raw("GET", "/health").status == 200
    begin_episode(server, raw)
    idle.append(server.rss_bytes())
    for fuzzer in fuzzers:
        fuzzer.raw.close()
    sizes = " ".join(str(size >> 20) for size in idle[:: max(1, len(idle) // 10)])
    print(f"\n{sum(counts.values())} requests in {len(peak)} episodes; server RSS in MiB: idle {sizes}", end="; ")
    print(f"peak {max(peak) >> 20}")
    names = [route[2] for routes in GROUPS.values() for route in routes]
    never = {"write_table", "admin_reset"}  # the one always refuses, the other is asked for by the episodes
    if sum(counts.values()) >= 10_000:  # else chance has not met everything yet
        assert not [name for name in names if not counts[f"{name} 2xx"] and name not in never], counts
        assert not [name for name in names if not counts[f"{name} 4xx"]], counts
        assert counts["lookup_arrow too large"], counts
    assert idle[-1] - idle[1] <= GROWTH_BYTES_MAX, idle
    assert max(peak) - idle[1] <= PEAK_BYTES_MAX, peak


# Many clients, some resets


class Attempt(NamedTuple):
    """One write as one client made it. Its rows are (client, number) under each of the keys."""

    client: int
    number: int
    ts: int
    keys: tuple[int, ...]
    acknowledged: bool


class Writer:
    """One client. Every attempt has its own ts; a failed one is retried with its values or given up for others."""

    def __init__(self, view: DynamicEmbeddingFeatureView, number: int) -> None:
        self.view, self.number = view, number
        self.attempts: list[Attempt] = []
        self._draw = random.Random(number)

    def run(self, until: float) -> None:
        value = 0
        while time.monotonic() < until:
            value += 1
            own = range(1000 * (self.number + 1), 1000 * (self.number + 1) + 20)
            keys = tuple(self._draw.sample(own, 3)) + tuple(self._draw.sample(range(SHARED_KEYS), 2))
            while not self._write(value, keys) and self._draw.random() < 0.7:
                pass
            if self._draw.random() < 0.1:
                self._read_back()

    def _write(self, value: int, keys: tuple[int, ...]) -> bool:
        ts = CLIENTS * (len(self.attempts) + 1) + self.number  # no two attempts of anybody share a ts
        batch = rows(["t"] * len(keys), list(keys), [[float(self.number), float(value)]] * len(keys))
        batch = batch.rename_columns([self.view.pk_field, self.view.sk_field, self.view.embedding_field])
        self.view.write_features_arrow(batch, version=VERSION, ts=ts)
        summary = self.view.write_flush()
        errors = summary["errors"]
        assert all(error.code == "ConnectionLost" and error.applied == "unknown" for error in errors), errors
        self.attempts.append(Attempt(self.number, value, ts, keys, not errors))
        return not errors

    def _read_back(self) -> None:
        """What this client was told is there, or something newer."""
        acknowledged = [attempt for attempt in self.attempts if attempt.acknowledged]
        if not acknowledged:
            return
        last = acknowledged[-1]
        found = self.view.lookup_arrow(VERSION, pa.repeat("t", len(last.keys)), pa.array(last.keys, pa.int64()))
        assert found.num_rows == len(last.keys)
        assert min(found.column("ts").to_pylist()) >= last.ts


def plan_resets(server: Server) -> None:
    often: dict[str, Any] = {"route": "write", "probability": RESETS / 2, "count": COUNT_MAX}
    faults: list[AnyFault] = [
        ResetFault(id="before-commit", when="before-commit", seed=1, **often),
        ResetFault(id="after-commit", when="after-commit", seed=2, **often),
    ]
    server.admin("PUT", "faults", msgspec.json.encode(faults))


def check_log(attempts: list[Attempt], log: pa.Table) -> None:
    """Every acknowledged attempt stands in the log once and whole, any other at most once; nothing else does."""
    sent = {attempt.ts: attempt for attempt in attempts}
    flat = log.column("embedding").combine_chunks().flatten().to_numpy().reshape(-1, 2)
    logged: dict[int, list[tuple[int, float, float]]] = collections.defaultdict(list)
    columns = [log.column(name).to_pylist() for name in ("ts", "sk")]
    for ts, key, (client, number) in zip(*columns, flat.tolist(), strict=True):
        logged[ts].append((key, client, number))
    assert logged.keys() <= sent.keys(), "the log holds writes that nobody sent"
    for ts, attempt in sent.items():
        want = [(key, float(attempt.client), float(attempt.number)) for key in attempt.keys]
        assert logged.get(ts, [] if not attempt.acknowledged else None) in ([], want), (attempt, logged.get(ts))
    unknown = [attempt for attempt in attempts if not attempt.acknowledged]
    assert any(attempt.ts in logged for attempt in unknown), "no reset came after a commit"
    assert any(attempt.ts not in logged for attempt in unknown), "no reset came before a commit"


def check_rows(log: pa.Table, scan: pa.Table) -> None:
    """What is stored is what the log amounts to: of each key the greatest ts (no two attempts share one)."""
    keys, ts = log.column("sk").to_numpy(), log.column("ts").to_numpy()
    flat = log.column("embedding").combine_chunks().flatten().to_numpy().reshape(-1, 2)
    order = np.lexsort((ts, keys))
    last = np.append(np.diff(keys[order]) != 0, True)
    winners = order[last]
    assert scan.column("sk").to_numpy().tolist() == keys[winners].tolist()
    assert scan.column("ts").to_numpy().tolist() == ts[winners].tolist()
    found = scan.column("embedding").combine_chunks().flatten().to_numpy().reshape(-1, 2)
    assert np.array_equal(found, flat[winners])


def test_many_clients_and_resets_lose_and_double_nothing(own_process: Server) -> None:
    preload()
    server = own_process
    raw = Raw(server)  # type: ignore[arg-type]  # it wants an endpoint and a token
    begin_episode(server, raw)
    writers, clients = [], []
    for number in range(CLIENTS):
        client = FeatureStoreClient(
            "deltaproof",
            "deltaproof",
            endpoint=server.endpoint,
            featuredb_username=f"client{number}",
            featuredb_password="password",
            read_timeout_s=DEADLINE_S,
        )
        project = client.get_project(PROJECT)
        view = project and project.get_dynamic_embedding_feature_view(VIEW)
        assert view
        view._max_workers = 1
        clients.append(client)
        writers.append(Writer(view, number))
    plan_resets(server)
    duration_s = soak_s(120)
    until = time.monotonic() + duration_s
    targets = [lambda writer=writer: writer.run(until) for writer in writers]
    with threads(targets, duration_s + DEADLINE_S):  # type: ignore[arg-type]
        pass
    scan = writers[0].view.scan(VERSION)
    for writer, client in zip(writers, clients, strict=True):
        writer.view.close()
        client.close()
    attempts = [attempt for writer in writers for attempt in writer.attempts]
    fired = {row["fault"]["id"]: row["fired"] for row in json.loads(server.admin("GET", "faults"))["Faults"]}
    lost = sum(not attempt.acknowledged for attempt in attempts)
    print(f"\n{len(attempts)} writes of {CLIENTS} clients in {duration_s:g} s, {lost} unacknowledged; fired: {fired}")
    assert sum(fired.values()) == lost
    assert 0.5 * RESETS < lost / len(attempts) < 2 * RESETS
    assert all(writer.attempts for writer in writers)
    log = pa.ipc.open_stream(server.admin("GET", f"log?project={PROJECT}&view={VIEW}")).read_all()
    check_log(attempts, log)
    check_rows(log, scan)

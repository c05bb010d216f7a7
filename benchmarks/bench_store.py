"""What the fake Feature Store costs over HTTP, against servers that do nothing, and whether that grows with the rows.

Ingest: the SDK facade writes Arrow batches (its default 1000 rows a request, 4 at a time; nine rows in ten are stored
already) to the store, and to an aiohttp handler that reads and discards the body. Point lookups: the facade asks for
200 keys at a time, of the store, and of a handler that returns fixed bytes of the same size. Client, store and handler
have a process each. The machine may be shared, so both sides and all sizes take turns of a tenth of a second or so,
again and again, and what is compared is the median of each turn against its neighbour's. That does not take out a load
of more than the cores: the server is one thread, and gets a thread's share, whatever it is busy with. So the load is
printed, and ``cpu``: the same ratio of the CPU time that client and server took together. Memory: what the store's
process gained per stored byte, after ``Store.compact``.

Goals (issue 3): store at least 0.50 of the handler's speed; 1e7 stored rows at least 0.80 of the speed at 1e5; memory
at most 1.50 of the live bytes. Exit code 1 when one is missed (``--report-only``, ``--quick``: 0).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from aiohttp import web

from deltaproof.fakes.feature_store_py import DynamicEmbeddingFeatureView, FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.state import ServerState
from deltaproof.fakes.store import DEFAULT_PROJECT, Store, ViewSpec

VERSION: Final = "v1"
TABLE: Final = "model.ebc.embedding_bags.item"
LOOKUP_KEYS: Final = 200
FILL_ROWS: Final = 50_000
REPLY_TIMEOUT_S: Final = 300.0
NOTHING: Final = 0  # stands where a number of stored rows does, for the server that does nothing
MEMORY_BYTES_MIN: Final = 2**26  # of rows: with fewer the ups and downs of the process itself would be measured
SPEED_GOAL, FLAT_GOAL, MEMORY_GOAL = 0.5, 0.8, 1.5


def view_name(dim: int, stored: int) -> str:
    return f"dim{dim}_rows{stored}"


def make_store() -> Store:
    return Store(lambda: time.time_ns() // 1_000_000, history=False)


def batch(keys: np.ndarray, dim: int, draw: np.random.Generator) -> pa.RecordBatch:
    values = pa.array(draw.random(len(keys) * dim, dtype=np.float32))
    offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(dim))
    columns = [pa.repeat(TABLE, len(keys)), pa.array(keys), pa.ListArray.from_arrays(offsets, values)]
    return pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"])


def spread(numbers: np.ndarray) -> np.ndarray:
    """Different keys for different numbers, all over int64: embedding keys are hashes more often than row numbers."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.int64) * np.int64(0x5851F42D4C957F2D)


# The servers' processes. Each answers commands of the parent until the pipe closes.


def rss_bytes() -> int:
    """Of this process, after the allocators gave back what they keep for later."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def fill(store: Store, dim: int, stored: int) -> None:
    spec = ViewSpec(DEFAULT_PROJECT, view_name(dim, stored), "entity", ttl_s=0)
    store.create_view(spec)
    draw = np.random.default_rng(0)
    for start in range(0, stored, FILL_ROWS):
        rows = batch(spread(np.arange(start, min(start + FILL_ROWS, stored))), dim, draw)
        store.write(DEFAULT_PROJECT, spec.name, rows, version=VERSION, ts=1)


def answer(pipe: Connection, server: FeatureStoreServer) -> None:
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        if command == "fill":
            fill(server.store, *arguments)
        elif command == "compact":
            server.store.compact()
        pipe.send(time.process_time_ns() if command == "cpu" else rss_bytes())


def store_process(pipe: Connection) -> None:
    with FeatureStoreServer(store=make_store()) as server:
        pipe.send(server.endpoint)
        answer(pipe, server)


def baseline_process(pipe: Connection) -> None:
    """A real control plane whose datasource names a data plane that does nothing."""
    import asyncio

    fixed: dict[str, bytes] = {}

    async def discard(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.json_response({})

    async def fixed_bytes(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=fixed[request.match_info["table"]])

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/api/v1/tables/{db}/{schema}/{table}/write_arrow", discard)
        app.router.add_post("/api/v1/tables/{db}/{schema}/{table}/lookup_arrow", fixed_bytes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with FeatureStoreServer(store=make_store()) as control:
            state: ServerState = control.state
            state.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            pipe.send(control.endpoint)
            while True:
                try:
                    command, *arguments = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
                except EOFError:
                    break
                if command == "view":
                    name, fixed_reply = arguments
                    control.store.create_view(ViewSpec(DEFAULT_PROJECT, name, "entity"))
                    fixed[name] = fixed_reply
                pipe.send(time.process_time_ns())
        await runner.cleanup()

    asyncio.run(main())


class Server:
    """One of the two, seen from the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        endpoint = self._receive()
        self.client = FeatureStoreClient(
            "deltaproof", "deltaproof", endpoint=endpoint, featuredb_username="bench", featuredb_password="password"
        )

    def _receive(self) -> Any:
        if not self._pipe.poll(REPLY_TIMEOUT_S):
            raise TimeoutError(f"a server did not answer within {REPLY_TIMEOUT_S:g} s")
        return self._pipe.recv()

    def ask(self, *command: Any) -> int:
        self._pipe.send(command)
        return int(self._receive())

    def view(self, name: str) -> DynamicEmbeddingFeatureView:
        project = self.client.get_project(DEFAULT_PROJECT)
        view = project and project.get_dynamic_embedding_feature_view(name)
        assert view, f"no view {name}"
        return view


@contextlib.contextmanager
def running(target: Callable[[Connection], None]) -> Iterator[Server]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        server = Server(ours)
        yield server
        server.client.close()
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


# What is timed


class Side:
    """One view of one server. ``prepare`` makes ready what ``run`` then does."""

    def __init__(self, server: Server, view: DynamicEmbeddingFeatureView) -> None:
        self.server, self.view = server, view

    def prepare(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError


class Ingest(Side):
    """Writes ``rows`` rows."""

    def __init__(
        self, server: Server, view: DynamicEmbeddingFeatureView, dim: int, stored: int, rows: int, seed: int
    ) -> None:
        super().__init__(server, view)
        self.dim, self.stored, self.rows = dim, stored, rows
        self._draw = np.random.default_rng(seed)
        self._ts = 1
        self._table = pa.table({})

    def prepare(self) -> None:
        fresh = np.arange(self.stored, self.stored + self.rows // 10)
        old = self._draw.integers(0, self.stored, self.rows - len(fresh))
        self.stored += len(fresh)
        numbers = np.concatenate([old, fresh])
        self._draw.shuffle(numbers)
        names = [self.view.pk_field, self.view.sk_field, self.view.embedding_field]
        self._table = batch(spread(numbers), self.dim, self._draw).rename_columns(names)

    def run(self) -> None:
        self._ts += 1
        self.view.write_features_arrow(self._table, version=VERSION, ts=self._ts)
        summary = self.view.write_flush()
        assert summary["success_records"] == self.rows, summary["errors"][:1]


class Lookup(Side):
    """Makes ``requests`` lookups, one after the other."""

    def __init__(
        self, server: Server, view: DynamicEmbeddingFeatureView, stored: int, requests: int, seed: int
    ) -> None:
        super().__init__(server, view)
        self.stored, self.requests = stored, requests
        self._draw = np.random.default_rng(seed)
        self._keys: list[pa.Array] = []
        self._names = pa.repeat(TABLE, LOOKUP_KEYS)

    def prepare(self) -> None:
        numbers = self._draw.integers(0, self.stored, (self.requests, LOOKUP_KEYS))
        self._keys = [pa.array(spread(row)) for row in numbers]

    def run(self) -> None:
        for keys in self._keys:
            found = self.view.lookup_arrow(VERSION, self._names, keys)
            assert found.num_rows == LOOKUP_KEYS


class Turn(NamedTuple):
    """What one turn took: seconds by the clock, and of CPU in client and server."""

    seconds: float
    cpu_s: float


def measured(side: Side) -> Turn:
    before = side.server.ask("cpu") + time.process_time_ns()
    started = time.perf_counter()
    side.run()
    seconds = time.perf_counter() - started
    return Turn(seconds, (side.server.ask("cpu") + time.process_time_ns() - before) / 1e9)


def take_turns(sides: Mapping[int, Side], rounds: int) -> dict[int, list[Turn]]:
    """The turns of each side; all sides meet the same weather. The first round warms up."""
    turns: dict[int, list[Turn]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for name in names:
            sides[name].prepare()
            turn = measured(sides[name])
            if number:
                turns[name].append(turn)
        names = names[1:] + names[:1]  # nobody always runs after the same one
    return turns


def ratio(turns: list[Turn], reference: list[Turn]) -> Turn:
    """Speed against the reference: the median over the rounds, each of which has both within a second or so."""
    pairs = [[theirs / ours for ours, theirs in zip(*two, strict=True)] for two in zip(turns, reference, strict=True)]
    return Turn(*(statistics.median(column) for column in zip(*pairs, strict=True)))


def reply_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


class Memory(NamedTuple):
    """What a view's rows are, and how much more than that the process grew by."""

    live_bytes: int
    ratio: float


class Report:
    """Collects lines and missed goals."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def goal(self, what: str, value: float, goal: float, at_least: bool = True) -> str:
        met = value >= goal if at_least else value <= goal
        if not met:
            self.missed.append(f"{what}: {value:.2f}, goal {'at least' if at_least else 'at most'} {goal:.2f}")
        return f"{value:5.2f}{' ' if met else '!'}"


def measure(dim: int, sizes: list[int], rounds: int, quick: bool, report: Report) -> None:
    with running(store_process) as store, running(baseline_process) as baseline:
        memory = {}
        for stored in sizes:
            before = store.ask("compact")
            store.ask("fill", dim, stored)
            live_bytes = stored * (8 + 8 + 4 * dim)  # key, ts, embedding
            memory[stored] = Memory(live_bytes, (store.ask("compact") - before) / live_bytes)
        name = view_name(dim, sizes[0])
        keys = pa.array(spread(np.arange(LOOKUP_KEYS)))
        reply = reply_bytes(store.view(name).lookup_arrow(VERSION, pa.repeat(TABLE, LOOKUP_KEYS), keys))
        baseline.ask("view", name, reply)

        rows = (20_000 if quick else 60_000) // (3 if dim > 64 else 1)
        servers = dict.fromkeys(sizes, store) | {NOTHING: baseline}
        views = {n: server.view(view_name(dim, n or sizes[0])) for n, server in servers.items()}
        ingest = take_turns({n: Ingest(servers[n], v, dim, n or sizes[0], rows, 1) for n, v in views.items()}, rounds)
        requests = 50 if quick else 100
        lookup = take_turns({n: Lookup(servers[n], v, n or sizes[0], requests, 2) for n, v in views.items()}, rounds)
        for view in views.values():
            view.close()

    for n in servers:
        megabytes = rows * (8 + 4 * dim) / statistics.median(turn.seconds for turn in ingest[n]) / 1e6
        per_s = requests / statistics.median(turn.seconds for turn in lookup[n])
        cells = ["", "", ""]
        if n != NOTHING:
            what = f"dim {dim}, {n:.0e} rows"
            for cell, turns, name in ((0, ingest, "ingest"), (1, lookup, "lookups")):
                speed = ratio(turns[n], turns[NOTHING])
                cells[cell] = report.goal(f"{what}, {name}, speed", speed.seconds, SPEED_GOAL) + f"{speed.cpu_s:5.2f} "
                if n != sizes[0]:
                    flat = ratio(turns[n], turns[sizes[0]]).seconds
                    cells[cell] += report.goal(f"{what}, {name}, against {sizes[0]:.0e} rows", flat, FLAT_GOAL)
            if memory[n].live_bytes >= MEMORY_BYTES_MIN:
                cells[2] = report.goal(f"{what}, memory", memory[n].ratio, MEMORY_GOAL, at_least=False)
        side = f"{n:.0e} rows" if n != NOTHING else "does nothing"
        print(
            f"{dim:4d}  {side:12s}  {megabytes:6.1f} MB/s  {cells[0]:20s}  {per_s:6.0f} /s  {cells[1]:20s}  {cells[2]}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, 1e5 rows: to see that it runs; exit 0")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rows", type=float, nargs="+", help="rows stored; default 1e5 1e6 1e7 (dim over 64: 1e5 1e6)")
    parser.add_argument("--rounds", type=int, help="measured rounds, default 41 (--quick: 3)")
    parser.add_argument("--report-only", action="store_true", help="exit 0 even when a goal is missed")
    options = parser.parse_args()
    report, load_before = Report(), os.getloadavg()[0]
    print(
        "speed, cpu: against the server that does nothing; flat: against the fewest rows; memory: of live bytes; "
        "!: missed; MB/s: of keys and embeddings"
    )
    print(" dim  stored             ingest  speed   cpu   flat            lookups  speed   cpu   flat        memory")
    for dim in options.dims:
        default = [1e5] if options.quick else [1e5, 1e6, 1e7] if dim <= 64 else [1e5, 1e6]
        sizes = sorted(int(n) for n in options.rows or default)
        measure(dim, sizes, options.rounds or (3 if options.quick else 41), options.quick, report)
    print(f"load average (cores: {os.cpu_count()}): {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")
    for line in report.missed:
        print(f"missed: {line}")
    return 1 if report.missed and not options.quick and not options.report_only else 0


if __name__ == "__main__":
    sys.exit(main())

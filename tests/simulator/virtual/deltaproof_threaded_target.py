"""A publisher as somebody else might write it, who never heard of the virtual engine; and three that are wrong.

It keeps its deltas in a list under a condition, sends them from a daemon thread through a pool, and backs off with
`time.sleep`. Nothing here knows about virtual time.
"""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from deltaproof.reference.contract import TableRef, embedding_names


class Threaded:
    def __init__(self, context) -> None:
        self.context = context
        self.source = context.model
        self.changed = threading.Condition()
        self.deltas: list[dict] = []
        self.unsent = 0
        self.closing = False
        self.failure: Exception | None = None
        self.last_ts = 0
        self.published: dict[str, np.ndarray] = {}
        refs = [TableRef(t.owner, t.collection, t.name) for t in context.tables]
        self.names = embedding_names(refs, naming=context.config.naming)

    # -- the training loop's side

    def start(self) -> None:
        client = self.context.client_factory()
        project = client.get_project(self.context.project)
        if self.context.rank == 0:
            project.create_entity(self.context.entity, join_id="embedding_name")
            project.create_dynamic_embedding_feature_view(
                name=self.context.view, entity=self.context.entity, shard_count=1
            )
        self.context.barrier()
        self.view = project.get_dynamic_embedding_feature_view(self.context.view)
        self.pool = ThreadPoolExecutor(2)
        self.worker = threading.Thread(target=self.work, daemon=True)
        self.worker.start()

    def after_step(self, step: int) -> None:
        if self.failure:
            raise self.failure
        if step % self.context.config.every_steps == 0:
            self.dump()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.source.paused():
            yield

    def finish(self, step: int) -> None:
        self.dump(final=True)
        self.drain()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.worker.join()
        self.pool.shutdown()

    def dump(self, final: bool = False) -> None:
        touched = self.source.drain()
        for fqn, info in self.source.tables().items():
            keys = touched.get(fqn, np.empty(0, np.int64))
            if info.sharding == "data_parallel":
                known = self.published.get(fqn, keys)
                self.published[fqn] = np.union1d(known, keys)
                keys = self.published[fqn] if final else keys
            if len(keys):
                self.submit(self.batch(fqn, keys))

    def batch(self, fqn: str, keys: np.ndarray) -> pa.RecordBatch:
        rows = self.source.gather(fqn, keys)
        offsets = np.arange(len(keys) + 1, dtype=np.int32) * rows.shape[1]
        embedding = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))
        return pa.RecordBatch.from_arrays(
            [pa.repeat(self.names[fqn], len(keys)), pa.array(keys), embedding],
            ["embedding_name", "key_id", "embedding"],
        )

    def submit(self, batch: pa.RecordBatch) -> None:
        with self.changed:
            self.unsent += 1
            self.deltas.append(batch)
            self.changed.notify_all()

    def drain(self) -> None:
        with self.changed:
            while self.unsent and not self.failure:
                self.changed.wait()
        if self.failure:
            raise self.failure

    # -- the background thread's side

    def take(self) -> pa.RecordBatch | None:
        with self.changed:
            while not self.deltas and not self.closing:
                self.changed.wait()
            return self.deltas.pop(0) if self.deltas else None

    def sent(self) -> None:
        with self.changed:
            self.unsent -= 1
            self.changed.notify_all()

    def work(self) -> None:
        try:
            while (batch := self.take()) is not None:
                self.pool.submit(self.send, batch).result()
                self.sent()
        except Exception as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def send(self, batch: pa.RecordBatch) -> None:
        for attempt in range(8):
            self.last_ts = max(self.last_ts + 1, int(time.time() * 1000))
            try:
                self.view.write_features_arrow(
                    batch=batch, version=self.context.version, write_mode="MERGE", ts=self.last_ts
                )
                summary = self.view.write_flush()
            except Exception:
                summary = {"failed_records": 1, "errors": []}
            if not summary["failed_records"]:
                return
            if any(not error.retriable for error in summary["errors"]):
                raise RuntimeError(f"rank {self.context.rank}: {summary['errors'][0]}")
            time.sleep(0.01 * 2**attempt)
        raise RuntimeError(f"rank {self.context.rank}: gave up after 8 attempts")


class LostWakeUp(Threaded):
    """Notifies only a worker that said it is idle, which it says a moment too late."""

    idle = False

    def submit(self, batch: pa.RecordBatch) -> None:
        self.unsent += 1
        self.deltas.append(batch)
        if self.idle:
            with self.changed:
                self.changed.notify_all()

    def take(self) -> pa.RecordBatch | None:
        while not self.deltas and not self.closing:
            with self.changed:
                self.idle = True
                self.changed.wait()
                self.idle = False
        return self.deltas.pop(0) if self.deltas else None


class Race(Threaded):
    """Counts what is unsent in two threads, without a lock: a count can get lost."""

    def submit(self, batch: pa.RecordBatch) -> None:
        self.unsent += 1
        with self.changed:
            self.deltas.append(batch)
            self.changed.notify_all()

    def sent(self) -> None:
        self.unsent -= 1
        with self.changed:
            self.changed.notify_all()

    def drain(self) -> None:
        while self.unsent > 0 and not self.failure:
            time.sleep(0.001)
        if self.failure:
            raise self.failure

    def close(self) -> None:
        """Does not wait for the worker: `drain` did."""


class DeadLock(Threaded):
    """Takes two locks in one order here and in the other there."""

    def __init__(self, context) -> None:
        super().__init__(context)
        self.counting = threading.Lock()

    def submit(self, batch: pa.RecordBatch) -> None:
        with self.counting:
            self.unsent += 1
            with self.changed:
                self.deltas.append(batch)
                self.changed.notify_all()

    def sent(self) -> None:
        with self.changed:
            self.changed.notify_all()
            with self.counting:
                self.unsent -= 1


class UsesASocket(Threaded):
    """Reaches for the real network."""

    def start(self) -> None:
        socket.create_connection(("127.0.0.1", 9), timeout=1)

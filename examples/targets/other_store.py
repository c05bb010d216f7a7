"""An uploader to another store than the Feature Store, here Redis: the kit compares rows wherever they lie.

    pip install fakeredis
    deltaproof conform examples.targets.other_store:RedisUploader
    REDIS_URL=redis://127.0.0.1:6379 deltaproof conform examples.targets.other_store:RedisUploader --engine processes

On the virtual engine the ranks share a `fakeredis` server in memory. On the process engine they are processes, and
need a real one. What strikes in the fake Feature Store cannot strike here, and is reported as not tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import redis

from deltaproof.conformance.target import RankContext, claims


def connect(context: RankContext) -> Any:
    """A client of the store of this run."""
    if context.shared is None:
        return redis.Redis.from_url(os.environ["REDIS_URL"], socket_timeout=5)
    import fakeredis

    return fakeredis.FakeRedis(server=context.shared.setdefault("redis", fakeredis.FakeServer()))


@claims("arrow")
class RedisUploader:
    """One hash per table, a field per key, the row's bytes as the value. `submit` returns when Redis has the rows."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def start(self) -> None:
        self._redis = connect(self._context)

    def submit(self, step: int, table: pa.Table) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        for batch in table.to_batches():
            rows = zip(batch["table_fqn"].to_pylist(), batch["key_id"].to_pylist(), batch["embedding"], strict=True)
            for fqn, key, row in rows:
                values = row.values.to_numpy()
                if key == -1 or not np.isfinite(values).all():
                    raise ValueError(f"step {step}: table {fqn}, key {key}: no such row may be published")
                pipeline.hset(f"{self._context.run}/{self._context.names[fqn]}", str(key), values.tobytes())
        pipeline.execute()

    def check_error(self) -> None:
        """Nothing happens in the background."""

    def close(self, drain: bool) -> None:
        self._redis.close()

    @staticmethod
    def contents(context: RankContext) -> Iterator[tuple[str, int, Any]]:
        """All rows of the store: (embedding_name, key, values). Called when the run is over, in no rank."""
        client = connect(context)
        for name in context.names.values():
            for key, value in client.hgetall(f"{context.run}/{name}").items():
                yield name, int(key), np.frombuffer(value, np.float32)

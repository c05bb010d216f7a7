"""When a rank dumps (Cadence) and what a dump holds (Dumper). Rank-local throughout: no collective, ever."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from .contract import Collection
from .delta import DeltaError, Keys, Mask, Rows, make_delta
from .settings import Settings

DATA_PARALLEL = "data_parallel"


class TableInfo(msgspec.Struct, frozen=True):
    """One table as this rank sees it; `hosted` says whether rows of it live here."""

    fqn: str
    owner: str
    collection: Collection
    table: str
    feature_names: tuple[str, ...]
    rows: int  # of the whole table
    dim: int
    sharding: str  # TorchRec's names: "row_wise", "table_wise", "data_parallel"
    hosted: bool


class TableSource(Protocol):
    """Where touched ids and their rows come from: TorchRec (tracker.py), or a simulator's NumPy shards."""

    def tables(self) -> Mapping[str, TableInfo]:
        """Every table of the model by FQN, hosted here or not."""

    def drain(self) -> Mapping[str, Keys]:
        """Global keys touched since the last drain, per FQN: int64, sorted, unique. Quiet tables may be absent."""

    def gather(self, fqn: str, keys: Keys) -> Rows:
        """Rows these global keys hold now: float32 (n, dim), read through fresh handles, owned by the caller."""

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        """Which of these global keys this rank holds rows of, bool (n,): none in a table of another rank, or unknown.

        Data-parallel tables are held by every rank; keys past the end of a table by none.
        """

    def paused(self) -> AbstractContextManager[None]:
        """While inside, forwards are not recorded (evaluation). Nests, and ends however the block ends."""


class Cadence:
    """Says at which of a rank's own steps a dump is due: every N steps, or every M minutes of its monotonic clock."""

    def __init__(self, settings: Settings, clock: Any = time) -> None:
        self._every_steps = settings.every_steps
        self._period_s = 60.0 * (settings.every_minutes or 0.0)
        self._clock = clock
        self._step_last: int | None = None
        self._deadline_s = clock.monotonic() + self._period_s

    def due(self, step: int) -> bool:
        """True when a boundary was crossed since the last call, however far the step number moved."""
        if self._every_steps is None:
            return self._due_by_time()
        before = self._step_last if self._step_last is not None else max(step - 1, 0)
        self._step_last = step
        return step // self._every_steps > before // self._every_steps

    def _due_by_time(self) -> bool:
        late_s = self._clock.monotonic() - self._deadline_s
        if late_s < 0:
            return False
        # Fixed rate: the sequence keeps its phase, and deadlines that a stall swallowed are skipped, not fired at once.
        self._deadline_s += self._period_s * (math.floor(late_s / self._period_s) + 1)
        return True


class Dumper:
    """Turns the ids a source recorded into a delta of this rank."""

    def __init__(self, source: TableSource, settings: Settings, rank: int, world_size: int) -> None:
        self._source = source
        self._rank, self._world_size = rank, world_size
        self._tables = dict(source.tables())
        self._undelivered: dict[str, Keys] = {}  # drained but not yet in a delta: a dump that raises forgets nothing
        self._replicated: dict[str, Keys] = {}  # data-parallel keys this rank ever published

    def dump(self, step: int, final: bool = False) -> pa.Table | None:
        """Delta (DELTA_SCHEMA) of all rows touched since the last dump, at their present values; None for none.

        `final` adds every data-parallel key this rank ever published. Ranks' clocks differ, so an old value of a
        replicated row may carry a greater ts than a newer one from another rank; at the end all replicas agree, so
        whichever rank wins is right.

        Raises:
            DeltaError: an id outside this rank's shard. Ids stay tracked when a dump raises.
        """
        try:
            touched = self._collect()
        except DeltaError as error:
            raise DeltaError(error.what, table=error.table, key=error.key, step=step) from None
        if final:
            touched = _merge(touched, self._replicated)
        deltas = [self._delta_of(step, fqn, touched[fqn], final) for fqn in self._targets(touched)]
        replicated = {fqn: keys for fqn, keys in touched.items() if self._tables[fqn].sharding == DATA_PARALLEL}
        self._replicated = _merge(self._replicated, replicated)
        self._undelivered = {}
        return pa.concat_tables(deltas) if deltas else None

    def discard(self) -> None:
        """Forget everything tracked so far: a warm-up batch before a restore is not training."""
        self._source.drain()
        self._undelivered = {}

    def tracked_rows(self) -> int:
        """How many rows wait for the next dump."""
        return sum(len(keys) for keys in self._collect().values())

    def _collect(self) -> dict[str, Keys]:
        self._undelivered = _merge(self._undelivered, self._source.drain())
        return self._undelivered

    def _targets(self, touched: Mapping[str, Keys]) -> list[str]:
        """Tables this dump reads. Only those with keys: a quiet table, or one of another rank, has nothing to read."""
        return sorted(fqn for fqn, keys in touched.items() if len(keys))

    def _delta_of(self, step: int, fqn: str, keys: Keys, final: bool) -> pa.Table:
        rows = np.ascontiguousarray(self._source.gather(fqn, keys))
        features, source = ",".join(self._tables[fqn].feature_names), "final" if final else "dump"
        return make_delta(step, self._rank, self._world_size, features, fqn, keys, rows, source)


def _merge(left: Mapping[str, Keys], right: Mapping[str, Keys]) -> dict[str, Keys]:
    merged = dict(left)
    for fqn, keys in right.items():
        merged[fqn] = np.union1d(merged[fqn], keys) if fqn in merged else keys
    return merged

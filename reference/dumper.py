"""When a rank dumps (Cadence) and what a dump holds (Dumper). Rank-local throughout: no collective, ever."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from .contract import Collection
from .delta import DeltaError, Keys, Mask, Rows, make_delta, unique
from .settings import Settings

DATA_PARALLEL = "data_parallel"
Source = Literal["dump", "restore", "final"]  # why rows are sent


class TableInfo(msgspec.Struct, frozen=True):
    """One table as this rank sees it; `hosted` says whether rows of it live here."""

    fqn: str
    owner: str
    collection: Collection
    table: str
    feature_names: tuple[str, ...]
    rows: int | None  # of the whole table, keys are below it; None where keys are any int64 (dynamic, ZCH)
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
        """While inside, forwards are not recorded (evaluation). Nests, and ends however the block ends.

        Holds for the calling thread alone: an evaluation beside the training thread must not hide what that looks up.
        """


class Pause:
    """Says whether this thread evaluates. Kept in a context variable, which `asyncio.to_thread` passes on too."""

    def __init__(self) -> None:
        self._held = ContextVar("evaluates", default=False)

    def __bool__(self) -> bool:
        return self._held.get()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token = self._held.set(True)
        try:
            yield
        finally:
            self._held.reset(token)


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
        before = max(step - 1, 0) if self._step_last is None else self._step_last
        self._step_last = step
        return step // self._every_steps > before // self._every_steps

    def _due_by_time(self) -> bool:
        now_s = self._clock.monotonic()
        if (late_s := now_s - self._deadline_s) < 0:
            # A clock that went back (a resumed machine) must not silence the rank for as long as it went back.
            self._deadline_s = min(self._deadline_s, now_s + self._period_s)
            return False
        # Fixed rate: the sequence keeps its phase, and deadlines that a stall swallowed are skipped, not fired at once.
        self._deadline_s += self._period_s * (math.floor(late_s / self._period_s) + 1)
        return True


class Dumper:
    """Turns the ids a source recorded into a delta of this rank."""

    def __init__(self, source: TableSource, settings: Settings, rank: int, world_size: int) -> None:
        self._source = source
        self._rank, self._world_size = rank, world_size
        self._embedding_type = settings.embedding_type
        self._tables = dict(source.tables())
        self._undelivered: dict[str, Keys] = {}  # drained, and in no delta that was submitted
        self._dumped = self._undelivered
        self._drained: list[Mapping[str, Keys]] = []  # nor yet merged into these
        self.replicated: dict[str, Keys] = {}  # data-parallel keys this rank answers for: those it ever published

    def dump(self, step: int, source: Source = "dump") -> pa.Table | None:
        """Delta (delta.SCHEMAS) of all rows touched since the last dump, at their present values; None for none.

        Forgets no key: `submitted` does, once the delta is in other hands.

        "final" adds every data-parallel key this rank ever published. Ranks' clocks differ, so an old value of a
        replicated row may carry a greater ts than a newer one from another rank; at the end all replicas agree, so
        whichever rank wins is right.

        Raises:
            DeltaError: an id outside this rank's shard, a row that int8 cannot hold.
        """
        try:
            touched = self._dumped = self._collect()
        except DeltaError as error:
            raise DeltaError(error.what, table=error.table, key=error.key, step=step) from None
        if source == "final":
            touched = merge_keys(touched, self.replicated)
        deltas = [self._delta_of(step, fqn, touched[fqn], source) for fqn in self._targets(touched)]
        replicated = {fqn: keys for fqn, keys in touched.items() if self._tables[fqn].sharding == DATA_PARALLEL}
        self.replicated = merge_keys(self.replicated, replicated)
        return pa.concat_tables(deltas) if deltas else None

    def submitted(self) -> None:
        """Forget the keys of the last dump, unless others have been added to them meanwhile."""
        if self._undelivered is self._dumped:
            self._undelivered = {}

    def discard(self) -> None:
        """Forget everything tracked so far: a warm-up batch before a restore is not training."""
        self._source.drain()
        self._drained, self._undelivered = [], {}

    def take_over(self, owed: Mapping[str, Keys], replicated: Mapping[str, Keys]) -> int:
        """Divide among the ranks what an earlier job owed the store (keys sorted, unique). This rank's share is in the
        next dump, as if it had been looked up; returns how many rows that is.
        """
        mine = {fqn: self._share(fqn, keys) for fqn, keys in owed.items()}
        self._undelivered = merge_keys(self._undelivered, mine)
        self.replicated = merge_keys(self.replicated, {fqn: self._share(fqn, keys) for fqn, keys in replicated.items()})
        return sum(map(len, mine.values()))

    def tracked(self) -> dict[str, Keys]:
        """Keys that wait for the next dump; takes nothing away."""
        return dict(self._collect())

    def _collect(self) -> dict[str, Keys]:
        self._drained.append(self._source.drain())  # at once: a signal handler may raise while they are merged
        self._undelivered = merge_keys(self._undelivered, *self._drained)
        self._drained.clear()
        return self._undelivered

    def _share(self, fqn: str, keys: Keys) -> Keys:
        """Those of the keys that this rank hosts; of a replicated table, which all host, one in `world_size`."""
        mine = keys[self._source.hosts(fqn, keys)]
        is_replicated = fqn in self._tables and self._tables[fqn].sharding == DATA_PARALLEL
        return mine[mine % self._world_size == self._rank] if is_replicated else mine

    def _targets(self, touched: Mapping[str, Keys]) -> list[str]:
        """Tables this dump reads. Only those with keys: a quiet table, or one of another rank, has nothing to read."""
        return sorted(fqn for fqn, keys in touched.items() if len(keys))

    def _delta_of(self, step: int, fqn: str, keys: Keys, source: Source) -> pa.Table:
        rows, features = np.ascontiguousarray(self._source.gather(fqn, keys)), ",".join(self._tables[fqn].feature_names)
        who = (step, self._rank, self._world_size)
        return make_delta(*who, features, fqn, keys, rows, source, self._embedding_type)


def merge_keys(*several: Mapping[str, Keys]) -> dict[str, Keys]:
    """Keys per FQN of several mappings, sorted and unique; those of one alone are not copied."""
    parts: dict[str, list[Keys]] = {}
    for keys_of in several:
        for fqn, keys in keys_of.items():
            parts.setdefault(fqn, []).append(keys)
    return {fqn: each[0] if len(each) == 1 else unique(np.concatenate(each)) for fqn, each in parts.items()}


def keys_of(table: pa.Table, name: str = "table_fqn", key: str = "key_id") -> dict[str, Keys]:
    """Keys per value of the column `name`, sorted and unique: of a delta, or of rows read from the store."""
    parts: dict[str, list[Keys]] = {}
    for batch in table.to_batches():
        coded, keys = batch[name].dictionary_encode(), batch[key].to_numpy()
        codes = coded.indices.to_numpy()
        for code, each in enumerate(coded.dictionary.to_pylist()):
            parts.setdefault(each, []).append(keys[codes == code])
    return {each: unique(np.concatenate(part)) for each, part in parts.items()}

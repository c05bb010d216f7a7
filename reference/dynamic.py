"""Tables whose rows come and go: dynamic tables (NVIDIA dynamicemb's kind) and TorchRec's ZCH (managed collision).

Here a key has a row of its own only while it is admitted, so what serves for it can change without a lookup of it: it
is evicted, or another key takes its slot. Every key that was looked up, admitted or evicted since the last drain is
published with what the model *now* serves for it, so that no key ever published keeps a vector the model gave up.

No torch here: tables come as objects with a small interface, ids as arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .contract import TableRef, fqn
from .delta import KEY_RESERVED, DeltaError, Keys, Mask, Rows, unique
from .dumper import Pause, TableInfo, TableSource, merge_keys

DYNAMIC = "dynamic"  # the sharding of such tables
FOLD_AT_IDS = 1 << 20  # pending ids of one table before duplicates are folded
FREE = np.iinfo(np.int64).max  # marks a place of a ZCH map that no raw id has


class TrackerError(RuntimeError):
    """The model cannot be followed row by row. Usual causes: column-wise or grid sharding, a table left unsharded, a
    dynamic table that forgets which keys it evicts, a torchrec release with another interface.
    """


class IdLog:
    """Ids of one table since the last drain; duplicates are folded now and then, so that memory stays bounded.

    Args:
        unique: makes one array (or tensor) of unique ids out of a list of them.
    """

    def __init__(self, unique: Callable[[list[Any]], Any]) -> None:
        self._unique = unique
        self._parts: list[Any] = []
        self._fold_at = FOLD_AT_IDS
        self.count = 0

    def add(self, ids: Any) -> None:
        """Keep ids (one-dimensional, not written to any more) for the next `fold`."""
        self._parts.append(ids)
        self.count += len(ids)
        if self.count > self._fold_at:
            self._fold_at = max(FOLD_AT_IDS, 2 * len(self.fold()))

    def fold(self) -> Any:
        """Unique ids, of which there is one at least; takes nothing away."""
        self._parts = [self._unique(self._parts)]
        self.count = len(self._parts[0])
        return self._parts[0]

    def clear(self) -> None:
        self._parts, self.count = [], 0


class DynamicTable(Protocol):
    """What `DynamicSource` asks of one rank's table. The stand-in of the fakes is one; dynamicemb's functions of these
    names need a few lines around them. Keys are int64 bit patterns of 64 bits, rows float32 (n, dim).
    """

    @property
    def dim(self) -> int: ...

    def flush(self) -> object:
        """Bring what `find` reads up to date: with a cache, newer rows lie elsewhere before."""

    def find(self, keys: Keys) -> tuple[Rows, Mask]:
        """Rows, the caller's to change, and which keys have one; the others' rows hold anything."""

    def pop_evicted(self) -> Keys:
        """Keys that left since the last call, also by an erase; some may be back. Raises if the table keeps none."""


class DynamicSpec(msgspec.Struct, frozen=True):
    """One dynamic table of a model. `eval_value`: what serving uses, in every place of the row, for a key without one
    (dynamicemb's `eval_initializer_args`, a constant).
    """

    ref: TableRef
    table: Any  # a DynamicTable
    feature_names: tuple[str, ...]
    eval_value: float = 0.0


def round_robin(keys: Keys, world_size: int) -> npt.NDArray[np.uint64]:
    """Rank of each key as dynamicemb deals them out by default: the *unsigned* key modulo the number of ranks."""
    return keys.view(np.uint64) % np.uint64(world_size)


class DynamicSource:
    """Table source (dumper.TableSource) of one rank's dynamic tables. Tell it what is looked up: see `record`.

    Args:
        rank_of: the rank that holds each key; must be the rule by which the model deals keys out.

    Raises:
        TrackerError: two tables of one name, or one that does not keep the keys it evicts.
    """

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        rank: int = 0,
        world_size: int = 1,
        rank_of: Callable[[Keys, int], npt.NDArray[Any]] = round_robin,
    ) -> None:
        self._rank, self._world_size, self._rank_of = rank, world_size, rank_of
        self._specs = {fqn(spec.ref.owner, spec.ref.collection, spec.ref.table): spec for spec in specs}
        if len(self._specs) < len(specs):
            raise TrackerError("two dynamic tables have one name; rename one or move it under another module")
        self._logs = {full: IdLog(lambda parts: unique(np.concatenate(parts))) for full in self._specs}
        self._pause = Pause()
        self._lock = threading.Lock()
        for full in self._specs:
            self._evicted(full)  # those of before are no concern of this publisher

    def tables(self) -> dict[str, TableInfo]:
        return {
            full: TableInfo(
                fqn=full,
                owner=spec.ref.owner,
                collection=spec.ref.collection,
                table=spec.ref.table,
                feature_names=spec.feature_names,
                rows=None,
                dim=spec.table.dim,
                sharding=DYNAMIC,
                hosted=True,
            )
            for full, spec in self._specs.items()
        }

    def record(self, fqn: str, keys: npt.ArrayLike) -> None:
        """Note the keys of one lookup in training: int64, or uint64 as bit patterns, shape (n,), repeats allowed.

        Raises:
            DeltaError: keys of another dtype; through a float, keys above 2**53 would change.
        """
        if not self._pause:
            self.track(fqn, keys)

    def track(self, fqn: str, keys: npt.ArrayLike) -> None:
        """As `record`, also within a pause: for lookups that were noted elsewhere."""
        ids = np.asarray(keys)
        if ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
            what = f"keys of {ids.dtype} {ids.shape}, expected int64 or uint64 (n,)"
            raise DeltaError(what, table=fqn, key=None, step=None)
        with self._lock:
            self._logs[fqn].add(ids.astype(np.int64))

    def drain(self) -> dict[str, Keys]:
        """Keys looked up, admitted or evicted since the last drain, per FQN. One that raises takes nothing away.

        Raises:
            DeltaError: the reserved key -1 was looked up.
        """
        with self._lock:
            for full, log in self._logs.items():
                log.add(self._evicted(full))
            found = {full: log.fold() for full, log in self._logs.items() if log.count}
            for full, keys in found.items():
                if (keys == KEY_RESERVED).any():
                    raise DeltaError(f"key {KEY_RESERVED} is reserved", table=full, key=KEY_RESERVED, step=None)
            for log in self._logs.values():
                log.clear()
        return found

    def gather(self, fqn: str, keys: Keys) -> Rows:
        """What serving uses for the keys now, float32 (n, dim): their rows, or the evaluation constant."""
        table = self._specs[fqn].table
        table.flush()
        rows, founds = table.find(keys)
        rows[~founds] = self._row_when_missing(fqn)
        return np.asarray(rows, np.float32)

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        """Which keys are this rank's to hold, admitted or not."""
        if fqn not in self._specs:
            return np.zeros(len(keys), np.bool_)
        return np.asarray(self._rank_of(keys, self._world_size) == self._rank) & (keys != KEY_RESERVED)

    def paused(self) -> AbstractContextManager[None]:
        return self._pause()

    def _evicted(self, fqn: str) -> Keys:
        """Keys that the table gave up. Flushed first: bringing rows to the last tier evicts others from there."""
        table = self._specs[fqn].table
        table.flush()
        try:
            return np.asarray(table.pop_evicted(), np.int64)
        except ValueError as error:
            raise TrackerError(
                f"table {fqn!r} does not say which keys it evicts, so what it served for them would stay in the store; "
                f"let it keep them (dynamicemb: evicted_item_mode=RETAIN_KEY): {error}"
            ) from error

    def _row_when_missing(self, fqn: str) -> float:
        return float(self._specs[fqn].eval_value)


class ZchTable:
    """Which row one shard's MCHManagedCollisionModule serves for a raw id, and for which ids that has changed.

    Facts of torchrec 1.6 to 1.9 (modules/mc_modules.py): the module keeps its raw ids in order in
    `_mch_sorted_raw_ids`, free places at the end, and the global row of each place in `_mch_remapped_ids_mapping`. It
    looks up every id that has no place in its last row, *shared* by all of them and trained by each. Ids get and lose
    places only within a forward in training, the losers without being looked up.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shared_slot = int(module._output_global_offset) + int(module._zch_size) - 1
        self._before = self._map()
        self._shared_row = b""
        self._shared_ids: Keys = np.empty(0, np.int64)  # published, and without a place of their own

    def slots(self, raw_ids: Keys) -> Keys:
        """The global row that is served for each raw id now."""
        return self._find(raw_ids, self._map())

    def published(self, raw_ids: Keys) -> None:
        """Note ids that the store holds from now on: those that share a row change whenever one of them is trained."""
        shares = (self.slots(raw_ids) == self.shared_slot) | (raw_ids == FREE)  # FREE is taken for the first free place
        self._shared_ids = unique(np.append(self._shared_ids, raw_ids[shares]))

    def changed(self, shared_row: bytes) -> Keys:
        """Ids for which another row, or another content of the shared row, is served than at the last call."""
        before, self._before = self._before, self._map()
        known = unique(np.append(self._shared_ids, before[0][before[0] != FREE]))
        slots = self._find(known, self._before)
        moved = slots != self._find(known, before)
        if shared_row != self._shared_row:
            moved |= slots == self.shared_slot
        self._shared_row = shared_row
        return known[moved]

    def _map(self) -> tuple[Keys, Keys]:
        """Copies of raw ids and their rows; the module changes its own in place."""
        places = self.module._mch_sorted_raw_ids, self.module._mch_remapped_ids_mapping
        ids, slots = (np.array(place.detach().cpu().numpy(), np.int64) for place in places)
        return ids, slots

    def _find(self, raw_ids: Keys, places: tuple[Keys, Keys]) -> Keys:
        at = np.searchsorted(places[0][:-1], raw_ids)
        return np.where(places[0][at] == raw_ids, places[1][at], self.shared_slot)


class CombinedSource:
    """Several table sources as one, asked in this order; no table may be in two of them."""

    def __init__(self, sources: Sequence[TableSource]) -> None:
        self._sources = list(sources)
        self._of = {full: source for source in self._sources for full in source.tables()}
        self._drained: list[Mapping[str, Keys]] = []  # of sources asked before one that raised
        if len(self._of) < sum(len(source.tables()) for source in self._sources):
            raise TrackerError("a table is in two of the combined sources; leave it out of one")

    def tables(self) -> Mapping[str, TableInfo]:
        return {full: info for source in self._sources for full, info in source.tables().items()}

    def drain(self) -> Mapping[str, Keys]:
        for source in self._sources:
            self._drained.append(source.drain())
        drained, self._drained = merge_keys(*self._drained), []
        return drained

    def gather(self, fqn: str, keys: Keys) -> Rows:
        return self._of[fqn].gather(fqn, keys)

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        return self._of[fqn].hosts(fqn, keys) if fqn in self._of else np.zeros(len(keys), np.bool_)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source.paused())
            yield

"""A stand-in for NVIDIA dynamicemb's dynamic tables on NumPy, and what a ZCH (managed collision) map serves.

Both kinds of table give a row to a key only while the key is admitted. So "the row of key k" is a question with three
answers, and a delta publisher must ask it of what serves, not of what was trained: the key's own row, the row that
serving uses for keys without one, and, after an eviction, that same fallback where the key's own row used to be.

Public facts about dynamicemb (NVIDIA/recsys-examples, corelib/dynamicemb: DynamicEmb_APIs.md, types.py,
embedding_admission.py):
- keys are int64, hashed as uint64 bit patterns: a key is any 64 bits, and the table has no first or last row;
- a key seen for the first time in training gets a row at once from ``initializer_args``; in evaluation a missing key
  gets ``eval_initializer_args``, a constant 0.0 by default, and is not inserted;
- admission: keys not in the table are counted by a Counter of limited capacity (the smallest frequency leaves a full
  one); a key is admitted when its frequency is >= the threshold, and its count is then erased. Keys not admitted get
  initial values for the forward pass and are not stored;
- eviction: in a full bucket the smallest score leaves. Scores: TIMESTAMP, STEP (one value per forward pass),
  CUSTOMIZED (set by the user), LFU (accumulated frequency). Keys that the running pass uses are protected; a key for
  which there is no room is not stored, and its embedding is 0.0 (DynamicEmbCheckMode);
- ``find`` of a storage returns values and a ``founds`` mask and writes only the rows found: the others hold whatever
  the buffer held. ``insert`` writes rows with scores; ``export_keys_values`` goes through all in batches;
  ``incremental_dump`` returns keys whose score is not less than a threshold;
- with ``caching=True`` the newest values lie in a cache on the device until ``flush``: ``find`` on the storage before
  it gives older rows, or misses keys;
- with ``EvictedItemMode.RETAIN_KEY`` evicted keys are kept until ``pop_evicted_keys`` reads and clears them (unique); a
  key may have been inserted again by then;
- capacity starts at ``init_capacity`` and doubles beyond ``max_load_factor``: storage is replaced, handles go stale.

Ours: one bucket per table; a lookup prefers keys of higher score where room is scarce, and the lower unsigned key
leaves first among equal scores (dynamicemb picks at random, unless DEMB_DETERMINISM_MODE); initial rows depend on seed
and key alone, so order and world size do not change them; rows not found are NaN, which no test can take for a value.

torch is imported nowhere: ``ZchMap`` reads TorchRec's module through its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.int64]

RESERVED_KEY: Final = -1  # marks an empty slot
Score = Literal["timestamp", "step", "lfu", "custom"]


class DynamicTableError(ValueError):
    """A key, row or option that a dynamic table cannot hold. The message names the table."""


class TableOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What DynamicEmbTableOptions says, as far as the stand-in follows it.

    Slots: ``init_capacity`` (None: ``capacity``), doubled up to ``capacity`` where more than ``load_max`` of them would
    be taken. Initial values are uniform in [``initial_min``, ``initial_max``); a missing key is served ``eval_value``.
    ``admit_count``: the lookup of a key that stores it (1: the first), counted for at most ``counter_capacity`` keys.
    ``score``: what eviction goes by ("timestamp" is LRU).
    """

    capacity: int
    init_capacity: int | None = None
    load_max: float = 0.5
    score: Score = "timestamp"
    admit_count: int = 1
    counter_capacity: int = 1 << 20
    initial_min: float = -0.01
    initial_max: float = 0.01
    eval_value: float = 0.0
    caching: bool = False
    retain_evicted: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise DynamicTableError if a number is out of range."""
        start = self.capacity if self.init_capacity is None else self.init_capacity
        if not 1 <= start <= self.capacity or self.admit_count < 1 or self.counter_capacity < 1:
            raise DynamicTableError(
                f"capacity {self.capacity}, init_capacity {self.init_capacity}, admit_count {self.admit_count}, "
                f"counter_capacity {self.counter_capacity}: want 1 <= init_capacity <= capacity, the others >= 1"
            )
        if not 0 < self.load_max <= 1 or not self.initial_min <= self.initial_max:
            raise DynamicTableError(
                f"load_max {self.load_max}, initial values {self.initial_min} to {self.initial_max}: want 0 < load_max "
                "<= 1 and an interval"
            )


class DynamicTable:
    """One rank's dynamic table: key -> row (float32, ``dim``). Not thread-safe, as a model's forward is not.

    Keys are passed as int64 or uint64 arrays of any order; results come in that order. Raises DynamicTableError for the
    reserved key -1, another dtype or another shape.
    """

    def __init__(self, name: str, dim: int, options: TableOptions) -> None:
        options.check()
        if dim < 1:
            raise DynamicTableError(f"table {name!r}: dim {dim}, want >= 1")
        self.name, self.dim, self.options = name, dim, options
        self.not_stored = 0  # admitted keys for which there was no room
        self._index = _Index()
        size = options.init_capacity or options.capacity
        self._rows = np.full((size, dim), np.nan, np.float32)
        self._stored, self._is_stored = self._rows, np.zeros(size, bool)  # what the last tier holds (see `find`)
        if options.caching:
            self._stored = self._rows.copy()
        self._scores = np.zeros(size, np.int64)
        self._free = np.arange(size)[::-1].copy()  # a stack: the lowest slot first
        self._counts = _Counter(options.counter_capacity)
        self._clock = 0
        self._step = 0
        self._custom = 0
        self._evicted: list[Keys] = []

    def __len__(self) -> int:
        return len(self._index.keys)

    @property
    def weights(self) -> Rows:
        """The storage as it is now, (slots, dim). Growth replaces it: a handle kept from before goes stale."""
        return self._rows

    # Training and serving

    def set_score(self, score: int) -> None:
        """The score of the lookups to come ("custom" only), as dynamicemb's ``set_score``."""
        if self.options.score != "custom":
            raise DynamicTableError(f"table {self.name!r} scores by {self.options.score}; only custom scores are set")
        if score < 0:
            raise DynamicTableError(f"table {self.name!r}: score {score}, want >= 0")
        self._custom = score

    def lookup(self, keys: npt.ArrayLike, *, training: bool = True) -> Rows:
        """Rows for a forward pass, (n, dim). In training, missing keys are counted, admitted and inserted.

        A key not admitted gets its initial row, which is not kept; one for which there is no room gets zeros. With
        ``training=False`` nothing changes and missing keys get ``eval_value``: what serving answers.
        """
        wanted = self._keys(keys)
        if not training:
            slots, found = self._index.find(wanted)
            rows = np.full((len(wanted), self.dim), self.options.eval_value, np.float32)
            rows[found] = self._rows[slots[found]]
            return rows
        if len(wanted) == 0:
            return np.empty((0, self.dim), np.float32)
        unique, inverse, counts = np.unique(wanted, return_inverse=True, return_counts=True)
        last = np.empty(len(unique), np.int64)
        last[inverse] = np.arange(len(wanted))  # the later of equal keys wins
        self._step += 1
        rows = self.initial(unique)
        slots, found = self._index.find(unique)
        self._touch(slots[found], counts[found], last[found])
        missing = np.flatnonzero(~found)
        total = self._counts.add(unique[missing], counts[missing])
        admitted = total >= self.options.admit_count
        self._counts.erase(unique[missing[admitted]])
        chosen = missing[admitted]
        fresh = self._score(total[admitted], last[chosen])
        kept = self._insert(unique[chosen], rows[chosen], fresh, protected=slots[found])
        self._clock += len(wanted)
        self.not_stored += int((~kept).sum())
        rows[chosen[~kept]] = 0.0
        rows[found] = self._rows[slots[found]]
        result: Rows = rows[inverse.reshape(-1)]
        return result

    def add(self, keys: npt.ArrayLike, deltas: npt.ArrayLike) -> Mask:
        """Add ``deltas`` (n, dim) to the keys' rows, as an optimizer's step does; equal keys add up.

        Returns which keys have a row; the others are left out (dynamicemb updates only what is stored).
        """
        wanted = self._keys(keys)
        change = self._values(deltas, len(wanted))
        slots, found = self._index.find(wanted)
        np.add.at(self._rows, slots[found], change[found])
        return found

    def served(self, keys: npt.ArrayLike) -> Rows:
        """The row serving uses for each key now: its own, else ``eval_value`` throughout. What a delta must hold."""
        return self.lookup(keys, training=False)

    def initial(self, keys: npt.ArrayLike) -> Rows:
        """Initial rows, a function of seed, key and column alone."""
        bits = np.asarray(keys).astype(np.int64, copy=False).view(np.uint64)[:, None]
        columns = np.arange(self.dim, dtype=np.uint64)[None, :]
        mixed = _mix(_mix(bits ^ _mix(np.uint64(self.options.seed % 2**64))) + columns)
        unit = (mixed >> np.uint64(40)).astype(np.float64) / 2**24
        low, high = self.options.initial_min, self.options.initial_max
        return (low + unit * (high - low)).astype(np.float32)

    # The storage's side

    def find(self, keys: npt.ArrayLike) -> tuple[Rows, Mask]:
        """Rows of the last tier (n, dim) and which were found; those not found are NaN. Changes nothing.

        With ``caching``, rows are as of the last ``flush``, and keys inserted since are not found.
        """
        wanted = self._keys(keys)
        slots, found = self._index.find(wanted)
        found[found] = self._is_stored[slots[found]]
        rows = np.full((len(wanted), self.dim), np.nan, np.float32)
        rows[found] = self._stored[slots[found]]
        return rows, found

    def flush(self) -> None:
        """Bring the last tier up to date."""
        if self.options.caching:
            slots = self._index.slots
            self._stored[slots] = self._rows[slots]
            self._is_stored[slots] = True

    def insert(self, keys: npt.ArrayLike, rows: npt.ArrayLike, scores: npt.ArrayLike | None = None) -> Mask:
        """Store rows (n, dim) under unique keys whatever admission says, as a load does; returns which have room.

        ``scores``: int64 (n,), default those of a lookup now. Rows go to the last tier.
        """
        wanted = self._keys(keys)
        values = self._values(rows, len(wanted))
        if len(np.unique(wanted)) < len(wanted):
            raise DynamicTableError(f"table {self.name!r}: insert wants unique keys")
        self._step += 1
        given = np.ones(len(wanted), np.int64) if scores is None else np.asarray(scores, np.int64)
        fresh = self._score(given, np.arange(len(wanted))) if scores is None else given
        if fresh.shape != wanted.shape or (fresh < 0).any():
            raise DynamicTableError(f"table {self.name!r}: scores {fresh.shape}, want {wanted.shape}, each >= 0")
        slots, found = self._index.find(wanted)
        self._scores[slots[found]] = fresh[found]
        kept = found.copy()
        kept[~found] = self._insert(wanted[~found], values[~found], fresh[~found], protected=slots[found])
        self._clock += len(wanted)
        slots, stored = self._index.find(wanted)
        self._rows[slots[stored]] = self._stored[slots[stored]] = values[stored]
        self._is_stored[slots[stored]] = True
        return kept

    def erase(self, keys: npt.ArrayLike) -> Mask:
        """Remove keys; returns which were there. Not reported by ``pop_evicted``."""
        wanted = np.unique(self._keys(keys))
        _, present = self._index.find(self._keys(keys))
        slots, found = self._index.find(wanted)
        self._release(wanted[found], slots[found])
        return present

    def export(self, batch_size: int = 65536, min_score: int | None = None) -> Iterator[tuple[Keys, Rows, Scores]]:
        """Keys (ascending as int64), rows and scores of the last tier, in batches of at most ``batch_size``.

        ``min_score``: only keys whose score is not less, as an incremental dump has them. Every row exported is a copy.
        """
        keys, slots = self._index.keys, self._index.slots
        chosen = self._is_stored[slots]
        if min_score is not None:
            chosen &= self._scores[slots] >= min_score
        keys, slots = keys[chosen], slots[chosen]
        for start in range(0, len(keys), batch_size):
            part = slots[start : start + batch_size]
            yield keys[start : start + batch_size].copy(), self._stored[part], self._scores[part]

    def scores(self, keys: npt.ArrayLike) -> Scores:
        """Scores (n,); -1 for keys without a row."""
        slots, found = self._index.find(self._keys(keys))
        result = np.full(len(found), -1, np.int64)
        result[found] = self._scores[slots[found]]
        return result

    def pop_evicted(self) -> Keys:
        """Keys evicted since the last call, sorted, unique; needs ``retain_evicted``. Some may be back by now."""
        if not self.options.retain_evicted:
            raise DynamicTableError(f"table {self.name!r} does not retain evicted keys: set retain_evicted")
        popped, self._evicted = self._evicted, []
        return np.unique(np.concatenate([np.empty(0, np.int64), *popped]))

    # Inside

    def _keys(self, keys: npt.ArrayLike) -> Keys:
        array = np.asarray(keys)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype not in (np.int64, np.uint64):
            raise DynamicTableError(
                f"table {self.name!r}: keys of {array.dtype} {array.shape}, want int64 or uint64 (n,): through a float "
                "keys above 2**53 change"
            )
        result = np.ascontiguousarray(array).view(np.int64)
        if (result == RESERVED_KEY).any():
            raise DynamicTableError(f"table {self.name!r}: key -1 is reserved, it marks an empty slot")
        return result

    def _values(self, rows: npt.ArrayLike, count: int) -> Rows:
        array = np.asarray(rows, np.float32)
        if array.shape != (count, self.dim):
            raise DynamicTableError(f"table {self.name!r}: rows {array.shape}, want ({count}, {self.dim})")
        return array

    def _score(self, counts: Scores, last: Scores) -> Scores:
        """Scores of new keys: ``counts`` lookups so far, last one at place ``last`` of the batch."""
        if self.options.score == "timestamp":
            return self._clock + last + 1
        if self.options.score == "lfu":
            return counts
        return np.full(len(counts), self._step if self.options.score == "step" else self._custom, np.int64)

    def _touch(self, slots: Scores, counts: Scores, last: Scores) -> None:
        fresh = self._score(counts, last)
        self._scores[slots] = self._scores[slots] + fresh if self.options.score == "lfu" else fresh

    def _insert(self, keys: Keys, rows: Rows, scores: Scores, protected: Scores) -> Mask:
        """Give new keys slots: free ones, then those of lower or equal score; returns which got one."""
        self._grow(len(keys))
        order = np.lexsort((keys.view(np.uint64), -scores))  # highest score first, then lowest key
        room = len(self._free)
        tail = order[room:]
        if len(tail):
            victims, their_slots = self._victims(len(tail), protected)
            tail = tail[: len(victims)]
            wins = scores[tail] >= self._scores[their_slots][: len(tail)]  # falls to False once: sorted both ways
            tail = tail[wins]
            self._release(victims[: len(tail)], their_slots[: len(tail)], evicted=True)
        chosen = np.concatenate([order[:room], tail])
        slots = self._free[len(self._free) - len(chosen) :][::-1].copy()
        self._free = self._free[: len(self._free) - len(chosen)]
        self._index.add(keys[chosen], slots)
        self._rows[slots], self._scores[slots] = rows[chosen], scores[chosen]
        self._is_stored[slots] = not self.options.caching
        kept = np.zeros(len(keys), bool)
        kept[chosen] = True
        return kept

    def _victims(self, count: int, protected: Scores) -> tuple[Keys, Scores]:
        """Up to ``count`` keys and slots to take, lowest score first, then lowest unsigned key."""
        keys, slots = self._index.keys, self._index.slots
        open_to_it = ~np.isin(slots, protected)
        keys, slots = keys[open_to_it], slots[open_to_it]
        order = np.lexsort((keys.view(np.uint64), self._scores[slots]))[:count]
        return keys[order], slots[order]

    def _release(self, keys: Keys, slots: Scores, evicted: bool = False) -> None:
        self._index.remove(keys)
        self._rows[slots] = self._stored[slots] = np.nan
        self._free = np.concatenate([self._free, slots[::-1]])
        if evicted and self.options.retain_evicted and len(keys):
            self._evicted.append(keys)

    def _grow(self, more: int) -> None:
        size, wanted = len(self._rows), len(self) + more
        while size < self.options.capacity and wanted > size * self.options.load_max:
            size = min(2 * size, self.options.capacity)
        added = size - len(self._rows)
        if added == 0:
            return
        self._free = np.concatenate([np.arange(len(self._rows), size)[::-1], self._free])
        blank = np.full((added, self.dim), np.nan, np.float32)
        cached = self.options.caching
        stored = np.concatenate([self._stored, blank]) if cached else None
        self._rows = np.concatenate([self._rows, blank])
        self._stored = self._rows if stored is None else stored
        self._is_stored = np.concatenate([self._is_stored, np.zeros(added, bool)])
        self._scores = np.concatenate([self._scores, np.zeros(added, np.int64)])


class _Index:
    """Sorted int64 keys and a number for each."""

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, np.int64)
        self.slots: Scores = np.empty(0, np.int64)

    def find(self, keys: Keys) -> tuple[Scores, Mask]:
        """Numbers (n,) and which keys are there; numbers of absent keys mean nothing."""
        if len(self.keys) == 0:
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return self.slots[at], self.keys[at] == keys

    def add(self, keys: Keys, slots: Scores) -> None:
        order = np.argsort(keys)
        at = np.searchsorted(self.keys, keys[order])
        self.keys = np.insert(self.keys, at, keys[order])
        self.slots = np.insert(self.slots, at, slots[order])

    def remove(self, keys: Keys) -> None:
        at = np.searchsorted(self.keys, keys)
        self.keys, self.slots = np.delete(self.keys, at), np.delete(self.slots, at)


class _Counter:
    """Lookups of keys that are not in the table; beyond ``capacity`` the least counted (then lowest keys) leave."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._index = _Index()  # slots are the counts

    def add(self, keys: Keys, counts: Scores) -> Scores:
        """Count unique keys; returns the totals."""
        before, found = self._index.find(keys)
        totals = counts + np.where(found, before, 0)
        self.erase(keys)
        self._index.add(keys, totals)
        spare = len(self._index.keys) - self._capacity
        if spare > 0:
            leaving = np.lexsort((self._index.keys.view(np.uint64), self._index.slots))[:spare]
            self._index.remove(self._index.keys[leaving])
        return totals

    def erase(self, keys: Keys) -> None:
        self._index.remove(keys[self._index.find(keys)[1]])


def _mix(bits: Any) -> Any:
    """The finalizer of splitmix64: every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


class ZchMoves(NamedTuple):
    """Raw ids (int64, sorted, hashed as the module hashes) whose row differs between two maps, and why."""

    admitted: Keys
    evicted: Keys
    moved: Keys


class ZchMap(NamedTuple):
    """One shard's raw id -> slot map of TorchRec's MCHManagedCollisionModule (ZCH), as of ``of(module)``.

    Facts of torchrec 1.8 (modules/mc_modules.py, distributed/mc_embedding_modules.py), shown by test_dynamicemb.py:
    - ``_mch_sorted_raw_ids`` (zch_size,) holds the admitted raw ids in order, free places as 2**63 - 1 at its end;
      ``_mch_remapped_ids_mapping`` holds the slot of each place, global: the shard's offset is included;
    - the last slot is never given to an id: every id without a slot is looked up, and trained, there. So the row of an
      id that is not admitted changes whenever any other such id is trained;
    - nothing is admitted or evicted but at the end of each ``eviction_interval`` of training forwards, inside
      ``forward``, before that same forward looks up. Evaluation changes nothing;
    - ids are counted in a buffer for 1.25 times as many ids as the first training batch would fill in an interval; what
      comes after is looked up but not counted, so it cannot be admitted then;
    - an evicted id leaves without being looked up; its slot goes to a new id in that step. TorchRec's unsharded modules
      leave the old id's row in the slot for the new id to inherit; the sharded ones reset it with the table's
      ``init_fn``;
    - raw id 2**63 - 1 cannot be told from a free place: it is looked up in the first free slot, or in the last.

    Fields: ``raw_ids``, ``slots`` int64 (zch_size,), free places included, and ``fallback``, the last slot.
    """

    raw_ids: Keys
    slots: Keys
    fallback: int

    @classmethod
    def of(cls, module: Any) -> ZchMap:
        """A copy of the module's map; the module goes on changing its buffers in place."""
        raw_ids = np.array(module._mch_sorted_raw_ids.detach().cpu().numpy(), np.int64)
        slots = np.array(module._mch_remapped_ids_mapping.detach().cpu().numpy(), np.int64)
        return cls(raw_ids, slots, int(module._output_global_offset) + int(module._zch_size) - 1)

    def find(self, raw_ids: npt.ArrayLike) -> tuple[Keys, Mask]:
        """The slot (global, int64 (n,)) that a lookup uses for each raw id, and which have one of their own.

        Raw ids are those after the module's ``preprocess`` (its hash, if it has one).
        """
        wanted = np.asarray(raw_ids, np.int64)
        at = np.searchsorted(self.raw_ids[:-1], wanted)
        matches = self.raw_ids[at] == wanted
        slots = np.where(matches, self.slots[at], self.fallback)
        return slots, matches & (slots != self.fallback) & (wanted != np.iinfo(np.int64).max)

    def served(self, raw_ids: npt.ArrayLike, weights: npt.ArrayLike, first_row: int = 0) -> Rows:
        """The row the model serves for each raw id now, float32 (n, dim): its slot's, else the fallback's.

        ``weights`` are the table's rows from global slot ``first_row`` on, this shard's at least.
        """
        table = np.asarray(weights)
        return table[self.find(raw_ids)[0] - first_row].astype(np.float32)

    def admitted(self) -> Keys:
        """Raw ids with a slot of their own, ascending."""
        return self.raw_ids[self.raw_ids != np.iinfo(np.int64).max]

    def moves_since(self, before: ZchMap) -> ZchMoves:
        """Ids that came, went, or came back to another slot. What is served for them changed with no lookup of theirs:
        a publisher must send admitted and moved ids their slot's row, and evicted ones the fallback's.
        """
        now, then = self.admitted(), before.admitted()
        both = np.intersect1d(now, then, assume_unique=True)
        return ZchMoves(
            admitted=np.setdiff1d(now, then, assume_unique=True),
            evicted=np.setdiff1d(then, now, assume_unique=True),
            moved=both[self.find(both)[0] != before.find(both)[0]],
        )

"""What the properties share: the store's rows matched with what the model held, and the events that led to a violation.

Everything here is vectorised: a history may hold a million accepted rows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..simulator.faults import Fault, StoreSchemaChanged, StoreViewDeleted
from ..simulator.history import Event, History, LedgerTable
from . import int8

#: Steps before the first and after the last one. ``NEVER``: the model never held it; ``FOREVER``: it still does.
NEVER, FOREVER = -1, int(np.iinfo(np.int64).max)

#: What struck a rank and how it ended: explains a violation whatever step it belongs to.
NOTABLE = {
    *("fault", "error", "restored", "finished", "closed"),
    *("rank-end", "rank-exit", "rank-ended-by-supervisor", "hang"),
}
#: What a rank and the store said to each other.
TALK = {"sdk-write", "sdk-flush", "request"}
EVENTS_KEPT = 12
#: What a rank writes when a lockstep step, or the restore that counts as one, is over.
MARKS = {"step", "restored"}


@dataclass(frozen=True)
class Rows:
    """Rows of one table found in the store, in arrival order, each matched bit by bit with the model.

    All int64 (n,): ``index`` row numbers in the Arrow table they come from, ``keys`` (the ledger's), ``ts``; ``first``
    and ``last`` step at which the model held exactly this value for this key (``NEVER``: at none). A value that came
    back later counts as held all the time in between, so that whoever says "too old" is certain. ``values``: float32
    (n, dim), zeros where ``sized`` (n,) is false because the row has another dimension or type than was asked for. Rows
    published as int8 are matched as int8.py says, and ``values`` are what serving makes of them.
    """

    ledger: LedgerTable
    index: np.ndarray
    keys: np.ndarray
    ts: np.ndarray
    values: np.ndarray
    sized: np.ndarray
    first: np.ndarray
    last: np.ndarray


def held(ledger: LedgerTable, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last step, int64 (n,) each, at which the model held ``values`` for ``keys`` (n,).

    ``values``: float32 (n, dim), or uint8 (n, dim + 4) as int8.py reads them.
    """
    n, rows = len(keys), len(ledger.initial)
    legal = (keys >= 0) & (keys < rows)
    asked = np.zeros(rows, bool)
    asked[keys[legal]] = True
    initial, changed = np.flatnonzero(asked), np.flatnonzero(asked[ledger.keys])
    model_keys = np.concatenate([initial, ledger.keys[changed]])
    model_steps = np.concatenate([np.zeros(len(initial), np.int64), ledger.steps[changed]])
    order = np.lexsort((model_steps, model_keys))
    model_keys, model_steps = model_keys[order], model_steps[order]
    model_values = np.concatenate([ledger.initial[initial], ledger.values[changed]])[order]
    until = np.full(len(order), FOREVER)
    superseded = np.flatnonzero(np.diff(model_keys) == 0)
    until[superseded] = model_steps[superseded + 1] - 1

    quantised = values.dtype == np.uint8
    codes = _codes(np.concatenate([int8.encode(model_values) if quantised else model_values, values]))
    width = len(codes) + 1
    pairs = np.append(model_keys, keys) * width + codes
    pairs[len(order) :][~legal] = -1
    known, where = np.unique(pairs[: len(order)], return_inverse=True)
    first, last = np.full(len(known), FOREVER), np.full(len(known), NEVER)
    np.minimum.at(first, where, model_steps)
    np.maximum.at(last, where, until)
    if not len(known):
        return np.full(n, NEVER), np.full(n, NEVER)
    at = np.minimum(np.searchsorted(known, pairs[len(order) :]), len(known) - 1)
    hit = known[at] == pairs[len(order) :]
    first, last = np.where(hit, first[at], NEVER), np.where(hit, last[at], NEVER)
    if quantised and len(rest := np.flatnonzero(legal & ~hit)):
        # Made in another way than FBGEMM's: compared with each value that the model held for the key.
        low, high = (np.searchsorted(model_keys, keys[rest], side=side) for side in ("left", "right"))
        row = np.repeat(np.arange(len(rest)), high - low)
        value = np.arange(len(row)) + np.repeat(high - np.cumsum(high - low), high - low)
        off = np.abs(int8.decode(values[rest])[row] - model_values[value])
        near = (off <= int8.tolerance(model_values[value])).all(axis=1)
        first[rest[row[near]]] = FOREVER
        np.minimum.at(first, rest[row[near]], model_steps[value[near]])
        np.maximum.at(last, rest[row[near]], until[value[near]])
    return first, last


def _codes(values: np.ndarray) -> np.ndarray:
    """int64 (n,): equal numbers for rows of float32 or uint8 that are equal bit by bit (0.0 and -0.0 are not, a NaN is
    what its bits are)."""
    values = np.ascontiguousarray(values)
    kind = pa.binary(values.shape[1] * values.itemsize)
    rows = pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    return rows.dictionary_encode().indices.to_numpy().astype(np.int64)


def match(history: History, table: pa.Table) -> dict[str, Rows]:
    """FQN -> rows of ``table`` (columns pk, sk, ts, embedding) under that table's published name; others are left
    out."""
    names = table["pk"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    keys, ts = table["sk"].to_numpy(), table["ts"].to_numpy()
    embeddings = table["embedding"].combine_chunks()
    lengths = pc.list_value_length(embeddings).fill_null(-1).to_numpy()
    quantised = history.scenario.publisher.embedding_type == "int8"
    typed = embeddings.type.value_type == (pa.uint8() if quantised else pa.float32())
    numbers = {name: code for code, name in enumerate(names.dictionary.to_pylist())}
    found = {}
    for fqn, ledger in history.tables.items():
        index = np.flatnonzero(codes == numbers.get(ledger.embedding_name, -1))
        mine = ledger.numbers(keys[index])
        dim = ledger.initial.shape[1]
        width = dim + int8.TRAILER_BYTES if quantised else dim
        sized = (lengths[index] == width) & typed
        raw = np.zeros((len(index), width), np.uint8 if quantised else np.float32)
        flat = embeddings.take(pa.array(index[sized])).flatten()
        raw[sized] = flat.to_numpy(zero_copy_only=False).reshape(-1, width)
        values = int8.decode(raw) if quantised else raw
        first, last = held(ledger, mine, raw)
        first[~sized] = last[~sized] = NEVER
        found[fqn] = Rows(ledger, index, mine, ts[index], values, sized, first, last)
    return found


_matched: tuple[weakref.ref[History], dict[str, dict[str, Rows]]] | None = None


def _match_once(history: History, what: str, table: pa.Table) -> dict[str, Rows]:
    """``match``, kept for the last history, because several properties ask for the same."""
    global _matched
    if _matched is None or _matched[0]() is not history:
        _matched = (weakref.ref(history), {})
    if what not in _matched[1]:
        _matched[1][what] = match(history, table)
    return _matched[1][what]


def written(history: History) -> dict[str, Rows]:
    """``match`` of the accepted writes."""
    return _match_once(history, "writes", history.writes)


def served(history: History) -> dict[str, Rows]:
    """``match`` of what the store served at the end."""
    return _match_once(history, "final", history.final)


def contains(some: Rows, asked: Rows) -> np.ndarray:
    """bool (n,): which rows of ``asked`` are among ``some``, with the same key, ts and bits."""
    if not len(some.keys) or not len(asked.keys):
        return np.zeros(len(asked.keys), bool)
    pairs = ((some.keys, asked.keys), (some.ts, asked.ts), (some.values, asked.values))
    keys, ts, values = (np.concatenate(pair) for pair in pairs)
    groups = np.unique(np.stack([keys, ts, _codes(values)], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    of_some = groups[: len(some.keys)][some.sized]
    found: np.ndarray = np.isin(groups[len(some.keys) :], of_some) & asked.sized
    return found


def touched(ledger: LedgerTable, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """First and last step, int64 (rows,) each, at which a key was touched: looked up in training by ``rank`` (None:
    by any rank, or changed, which also shows the lookup of a rank that was killed before it could write it down).

    Keys never touched have ``FOREVER`` and ``NEVER``.
    """
    keys, steps = ledger.lookup_keys, ledger.lookup_steps
    if rank is None:
        keys, steps = np.append(keys, ledger.keys), np.append(steps, ledger.steps)
    else:
        mine = ledger.lookup_ranks == rank
        keys, steps = keys[mine], steps[mine]
    first, last = np.full(len(ledger.initial), FOREVER), np.full(len(ledger.initial), NEVER)
    np.minimum.at(first, keys, steps)
    np.maximum.at(last, keys, steps)
    return first, last


def struck(history: History, attempt: int, *, lasting: bool = True) -> list[tuple[Fault, int]]:
    """The planned faults that struck in one attempt or (``lasting``) before it and for good, and how often."""
    counts = list(history.fired)
    if history.restarted:
        counts = [0] * len(history.scenario.faults)
        begin_ms, end_ms = history.starts[attempt].begin_ms, history.starts[attempt].end_ms
        for event in (e for e in history.events if e.kind == "fault" and e.t_ms <= end_ms):
            index = event.data["index"]
            lasts = lasting and isinstance(history.scenario.faults[index], StoreViewDeleted | StoreSchemaChanged)
            counts[index] += lasts or begin_ms <= event.t_ms
    return [(fault, n) for fault, n in zip(history.scenario.faults, counts, strict=False) if n]


def survived(history: History, steps: np.ndarray) -> np.ndarray:
    """bool (n,): whether the model that is left was trained in these of the history's steps (int64 (n,)).

    Those of the last attempt were, those before the checkpoint that it began from, and so on; steps between a
    checkpoint and the crash after it were made by a model that is gone.
    """
    kept = np.zeros(len(steps), bool)
    number, until = len(history.starts) - 1, float("inf")
    while True:
        attempt = history.starts[number]
        kept |= (steps > attempt.since) & (steps <= until)
        if attempt.checkpoint_of is None:
            return kept
        number = attempt.checkpoint_of
        until = attempt.restored + history.starts[number].shift


def log_is_whole(history: History) -> bool:
    """Whether the store's log has every row that was ever accepted: it goes with its view when that is deleted."""
    planned = zip(history.scenario.faults, history.fired, strict=False)
    return not any(isinstance(fault, StoreViewDeleted | StoreSchemaChanged) and fired for fault, fired in planned)


def step_starts(history: History) -> np.ndarray:
    """float64 (s,): no rank began lockstep step i before this moment (ms, monotonic); -inf where nothing is known.

    A rank writes its event ``step`` after the update, so step s begins after the first rank's event of step s - 1 or
    later. Steps are the history's, which count on over restarts.
    """
    seen = [(step, e.t_ms) for e in history.events if e.kind in MARKS and (step := history.moment(e)) is not None]
    size = 2 + max([step for step, _ in seen], default=0)
    starts = np.full(size, np.inf)
    for step, t_ms in seen:
        starts[step + 1] = min(starts[step + 1], t_ms)
    starts = np.minimum.accumulate(starts[::-1])[::-1]
    starts[:2] = -np.inf
    return np.where(np.isinf(starts), -np.inf, starts)


def value_at(ledger: LedgerTable, key: int, step: int) -> np.ndarray:
    """float32 (dim,): what the model held for ``key`` at the end of ``step``."""
    raw = [value for at, value in ledger.versions(key) if at <= step][-1]
    return np.frombuffer(raw, np.float32)


def key_id(ledger: LedgerTable, key: int) -> int:
    """What the store calls a row number of the ledger; a number outside of the table is what it is."""
    return int(ledger.key_ids[key]) if 0 <= key < len(ledger.key_ids) else key


def same_bits(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """bool (n,): rows of two float32 (n, dim) arrays that are equal bit by bit."""
    bits = [np.ascontiguousarray(side, np.float32).view(np.uint32) for side in (left, right)]
    return (bits[0] == bits[1]).all(axis=1)


def when_held(first: int, last: int) -> str:
    """Words for an interval of steps."""
    if first == NEVER:
        return "a value the model never held for this key"
    since = "the initial value" if first == 0 else f"the value of step {first}"
    return (
        f"{since}, which the model still holds"
        if last == FOREVER
        else f"{since}, which the model held until step {last}"
    )


def writers(history: History) -> np.ndarray:
    """int64 (rows of the accepted writes,): the rank whose client wrote the row, -1 for any other client."""
    clients = history.writes["client"].combine_chunks().dictionary_encode()
    ranks = [rank_of(name or "") for name in clients.dictionary.to_pylist()]
    known = np.array([-1 if rank is None else rank for rank in ranks] + [-1], np.int64)
    return known[clients.indices.fill_null(-1).to_numpy()]


def rank_of(client: str) -> int | None:
    """The rank behind a store client's name: ranks log in as ``rank0``, ``rank1``, …"""
    number = client.removeprefix("rank")
    return int(number) if client.startswith("rank") and number.isdecimal() else None


def events_about(
    history: History, rank: int | None, step: int | None = None, until_ms: float | None = None
) -> list[Event]:
    """The few events, in time order, that explain what became of ``step`` (the history's) on ``rank`` (None: on any).

    The step itself and what was said to the store next, what struck and what was said right after it, and how it ended.
    ``until_ms`` leaves out what came later, and then the last words count more than the first.
    """

    def concerns(event: Event) -> bool:
        if rank is None or event.who == "supervisor":
            return rank is None or event.rank in (None, rank)
        return event.rank == rank or event.data.get("client") == f"rank{rank}"

    mine = [e for e in history.events if concerns(e) and (until_ms is None or e.t_ms <= until_ms)]
    since = next((e.t_ms for e in mine if step is not None and history.moment(e) == step), float("-inf"))
    notable = [e for e in mine if e.kind in NOTABLE]
    struck = [e.t_ms for e in notable if e.kind == "fault" and e.t_ms >= since]
    near = [
        e for e in mine if e.t_ms >= since and (e.kind in TALK or (e.kind not in NOTABLE and history.moment(e) == step))
    ]
    after = [e for e in near if struck and e.t_ms >= struck[0]]
    few = EVENTS_KEPT // 4
    kept = [*notable[:few], *notable[-few:], *after[:few]]
    kept += near[:few] if until_ms is None else near[-few:]
    return sorted({id(e): e for e in kept}.values(), key=lambda e: e.t_ms)

"""The property ``incremental-read-complete``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...simulator.history import Event, History
from .. import evidence
from ..verdict import Finding, Violation


def incremental_read_complete(history: History) -> Finding:
    """A reader that follows one rank's rows by ts, and polls whenever none of them is under way, ends with every row
    that the store serves from a write that the rank saw acknowledged.

    Serving replicas, caches and backups read a store incrementally: give me what has a ts above my cursor. Whatever
    arrives later with a ts at or below it stays unseen for ever, although every lookup in the store itself is right.
    Real cases: a range of ts reserved from rows / batch size, where chunked tables make more batches, so that the next
    step begins below the ts already used (S12); a retry that replays a partly applied batch under the ts of the failed
    attempt (S13). The readers asked about are all those that a publisher can be held to. Within a window batches
    commit in any order, and ranks stamp by clocks of their own: no publisher without a clock shared by all ranks can
    serve a reader that polls into an open window, or that has one cursor for several ranks; such a reader has to ask
    again for an overlap longer than both. So one reader per rank is replayed here on the store's log, polling right
    after each ``write_flush()`` at which none of the rank's views had a write open. A window that fails may well leave
    it a row with a high ts while a lower one is missing; the replay, under newer ts, must then bring both. Rows of
    writes that were never acknowledged are not asked for, nor is a second delivery of a row that was read before.
    """
    finding = Finding("incremental-read-complete", unit="rows")
    for rank in range(len(history.outcomes)):
        _follow(history, rank, finding)
    if not finding.checked:
        finding.reason = "no acknowledged write of any rank is served by the store"
    return finding


@dataclass
class _Talk:
    """What a rank's client was told: ``polls_ms``, moments at which nothing was under way; ``acknowledged`` ts."""

    polls_ms: list[float] = field(default_factory=list)
    acknowledged: set[int] = field(default_factory=set)


def _talk(events: list[Event]) -> _Talk:
    talk = _Talk()
    open_: dict[object, int] = {}  # view -> its last write that no flush has covered
    window: dict[object, set[int]] = {}
    for event in events:
        view = event.data.get("view")
        if event.kind == "sdk-write":
            open_[view] = event.data.get("number", 0)
            window.setdefault(view, set()).add(event.data.get("ts") or 0)
        elif open_.get(view, 0) <= event.data.get("covers", 0):
            open_.pop(view, None)
            stamps = window.pop(view, set())
            if not event.data.get("failed_batches") and not event.data.get("errors"):
                talk.acknowledged |= stamps
            if not open_:
                talk.polls_ms.append(event.t_ms)
    return talk


def _follow(history: History, rank: int, finding: Finding) -> None:
    talk = _talk(list(history.of(f"rank{rank}", "sdk-write", "sdk-flush")))
    polls_ms = np.array(talk.polls_ms)
    served = evidence.match(history, history.final)
    arrived_ms = history.writes["t_ms"].to_numpy()
    mine = evidence.writers(history) == rank
    # What the reader has as its cursor after each poll.
    of_rank = np.flatnonzero(mine)
    cursors = np.zeros(len(polls_ms), np.int64)
    if len(of_rank):
        order = of_rank[np.argsort(arrived_ms[of_rank], kind="stable")]
        highest = np.maximum.accumulate(history.writes["ts"].to_numpy()[order])
        seen = np.searchsorted(arrived_ms[order], polls_ms, side="right")
        cursors = np.where(seen > 0, highest[np.maximum(seen - 1, 0)], 0)
    for fqn, rows in evidence.written(history).items():
        final = served[fqn]
        current = np.flatnonzero(final.sized & np.isin(final.ts, sorted(talk.acknowledged)))
        first = _first_arrivals(rows, mine[rows.index], final, current)
        ours = first >= 0
        current, first = current[ours], first[ours]
        finding.checked += len(current)
        came_ms = arrived_ms[rows.index[first]]
        last_poll = np.searchsorted(polls_ms, came_ms) - 1
        cursor = np.where(last_poll >= 0, cursors[np.maximum(last_poll, 0)], -1) if len(polls_ms) else current * 0 - 1
        unseen = np.flatnonzero(final.ts[current] <= cursor)

        def violation(
            i: int,
            fqn: str = fqn,
            final: evidence.Rows = final,
            current: np.ndarray = current,
            cursor: np.ndarray = cursor,
            last_poll: np.ndarray = last_poll,
            came_ms: np.ndarray = came_ms,
        ) -> Violation:
            row = int(current[i])
            return Violation(
                property=finding.property,
                message=f"a reader that polled {came_ms[i] - polls_ms[last_poll[i]]:.0f} ms before this row of rank "
                f"{rank} arrived had come to ts {cursor[i]}, and never sees it",
                table=fqn,
                name=final.ledger.embedding_name,
                key=int(final.keys[row]),
                rank=rank,
                step=int(final.first[row]) if final.first[row] >= 0 else None,
                ts=int(final.ts[row]),
                expected=final.values[row],
                events=evidence.events_about(history, rank, until_ms=float(came_ms[i])),
            )

        finding.report(unseen.tolist(), violation)


def _first_arrivals(written: evidence.Rows, mine: np.ndarray, served: evidence.Rows, current: np.ndarray) -> np.ndarray:
    """int64 (n,): for each served row of ``current`` the first accepted one of mine with its key, ts and bits, or
    -1."""
    candidates = np.flatnonzero(mine & written.sized & np.isin(written.ts, served.ts[current]))
    pairs = ((written.keys, served.keys), (written.ts, served.ts), (written.values, served.values))
    keys, ts, values = (np.concatenate([theirs[candidates], ours[current]]) for theirs, ours in pairs)
    rows = np.stack([keys, ts, evidence.bit_codes(values)], axis=1)
    groups = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    first = np.full(len(rows), len(candidates))
    np.minimum.at(first, groups[: len(candidates)], np.arange(len(candidates)))
    found = first[groups[len(candidates) :]]
    return np.append(candidates, -1)[found]

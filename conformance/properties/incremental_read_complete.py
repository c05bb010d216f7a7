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
    ranks = range(history.ranks_max)
    talks = [_talk(list(history.of(f"rank{rank}", "sdk-write", "sdk-flush"))) for rank in ranks]
    acknowledged = np.array(sorted(set[int]().union(*(talk.acknowledged for talk in talks))), np.int64)
    finding.checked = sum(int(np.isin(rows.ts, acknowledged).sum()) for rows in evidence.served(history).values())
    if not finding.checked:
        finding.reason = "no acknowledged write of any rank is served by the store"
        return finding
    writers, arrived_ms = evidence.writers(history), history.writes["t_ms"].to_numpy()
    for rank, talk in zip(ranks, talks, strict=True):
        cursors = _cursors(history, np.flatnonzero(writers == rank), np.array(talk.polls_ms))
        for fqn, rows in evidence.written(history).items():
            late = np.flatnonzero((writers[rows.index] == rank) & (rows.ts <= cursors[rows.index]))
            unseen = [i for i in late.tolist() if _is_asked_for(history, fqn, rows, i, talk, writers)]

            def violation(
                i: int,
                fqn: str = fqn,
                rows: evidence.Rows = rows,
                rank: int = rank,
                cursors: np.ndarray = cursors,
            ) -> Violation:
                return Violation(
                    property=finding.property,
                    message=f"a reader of rank {rank}'s rows that polled before this one arrived had come to ts "
                    f"{cursors[rows.index[i]]}, and never sees it",
                    table=fqn,
                    name=rows.ledger.embedding_name,
                    key=evidence.key_id(rows.ledger, int(rows.keys[i])),
                    rank=rank,
                    step=int(rows.first[i]) if rows.first[i] >= 0 else None,
                    ts=int(rows.ts[i]),
                    expected=rows.values[i],
                    events=evidence.events_about(history, rank, until_ms=float(arrived_ms[rows.index[i]])),
                )

            finding.report(unseen, violation)
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
    attempt = 0
    for event in events:
        if event.attempt != attempt:  # a process is gone, and with it whatever it had open
            attempt, open_, window = event.attempt, {}, {}
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


def _cursors(history: History, mine: np.ndarray, polls_ms: np.ndarray) -> np.ndarray:
    """int64 (rows of the accepted writes,): for each of ``mine`` the ts that the reader had come to before it arrived,
    by the last poll before; -1 for all others."""
    cursors = np.full(history.writes.num_rows, -1)
    if not len(mine) or not len(polls_ms):
        return cursors
    arrived_ms, ts = history.writes["t_ms"].to_numpy(), history.writes["ts"].to_numpy()
    order = mine[np.argsort(arrived_ms[mine], kind="stable")]
    seen = np.searchsorted(arrived_ms[order], polls_ms, side="right")  # rows that had arrived by each poll
    come_to = np.append(-1, np.maximum.accumulate(ts[order]))[seen]
    poll = np.searchsorted(polls_ms, arrived_ms[mine])  # how many polls there were before each row
    cursors[mine] = np.append(-1, come_to)[poll]
    return cursors


def _is_asked_for(history: History, fqn: str, rows: evidence.Rows, i: int, talk: _Talk, writers: np.ndarray) -> bool:
    """Whether the store serves just this row, its write was acknowledged, and the reader did not get it earlier."""
    if int(rows.ts[i]) not in talk.acknowledged or not rows.sized[i]:
        return False

    def same(others: evidence.Rows) -> np.ndarray:
        found = np.flatnonzero((others.keys == rows.keys[i]) & (others.ts == rows.ts[i]) & others.sized)
        return found[[others.values[j].tobytes() == rows.values[i].tobytes() for j in found]]

    earlier = [j for j in same(rows).tolist() if j < i and writers[rows.index[j]] == writers[rows.index[i]]]
    return bool(len(same(evidence.served(history)[fqn]))) and not earlier

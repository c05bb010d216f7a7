"""The property ``monotonic-reads``."""

from __future__ import annotations

import numpy as np

from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation


def monotonic_reads(history: History) -> Finding:
    """A reader that polls a key never sees its value go back to one that the model held strictly earlier.

    The accepted rows are replayed in arrival order under the store's own rule (greatest ts wins, equal ts: the later
    arrival). A step backwards comes from a retry or a resend that puts old rows back under new ts, or from two
    uploads of one rank overtaking each other; serving then flips between models. It is reported only when it is
    certain: the last step at which the model held the newly visible value lies before the first step of the one it
    hides. Keys of data-parallel tables are judged only when one client alone wrote them: several ranks publish the
    same row by clocks of their own, which may differ, and the final flush is what reconciles them.
    """
    finding = Finding("monotonic-reads", unit="reads")
    if not history.store_log:
        finding.reason = "the target's own store does not tell what it served in the meantime"
        return finding
    clients = history.writes["client"].combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy()
    for fqn, rows in evidence.written(history).items():
        order = np.argsort(rows.keys, kind="stable")  # per key, in arrival order
        keys, ts, client = rows.keys[order], rows.ts[order], clients[rows.index[order]]
        if not len(order):
            continue
        group = np.append(0, np.cumsum(np.diff(keys) != 0))
        rank = np.unique(ts, return_inverse=True)[1]
        height = group * (rank.max() + 1) + rank  # grows from group to group, so one running maximum serves all keys
        visible = height == np.maximum.accumulate(height)
        if rows.ledger.table.sharding == "data_parallel":
            low, high = np.full(group[-1] + 1, evidence.FOREVER), np.full(group[-1] + 1, evidence.NEVER)
            np.minimum.at(low, group, client)
            np.maximum.at(high, group, client)
            visible &= (low == high)[group]
        seen = np.flatnonzero(visible & (rows.last[order] != evidence.NEVER))
        old, new = seen[:-1], seen[1:]
        first, last = rows.first[order], rows.last[order]
        back = np.flatnonzero((keys[old] == keys[new]) & (last[new] < first[old]))
        finding.checked += len(seen)

        def violation(
            i: int,
            fqn: str = fqn,
            rows: evidence.Rows = rows,
            before: np.ndarray = order[old],
            after: np.ndarray = order[new],
        ) -> Violation:
            was, now = int(before[i]), int(after[i])
            row = history.writes.slice(int(rows.index[now]), 1).to_pylist()[0]
            who = evidence.rank_of(row["client"] or "")
            return Violation(
                property=finding.property,
                message=f"readers saw {evidence.when_held(int(rows.first[was]), int(rows.last[was]))} under ts "
                f"{rows.ts[was]}, and then again {evidence.when_held(int(rows.first[now]), int(rows.last[now]))}",
                table=fqn,
                name=rows.ledger.embedding_name,
                key=evidence.key_id(rows.ledger, int(rows.keys[now])),
                rank=who,
                step=int(rows.first[was]),
                ts=int(rows.ts[now]),
                expected=rows.values[was],
                found=rows.values[now],
                events=evidence.events_about(history, who, int(rows.first[was]), until_ms=row["t_ms"]),
            )

        finding.report(back.tolist(), violation)
    if not finding.checked:
        finding.reason = "no accepted row is a value of the model whose order could be judged"
    return finding

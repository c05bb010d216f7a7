"""The property ``no-silent-loss``."""

from __future__ import annotations

import numpy as np

from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation


def no_silent_loss(history: History) -> Finding:
    """A rank that ended without an error has had accepted, for every key it had to publish, the value of that key's
    last touch or a later one. Judged rank by rank, so it also holds in a job that failed elsewhere.

    A publisher may fail; it may not say that all is well while rows are missing. Most bugs of TorchEasyRec's delta
    dump are of this kind: the trailing steps after the last dump boundary are never flushed (S01, S02), the
    background thread dies and nobody is told (S08), a flush summary with failed rows counts as success (S11), a retry
    sends only what came after the failed window (S14). Whether a newer row then hides the accepted one is for
    ``no-lost-rows`` to say. A rank that ended with an error claims nothing here, and ``fails-loudly`` looks at how it
    said so.
    """
    finding = Finding("no-silent-loss", unit="rows")
    if not evidence.log_is_whole(history):
        finding.reason = "the view was deleted, and with it the log of what it had accepted"
        return finding
    if not history.store_log:
        finding.reason = "the target's own store does not tell what it had accepted; see no-lost-rows"
        return finding
    claims = [o.rank for o in history.outcomes if o.status == "ok"]
    if not claims:
        finding.reason = "no rank claimed success"
        return finding
    for fqn, rows in evidence.written(history).items():
        ledger = rows.ledger
        newest = np.full(len(ledger.initial), evidence.NEVER)
        real = rows.last != evidence.NEVER
        np.maximum.at(newest, rows.keys[real], rows.last[real])
        for rank in claims:
            keys = ledger.responsible(rank)
            last_touch = evidence.touched(ledger, rank if ledger.table.sharding == "data_parallel" else None)[1]
            finding.checked += len(keys)

            def violation(
                key: int, fqn: str = fqn, rank: int = rank, rows: evidence.Rows = rows, touch: np.ndarray = last_touch
            ) -> Violation:
                ledger, step = rows.ledger, int(touch[key])
                mine = np.flatnonzero((rows.keys == key) & (rows.last != evidence.NEVER))
                best = int(mine[np.argmax(rows.last[mine])]) if len(mine) else None
                best_is = "none" if best is None else evidence.when_held(int(rows.first[best]), int(rows.last[best]))
                return Violation(
                    property=finding.property,
                    message=f"rank {rank} ended without an error, but the store never accepted the value of this key's "
                    f"last touch at step {step}; the newest it accepted: {best_is}",
                    table=fqn,
                    name=ledger.embedding_name,
                    key=evidence.key_id(ledger, key),
                    rank=rank,
                    step=step,
                    ts=None if best is None else int(rows.ts[best]),
                    expected=evidence.value_at(ledger, key, step),
                    found=None if best is None else rows.values[best],
                    events=evidence.events_about(history, rank, step),
                )

            finding.report(keys[newest[keys] < last_touch[keys]].tolist(), violation)
    if not finding.checked:
        finding.reason = "the ranks that claimed success had no row to publish"
    return finding

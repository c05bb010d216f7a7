"""The property ``no-lost-rows``."""

from __future__ import annotations

import numpy as np

from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation


def no_lost_rows(history: History) -> Finding:
    """After a job that succeeded, the store serves for every touched row exactly the bits that the model holds.

    This is what a delta publisher is for, and its failures are silent: a row that was never published, or that an
    older value with a greater ts hides, looks like any other row until somebody wonders about the recommendations.
    Real cases: ts that follow a wall clock which stepped back, so that new rows lose against old ones (S15), and
    state keyed by bare table name, where one of two owners is forgotten (S19, TorchEasyRec pull request 603). A job
    that failed makes no such promise; ``no-silent-loss`` holds its ranks to what they did claim. A job that failed
    and was started again is ``restart-converges``' to judge.
    """
    finding = Finding("no-lost-rows", unit="rows")
    if history.restarted:
        finding.reason = "the job was restarted: see restart-converges"
    elif not evidence.log_is_whole(history):
        finding.reason = "the view was deleted, and with it what it held"
    elif not history.succeeded:
        finding.reason = "the job did not succeed, so its launcher knows that rows may be missing"
    else:
        compare_rows(history, finding)
    return finding


def compare_rows(history: History, finding: Finding) -> None:
    """Compare what the store serves with what the model holds last, for every key that training ever touched.

    A key that only steps of a discarded future touched has its initial value again, which the store may lack.
    """
    served = evidence.served(history)
    for fqn, ledger in history.tables.items():
        last_touch = evidence.touched(ledger)[1]
        keys = np.flatnonzero(last_touch != evidence.NEVER)
        rows = served[fqn]
        finding.checked += len(keys)
        at = np.full(len(ledger.initial), -1)
        inside = (rows.keys >= 0) & (rows.keys < len(at)) & rows.sized
        at[rows.keys[inside]] = np.flatnonzero(inside)
        equal = at[keys] >= 0
        equal[equal] = rows.last[at[keys[equal]]] == evidence.FOREVER
        if history.restarted:
            kept = ledger.lookup_keys[evidence.survived(history, ledger.lookup_steps)]
            equal |= (at[keys] < 0) & ~np.isin(keys, kept)

        def violation(
            key: int,
            fqn: str = fqn,
            rows: evidence.Rows = rows,
            at: np.ndarray = at,
            last_touch: np.ndarray = last_touch,
        ) -> Violation:
            ledger, found, step = rows.ledger, int(at[key]), int(last_touch[key])
            rank = _publisher_of(rows, key)
            return Violation(
                property=finding.property,
                message=_explain(history, fqn, key, rows, found),
                table=fqn,
                name=ledger.embedding_name,
                key=evidence.key_id(ledger, key),
                rank=rank,
                step=step,
                ts=int(rows.ts[found]) if found >= 0 else None,
                expected=ledger.final[key],
                found=rows.values[found] if found >= 0 else None,
                events=evidence.events_about(history, rank, step),
            )

        finding.report(keys[~equal].tolist(), violation)
    if not finding.checked:
        finding.reason = "training touched no row"


def _publisher_of(rows: evidence.Rows, key: int) -> int | None:
    """The rank that had to publish the key: its host, or of a replicated table the last rank that looked it up."""
    ledger = rows.ledger
    if (host := int(ledger.host[key])) >= 0:
        return host
    lookups = np.flatnonzero(ledger.lookup_keys == key)
    return int(ledger.lookup_ranks[lookups[np.argmax(ledger.lookup_steps[lookups])]]) if len(lookups) else None


def _explain(history: History, fqn: str, key: int, served: evidence.Rows, found: int) -> str:
    if not history.store_log:
        if found < 0:
            return "the target's store has no row for this key"
        return f"the target's store has {evidence.when_held(int(served.first[found]), int(served.last[found]))}"
    accepted = evidence.written(history)[fqn]
    mine = np.flatnonzero(accepted.keys == key)
    right = mine[accepted.last[mine] == evidence.FOREVER]
    if found < 0:
        if len(mine):
            return f"the store accepted {len(mine)} rows for this key and serves none of them"
        return "the store never received a row for this key"
    held = evidence.when_held(int(served.first[found]), int(served.last[found]))
    if len(right):
        ts = int(accepted.ts[right].max())
        winner = int(served.ts[found])
        order = "greater" if winner > ts else "equal" if winner == ts else "smaller"
        return (
            f"the store accepted the model's last value under ts {ts}, but serves {held}, under the {order} ts {winner}"
        )
    return f"the store serves {held}; it never received the model's last value"

"""The property ``no-phantom-rows``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...simulator.history import History
from .. import evidence, int8
from ..verdict import Finding, Violation


def no_phantom_rows(history: History) -> Finding:
    """Whatever the store accepted is a row that the model held: a known table, a key that training had touched by then,
    and bit for bit a value which the model held for that key from its first touch on, and not before the model held it.

    A phantom row is worse than a missing one, because serving trusts it. Real cases: the ids of one owner looked up
    in the weights of another owner's table of equal name (S20), row-wise ids published without the shard's offset, so
    that rank 1's rows overwrite rank 0's (S33), rows of evaluation or warm-up batches, zeros for keys that were
    evicted. Rows of jobs that failed are held to the same rule: a failure excuses missing rows, never wrong ones.
    """
    finding = Finding("no-phantom-rows", checked=history.writes.num_rows + history.strays.num_rows, unit="rows")
    if not finding.checked:
        finding.reason = "the store accepted no row"
        return finding
    starts = evidence.step_starts(history)
    arrived_ms = history.writes["t_ms"].to_numpy()

    def violation(index: int, message: str, of: pa.Table = history.writes, **details: object) -> Violation:
        row = of.slice(index, 1).to_pylist()[0]
        rank = evidence.rank_of(row["client"] or "")
        details.setdefault("found", np.array(row["embedding"], np.float32))
        return Violation(
            property=finding.property,
            message=message,
            name=row["pk"],
            key=row["sk"],
            rank=rank,
            ts=row["ts"],
            events=evidence.events_about(history, rank, until_ms=row["t_ms"]),
            **details,  # type: ignore[arg-type]
        )

    names = pa.array([t.embedding_name for t in history.tables.values()], pa.string())
    unknown = np.flatnonzero(~pc.is_in(history.writes["pk"], names).to_numpy())
    finding.report(unknown.tolist(), lambda i: violation(i, "no table is published under this name"))

    versions = history.strays["version"].to_pylist()
    finding.report(
        range(len(versions)),
        lambda i: violation(i, f"the row went to version {versions[i]!r}, which is not this run's", history.strays),
    )

    for fqn, rows in evidence.written(history).items():
        ledger = rows.ledger
        first_touch = evidence.touched(ledger)[0]
        outside = (rows.keys < 0) | (rows.keys >= len(first_touch))
        touched_at = np.where(outside, evidence.FOREVER, first_touch[np.where(outside, 0, rows.keys)])
        untouched = touched_at == evidence.FOREVER
        too_old = rows.last < touched_at  # or never held at all
        known = np.minimum(np.maximum(touched_at, rows.first), len(starts) - 1)
        too_early = arrived_ms[rows.index] < starts[known]
        bad = np.flatnonzero(untouched | too_old | too_early)

        def describe(
            i: int, fqn: str = fqn, rows: evidence.Rows = rows, touched_at: np.ndarray = touched_at
        ) -> Violation:
            ledger, key, index = rows.ledger, int(rows.keys[i]), int(rows.index[i])
            first, last, touch = int(rows.first[i]), int(rows.last[i]), int(touched_at[i])
            size, dim = ledger.initial.shape
            expected = ledger.final[key] if 0 <= key < size else None
            if not rows.sized[i]:
                kind = history.scenario.publisher.embedding_type
                message = f"the row does not have the table's dimension {dim} as {kind}"
            elif not 0 <= key < size:
                message = f"the key lies outside the table's {size} rows{_origin(history, rows, i)}"
            elif touch == evidence.FOREVER:
                message = "no training batch of any rank ever looked this key up" + _origin(history, rows, i)
            elif last == evidence.NEVER:
                message = "the model never held this value for this key" + _origin(history, rows, i)
            elif last < touch:
                message = f"{evidence.when_held(first, last)}, but training first touched the key at step {touch}"
                expected = evidence.value_at(ledger, key, touch)
            else:
                message = (
                    f"the row arrived before step {max(first, touch)} began, which first gave the model this value"
                )
            step = touch if touch != evidence.FOREVER else None
            found = {"found": rows.values[i]} if rows.sized[i] else {}
            return violation(index, message, table=fqn, step=step, expected=expected, **found)

        finding.report(bad.tolist(), describe)
    return finding


def _origin(history: History, rows: evidence.Rows, i: int) -> str:
    """Whose row it is, when some other key of any table held these bits: that tells a wrong owner from a wrong id."""
    if not rows.sized[i]:
        return ""
    value, key = rows.values[i : i + 1], int(rows.keys[i])
    for fqn, other in history.tables.items():
        if other.initial.shape[1] != value.shape[1]:
            continue
        keys = np.append(np.arange(len(other.initial)), other.keys)
        steps = np.append(np.zeros(len(other.initial), np.int64), other.steps)
        model = np.concatenate([other.initial, other.values])
        if history.scenario.publisher.embedding_type == "int8":
            held = np.flatnonzero((np.abs(model - value) <= int8.tolerance(model)).all(axis=1))
        else:
            held = np.flatnonzero(evidence.same_bits(model, value))
        if not len(held):
            continue
        # Of several, the same key under another owner explains most.
        best = int(held[np.argmax(keys[held] == key)])
        source, since = int(keys[best]), int(steps[best])
        if other is not rows.ledger:
            return f"; it is the value of key {source} of another table, {fqn}, since step {since}"
        offset = source - key
        host = int(other.host[source])
        if host > 0 and len(hosted := np.flatnonzero(other.host == host)) and hosted[0] == offset:
            return (
                f"; it is the value of key {source} since step {since}: {key} is that row's local id in the shard of "
                f"rank {host}, which begins at {offset}"
            )
        return f"; it is the value of key {source} of this table since step {since}"
    return ""

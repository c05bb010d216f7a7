"""The property ``retained-equals-store``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from ...simulator.disk import Shard
from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation


def retained_equals_store(history: History) -> Finding:
    """The copies that ranks keep of what they published are whole, hold nothing that the store did not accept, and lack
    nothing that it serves from a rank which ended well.

    Retained shards are what an audit, a second region or a repair starts from, months later, when nobody can ask the
    job any more. So a file under its final name is complete, also after a crash in the middle of a write (S38), and a
    manifest never vouches for a shard that is not there yet (S39) or is another start's (S49). And they are complete:
    real publishers replaced the shard of a step by that of the final flush on the same step (S03, S04). Files under
    other names are writes that did not end, and shards without a manifest claim nothing.
    """
    finding = Finding("retained-equals-store", unit="shards")
    if history.retained is None:
        finding.reason = "the publisher was not asked to retain shards"
        return finding
    finding.checked = len(history.retained)
    if not finding.checked:
        finding.reason = "no rank retained a shard"

    def damaged(shard: Shard) -> Violation:
        rank = (shard.manifest or {}).get("rank")
        return Violation(
            property=finding.property,
            message=f"{shard.path}: {shard.damage}",
            rank=rank,
            found=shard.path,
            events=evidence.events_about(history, rank),
        )

    finding.report([s for s in history.retained if s.damage and not _planned(history, s)], damaged)
    if not evidence.log_is_whole(history):
        return finding  # nobody knows any more what the store had accepted
    spoilt = any(_planned(history, shard) for shard in history.retained)
    kept = evidence.match(history, retained_rows(history.retained))
    for fqn, rows in evidence.written(history).items():
        of_kept, of_store = (_describer(history, finding, found, fqn) for found in (kept[fqn], rows))
        foreign = np.flatnonzero(~evidence.contains(rows, kept[fqn]))
        text = "a retained row is not one that the store accepted"
        finding.report(foreign.tolist(), functools.partial(of_kept, text, None))
        for outcome in (o for o in history.outcomes if o.status == "ok" and not spoilt):
            must = _must_be_kept(history, rows, fqn, outcome.rank)
            lacking = np.flatnonzero(must & ~evidence.contains(kept[fqn], rows))
            text = f"the store serves this row of rank {outcome.rank}, which ended well, and no sound shard has it"
            finding.report(lacking.tolist(), functools.partial(of_store, text, outcome.rank))
    return finding


def retained_rows(shards: list[Shard]) -> pa.Table:
    """All rows of sound shards with a manifest that says they were acknowledged, under the store's column names."""
    tables = [shard.acknowledged for shard in shards if shard.acknowledged is not None]
    kind = pa.list_(pa.float32())
    empty = {"embedding_name": pa.string(), "key_id": pa.int64(), "ts": pa.int64(), "embedding": kind}
    rows = pa.concat_tables(tables) if tables else pa.schema(empty).empty_table()
    return rows.select(list(empty)).rename_columns(["pk", "sk", "ts", "embedding"])


def _planned(history: History, shard: Shard) -> bool:
    """Whether the scenario itself damaged this shard."""
    struck = (e.data.get("shard") for e in history.events if e.kind == "fault")
    return f"{shard.path}.parquet" in struck


def _must_be_kept(history: History, rows: evidence.Rows, fqn: str, rank: int) -> np.ndarray:
    """bool (n,): rows that the store serves, and that ``rank`` wrote in the last attempt."""
    recent = history.writes["t_ms"].to_numpy()[rows.index] >= history.starts[-1].begin_ms
    mine: np.ndarray = evidence.writers(history)[rows.index] == rank
    return mine & recent & evidence.contains(evidence.served(history)[fqn], rows)


def _describer(
    history: History, finding: Finding, rows: evidence.Rows, fqn: str
) -> Callable[[str, int | None, int], Violation]:
    def describe(message: str, rank: int | None, i: int) -> Violation:
        return Violation(
            property=finding.property,
            message=message,
            table=fqn,
            name=rows.ledger.embedding_name,
            key=evidence.key_id(rows.ledger, int(rows.keys[i])),
            rank=rank,
            step=int(rows.first[i]) if rows.first[i] >= 0 else None,
            ts=int(rows.ts[i]),
            found=rows.values[i],
            events=evidence.events_about(history, rank),
        )

    return describe

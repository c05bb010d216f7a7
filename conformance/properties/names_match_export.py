"""The property ``names-match-export``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.compute as pc

from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation


def names_match_export(history: History) -> Finding:
    """The exporter's manifest names every table once, the store holds no other name, and every table that a successful
    rank had to publish appears under its own.

    Serving finds a row by the name that the model export wrote down; rows under any other name are there and never
    read. Real cases: two owners of equal table names sharing one entry (S19), an exporter and a publisher with two
    copies of the naming algorithm that differ on collisions (S22), user-side twin modules publishing under their own
    names (S23), a role suffix that meets a raw table of that very name (S24).
    """
    finding = Finding("names-match-export", unit="names")
    manifest = history.manifest
    finding.checked = len(manifest)
    shared = [name for name, count in Counter(manifest.values()).items() if count > 1]
    finding.report(
        shared,
        lambda name: Violation(
            property=finding.property,
            message=f"the manifest gives one name to {', '.join(f for f, n in manifest.items() if n == name)}",
            name=name,
        ),
    )
    finding.report(
        sorted(history.tables.keys() - manifest.keys()),
        lambda fqn: Violation(property=finding.property, message="the manifest leaves this table out", table=fqn),
    )
    stored = set(pc.unique(history.writes["pk"]).to_pylist()) | set(pc.unique(history.final["pk"]).to_pylist())

    def foreign(name: str) -> Violation:
        rows = history.writes.filter(pc.equal(history.writes["pk"], name)).slice(0, 1).to_pylist()
        row: dict[str, Any] = rows[0] if rows else {"client": "", "sk": None, "ts": None, "t_ms": None}
        rank = evidence.rank_of(row["client"] or "")
        return Violation(
            property=finding.property,
            message=f"rows are stored under a name outside the manifest, which has {', '.join(manifest.values())}",
            name=name,
            key=row["sk"],
            rank=rank,
            ts=row["ts"],
            events=evidence.events_about(history, rank, until_ms=row["t_ms"]),
        )

    finding.report(sorted(stored - set(manifest.values())), foreign)
    absent = [
        (fqn, o.rank)
        for fqn, ledger in history.tables.items()
        for o in history.outcomes
        if o.status == "ok"
        and evidence.log_is_whole(history)
        and ledger.embedding_name not in stored
        and len(ledger.responsible(o.rank))
    ]
    finding.report(
        absent,
        lambda lost: Violation(
            property=finding.property,
            message=f"rank {lost[1]} ended without an error and had rows of this table to publish, but the store has "
            "nothing under its name",
            table=lost[0],
            name=history.tables[lost[0]].embedding_name,
            rank=lost[1],
            events=evidence.events_about(history, lost[1]),
        ),
    )
    if not finding.checked:
        finding.reason = "the manifest is empty"
    return finding

"""The property ``readback-agrees``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ...simulator.faults import ShardCorrupted
from ...simulator.history import History
from .. import evidence
from ..verdict import Finding, Violation
from .retained_equals_store import retained_rows

#: Verdicts of a readback that can be checked key by key.
VERDICTS = ("MATCH", "SUPERSEDED", "MISSING", "DIFFERENT")


def readback_agrees(history: History) -> Finding:
    """A readback tells of each key what is so: it finds what is wrong, and nothing else; after a job that succeeded,
    on shards that nobody damaged, it finds nothing.

    People run it to learn whether they may trust the store. One that takes a damaged shard for good (S40), or calls a
    row a mismatch that was merely updated since (S41), is worse than none: it sends them after errors that are not
    there, or hides those that are. So its count of every verdict is compared with one made here, from the shards and
    from what the store serves, by code of its own: of each key the sound shards' row of the greatest ts counts.
    """
    finding = Finding("readback-agrees", unit="keys")
    told = next((event for event in history.events if event.kind == "readback"), None)
    if told is None or history.retained is None:
        finding.reason = "there was no readback"
        return finding
    report: dict[str, Any] | None = told.data["report"]
    if report is None:
        finding.reason = "the target cannot read back"
        return finding
    expected, damaged = _expected(history), any(shard.damage for shard in history.retained)
    finding.checked = sum(expected.values())

    def violation(message: str) -> Violation:
        return Violation(
            property=finding.property,
            message=message,
            rank=told.rank,
            expected=str(dict(expected)),
            found=str(report.get("verdicts", report)),
            events=[*evidence.events_about(history, told.rank)[-evidence.EVENTS_KEPT + 1 :], told],
        )

    wrong = []
    if "error" in report:
        wrong.append(f"the readback failed: {report['error']}")
    else:
        verdicts = report["verdicts"]
        wrong += [
            f"the readback says {verdicts.get(name, 0)} keys are {name}; it is {expected[name]}"
            for name in VERDICTS
            if verdicts.get(name, 0) != expected[name]
        ]
        if bool(verdicts.get("CORRUPT_LOCAL", 0) or report["damaged"]) != damaged:
            wrong.append(
                f"the readback says that shards {'are sound' if damaged else 'are damaged'}, and that is not so"
            )
        sound = not damaged and not expected["MISSING"] and not expected["DIFFERENT"]
        if report["agrees"] != (sound and bool(finding.checked)):
            wrong.append(f"the readback says that store and shards {'agree' if report['agrees'] else 'do not agree'}")
        planned = zip(history.scenario.faults, history.fired, strict=False)
        harmed = any(isinstance(fault, ShardCorrupted) and n for fault, n in planned)
        harmed |= not evidence.log_is_whole(history)
        if history.succeeded and finding.checked and not harmed and not report["agrees"]:
            wrong.append("the job succeeded and nobody damaged a shard, yet store and shards do not agree")
    finding.report(wrong, violation)
    return finding


def _expected(history: History) -> Counter[str]:
    """How many keys have which verdict."""
    counts: Counter[str] = Counter()
    served = evidence.served(history)
    for fqn, kept in evidence.match(history, retained_rows(history.retained or [])).items():
        order = np.lexsort((kept.ts, kept.keys))
        newest = order[np.append(np.diff(kept.keys[order]) != 0, True)] if len(order) else order
        at = {int(key): i for i, key in enumerate(served[fqn].keys.tolist())}
        for i in newest.tolist():
            j = at.get(int(kept.keys[i]), -1)
            if j < 0:
                counts["MISSING"] += 1
            elif served[fqn].ts[j] > kept.ts[i]:
                counts["SUPERSEDED"] += 1
            elif served[fqn].ts[j] == kept.ts[i] and served[fqn].values[j].tobytes() == kept.values[i].tobytes():
                counts["MATCH"] += 1
            else:
                counts["DIFFERENT"] += 1
    return counts

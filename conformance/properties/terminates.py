"""The property ``terminates``."""

from __future__ import annotations

from ...simulator.history import History, RankOutcome
from .. import evidence
from ..verdict import Finding, Violation


def terminates(history: History) -> Finding:
    """Every rank ends within the scenario's deadlines: by itself, or ended by its launcher because a peer had failed.
    Under strict supervision nobody ends it: it must end by itself, peers or not.

    A job that hangs holds its machines until somebody looks, and tells nobody why. Real cases: the rank that sees an
    upload error raises while its peers enter the next collective, and then does not exit (S05); rank 0 fails to
    create the view and never joins the start-up barrier (S06); submit waits for room in the queue of a dead worker
    (S09); a refused credential is retried for minutes (S47). Peers of a failed rank may be waiting for it in a
    collective: that is the launcher's to end, and no violation.
    """
    outcomes = [outcome for attempt in history.starts for outcome in attempt.outcomes]
    finding = Finding("terminates", checked=len(outcomes), unit="ranks")
    deadlines = history.scenario.deadlines
    limits = f"run: {deadlines.run_s:g} s"
    if history.supervision != "strict":
        limits += f", after a failure: {deadlines.grace_s:g} s"

    def violation(outcome: RankOutcome) -> Violation:
        last = next((e.step for e in reversed(history.events) if e.rank == outcome.rank and e.step is not None), None)
        hang = [e for e in history.events if e.kind == "hang" and e.attempt == outcome.attempt]
        seen = "; ".join(e.data["says"] for e in sorted(hang, key=lambda e: e.rank or 0))
        return Violation(
            property=finding.property,
            message=f"rank {outcome.rank} was still running when its time was over ({limits})"
            + (f": {seen}" if seen else ""),
            rank=outcome.rank,
            step=last,
            found=history.stacks.get(outcome.rank) or outcome.error or None,
            events=evidence.events_about(history, outcome.rank),
        )

    finding.report([o for o in outcomes if o.status == "deadline"], violation)
    if not finding.checked:
        finding.reason = "no rank was started"
    return finding

"""The property ``fails-loudly``."""

from __future__ import annotations

import re

from ...simulator.faults import DiskCrash, Fault, RankKill
from ...simulator.history import Event, History, RankOutcome
from .. import evidence
from ..verdict import Finding, Violation

#: Codes by which the store refuses a row that the publisher had to refuse.
REFUSED_ROWS = ("NonFiniteValue", "ReservedKey", "DimensionMismatch")


def fails_loudly(history: History) -> Finding:
    """A job fails only when something happened that it need not survive, and then it says where.

    A publisher that gives up over a fault it should tolerate stops training for nothing: an owner whose shard lives
    on another rank made the dump raise (S21), a table without new ids made the tracker raise (S25), the job failed
    when its first token expired (S36), a rank opened the view before rank 0 had made it (S07). And one that fails
    without a word cannot be repaired: a rank must not vanish or die of a signal that nobody sent, and the error that
    brings the job down names its rank or a step. Ranks that fall after it only repeat what the broken process group
    told them; of them, no more than any text is asked.

    What must not be published has to stop the job as loudly. A row with NaN, with the reserved key or of another
    dimension is the publisher's to refuse: a store that has to do it names neither step nor table, and one that does
    not check serves it (S35). A job that is told to publish to no version, or to the one that serving reads by
    default, may not succeed (S48).
    """
    finding = Finding("fails-loudly", unit="ranks")

    def sent(request: Event) -> Violation:
        return Violation(
            property=finding.property,
            message=f"the store had to refuse a row that must not be sent ({request.data['code']})",
            rank=request.rank,
            ts=request.data.get("ts"),
            events=[*evidence.events_about(history, request.rank, until_ms=request.t_ms), request],
        )

    bad_rows = [e for e in history.of("store", "request") if e.data.get("code") in REFUSED_ROWS]
    finding.report(bad_rows, sent)
    for attempt in range(len(history.starts)):
        _judge_attempt(history, attempt, finding)
    if not finding.checked:
        finding.reason = "no rank was started"
    return finding


def _judge_attempt(history: History, attempt: int, finding: Finding) -> None:
    outcomes, struck = history.starts[attempt].outcomes, evidence.struck(history, attempt)
    finding.checked += len(outcomes)
    failed = sorted((o for o in outcomes if o.status != "ok"), key=lambda o: _when(history, o))
    raised = [o for o in failed if o.status == "error"]

    def violation(outcome: RankOutcome, message: str) -> Violation:
        error = _error(history, outcome)
        return Violation(
            property=finding.property,
            message=f"rank {outcome.rank} {message}",
            rank=outcome.rank,
            step=history.moment(error) if error else None,
            found=outcome.error or None,
            events=evidence.events_about(history, outcome.rank),
        )

    if not _may_fail(history, struck):
        kinds = sorted({fault.kind for fault, _ in struck})
        cause = f"only faults it must survive had struck ({', '.join(kinds)})" if kinds else "no fault had struck"
        finding.report(raised, lambda o: violation(o, f"failed although {cause}"))
    if not failed and any(fault.must_fail for fault, _ in evidence.struck(history, attempt, lasting=False)):
        finding.report(outcomes, lambda o: violation(o, "succeeded with what had to be refused"))
    mute = [o for o in raised if not o.error.strip()]
    finding.report(mute, lambda o: violation(o, "failed without a word"))
    # What the training loop itself raises is not the target's text; what a factory refuses is wrong on all ranks alike.
    told = [o for o in raised if o.where not in ("train", "factory") and o not in mute]
    vague = [o for o in told if o is failed[0] and not _names_a_place(o)]
    finding.report(vague, lambda o: violation(o, "failed with a text that names neither the rank nor a step"))
    vanished = [o for o in failed if o.status == "vanished"]
    finding.report(vanished, lambda o: violation(o, f"vanished (exit code {o.exitcode}): no error, and not finished"))
    planned = {fault.rank for fault, _ in struck if isinstance(fault, RankKill | DiskCrash)}
    killed = [o for o in failed if o.status == "killed" and o.rank not in planned]
    finding.report(killed, lambda o: violation(o, f"died of a signal that nobody sent (exit code {o.exitcode})"))


def _error(history: History, outcome: RankOutcome) -> Event | None:
    errors = history.of(f"rank{outcome.rank}", "error")
    return next((e for e in errors if e.attempt == outcome.attempt), None)


def _when(history: History, outcome: RankOutcome) -> float:
    """When a rank failed, by its own account; what is not known counts as last.

    A rank that died without a word comes first: its peers may notice before the supervisor does.
    """
    if outcome.status in ("killed", "vanished"):
        return float("-inf")
    error = _error(history, outcome)
    return float("inf") if error is None else error.t_ms


def _may_fail(history: History, struck: list[tuple[Fault, int]]) -> bool:
    """Whether a fault that struck, or several together, allow the attempt to fail."""
    scenario = history.scenario
    # Each refused request can cost one attempt of the same step, so the store's faults add up.
    refused = sum(n for fault, n in struck if fault.failures)
    fatal = any(fault.expect(scenario) == "fail-loudly" for fault, _ in struck)
    return fatal or refused >= scenario.publisher.retry_attempts_max


def _names_a_place(outcome: RankOutcome) -> bool:
    return bool(re.search(rf"\brank\W{{0,3}}{outcome.rank}\b|\bstep\W{{0,3}}\d", outcome.error, re.IGNORECASE))

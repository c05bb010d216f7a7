"""From a history to a verdict: run every property over it and weigh what they say."""

from __future__ import annotations

from ..simulator.history import History
from .properties import PROPERTIES
from .verdict import ROWS_COMPARED_BY, Finding, Report, Verdict


def judge(history: History) -> Report:
    """Judge one run by every property.

    A broken property always counts. A run in which a planned fault never struck, or in which nothing could be checked,
    proves nothing however well it went, and is *not exercised*. Kit errors are raised by the engine, never judged here.
    """
    if history.incomplete:
        return Report(history, [], Verdict.NOT_EXERCISED, history.incomplete)
    findings = [prop(history) for prop in PROPERTIES.values()]
    broken = [f.property for f in findings if f.verdict is Verdict.BROKEN]
    if broken:
        return Report(history, findings, Verdict.BROKEN, f"broken: {', '.join(broken)}")
    idle = [
        fault.describe()
        for index, fault in enumerate(history.scenario.faults)
        if index >= len(history.fired) or not history.fired[index]
    ]
    if idle:
        return Report(history, findings, Verdict.NOT_EXERCISED, f"never struck: {'; '.join(idle)}")
    if reason := _nothing_checked(history, findings):
        return Report(history, findings, Verdict.NOT_EXERCISED, reason)
    return Report(history, findings, Verdict.HELD)


def _nothing_checked(history: History, findings: list[Finding]) -> str:
    if not any(f.checked for f in findings):
        return "nothing could be checked"
    # A job that had to fail may have published nothing; one that succeeded without a row to compare tested no
    # publisher.
    if history.succeeded and not any(f.checked for f in findings if f.property in ROWS_COMPARED_BY):
        return "the job succeeded without a row to compare"
    return ""

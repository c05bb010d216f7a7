"""The property ``no-secret-leak``."""

from __future__ import annotations

import re

from ...simulator.history import History, Leak
from .. import evidence
from ..verdict import Finding, Violation


def no_secret_leak(history: History) -> Finding:
    """No credential appears in anything that a run leaves behind: logs, events, error texts, tracebacks, the target's
    own ``repr``, shards and settings.

    Logs of training jobs are read by many people and kept for years, and the first thing anybody does with an error is
    paste it somewhere. Store clients put URLs, headers and whole requests into the text of their exceptions; a
    publisher that logs that text, or raises it again, publishes a password (S37). The engine plants secrets of its own
    in every rank's environment and login, new ones for each run, and searches every file of the run for them, also in
    the form in which they travel (base64 of user and password).
    """
    finding = Finding("no-secret-leak", checked=len(history.planted), unit="secrets")

    def violation(leak: Leak) -> Violation:
        found = re.search(r"\brank(\d+)\.", leak.file)
        rank = int(found[1]) if found else None
        return Violation(
            property=finding.property,
            message=f"{leak.file} has the value of {leak.secret}",
            rank=rank,
            found=leak.line,
            events=evidence.events_about(history, rank),
        )

    finding.report(history.leaks, violation)
    if not finding.checked:
        finding.reason = "no secret was planted"
    return finding

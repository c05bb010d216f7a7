"""Verdicts, violations and reports: how a history is judged, and the exit code that each judgement leads to."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from ..simulator.history import Event, History

T = TypeVar("T")

#: How many violations a finding describes in full.
VIOLATIONS_KEPT = 5
#: The properties that compare every row's final value in the store with the model's.
ROWS_COMPARED_BY = ("no-lost-rows", "restart-converges")


class Verdict(Enum):
    """What a run, or one property of it, came to. Never confuse the last three with ``HELD``."""

    HELD = "held"
    BROKEN = "broken"
    NOT_EXERCISED = "not exercised"
    NOT_TESTED = "not tested"
    KIT_ERROR = "kit error"

    @property
    def exit_code(self) -> int:
        """0 held, 1 broken, 3 nothing could be judged, 4 the kit itself failed (2 is bad input, found before a run)."""
        return {"held": 0, "broken": 1, "kit error": 4}.get(self.value, 3)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several runs: kit error before broken before not exercised before held; of none: not exercised."""
    for verdict in (Verdict.KIT_ERROR, Verdict.BROKEN, Verdict.NOT_EXERCISED, Verdict.NOT_TESTED, Verdict.HELD):
        if verdict in verdicts:
            return verdict
    return Verdict.NOT_EXERCISED


@dataclass
class Violation:
    """One broken rule with its evidence. ``table`` is the FQN, ``name`` the embedding_name; ``expected`` is what the
    model holds, ``found`` what the store holds: float32 (dim,), or a text, or None for nothing; ``events`` led there,
    in time order."""

    property: str
    message: str
    table: str | None = None
    name: str | None = None
    key: int | None = None
    rank: int | None = None
    step: int | None = None
    ts: int | None = None
    expected: Any = None
    found: Any = None
    events: list[Event] = field(default_factory=list)


@dataclass
class Finding:
    """What one property says about one history.

    ``checked`` counts what was checked (``unit``: rows, ranks, names, …); ``reason`` says why nothing was, when nothing
    was. ``total`` counts all violations; ``violations`` describes the first few.
    """

    property: str
    checked: int = 0
    unit: str = "rows"
    violations: list[Violation] = field(default_factory=list)
    total: int = 0
    reason: str = ""

    def report(self, broken: Sequence[T], violation: Callable[[T], Violation]) -> None:
        """Count all of ``broken`` and describe the first few; describing is dear, and nobody reads the thousandth."""
        self.total += len(broken)
        self.violations += [violation(one) for one in broken[: max(0, VIOLATIONS_KEPT - len(self.violations))]]

    @builtins.property
    def verdict(self) -> Verdict:
        if self.total or self.violations:
            return Verdict.BROKEN
        return Verdict.HELD if self.checked else Verdict.NOT_EXERCISED


Property = Callable[[History], Finding]


@dataclass
class Report:
    """The judgement of one run."""

    history: History
    findings: list[Finding]
    verdict: Verdict
    reason: str = ""

    @property
    def violations(self) -> list[Violation]:
        return [v for f in self.findings for v in f.violations]

    @property
    def outcome(self) -> str:
        """How the job ended, in words."""
        if self.history.succeeded:
            return "succeeded"
        failed = (o for o in self.history.outcomes if o.status != "ok")
        return "failed: " + ", ".join(f"rank {o.rank} {o.status}" for o in failed)

    @property
    def rows_compared(self) -> int:
        """Rows whose final value in the store was compared, bit by bit, with the model's."""
        return sum(f.checked for f in self.findings if f.property in ROWS_COMPARED_BY)

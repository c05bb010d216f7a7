"""A report for a terminal: the verdict, what broke and how to repeat it, and the table of properties by faults."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .document import Cell, Document, Failure

COLOURS = {
    "held": "green",
    "broken": "bold red",
    "not exercised": "yellow",
    "not tested": "dim",
    "kit error": "bold magenta",
}
#: Lines of one failure's text that are shown; report.html has all.
LINES_MAX = 24


def print_report(document: Document, out: Console) -> None:
    """Print all of it: failures, table, what proves nothing and why, and the verdict last, where a reader's eye is."""
    first: dict[str, Failure] = {}
    for failure in document.failures:
        first.setdefault(failure.property, failure)
    for failure in first.values():
        out.print()
        out.print(Text(failure_text(failure)), soft_wrap=True)
    out.print()
    print_summary(document, out, [f for f in document.failures if f is not first[f.property]])


def print_summary(document: Document, out: Console, failures: Sequence[Failure] | None = None) -> None:
    """Print the table, a line for each of ``failures`` (all when not given), what proves nothing and why, and the
    verdict."""
    out.print(table(document))
    for failure in document.failures if failures is None else failures:
        out.print(Text(_brief(failure), "red"), soft_wrap=True)
    for diagnosis in document.diagnoses:
        seen = f"{diagnosis.name} (in {diagnosis.runs} runs): {diagnosis.seen}; {diagnosis.meaning}"
        out.print(Text(f"the target {seen}", "bold yellow"), soft_wrap=True)
    for verdict in ("kit error", "not exercised", "not tested"):
        reasons: dict[str, list[str]] = {}
        for run in document.runs:
            if run.verdict == verdict:
                reasons.setdefault(run.reason, []).append(run.name)
        for reason, names in reasons.items():
            few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            out.print(Text(f"{verdict}: {few}: {reason}", COLOURS[verdict]), soft_wrap=True)
    out.print(Text(headline(document), COLOURS[document.verdict]), soft_wrap=True)
    if document.repeat:
        out.print(Text(f"all of it again: {document.repeat}"), soft_wrap=True)


def _brief(failure: Failure) -> str:
    under = ", ".join(fault.kind for fault in failure.run.faults) or "no fault"
    return f"BROKEN {failure.property} under {under} ({failure.run.name}): {failure.replay or 'see the report'}"


def headline(document: Document) -> str:
    """The verdict in one sentence."""
    broken = sorted({cell.property for cell in document.cells if cell.verdict == "broken"})
    judged = [run for run in document.runs if run.findings]
    compared = sum(run.rows_compared for run in judged)
    runs = f"{len(judged)} of {len(document.runs)} runs judged, {compared} rows compared bit by bit"
    if document.verdict == "broken":
        return f"BROKEN: {document.target} breaks {len(broken)} of {len(document.properties)} properties ({runs})"
    if document.verdict == "held":
        return f"HELD: nothing that {document.target} was asked for broke ({runs})"
    if document.verdict == "kit error":
        return f"KIT ERROR: deltaproof itself failed, so this says nothing certain about {document.target} ({runs})"
    return f"{document.verdict.upper()}: nothing is known about {document.target} ({runs})"


def table(document: Document) -> Table:
    """Property by fault family: how many runs held, or broke of how many; ``-`` not tested, ``?`` not exercised."""
    found = Table(box=None, pad_edge=False)
    found.add_column("property", min_width=max((len(p.name) for p in document.properties), default=0))
    for family in document.families:
        found.add_column("no fault" if family == "none" else family, justify="right")
    for property in document.properties:
        cells = [document.cell(property.name, family) for family in document.families]
        found.add_row(property.name, *(Text(short(cell), COLOURS[cell.verdict]) for cell in cells))
    found.caption = (
        "n: held in n runs; m/n: broken in m of n; ?: nothing to check or a fault never struck; -: not tested"
    )
    found.caption_justify = "left"
    return found


def short(cell: Cell) -> str:
    """A cell in a few characters."""
    if cell.verdict == "broken":
        return f"{cell.broken}/{cell.broken + cell.held} broken"
    return {"held": str(cell.held), "not exercised": "?", "not tested": "-", "kit error": "kit error"}[cell.verdict]


def failure_text(failure: Failure) -> str:
    """What broke in the smallest run found, in words, and the command that repeats it."""
    lines = [f"BROKEN {failure.property} in {failure.run.name}, seed {failure.run.seed}, target {failure.run.target}"]
    finding = failure.run.finding(failure.property)
    if finding is not None and finding.violations:
        text = finding.violations[0].text
        lines += text[:LINES_MAX] + (["  ..."] if len(text) > LINES_MAX else [])
        if finding.violations_total > 1:
            lines.append(f"  and {finding.violations_total - 1} more violations of {failure.property} in this run")
    lines += ["the smallest scenario found:", *(f"  {sentence}" for sentence in failure.in_words)]
    if failure.also:
        lines.append(f"it broke in {len(failure.also)} more runs: {', '.join(failure.also[:8])}")
    if failure.replay:
        lines.append(f"repeat with: {failure.replay}")
    return "\n".join(lines)

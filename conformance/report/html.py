"""A report as one HTML file that needs nothing else: no script, style, font or picture from anywhere."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..explain import HOLDERS, OTHER_HOLDERS
from .document import Document, Failure, Mark, RunReport, Timeline, ViolationReport
from .terminal import headline, short

#: Pixels of a timeline: height of a lane, room left and right, least distance of two marks of a lane.
LANE_PX, MARGIN_PX, MARK_PX = 34, 16, 13
#: Least distance, in pixels, of two times written under a timeline.
TICK_PX = 90
#: Elements of a row that are set side by side; of longer ones, those that differ first of all.
ELEMENTS_SHOWN = 8
#: Failures of one property that are open when the page is; the others open at a click.
OPEN = 1
#: Runs that the page lists; report.json has all.
RUNS_LISTED = 500

#: How a kind of mark looks: class of the style sheet, and the words of the legend.
LOOKS = {
    "fault": ("fault", "a planned fault strikes"),
    "error": ("error", "an error, or a rank ended from outside"),
    "thread-died": ("error", ""),
    "rank-ended-by-supervisor": ("error", ""),
    "step": ("step", "a training step is over"),
    "restored": ("step", ""),
    "sdk-write": ("send", "the target hands rows to the client"),
    "sdk-flush": ("flush", "the client says how many arrived"),
    "accepted": ("accepted", "the store accepts rows"),
}
OTHER = ("other", "anything else: start, finish, exit, …")


class Placed(NamedTuple):
    """A mark with its place in the drawing (pixels)."""

    mark: Mark
    x: float
    y: float
    look: str


class Element(NamedTuple):
    """One number of a row: its place, what the model holds, what the store holds."""

    place: int
    expected: str
    found: str
    differs: bool


def to_html(document: Document) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rules = {property.name: property for property in document.properties}
    unjudged: dict[tuple[str, str], list[str]] = {}
    for run in document.runs:
        if run.verdict in ("kit error", "not exercised", "not tested"):
            unjudged.setdefault((run.verdict, run.reason), []).append(run.name)
    return environment.get_template("report.html.j2").render(
        document=document,
        headline=headline(document),
        rules=rules,
        failures=_grouped(document.failures),
        unjudged=unjudged,
        listed=_listed(document.runs),
        short=short,
        draw=draw,
        elements=elements,
        holders=lambda property: OTHER_HOLDERS.get(property, HOLDERS),
        violations_of=_violations,
        legend=[look for look in dict.fromkeys([*LOOKS.values(), OTHER]) if look[1]],
        json=functools.partial(json.dumps, indent=2, ensure_ascii=False),
        open=OPEN,
    )


def _grouped(failures: Sequence[Failure]) -> list[tuple[str, list[Failure]]]:
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(failure.property, []).append(failure)
    return list(groups.items())


def _listed(runs: Sequence[RunReport]) -> list[RunReport]:
    """All runs, or of very many those first that did not hold."""
    first = sorted(range(len(runs)), key=lambda i: (runs[i].verdict == "held", i))[:RUNS_LISTED]
    return [runs[i] for i in sorted(first)]


def _violations(run: RunReport, property: str) -> list[ViolationReport]:
    finding = run.finding(property)
    return finding.violations if finding else []


def draw(timeline: Timeline) -> dict[str, Any]:
    """Where each mark goes. Time goes from left to right, but waiting is cut short: a pause of an hour is a small gap.

    Marks of one moment stand above each other, and beside each other where they are of one lane.
    """
    rows = {lane: (i + 0.5) * LANE_PX for i, lane in enumerate(timeline.lanes)}
    placed: list[Placed] = []
    ticks: list[tuple[float, str]] = []
    x, before = float(MARGIN_PX), None
    taken: dict[str, float] = {}
    for mark in sorted(timeline.marks, key=lambda m: m.t_ms):
        if before is not None and mark.t_ms > before:
            x += 4 + min(46.0, 12 * math.log10(1 + mark.t_ms - before))
        x = max(x, taken.get(mark.lane, -math.inf) + MARK_PX)
        before = mark.t_ms
        taken[mark.lane] = x
        placed.append(Placed(mark, round(x, 1), rows[mark.lane], LOOKS.get(mark.kind, OTHER)[0]))
        if not ticks or x - ticks[-1][0] >= TICK_PX:
            ticks.append((round(x, 1), _time(mark.t_ms)))
    return {
        "placed": placed,
        "ticks": ticks,
        "lanes": [(lane, rows[lane]) for lane in timeline.lanes],
        "width": math.ceil(x) + 4 * MARGIN_PX,
        "height": LANE_PX * len(timeline.lanes),
        "lane": LANE_PX,
    }


def _time(t_ms: float) -> str:
    if t_ms < 10_000:
        return f"{t_ms:.0f} ms"
    return f"{t_ms / 1000:.1f} s" if t_ms < 600_000 else f"{t_ms / 60_000:.1f} min"


def elements(violation: ViolationReport) -> list[Element]:
    """The numbers of a row that the model and the store hold, side by side; empty when it is not about a row."""
    expected, found = violation.expected, violation.found
    if not isinstance(expected, list):
        return []
    if not isinstance(found, list):
        return [Element(i, _number(value), "nothing", True) for i, value in enumerate(expected[:ELEMENTS_SHOWN])]
    pairs = [
        Element(i, _number(a), _number(b), _number(a) != _number(b))
        for i, (a, b) in enumerate(zip(expected, found, strict=False))
    ]
    chosen = sorted(pairs, key=lambda e: (not e.differs, e.place))[:ELEMENTS_SHOWN]
    return sorted(chosen, key=lambda e: e.place)


def _number(value: object) -> str:
    return f"{value:.8g}" if isinstance(value, float) else str(value)

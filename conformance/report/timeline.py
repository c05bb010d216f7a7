"""A run's events by lane, and the life of one row: what the model held, what the store accepted, what never came."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...simulator.history import Event, History, one_line
from .. import evidence
from ..verdict import Violation
from .document import Mark, Moment, Timeline

#: More marks than this make a page that nobody reads and a browser struggles with.
MARKS_MAX = 400
#: Lines of a row's life that are kept: of a long one, the first and the last.
STORY_MAX = 24
#: What is left out first of a timeline with too many marks.
DULL = ("after-step", "request", "step", "sdk-flush", "sdk-write")

#: Events that belong into the life of a row whoever they happened to.
TROUBLE = ("fault", "error", "thread-died", "rank-ended-by-supervisor")

WORDS = {
    "rank-start": "process starts",
    "model-ready": "model is built",
    "restored": "checkpoint is restored",
    "publisher-started": "target's start() returned",
    "step": "training step is over, weights updated",
    "after-step": "target's after_step() returned",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint is written",
    "sdk-write": "target hands rows to the store's client",
    "sdk-flush": "client's write_flush() returned",
    "finished": "target's finish() returned",
    "closed": "target's close() returned",
    "readback": "readback",
    "fault": "FAULT strikes",
    "error": "ERROR",
    "thread-died": "a thread of the target died",
    "rank-end": "loop is over",
    "rank-exit": "process is gone",
    "hang": "somebody's time is over",
    "rank-ended-by-supervisor": "ENDED by the supervisor",
    "request": "store answers",
}


def timeline(history: History, violation: Violation | None = None) -> Timeline:
    """The lanes of a run; marks of the writes that carried ``violation``'s row, and of its place, are ``about`` it."""
    cited = {id(event) for event in violation.events} if violation else set()
    carried = _carried(history, violation)
    marks = [
        (mark_of(history, event, (event.who, event.data.get("ts")) in carried), id(event) in cited)
        for event in history.events
        if not (event.kind == "request" and event.data.get("status") == 200 and _writes(event))
    ]
    marks += [(mark, False) for mark in _accepted(history, carried)]
    marks.sort(key=lambda pair: pair[0].t_ms)
    lanes = [f"rank{rank}" for rank in range(history.ranks_max)] + ["store"]
    lanes += sorted({mark.lane for mark, _ in marks} - set(lanes))
    shown = marks
    for kind in DULL:
        if len(shown) > MARKS_MAX:
            shown = [(mark, kept) for mark, kept in shown if kept or mark.about or mark.kind != kind]
    if len(shown) > MARKS_MAX:
        shown = shown[: MARKS_MAX // 2] + shown[-MARKS_MAX // 2 :]
    return Timeline(lanes=lanes, marks=[mark for mark, _ in shown], left_out=len(marks) - len(shown))


def mark_of(history: History, event: Event, about: bool = False) -> Mark:
    """An event in words, on its writer's lane."""
    words = WORDS.get(event.kind, event.kind)
    index = event.data.get("index")
    if event.kind == "fault" and isinstance(index, int) and index < len(history.scenario.faults):
        words = f"{words}: {history.scenario.faults[index].describe()}"
    if event.step is not None:
        words += f", step {event.step}"
    if event.attempt:
        words += f", attempt {event.attempt}"
    left_out = ("traceback", "index", "kind", "resident_bytes", "clock_s", "own_step", "number", "view", "covers")
    details = ", ".join(
        f"{name} {one_line(value)}"
        for name, value in event.data.items()
        if name not in left_out and value not in (None, "", [], {})
    )
    t_ms = round(event.t_ms - history.start_ms, 3)
    return Mark(
        t_ms=t_ms, lane=event.who, kind=event.kind, text=f"{words}: {details}" if details else words, about=about
    )


def _writes(request: Event) -> bool:
    return str(request.data.get("route", "")).startswith("write")


def _accepted(history: History, carried: set[tuple[str, int | None]]) -> list[Mark]:
    """One mark for each batch of rows that the store accepted."""
    batches: dict[tuple[float, str, int], Counter[str]] = {}
    for row in history.writes.select(["t_ms", "client", "ts", "pk"]).to_pylist():
        batches.setdefault((row["t_ms"], row["client"], row["ts"]), Counter())[row["pk"]] += 1
    return [
        Mark(
            t_ms=round(t_ms - history.start_ms, 3),
            lane="store",
            kind="accepted",
            text=f"store accepts from {client} under ts {ts}: "
            + ", ".join(f"{n} rows of {pk}" for pk, n in rows.items()),
            about=(client, ts) in carried,
        )
        for (t_ms, client, ts), rows in batches.items()
    ]


def story(history: History, violation: Violation, most: int = STORY_MAX) -> list[Moment]:
    """The life of the row that a violation names, in time order; nothing for one that names no row of a table. Of more
    than ``most`` moments, the first and the last."""
    ledger = history.tables.get(violation.table or "")
    if ledger is None or violation.key is None:
        return []
    number = int(ledger.numbers(np.array([violation.key], np.int64))[0])
    if not 0 <= number < len(ledger.initial):
        return []
    ends: dict[int, float] = {}
    for event in history.events:
        step = history.moment(event)
        if event.kind in evidence.MARKS and step is not None:
            ends.setdefault(step, event.t_ms)
    told: list[tuple[float, Moment]] = []

    def tell(t_ms: float, lane: str, kind: str, text: str) -> None:
        since = None if math.isinf(t_ms) else round(t_ms - history.start_ms, 3)
        told.append((t_ms, Moment(t_ms=since, lane=lane, kind=kind, text=text)))  # type: ignore[arg-type]

    versions = dict(ledger.versions(number))
    lookups: dict[int, list[int]] = {}
    for at in np.flatnonzero(ledger.lookup_keys == number).tolist():
        lookups.setdefault(int(ledger.lookup_steps[at]), []).append(int(ledger.lookup_ranks[at]))
    host = int(ledger.host[number])
    home = f"rank{host}" if host >= 0 else "every rank"
    for step in sorted({*versions, *lookups}):
        who = ", ".join(f"rank {rank}" for rank in sorted(set(lookups.get(step, []))))
        value = "" if step not in versions else f"the model on {home} now holds {_short(versions[step])}"
        read = f"looked up by {who}" if who else ""
        text = "; ".join(filter(None, [read, value or (read and "its value did not change")]))
        if step:
            tell(ends.get(step, math.inf), home, "model", f"step {step}: {text}")
        else:
            tell(-math.inf, home, "model", f"before step 1: {value}")
    written = evidence.written(history)[ledger.table.fqn]
    for i in np.flatnonzero(written.keys == number).tolist():
        row = history.writes.slice(int(written.index[i]), 1).select(["t_ms", "client"]).to_pylist()[0]
        meaning = evidence.when_held(int(written.first[i]), int(written.last[i]))
        tell(row["t_ms"], "store", "store", f"accepted from {row['client']} under ts {written.ts[i]}: {meaning}")
    since = min((ends.get(step, -math.inf) for step in lookups), default=-math.inf)
    for event in history.events:
        if event.kind in TROUBLE and event.t_ms >= since:
            tell(event.t_ms, event.who, "trouble", _trouble(history, event))
    told.sort(key=lambda pair: pair[0])
    moments = _without_echoes([moment for _, moment in told])
    if len(moments) > most:
        gap = Moment(t_ms=None, lane="", kind="model", text=f"({len(moments) - most} more)")
        moments = [*moments[: most // 3], gap, *moments[-(most - most // 3) :]]
    served = evidence.served(history)[ledger.table.fqn]
    last = "nothing"
    for i in np.flatnonzero(served.keys == number).tolist():
        last = f"{evidence.when_held(int(served.first[i]), int(served.last[i]))}, under ts {served.ts[i]}"
    kind = "missing" if last == "nothing" else "store"
    end = Moment(t_ms=None, lane="store", kind=kind, text=f"at the end it serves {last}")  # type: ignore[arg-type]
    return [*moments, end]


def _trouble(history: History, event: Event) -> str:
    index = event.data.get("index")
    if event.kind == "fault" and isinstance(index, int) and index < len(history.scenario.faults):
        client = event.data.get("client")
        met = f", met by {client}" if client else ""
        return f"fault {history.scenario.faults[index].describe()} strikes{met}"
    return (
        f"{WORDS.get(event.kind, event.kind)}: {one_line(event.data.get('message') or event.data.get('error') or '')}"
    )


def _without_echoes(moments: list[Moment]) -> list[Moment]:
    """The same trouble again and again is told once, with how often."""
    kept: list[Moment] = []
    again: list[int] = []
    for moment in moments:
        if kept and moment.kind == "trouble" and (moment.lane, moment.text) == (kept[-1].lane, kept[-1].text):
            again[-1] += 1
        else:
            kept.append(moment)
            again.append(1)
    return [
        moment if n == 1 else msgspec.structs.replace(moment, text=f"{moment.text} ({n} times)")
        for moment, n in zip(kept, again, strict=True)
    ]


def _rows_of(table: pa.Table, name: str, key: int) -> pa.Table:
    return table.filter(pc.and_(pc.equal(table["pk"], name), pc.equal(table["sk"], key)))


def _short(row: bytes) -> str:
    numbers = np.frombuffer(row, np.float32)
    return f"[{', '.join(f'{n:.4g}' for n in numbers[:4])}{', …' if len(numbers) > 4 else ''}]"


def _carried(history: History, violation: Violation | None) -> set[tuple[str, int | None]]:
    """(lane, ts) of the writes that carried the violation's row."""
    if violation is None or violation.key is None:
        return set()
    rows = _rows_of(history.writes, violation.name or "", violation.key)
    return {(row["client"], row["ts"]) for row in rows.select(["client", "ts"]).to_pylist()}

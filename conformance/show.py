"""A history as lines of text, one per event, with a lane for each rank: what ``deltaproof show`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..simulator.errors import ScenarioError
from ..simulator.history import Event, History, LedgerTable
from .report.document import Moment
from .report.timeline import TROUBLE, mark_of, story
from .verdict import Violation


@dataclass(frozen=True)
class Row:
    """A row of a table, as the store knows it."""

    table: LedgerTable
    key: int


def find_row(history: History, text: str) -> Row:
    """The row that ``TABLE:KEY`` names; TABLE is an FQN, an embedding name or a bare name that is the only one of its
    kind. Raises ScenarioError."""
    name, colon, digits = text.rpartition(":")
    try:
        key = int(digits)
    except ValueError:
        colon = ""
    if not colon:
        raise ScenarioError(f"--key {text}: want TABLE:KEY, with an int64 for KEY")
    for names in (
        {t.table.fqn: [t] for t in history.tables.values()},
        {t.embedding_name: [t] for t in history.tables.values()},
        {n: [t for t in history.tables.values() if t.table.name == n] for n in [name]},
    ):
        found = names.get(name, [])
        if len(found) > 1:
            raise ScenarioError(f"--key {text}: {name} is any of {', '.join(t.table.fqn for t in found)}")
        if found:
            known = found[0].key_ids
            if key not in known:
                raise ScenarioError(f"--key {text}: {found[0].table.fqn} has {len(known)} keys, and {key} is none")
            return Row(found[0], key)
    raise ScenarioError(f"--key {text}: no such table; this history has {', '.join(history.tables)}")


def select(history: History, ranks: Sequence[int], steps: tuple[int, int] | None) -> list[Event]:
    """The events of these ranks (none: of all), and what the store and the supervisor said to them, within the time
    from the first event of the first step to the last one of the last step. Raises ScenarioError when there is no such
    rank or step."""
    events = history.events
    for rank in ranks:
        if not 0 <= rank < history.ranks_max:
            raise ScenarioError(f"--rank {rank}: this history has ranks 0 to {history.ranks_max - 1}")
    if steps is not None:
        inside = [e.t_ms for e in events if (m := history.moment(e)) is not None and steps[0] <= m <= steps[1]]
        if not inside:
            last = max((m for e in events if (m := history.moment(e)) is not None), default=0)
            raise ScenarioError(f"--step {steps[0]}-{steps[1]}: this history has steps up to {last}")
        events = [e for e in events if inside[0] <= e.t_ms <= max(inside)]
    return [e for e in events if not ranks or e.rank in ranks]


def heading(history: History) -> list[Text]:
    """What was run, and how it ended."""
    s = history.scenario
    sizes = ", then ".join(str(attempt.world_size) for attempt in history.starts)
    engine = history.engine
    if (history.launcher, history.supervision) != ("own", "torchrun"):
        engine += f" (launcher {history.launcher}, nodes {history.nodes}, supervision {history.supervision})"
    lines = [
        Text(f"{s.name}, seed {s.seed}, target {history.target}, engine {engine}, {sizes} ranks", "bold"),
        *(Text(f"  fault {i}: {f.describe()}, fired {history.fired[i]} times") for i, f in enumerate(s.faults)),
    ]
    for attempt, start in enumerate(history.starts):
        for outcome in start.outcomes:
            of = f" (attempt {attempt})" if history.restarted else ""
            why = f": {' '.join(outcome.error.split())}" if outcome.error else ""
            style = "" if outcome.status == "ok" else "red"
            lines.append(Text(f"  rank {outcome.rank}{of} {outcome.status}{why}", style))
    lines.append(Text(f"  {history.writes.num_rows} rows accepted, {history.final.num_rows} served at the end"))
    if history.incomplete:
        lines.append(Text(f"  incomplete: {history.incomplete}", "yellow"))
    return lines


def print_events(out: Console, history: History, events: Sequence[Event], limit: int) -> None:
    """A line for each event: ``*`` in the lane of whom it happened to, ``-`` in that of the rank that spoke to the
    store.

    Of more than ``limit`` events (0: no limit), the first and the last ones, and how many are left out.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    lanes = [f"rank{rank}" for rank in range(history.ranks_max)]
    for rank in range(history.ranks_max):
        table.add_column(str(rank), justify="center")
    table.add_column("store")
    table.add_column("what", overflow="fold")
    left_out = max(0, len(events) - limit) if limit else 0
    for number, event in enumerate(events):
        if left_out and limit // 2 <= number < limit // 2 + left_out:
            if number == limit // 2:
                table.add_row("...", *[""] * (len(lanes) + 1), f"{left_out} more: --limit 0 shows them all")
            continue
        mark = mark_of(history, event)
        lane = f"rank{event.rank}" if mark.lane == "supervisor" else mark.lane
        style = "red" if event.kind in TROUBLE else "dim" if mark.lane == "store" else ""
        cells = ["*" if lane == mine else "-" if event.rank == rank else "" for rank, mine in enumerate(lanes)]
        cells.append("*" if mark.lane == "store" else "")
        what = mark.text if mark.text.startswith(mark.lane) else f"{mark.lane} {mark.text}"
        table.add_row(f"{mark.t_ms:.1f}", *cells, Text(what, style))
    out.print(table)


def life(history: History, row: Row, limit: int) -> list[Moment]:
    """What became of one row: what the model held, what the store accepted, what it serves."""
    about = Violation("", "", table=row.table.table.fqn, name=row.table.embedding_name, key=row.key)
    return story(history, about, limit or len(history.events) + history.writes.num_rows + len(row.table.steps))


def print_life(out: Console, row: Row, moments: Sequence[Moment]) -> None:
    """The lines of ``life``."""
    hosted = int(row.table.host[int(row.table.numbers(np.array([row.key]))[0])])
    where = "every rank" if hosted < 0 else f"rank {hosted}"
    out.print(Text(f"key {row.key} of {row.table.table.fqn}, on {where}, published as {row.table.embedding_name!r}"))
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    table.add_column("who")
    table.add_column("what", overflow="fold")
    for moment in moments:
        style = {"trouble": "red", "missing": "bold red", "store": "green"}.get(moment.kind, "")
        when = "" if moment.t_ms is None else f"{moment.t_ms:.1f}"
        table.add_row(when, moment.lane, Text(moment.text, style))
    out.print(table)


def as_dict(history: History, events: Sequence[Event]) -> dict[str, Any]:
    """The history's heading and these events as JSON-able data; ``moment`` is the step as it counts over restarts."""
    return {
        "scenario": msgspec.to_builtins(history.scenario),
        "target": history.target,
        "engine": history.engine,
        "launcher": history.launcher,
        "nodes": history.nodes,
        "supervision": history.supervision,
        "succeeded": history.succeeded,
        "incomplete": history.incomplete,
        "fired": history.fired,
        "attempts": [msgspec.to_builtins(start) for start in history.starts],
        "stacks": {str(rank): text for rank, text in history.stacks.items()},
        "rows_accepted": history.writes.num_rows,
        "start_ms": history.start_ms,
        "events": [{**msgspec.to_builtins(e, enc_hook=str), "moment": history.moment(e)} for e in events],
    }

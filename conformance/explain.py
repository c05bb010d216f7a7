"""One violation as text that a reader without the code understands, and as plain data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from .verdict import Violation

#: Elements of a row that are written out; of longer rows, the first ones and those that differ.
ELEMENTS_SHOWN = 8
#: Who is said to hold the expected row, and who the row that was found; by property where it is not the store.
HOLDERS = ("the model holds", "the store holds")
OTHER_HOLDERS = {"incremental-read-complete": ("the store took", "the reader sees")}


def explain(violation: Violation, start_ms: float = 0.0) -> list[str]:
    """Lines of text: what is broken, where, what the model and the store hold, and the events that led there.

    ``start_ms``: the moment (monotonic clock) from which the events' times count, usually ``history.start_ms``.
    """
    v = violation
    lines = [f"{v.property}: {v.message}"]
    table = v.table if v.name in (None, v.table) else f"{v.table or '(no table)'}, published as {v.name!r}"
    places = [("table", table), ("key", v.key), ("rank", v.rank), ("step", v.step), ("ts", _moment(v.ts))]
    lines += [f"  {label:<16}{value}" for label, value in places if value is not None]
    of_a_row = isinstance(v.expected, np.ndarray) or isinstance(v.found, np.ndarray) or v.expected is not None
    if of_a_row:
        expected_at, found_at = OTHER_HOLDERS.get(v.property, HOLDERS)
        lines.append(f"  {expected_at:<16}{show(v.expected, v.found)}")
        lines.append(f"  {found_at:<16}{show(v.found, v.expected)}")
    elif v.found is not None:
        first, *rest = str(v.found).rstrip().splitlines() or [""]
        lines += [f"  {'seen':<16}{first}", *(f"  {'':<16}{line}" for line in rest)]
    if v.events:
        lines.append("  events:")
        lines += [f"  {event.line(start_ms)}" for event in v.events]
    return lines


def _moment(ts: int | None) -> str | None:
    """A publish timestamp with the time it means, if it means one."""
    if ts is None:
        return None
    try:
        return f"{ts} ({datetime.fromtimestamp(ts / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC, of the row in the store)"
    except (OverflowError, ValueError, OSError):
        return f"{ts} (of the row in the store)"


def show(value: Any, other: Any = None) -> str:
    """A row as text in which different bits look different; of a long row, what differs from ``other`` first of all."""
    if value is None:
        return "nothing"
    if not isinstance(value, np.ndarray):
        return str(value)
    row = np.atleast_1d(value)
    if len(row) <= ELEMENTS_SHOWN:
        return f"[{', '.join(map(_element, row))}]"
    chosen = np.arange(ELEMENTS_SHOWN // 2)
    if isinstance(other, np.ndarray) and other.shape == row.shape:
        differing = np.flatnonzero(row.view(np.uint32) != np.atleast_1d(other).view(np.uint32))
        chosen = np.unique(np.append(chosen, differing[: ELEMENTS_SHOWN // 2]))
        tail = f", … ({len(row)} values, {len(differing)} differ)]"
    else:
        tail = f", … ({len(row)} values)]"
    return "[" + ", ".join(f"{i}: {_element(row[i])}" for i in chosen) + tail


def _element(number: np.float32) -> str:
    """The shortest decimal that reads back as this float32; a NaN by its bits, because all of them print alike."""
    if np.isnan(number):
        return f"nan(0x{int(np.float32(number).view(np.uint32)):08x})"
    return str(number)


def as_dict(violation: Violation) -> dict[str, Any]:
    """The violation as JSON-able data. Rows become lists of numbers that read back to the same float32 (NaN: a
    text)."""
    plain = {
        name: getattr(violation, name) for name in ("property", "message", "table", "name", "key", "rank", "step", "ts")
    }
    for name in ("expected", "found"):
        value = getattr(violation, name)
        if isinstance(value, np.ndarray):
            value = [float(str(n)) if np.isfinite(n) else _element(n) for n in np.atleast_1d(value)]
        plain[name] = value
    plain["events"] = [msgspec.to_builtins(event, enc_hook=str) for event in violation.events]
    return plain

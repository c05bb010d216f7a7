"""The page at ``/``: what the store holds, which faults are planned, what was written last. It changes nothing, names
no secret and loads nothing from elsewhere; everything that a client chose is escaped.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import time
from typing import TYPE_CHECKING, Any, Final

from ... import __version__
from ..plan import Fired
from .faults import AnyFault
from .state import INSTANCE_ID, RequestEntry, ServerState

if TYPE_CHECKING:
    import jinja2

ROWS_MAX: Final = 200  # of the tables of views and of faults
WRITES_MAX: Final = 20
TEXT_MAX: Final = 60
HEADERS: Final = {
    # Belt and braces: even text that got past the escaping could neither run nor load anything.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # here: a server whose page nobody asks for does without

    text = importlib.resources.files(__package__).joinpath("status.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text)


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _view_rows(state: ServerState) -> tuple[list[dict[str, Any]], int]:
    """The rows of the table of views, at most ``ROWS_MAX`` of them, and how many there would be."""
    store, found, total = state.store, [], 0
    for spec in store.views():
        versions: list[str | None] = [*store.versions(spec.project, spec.name)]
        for version in (versions or [None])[: max(0, ROWS_MAX - total)]:
            row: dict[str, Any] = {"project": _short(spec.project), "view": _short(spec.name), "value": spec.value_type}
            row["ttl"] = str(spec.ttl_s) if spec.ttl_s else "never"
            if version is None:
                found.append({**row, "version": "none", "rows": "0", "ts": ""})
                continue
            rows = f"{store.rows(spec.project, spec.name, version):,}"
            ts = store.high_water_ts(spec.project, spec.name, version)
            found.append({**row, "version": _short(version), "rows": rows, "ts": ts})
        total += max(1, len(versions))
    return found, total


def _fault_row(entry: Fired[AnyFault]) -> dict[str, Any]:
    fault = entry.fault
    return {
        "id": _short(fault.id),
        "kind": fault.__struct_config__.tag,
        "route": fault.route,
        "client": _short(fault.client) if fault.client is not None else "any",
        "seen": entry.seen,
        "fired": entry.fired,
        "count": fault.count,
        "state": "done" if entry.fired >= fault.count else "active",
    }


def _write_row(entry: RequestEntry, now_ms: float) -> dict[str, Any]:
    answer = "none" if entry.status is None else str(entry.status)
    return {
        "ago": _span((now_ms - entry.end_ms) / 1000),
        "client": _short(entry.client),
        "route": entry.route + (" (again)" if entry.delivery > 1 else ""),
        "version": _short(entry.version),
        "ts": entry.ts or "",
        "rows": entry.rows,
        "applied": entry.rows_applied,
        "answer": f"{answer} {entry.code}".strip(),
        "bad": entry.status != 200 or bool(entry.code),
        "faults": _short(", ".join(entry.fault_ids)),
    }


def page(state: ServerState) -> bytes:
    """The page as UTF-8 HTML."""
    now_ms = time.monotonic() * 1000
    with state.lock:
        writes = list(
            itertools.islice((e for e in reversed(state.requests) if e.route.startswith("write_")), WRITES_MAX)
        )
        faults = state.faults.fired()
    views, views_total = _view_rows(state)
    used = {spec.project for spec in state.store.views()}
    folder = getattr(state.store, "folder", None)
    text = _template().render(
        version=__version__,
        instance=INSTANCE_ID,
        up=_span((now_ms - state.begun_ms) / 1000),
        kept="Content is kept over a restart." if folder is not None else "Content is in memory only.",
        views=views,
        views_left=views_total - len(views),
        empty_projects=[_short(name) for name in state.store.projects() if name not in used][:ROWS_MAX],
        faults=[_fault_row(entry) for entry in faults[:ROWS_MAX]],
        faults_left=max(0, len(faults) - ROWS_MAX),
        writes=[_write_row(entry, now_ms) for entry in writes],
    )
    return text.encode()

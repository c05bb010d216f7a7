"""What is wrong with a target itself, whatever becomes of its rows: named, so that a reader need not guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..simulator.faults import DiskCrash, RankKill, RefusedVersion
from ..simulator.history import History

#: Name of a diagnosis -> what it means and what to do about it.
DIAGNOSES: Final[dict[str, str]] = {
    "factory-raises": "the factory raised in place of returning a publisher or uploader",
    "hangs-in-start": "start() did not return before the deadline; nothing could be tested",
    "dies": "the rank's process was gone without an error: something called os._exit, or crashed",
    "leaks-threads": "close() returned and left threads running; a job that goes on keeps them, and what they hold",
    "prints-on-stdout": "the program printed on stdout what is no message; diagnostics belong on stderr",
    "program-dies": "the program ended before close was answered",
    "breaks-the-protocol": "the program's answer is not what docs/protocol.md asks for",
}
#: Exceptions of subprocess_target, by what they are a sign of.
_OF_PROGRAMS: Final = {
    "PrintsOnStdout": "prints-on-stdout",
    "ProgramDied": "program-dies",
    "BreaksProtocol": "breaks-the-protocol",
}


def diagnose(history: History) -> list[tuple[str, str]]:
    """(name, what was seen) of what one run shows to be wrong with the target, each name once."""
    found: dict[str, str] = {}
    for name, seen in _signs(history):
        found.setdefault(name, seen)
    return list(found.items())


def _signs(history: History) -> Iterator[tuple[str, str]]:
    planned = zip(history.scenario.faults, history.fired, strict=False)
    struck = {type(fault) for fault, fired in planned if fired}
    mortal = bool(struck & {RankKill, DiskCrash})
    for attempt in history.starts:
        for outcome in attempt.outcomes:
            rank = f"rank {outcome.rank}"
            if outcome.where == "factory" and outcome.status == "error" and RefusedVersion not in struck:
                yield "factory-raises", f"{rank}: {outcome.error}"
            seen = {e.kind for e in history.of(f"rank{outcome.rank}") if e.attempt == outcome.attempt}
            if outcome.status == "deadline" and not seen & {"publisher-started", "error"}:
                yield "hangs-in-start", f"{rank}: " + _last_line(history.stacks.get(outcome.rank, ""))
            if outcome.status == "vanished" or (outcome.status == "killed" and not mortal):
                yield "dies", f"{rank}: exit code {outcome.exitcode}"
    for event in history.events:
        if event.kind == "closed" and event.data.get("threads"):
            yield "leaks-threads", f"{event.who}: {', '.join(event.data['threads'])}"
        if event.kind == "error" and event.data.get("type") in _OF_PROGRAMS:
            yield _OF_PROGRAMS[event.data["type"]], f"{event.who}: {event.data['message']}"


def _last_line(stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.strip()]
    return lines[-1] if lines else "no stack was to be had"

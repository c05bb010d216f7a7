"""The commands over saved histories, ``show`` and ``check``, and what ``--history`` of ``run`` and ``replay`` does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from .simulator.errors import ScenarioError

if TYPE_CHECKING:
    from .conformance.verdict import Report

HistoryOption = Annotated[
    Path | None, typer.Option("--history", help="Save what was observed in each run in a folder of this folder.")
]
HistoriesArgument = Annotated[
    list[Path], typer.Argument(help="Saved histories, or folders that hold some.", show_default=False)
]
HistoryArgument = Annotated[Path, typer.Argument(help="A saved history.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")]
#: Events that are printed unless somebody asks for more.
LIMIT = 200


def prepare(folder: Path | None, option: str = "--history") -> None:
    """Find out before a run whether what it leaves can be saved there; ``option`` named it. Raises ScenarioError."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScenarioError(f"{option} {folder}: {error.strerror or error}") from None


def save(report: Report, folder: Path) -> Path:
    """Save a run's history in a folder of its own, named after the scenario; its path."""
    from .simulator.recorded import folder_name

    name = folder_name(report.history.scenario.name)
    place, number = folder / name, 1
    while place.exists():
        number += 1
        place = folder / f"{name}-{number}"
    return report.history.save(place)


def show(
    history: HistoryArgument,
    rank: Annotated[list[int] | None, typer.Option(help="Only of this rank; may be repeated.")] = None,
    step: Annotated[str | None, typer.Option(help="Only during this step, or steps: 3 or 3-5.")] = None,
    key: Annotated[str | None, typer.Option(help="The life of one row instead: TABLE:KEY.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines to print, the first and the last; 0: all.")] = LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Print a saved history as a timeline, with a lane for each rank and one for the store (docs/histories.md)."""
    from . import cli
    from .conformance import show as shown
    from .simulator.history import History

    folder = _only(history)
    found = History.load(folder)
    row = None if key is None else shown.find_row(found, key)
    events = shown.select(found, rank or [], _steps(step))
    moments = None if row is None else shown.life(found, row, 0 if as_json else limit)
    if as_json:
        told = {"command": "show", "history": str(folder), **shown.as_dict(found, events)}
        if moments is not None:
            told["life"] = msgspec.to_builtins(moments)
        cli._print_json(told)
        return
    for line in shown.heading(found):
        cli.out.print(line, soft_wrap=True)
    if row is not None and moments is not None:
        shown.print_life(cli.out, row, moments)
    else:
        shown.print_events(cli.out, found, events, limit)


def check(histories: HistoriesArgument, as_json: JsonOption = False) -> None:
    """Judge saved histories by every property, as when they were live. Exit codes are those of ``run``."""
    from . import cli
    from .conformance.judge import judge
    from .conformance.verdict import Verdict, worst
    from .simulator.history import History

    folders = [folder for named in histories for folder in _all(named)]
    reports = [judge(History.load(folder)) for folder in folders]
    verdict = worst([report.verdict for report in reports])
    if as_json:
        runs = [
            {"history": str(folder), **cli._report_json(report)}
            for folder, report in zip(folders, reports, strict=True)
        ]
        cli._print_json({"command": "check", "verdict": verdict.value, "runs": runs})
        raise typer.Exit(verdict.exit_code)
    cli._print_table(reports)
    for folder, report in zip(folders, reports, strict=True):
        if report.verdict is Verdict.BROKEN:
            scenario, target = shlex.quote(str(folder / "scenario.json")), shlex.quote(report.history.target)
            cli._print_failure(report, None, f"{cli._program()} run {scenario} --target {target}")
    cli._print_not_exercised(reports)
    raise typer.Exit(verdict.exit_code)


def _all(folder: Path) -> list[Path]:
    """The histories that a path names; the path itself, to be refused, where there is none."""
    from .simulator.recorded import find

    return find(folder) or [folder]


def _only(folder: Path) -> Path:
    found = _all(folder)
    if len(found) > 1:
        raise ScenarioError(f"{folder} holds {len(found)} histories; name one: {', '.join(map(str, found))}")
    return found[0]


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise ScenarioError(f"--step {text}: want a step, such as 3, or two, such as 3-5")
    return int(match[1]), int(match[2] or match[1])

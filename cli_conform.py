"""The commands of who has a target: ``conform`` asks it everything, ``init-target`` writes a first one."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .simulator.errors import ScenarioError

if TYPE_CHECKING:
    from .conformance.check import Engine
    from .conformance.suite import Suite
    from .conformance.verdict import Report
    from .simulator.scenario import Scenario


TargetArgument = Annotated[
    str, typer.Argument(help="package.module:factory, or exec:COMMAND (docs/protocol.md).", show_default=False)
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="virtual or processes.", show_default="as the target needs")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", help="Folder for report.html, report.json, junit.xml and failure files.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print report.json on stdout instead of tables.")]


def conform(
    target: TargetArgument,
    engine: EngineOption = None,
    profile: Annotated[str, typer.Option(help="How much: smoke, ci or nightly.")] = "smoke",
    seed: Annotated[int, typer.Option(min=0, help="Seed of what the profile generates.")] = 0,
    report: ReportOption = None,
    shrink_s: Annotated[float, typer.Option(min=0, help="Seconds spent on making one failure smaller.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Ask a target everything that a profile has, and report what broke (docs/conformance.md)."""
    from . import cli, cli_histories
    from .conformance.check import check_smaller
    from .conformance.engines import running
    from .conformance.profiles import plan
    from .conformance.report.document import to_json
    from .conformance.report.files import write
    from .conformance.report.terminal import print_report
    from .conformance.suite import Suite
    from .conformance.target import default_engine, missing

    engine = engine or default_engine(target)
    why_not = missing(target, engine)
    scenarios = plan(profile, engine, seed, target)
    program = cli._program()
    repeat = f"{program} conform {shlex.quote(target)} --engine {engine} --profile {profile} --seed {seed}"
    suite = Suite(target, engine, profile, seed, scenarios, program=program, repeat=repeat)
    if report is not None:
        cli_histories.prepare(report, "--report")
    if not as_json:
        what = f"engine {engine}, profile {profile}, seed {seed}: {len(scenarios)} scenarios"
        cli.out.print(f"deltaproof conform: {target}, {what}", markup=False)
    with running(engine) as started:

        def judged(scenario: Scenario) -> Report | None:
            return None if why_not(scenario) else check_smaller(started, scenario, target)

        _run(suite, started, {s.name: why for s in scenarios if (why := why_not(s))}, quiet=as_json)
        suite.explain(judged, cli.FAILURES if report is None else report / "failures", shrink_s)
    document = suite.document()
    if as_json:
        print(to_json(document), end="", flush=True)
    else:
        print_report(document, cli.out)
    if report is not None:
        paths = write(document, report)
        if not as_json:
            cli.out.print(f"report: {paths['html']}", markup=False, soft_wrap=True)
    raise typer.Exit({"held": 0, "broken": 1, "kit error": 4}.get(document.verdict, 3))


def init_target(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if need be.", show_default=False)],
    uploader: Annotated[bool, typer.Option("--uploader", help="It sends rows that it is given (default).")] = False,
    publisher: Annotated[bool, typer.Option("--publisher", help="It follows a TorchRec model itself.")] = False,
    subprocess: Annotated[bool, typer.Option("--subprocess", help="It is a program, in any language.")] = False,
) -> None:
    """Write a commented adapter, and a test file that runs as it is, for your own uploader or publisher."""
    from . import cli

    if uploader + publisher + subprocess > 1:
        raise ScenarioError("--uploader, --publisher and --subprocess exclude one another")
    kind = "publisher" if publisher else "program" if subprocess else "uploader"
    texts = _texts(kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := [name for name in texts if (folder / name).exists()]:
            raise ScenarioError(f"{folder / there[0]} is there already, and is not replaced; name another folder")
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ScenarioError(f"cannot write to {folder}: {error.strerror or error}") from None
    for name in texts:
        cli.out.print(f"wrote {folder / name}", markup=False, soft_wrap=True)
    engine = " --engine processes" if kind == "publisher" else ""
    target = '"exec:python3 uploader.py"' if kind == "program" else "adapter:Adapter"
    cli.out.print(f"next:\n  cd {shlex.quote(str(folder))}\n  pytest", markup=False, soft_wrap=True)
    cli.out.print(f"  deltaproof conform {target}{engine} --report report", markup=False, soft_wrap=True)


def _texts(kind: str) -> dict[str, str]:
    """File name -> text of what `init_target` writes."""
    package = f"{__package__}.conformance.templates"

    def text(name: str) -> str:
        relative = (files(package) / name).read_text()
        absolute = re.sub(r"(?m)^from (\.\S+) import", lambda m: f"from {resolve_name(m[1], package)} import", relative)
        in_order = re.compile(r"(?m)(?:^from deltaproof\.\S+ import .*\n)+")
        return in_order.sub(lambda m: "".join(sorted(m[0].splitlines(keepends=True))), absolute)

    adapter, test = text(f"{kind}.py"), text("conformance_test.py")
    if kind != "program":
        return {"adapter.py": adapter, "test_conformance.py": test}
    here = "TARGET = f\"exec:{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).parent / 'uploader.py'))}\""
    test = test.replace('TARGET = "adapter:Adapter"', here).replace("import sys\n", "import shlex\nimport sys\n")
    test = test.replace('ENGINE = "virtual"  # or "processes": real', 'ENGINE = "processes"  # real')
    return {"uploader.py": adapter, "test_conformance.py": test}


def _run(suite: Suite, engine: Engine, not_tested: dict[str, str], quiet: bool) -> None:
    from . import cli

    with cli._progress(quiet) as progress:
        bar = progress.add_task("starting", total=len(suite.scenarios))
        for scenario in suite.scenarios:
            progress.update(bar, description=scenario.name)
            suite.ask(engine, scenario, not_tested.get(scenario.name))
            progress.advance(bar)

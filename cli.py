"""The command line: ``demo``, ``run``, ``replay``, ``explore``, ``serve``, ``readback``, ``resend``, ``list``,
``show`` and ``check`` of cli_histories.py, and ``conform`` and ``init-target`` of cli_conform.py.

Exit codes: 0 everything held, 1 a property broke, 2 bad input or environment, 3 a planned fault never fired or nothing
could be checked, 4 the kit itself failed, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import cli_conform, cli_histories
from .cli_histories import HistoryOption
from .conformance.check import check, load, save_failure
from .conformance.verdict import Report, Verdict, worst
from .simulator.errors import KitError, ScenarioError
from .simulator.scenario import Backend, Devices, Scenario
from .simulator.target import require
from .simulator.workload import Workload

if TYPE_CHECKING:
    from .reference.readback import StoreReader
    from .reference.shards import Files, Found
    from .simulator.history import History

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Prove that no embedding row is lost between a training job and the store that serves it.",
)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """A reader such as ``head`` went away. rich would exit with 1, which here means that a property broke."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE)


out = _Output(highlight=False)
if not out.is_terminal:
    # Nobody resizes a log file: room for one line per table row.
    out = _Output(highlight=False, width=150)
err = Console(stderr=True, highlight=False)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="reference, specimen:ID or package.module:factory.", show_default=False)
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Parquet file of interactions; its int64 columns give the ids.")
]
FailuresOption = Annotated[Path, typer.Option("--failures", help="Folder in which failing scenarios are kept.")]
ShardsArgument = Annotated[str, typer.Argument(help="Folder or s3://BUCKET/PREFIX of shards.", show_default=False)]
EndpointOption = Annotated[str | None, typer.Option(help="The store: HOST[:PORT].", show_default="by --region")]
RegionOption = Annotated[str, typer.Option(help="The store's region.")]
ProjectOption = Annotated[str | None, typer.Option(help="Only shards of this project.", show_default=False)]
ViewOption = Annotated[str | None, typer.Option(help="Only shards of this view.", show_default=False)]
VersionOption = Annotated[str | None, typer.Option(help="Only shards of this version.", show_default=False)]
GenerationOption = Annotated[
    str | None, typer.Option(help="Only shards of one start of one rank, as manifests name it.", show_default=False)
]
JsonFileOption = Annotated[str | None, typer.Option("--json", help="Write the report to this file; - is stdout.")]
EngineOption = Annotated[str, typer.Option("--engine", help="Engine to run on: processes or virtual.")]
LauncherOption = Annotated[str, typer.Option("--launcher", help="What starts the ranks: own or torchrun.")]
NodesOption = Annotated[int, typer.Option("--nnodes", help="Nodes under torchrun, all of them on this machine.")]
SupervisionOption = Annotated[
    str,
    typer.Option(
        "--supervision",
        help="Once a rank has failed: torchrun ends its peers after a grace, strict waits for each to end by itself.",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", help="cpu, per-rank or shared (one CUDA device for all ranks).", show_default="the file's"
    ),
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Process group: gloo or nccl.", show_default="the file's")
]

COLOURS = {
    Verdict.HELD: "green",
    Verdict.BROKEN: "bold red",
    Verdict.NOT_EXERCISED: "yellow",
    Verdict.NOT_TESTED: "yellow",
    Verdict.KIT_ERROR: "bold magenta",
}
#: Damaged files that are named; --json names all.
SHOWN_FILES = 10
#: Violations of one property that are written out; --json has more.
SHOWN = 1
#: What the machine, not the kit, is to blame for.
ENVIRONMENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENOMEM)
INTERRUPTED = 128 + signal.SIGINT
#: Runs between two lines of progress when nobody watches a bar.
LOG_EVERY = 50
FAILURES = Path("deltaproof-failures")


app.command()(cli_histories.show)
app.command()(cli_histories.check)
app.command()(cli_conform.conform)
app.command()(cli_conform.init_target)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Prove that no embedding row is lost between a training job and the store that serves it."""
    if version:
        from . import __version__

        print(f"deltaproof {__version__}")
        raise typer.Exit


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of ids and weights.")] = 2026,
    data: DataOption = None,
    failures: FailuresOption = FAILURES,
    as_json: JsonFlag = False,
) -> None:
    """Train a sharded model under every fault, compare every row, then show how a known bug is reported."""
    from .conformance.specimens import SPECIMENS
    from .simulator.catalogue import demo_scenarios

    planned = demo_scenarios(seed=seed, data=None if data is None else str(data))
    started = time.monotonic()
    with _engine("processes") as engine:
        if not as_json:
            out.print(
                f"deltaproof demo: {len(planned)} scenarios, seed {seed}, real TorchRec ranks over gloo, store on HTTP"
            )
        reports = _run_all(engine, [(s, "reference") for s in planned], quiet=as_json)
        specimen = SPECIMENS["S02"]
        caught = check(engine, specimen.scenario, f"specimen:{specimen.id}")
    wall_s = time.monotonic() - started
    bad = [_save(r, failures) for r in reports if r.verdict is Verdict.BROKEN]
    found = set(specimen.properties) & {f.property for f in caught.findings if f.violations}
    saved = _save(caught, failures) if found else None
    verdict = worst([r.verdict for r in reports])
    if not found and verdict is Verdict.HELD:
        verdict = Verdict.BROKEN
    if as_json:
        _print_json(
            {
                "command": "demo",
                "seed": seed,
                "verdict": verdict.value,
                "wall_s": round(wall_s, 3),
                "rows_compared": sum(r.rows_compared for r in reports),
                "runs": [_report_json(r) for r in reports],
                "specimen": {"id": specimen.id, "caught_by": sorted(found), "run": _report_json(caught)},
                "failures": [str(p) for p in bad if p],
            }
        )
        raise typer.Exit(verdict.exit_code)
    _print_table(reports)
    for report, path in zip((r for r in reports if r.verdict is Verdict.BROKEN), bad, strict=True):
        _print_failure(report, path)
    compared = sum(r.rows_compared for r in reports)
    tolerated = sum(1 for r in reports if r.history.succeeded)
    out.print(
        f"{compared} rows of {tolerated} jobs that succeeded were compared with the model, bit by bit; "
        f"{sum(len(r.violations) for r in reports)} violations; {wall_s:.1f} s"
    )
    out.rule(Text(f"the same check on a known bug: {specimen.id} {specimen.slug}"))
    out.print(Text(specimen.cause))
    if not found:
        out.print(Text(f"NOT CAUGHT by {', '.join(specimen.properties)}: the harness is blind to this bug", "bold red"))
    else:
        _print_failure(caught, saved)
        out.print(Text(f"{specimen.id} was reported, as it should be", "green"))
    raise typer.Exit(verdict.exit_code)


@app.command()
def run(
    files: Annotated[list[Path], typer.Argument(help="Scenario files, or failure files.", show_default=False)],
    target: TargetOption = None,
    engine: EngineOption = "processes",
    data: DataOption = None,
    devices: DevicesOption = None,
    backend: BackendOption = None,
    keep: Annotated[Path | None, typer.Option(help="Keep each run's logs, events and ledger in this folder.")] = None,
    history: HistoryOption = None,
    launcher: LauncherOption = "own",
    nodes: NodesOption = 1,
    supervision: SupervisionOption = "torchrun",
    failures: FailuresOption = FAILURES,
    as_json: JsonFlag = False,
) -> None:
    """Run scenario files (docs/scenarios.md says what they hold) and judge them."""
    cli_histories.prepare(history)
    cli_histories.prepare(keep, "--keep")
    work = []
    for path in files:
        saved = load(path)
        scenario = _placed(_with_data(saved.scenario, data), devices, backend)
        work.append((scenario, target or saved.target))
    with _engine(engine, keep=keep, launcher=launcher, nodes=nodes, supervision=supervision) as running:
        reports = _run_all(running, work, quiet=as_json, histories=history)
    _finish("run", reports, failures, as_json)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A failure file, as a failing run prints it.", show_default=False)],
    target: TargetOption = None,
    engine: EngineOption = "processes",
    devices: DevicesOption = None,
    backend: BackendOption = None,
    history: HistoryOption = None,
    launcher: LauncherOption = "own",
    nodes: NodesOption = 1,
    supervision: SupervisionOption = "torchrun",
    as_json: JsonFlag = False,
) -> None:
    """Repeat a saved failure. Exit code 1: it reproduced; 3: it did not (``run`` judges afresh)."""
    cli_histories.prepare(history)
    saved = load(file)
    if not saved.broken:
        raise ScenarioError(f"{file} is a scenario, not a failure file: deltaproof run judges it")
    scenario = _placed(saved.scenario, devices, backend)
    with _engine(engine, launcher=launcher, nodes=nodes, supervision=supervision) as running:
        [report] = _run_all(running, [(scenario, target or saved.target)], quiet=as_json, histories=history)
    broken = {f.property for f in report.findings if f.violations}
    wanted = set(saved.broken)
    reproduced = bool(broken & wanted)
    code = 1 if reproduced else (report.verdict.exit_code or 3)
    if as_json:
        _print_json({"command": "replay", "reproduced": reproduced, "run": _report_json(report)})
    elif reproduced:
        _print_table([report])
        _print_failure(report, file)
    else:
        _print_table([report])
        text = f"did not reproduce: {', '.join(sorted(wanted))} held this time"
        if broken:
            text += f"; but {', '.join(sorted(broken))} broke"
        out.print(Text(text, "yellow"))
    raise typer.Exit(code)


@app.command()
def explore(
    engine: EngineOption = "processes",
    count: Annotated[int, typer.Option(min=1, help="Scenarios to generate and run.")] = 100,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed; drawn and printed when absent.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Engines side by side.")] = 1,
    target: TargetOption = None,
    ranks_max: Annotated[int, typer.Option(min=1, max=16, help="Greatest world size.")] = 4,
    devices: DevicesOption = None,
    backend: BackendOption = None,
    shrink_s: Annotated[float, typer.Option(min=0, help="Seconds spent on making one failure smaller.")] = 60.0,
    failures: FailuresOption = FAILURES,
    as_json: JsonFlag = False,
) -> None:
    """Generate scenarios with every fault, run and judge them, and shrink what fails."""
    from .conformance.campaign import campaign
    from .simulator.processes.engine import require_torch

    if engine != "processes":
        raise ScenarioError(f"unknown engine {engine!r}; known engines: processes")
    require_torch()
    place = _placed(Scenario(), devices, backend)
    if seed is None:
        seed = time.time_ns() % 2**31
    if not as_json:
        out.print(
            f"explore: {count} scenarios, seed {seed}, engine {engine}, target {target or 'reference'}, {jobs} jobs"
        )
    with _progress(quiet=as_json) as progress:
        bar = progress.add_task("runs", total=count)

        told = 0

        def tell(done: int, text: str) -> None:
            nonlocal told
            progress.update(bar, completed=done, description=text)
            # A log gets a line now and then, where a terminal has the bar.
            if not as_json and not err.is_terminal and done >= told + LOG_EVERY:
                told = done
                err.print(f"{done} of {count} runs, {text}")

        result = campaign(
            target=target or "reference",
            count=count,
            seed=seed,
            jobs=jobs,
            ranks_max=ranks_max,
            shrink_s=shrink_s,
            failures=failures,
            tell=tell,
            devices=place.devices,
            backend=place.backend,
        )
    command = f"{_program()} explore --engine {engine} --count {count} --seed {seed} --jobs {jobs}"
    command += f" --ranks-max {ranks_max}" + (f" --target {shlex.quote(target)}" if target else "")
    command += (f" --devices {devices}" if devices else "") + (f" --backend {backend}" if backend else "")
    if as_json:
        _print_json({"command": "explore", "repeat": command, **result.as_json()})
    else:
        result.print(out)
        if result.failures:
            out.print(Text(f"repeat with: {command}"))
    raise typer.Exit(result.verdict.exit_code)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps projects, views and every acknowledged write over a restart, even after kill -9.",
            show_default=False,
        ),
    ] = None,
    fsync: Annotated[
        str,
        typer.Option(
            help="With --data-dir: os hands each write to the operating system before it is acknowledged (a loss of "
            "power may cost the last seconds), always flushes it to the disk first (slower; survives that too)."
        ),
    ] = "os",
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="With --data-dir: where acknowledged writes are damaged or gone, go on with those before; the rest is "
            "set aside in the folder.",
        ),
    ] = False,
    tls: Annotated[bool, typer.Option("--tls", help="HTTPS, with a certificate that signs itself.")] = False,
    cert: Annotated[Path | None, typer.Option(help="HTTPS with this PEM certificate.", show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="PEM key of --cert, without passphrase.", show_default=False)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start the fake Feature Store and print how a client connects; a page at / shows what it holds. Ctrl-C ends it."""
    from .fakes.durable import DataDirError, DurableStore
    from .fakes.server.serve import CannotListen, client_host, run_forever
    from .fakes.server.state import endpoint
    from .fakes.server.tls import Certificate, TlsError, self_signed

    if fsync not in ("os", "always"):
        raise ScenarioError(f"--fsync {fsync}: want os or always")
    if not host.strip():
        raise ScenarioError("--host is empty; 127.0.0.1 serves this machine, 0.0.0.0 every interface")
    if accept_loss and data_dir is None:
        raise ScenarioError("--accept-loss is about the folder of --data-dir")
    if fsync == "always" and data_dir is None:
        raise ScenarioError("--fsync always is about the folder of --data-dir: without one nothing is kept")
    if data_dir == Path():
        raise ScenarioError("--data-dir is empty, or the current folder: name a folder of its own")
    if (cert is None) != (key is None):
        raise ScenarioError("--cert and --key go together")
    cleanup = ExitStack()
    certificate = Certificate(cert, key) if cert and key else None
    scheme = "https" if tls or certificate else "http"

    def ready(port: int) -> None:
        ca_file = str(certificate.cert_file) if certificate else None
        address = endpoint(scheme, client_host(host), port)
        if as_json:
            where = {"host": host, "port": port, "scheme": scheme, "endpoint": address, "ca_file": ca_file}
            print(json.dumps({"command": "serve", **where}), flush=True)
            return
        kept = f"{data_dir} keeps its content" if data_dir else "nothing is kept"
        url = address if "://" in address else f"{scheme}://{address}"
        if host in ("0.0.0.0", "::"):
            url += " and every other address of this machine"
        out.print(f"fake Feature Store on {url} (Ctrl-C ends it; {kept})", markup=False)
        out.print(
            Text(
                "from deltaproof.fakes.feature_store_py import FeatureStoreClient\n"
                f'client = FeatureStoreClient("deltaproof", "deltaproof", "local", "{address}", '
                'featuredb_username="me", featuredb_password="any"' + (f', ca_file="{ca_file}")' if ca_file else ")")
            ),
            soft_wrap=True,  # to be pasted, whatever the width
        )

    try:
        with cleanup:
            if accept_loss and data_dir is not None:
                with DurableStore(data_dir, accept_loss=True) as store:
                    if store.set_aside is not None:
                        err.print(Text(f"lost: what followed the damage is set aside in {store.set_aside}"))
            if tls and certificate is None:
                folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix=f"deltaproof-{os.getpid()}-tls-"))
                certificate = self_signed(Path(folder), host)
            run_forever(host, port, ready=ready, data_dir=data_dir, fsync=fsync, tls=certificate)  # type: ignore[arg-type]
    except (CannotListen, DataDirError, TlsError) as error:
        raise ScenarioError(error.strerror or str(error)) from None
    except OSError as error:
        raise ScenarioError(f"cannot serve: {error.strerror or error}") from None


@app.command()
def readback(
    shards: ShardsArgument,
    endpoint: EndpointOption = None,
    region: RegionOption = "cn-hangzhou",
    project: ProjectOption = None,
    view: ViewOption = None,
    version: VersionOption = None,
    generation: GenerationOption = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Compare so many keys only.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Decides which keys are the sample.")] = 0,
    json_file: JsonFileOption = None,
) -> None:
    """Compare retained shards with what the store serves (docs/readback.md). Exit code 0: all of it agrees; 1: not."""
    from .reference.readback import Readback, Report

    with _bad_input_told():
        files, found = _find_shards(shards, generation, project=project, view=view, version=version)
        report = Report(found.damaged, found.unverified, 0, 0)
        if any(entry.manifest.state == "acknowledged" for entry in found.entries):
            reader, ttl_s = _store_reader(found, endpoint, region)
            with err.status("comparing"):
                expired_ms = int((time.time() - ttl_s) * 1000) if ttl_s else -1
                report = Readback(files, found, reader, sample=sample, seed=seed).run(expired_ms)
    told = {**msgspec.to_builtins(report), "agrees": report.agrees, "sample": sample, "seed": seed}
    if json_file != "-":
        table = Table(box=None, pad_edge=False)
        table.add_column("verdict")
        table.add_column("keys", justify="right")
        for name, keys in report.verdicts.items():
            table.add_row(name, str(keys))
        out.print(f"{report.shards} shards with {report.rows} rows; {report.compared} keys compared with the store")
        out.print(table)
        if report.maybe_expired:
            out.print(
                f"{report.maybe_expired} of the MISSING are older than the view keeps rows: they may have expired"
            )
        if report.verdicts.get("UNDECIDED"):
            out.print("UNDECIDED: other bits, and this SDK does not tell ts: DIFFERENT or SUPERSEDED")
        for example in report.examples:
            brief = {name: value[:8] if isinstance(value, list) else value for name, value in example.items()}
            out.print(Text(json.dumps(brief, ensure_ascii=False)), soft_wrap=True)
        _print_unread(report.damaged, report.unverified)
        verdict = "they do not agree" if report.compared or report.damaged else "nothing was compared"
        out.print(Text("store and shards agree", "green") if report.agrees else Text(verdict, "bold red"))
    _finish_shards("readback", shards, told, json_file, code=0 if report.agrees else 1)


@app.command()
def resend(
    shards: ShardsArgument,
    endpoint: EndpointOption = None,
    region: RegionOption = "cn-hangzhou",
    project: ProjectOption = None,
    view: ViewOption = None,
    version: VersionOption = None,
    generation: GenerationOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    json_file: JsonFileOption = None,
) -> None:
    """Send spilled rows that the store still lacks (docs/readback.md). Exit code 1: something could not be sent."""
    from .reference.readback import Resend, ResendReport
    from .reference.uploader import UploadError

    with _bad_input_told():
        files, found = _find_shards(shards, generation, project=project, view=view, version=version)
        report = ResendReport(found.damaged, found.unverified, 0, 0)
        if any(entry.manifest.state == "spilled" for entry in found.entries):
            reader, _ = _store_reader(found, endpoint, region)
            try:
                with err.status("sending"):
                    report = Resend(files, found, reader).run(dry_run)
            except UploadError as error:
                print(f"deltaproof: {error}; no manifest was marked, so the same command goes on", file=sys.stderr)
                raise typer.Exit(1) from None
    if json_file != "-":
        sent = "would be sent" if dry_run else "sent"
        out.print(
            f"{report.shards} spilled shards with {report.rows} rows: {report.sent} {sent}, "
            f"{report.superseded} superseded"
        )
        _print_unread(report.damaged, report.unverified)
    told = {**msgspec.to_builtins(report), "dry_run": dry_run}
    _finish_shards("resend", shards, told, json_file, code=1 if report.damaged else 0)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="faults, properties or specimens.", show_default=False)],
    as_json: JsonFlag = False,
) -> None:
    """List what scenarios can plan, what is judged, and which known bugs the harness must catch."""
    columns, rows = _listing(what)
    if as_json:
        _print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def _listing(what: str) -> tuple[list[str], list[list[str]]]:
    if what == "faults":
        from .simulator.faults import REGISTRY, summary

        return ["fault", "family", "what it does"], [[k, c.family, summary(k)] for k, c in REGISTRY.items()]
    if what == "properties":
        from .conformance.properties import PROPERTIES

        return ["property", "what it says"], [[n, _first_sentence(f.__doc__)] for n, f in PROPERTIES.items()]
    if what == "specimens":
        from .conformance.specimens import SPECIMENS

        columns = ["id", "bug", "family", "reported by", "title"]
        return columns, [[s.id, s.slug, s.family, ", ".join(s.properties), s.title] for s in SPECIMENS.values()]
    raise ScenarioError(f"cannot list {what!r}; list faults, properties or specimens")


def _first_sentence(doc: str | None) -> str:
    text = " ".join((doc or "").strip().split())
    return text.split(". ")[0].rstrip(".") + "."


# ------------------------------------------------------------------------------------------------------- running
#: Options of a run that only the process engine has, with what they are when nobody asks for them.
OF_PROCESSES = {"keep": None, "launcher": "own", "nodes": 1, "supervision": "torchrun"}


@contextmanager
def _engine(name: str, **options: Any) -> Iterator[Any]:
    from .conformance.engines import running

    asked = [option for option, value in options.items() if value != OF_PROCESSES[option]]
    if asked and name != "processes":
        raise ScenarioError(f"--{asked[0]} needs --engine processes")
    with running(name, **options) as engine:
        yield engine


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        yield progress


def _run_all(engine: Any, work: list[tuple[Scenario, str]], quiet: bool, histories: Path | None = None) -> list[Report]:
    """Run in order; in the folder ``histories``, if any, each run's history is saved as soon as it is over. Every
    setting of a run is printed before its first step when there is only one."""
    for scenario, target in work:  # before the engine is warmed up, which takes seconds
        Workload(scenario)
        require(target)
    reports = []
    if len(work) == 1 and not quiet:
        scenario, target = work[0]
        out.print(Text(f"scenario {scenario.name!r}, seed {scenario.seed}, target {target}"))
        out.print(Text(json.dumps(msgspec.to_builtins(scenario), ensure_ascii=False), "dim"))
    with _progress(quiet) as progress:
        bar = progress.add_task("starting", total=len(work))
        if hasattr(engine, "warm_up"):
            engine.warm_up()
        for scenario, target in work:
            progress.update(bar, description=scenario.name)
            reports.append(check(engine, scenario, target))
            if histories is not None:
                saved = cli_histories.save(reports[-1], histories)
                if not quiet:
                    out.print(Text(f"history: {_program()} show {shlex.quote(str(saved))}"), soft_wrap=True)
            progress.advance(bar)
    return reports


def _with_data(scenario: Scenario, data: Path | None) -> Scenario:
    if data is None:
        return scenario
    workload = msgspec.structs.replace(scenario.workload, data=str(data.resolve()))
    return msgspec.structs.replace(scenario, workload=workload)


def _placed(scenario: Scenario, devices: str | None, backend: str | None) -> Scenario:
    """The scenario on other devices, or over another backend, than it says."""
    asked = {"devices": devices, "backend": backend}
    for name, known in (("devices", get_args(Devices)), ("backend", get_args(Backend))):
        if asked[name] not in (None, *known):
            raise ScenarioError(f"--{name} {asked[name]}: want {', '.join(known[:-1])} or {known[-1]}")
    return msgspec.structs.replace(scenario, **{n: v for n, v in asked.items() if v is not None}).checked()


def _finish(command: str, reports: list[Report], failures: Path, as_json: bool) -> None:
    verdict = worst([r.verdict for r in reports])
    broken = [(r, _save(r, failures)) for r in reports if r.verdict is Verdict.BROKEN]
    if as_json:
        runs = [_report_json(r) for r in reports]
        _print_json(
            {"command": command, "verdict": verdict.value, "runs": runs, "failures": [str(p) for _, p in broken if p]}
        )
    else:
        _print_table(reports)
        for report, path in broken:
            _print_failure(report, path)
        _print_not_exercised(reports)
    raise typer.Exit(verdict.exit_code)


# ---------------------------------------------------------------------------------------------- retained shards
@contextmanager
def _bad_input_told() -> Iterator[None]:
    """What the folder, the store or the options are to blame for ends with one line and exit code 2."""
    from .reference.errors import redact
    from .reference.uploader import AttemptError

    try:
        yield
    except (OSError, ValueError, AttemptError) as error:
        raise ScenarioError(redact(error) if isinstance(error, OSError) else str(error)) from None


def _find_shards(where: str, generation: str | None, **wanted: str | None) -> tuple[Files, Found]:
    from .reference.readback import choose
    from .reference.shards import Files, find

    files = Files(where)
    if not files.exists():
        raise ScenarioError(f"there is no {where}")
    return files, choose(find(files), generation, **wanted)


def _store_reader(found: Found, endpoint: str | None, region: str) -> tuple[StoreReader, int]:
    """A reader of the view that the shards were published to, and for how many seconds the view keeps a row."""
    from .fakes.feature_store_py import install
    from .reference.connect import connect
    from .reference.errors import redact
    from .reference.readback import StoreReader
    from .reference.settings import Settings

    manifest = found.entries[0].manifest
    where = {name: getattr(manifest, name) for name in ("project", "view", "version")}
    settings = Settings(**where, every_steps=1, endpoint=endpoint, region=region)
    if endpoint and "feature_store_py" not in sys.modules and find_spec("feature_store_py") is None:
        install()  # without Alibaba's SDK an address can only be that of `deltaproof serve`

    def open_view() -> Any:
        project = connect(settings).get_project(settings.project)
        view = project and project.get_dynamic_embedding_feature_view(settings.view)
        if view is None:
            raise ScenarioError(f"the store has no view {settings.view!r} in project {settings.project!r}")
        return view

    try:
        view = open_view()
    except ScenarioError:
        raise
    except Exception as error:  # an SDK's own kind
        raise ScenarioError(f"the store cannot be reached: {type(error).__name__}: {redact(error)}") from None
    return StoreReader(view, settings, 0, 1, reconnect=open_view), int(getattr(view, "ttl", 0) or 0)


def _print_unread(damaged: dict[str, str], unverified: list[str]) -> None:
    for path, why in list(damaged.items())[:SHOWN_FILES]:
        out.print(Text(f"CORRUPT_LOCAL {path}: {why}", "red"), soft_wrap=True)
    if len(damaged) > SHOWN_FILES:
        out.print(f"... and {len(damaged) - SHOWN_FILES} more damaged files")
    if unverified:
        out.print(f"{len(unverified)} shards have no manifest (writes that did not end) and were not read")


def _finish_shards(command: str, where: str, told: dict[str, Any], json_file: str | None, code: int) -> None:
    document = _json_text({"command": command, "shards_in": where, **told})
    if json_file == "-":
        print(document, flush=True)
    elif json_file is not None:
        with _bad_input_told():
            Path(json_file).write_text(document + "\n")
    raise typer.Exit(code)


# ------------------------------------------------------------------------------------------------------ printing
def _print_table(reports: list[Report]) -> None:
    table = Table(box=None, pad_edge=False)
    for column, justify in (
        ("scenario", "left"),
        ("ranks", "right"),
        ("faults", "left"),
        ("expected", "left"),
        ("outcome", "left"),
        ("rows", "right"),
        ("verdict", "left"),
        ("time", "right"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for report in reports:
        history = report.history
        scenario = history.scenario
        table.add_row(
            Text(scenario.name),
            str(scenario.world_size),
            Text(", ".join(f.kind for f in scenario.faults) or "-"),
            "must succeed" if scenario.expect == "tolerate" else "may fail",
            Text(report.outcome),
            str(report.rows_compared or "-"),
            Text(report.verdict.value, COLOURS[report.verdict]),
            f"{history.wall_s:.2f} s",
        )
    out.print(table)


def _print_not_exercised(reports: list[Report]) -> None:
    for report in reports:
        if report.verdict is Verdict.NOT_EXERCISED:
            out.print(Text(f"{report.history.scenario.name}: not exercised: {report.reason}", "yellow"))


def _save(report: Report, folder: Path) -> Path | None:
    """The failure file, or None after a warning: where nothing can be written, the report must still be printed."""
    try:
        return save_failure(report, folder)
    except OSError as error:
        print(f"deltaproof: no failure file in {folder}: {error.strerror or error}; see --failures", file=sys.stderr)
        return None


def _program() -> str:
    """How this command was called, ready to paste: ``make demo`` runs it from a folder that is not on PATH."""
    if shutil.which("deltaproof"):
        return "deltaproof"
    called = Path(sys.argv[0])
    if called.name == "deltaproof":
        return shlex.quote(str(called))
    return f"{shlex.quote(sys.executable)} -m deltaproof"


def _print_failure(report: Report, path: Path | None, command: str = "") -> None:
    """``path``: of the failure file; None where there is none, and then ``command``, if given, repeats the run."""
    from .conformance.explain import explain

    history = report.history
    scenario = history.scenario
    out.print()
    out.print(Text(f"BROKEN: {scenario.name}, seed {scenario.seed}, target {history.target}", "bold red"))
    for index, fault in enumerate(scenario.faults):
        out.print(Text(f"  fault {index}: {fault.describe()}, fired {history.fired[index]} times"))
    shown: set[tuple[object, ...]] = set()
    for finding in report.findings:
        if finding.violations:
            for violation in finding.violations[:SHOWN]:
                head, *lines = explain(violation, history.start_ms)
                out.print(Text(head, "red"), soft_wrap=True)
                row = (violation.table, violation.key, violation.rank, violation.step)
                if violation.key is not None and row in shown:
                    lines = ["  the same row as above"]
                shown.add(row)
                for line in lines:
                    out.print(Text(line), soft_wrap=True)
            if finding.total > SHOWN:
                out.print(Text(f"  ... and {finding.total - SHOWN} more violations of {finding.property}"))
    if path is not None:
        command = f"{_program()} replay {shlex.quote(str(path))}{_launched(history)}"
    elif not command:
        command = (
            f"{_program()} run FILE --target {shlex.quote(history.target)}{_launched(history)}, "
            f"FILE holding this:\n{scenario.to_json()}"
        )
    out.print(Text(f"seed {scenario.seed}; repeat with:\n  {command}"), soft_wrap=True)


def _launched(history: History) -> str:
    """The options that were not the default ones, to be put behind a command."""
    text = "" if history.engine == "processes" else f" --engine {history.engine}"
    text += "" if history.launcher == "own" else f" --launcher {history.launcher} --nnodes {history.nodes}"
    return text if history.supervision == "torchrun" else f"{text} --supervision {history.supervision}"


def _report_json(report: Report) -> dict[str, Any]:
    from .conformance.explain import as_dict

    history = report.history
    return {
        "scenario": json.loads(history.scenario.to_json()),
        "target": history.target,
        "engine": history.engine,
        "launcher": history.launcher,
        "nodes": history.nodes,
        "supervision": history.supervision,
        "verdict": report.verdict.value,
        "reason": report.reason,
        "expected": history.scenario.expect,
        "outcome": report.outcome,
        "rows_compared": report.rows_compared,
        "faults": [
            {"fault": f.describe(), "fired": n} for f, n in zip(history.scenario.faults, history.fired, strict=True)
        ],
        "ranks": [
            {"rank": o.rank, "status": o.status, "exitcode": o.exitcode, "error": o.error} for o in history.outcomes
        ],
        "properties": [
            {
                "property": f.property,
                "verdict": f.verdict.value,
                "checked": f.checked,
                "unit": f.unit,
                "reason": f.reason,
                "violations_total": f.total,
                "violations": [as_dict(v) for v in f.violations],
            }
            for f in report.findings
        ],
        "wall_s": round(history.wall_s, 3),
    }


def _print_json(value: Any) -> None:
    print(_json_text(value), flush=True)


def _json_text(value: Any) -> str:
    def plain(item: Any) -> Any:
        """JSON has no NaN and no infinity: they become text."""
        if hasattr(item, "tolist"):
            item = item.tolist()
        if isinstance(item, dict):
            return {str(k): plain(v) for k, v in item.items()}
        if isinstance(item, list | tuple):
            return [plain(v) for v in item]
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        return item if item is None or isinstance(item, str | int | float) else str(item)

    return json.dumps(plain(value), indent=2, allow_nan=False)


# ----------------------------------------------------------------------------------------------------------- main
def main(argv: list[str] | None = None) -> None:
    """Console entry point. Bad input gives one line and exit code 2; a fault of the kit itself gives 4."""
    # A supervisor that is asked to end must end its ranks first: SIGTERM and SIGHUP take Ctrl-C's way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # A target named with --target may lie in the folder one works in, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.exit(_guarded(lambda: app(argv, standalone_mode=False)))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _guarded(body: Callable[[], Any]) -> int:
    try:
        code = body()
        if code == INTERRUPTED:  # typer makes this of KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except ScenarioError as error:
        print(f"deltaproof: {error}", file=sys.stderr)
        return 2
    except typer.Exit as error:
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("deltaproof: interrupted; ranks, store and temporary files are gone", file=sys.stderr)
        return INTERRUPTED
    except KitError as error:
        print(f"deltaproof: the kit itself failed, nothing is known about the target: {error}", file=sys.stderr)
        return 4
    except OSError as error:
        if error.errno not in ENVIRONMENT_ERRORS:
            return _kit_failed()
        print(f"deltaproof: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            print(f"deltaproof: {error.format_message()} (see deltaproof --help)", file=sys.stderr)
            return 2
        return _kit_failed()


def _kit_failed() -> int:
    traceback.print_exc()
    print("deltaproof: the kit itself failed (please report the lines above)", file=sys.stderr)
    return 4


if __name__ == "__main__":
    main()

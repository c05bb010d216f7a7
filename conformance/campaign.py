"""A campaign of generated scenarios over one or several engines side by side, and its summary."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.connection
import signal
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..simulator.errors import KitError
from ..simulator.explore import explore
from ..simulator.processes.lifeline import die_with_parent
from ..simulator.scenario import Backend, Deadlines, Devices, Scenario
from ..simulator.strategies import wide_scenarios
from .check import Engine, check, check_smaller, save_failure
from .shrink import Smallest, shrink
from .verdict import Report, Verdict

Tell = Callable[[int, str], None]

#: Between two seeds of one campaign, so that the rounds of one job never meet those of another.
SEED_STRIDE = 1_000_003


@dataclass
class Result:
    """What a campaign found. ``properties``: name -> verdict -> runs; ``faults``: kind -> runs in which it fired;
    ``drawn``: a digest of each scenario that was drawn, which the same seed repeats whatever came of the runs."""

    runs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    properties: dict[str, Counter[str]] = field(default_factory=dict)
    faults: dict[str, Counter[str]] = field(default_factory=dict)
    rows_compared: int = 0
    walls_s: list[float] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    def add(self, report: Report) -> None:
        history = report.history
        self.runs += 1
        self.drawn.append(hashlib.sha256(history.scenario.to_json().encode()).hexdigest()[:12])
        self.verdicts[report.verdict.value] += 1
        self.outcomes[f"{history.scenario.expect}: {'succeeded' if history.succeeded else 'failed'}"] += 1
        self.rows_compared += report.rows_compared
        self.walls_s.append(history.wall_s)
        for finding in report.findings:
            self.properties.setdefault(finding.property, Counter())[finding.verdict.value] += 1
        for kind in {f.kind for f in history.scenario.faults}:
            hit = any(n for f, n in zip(history.scenario.faults, history.fired, strict=True) if f.kind == kind)
            self.faults.setdefault(kind, Counter())["fired" if hit else "never fired"] += 1

    def merge(self, other: Result) -> None:
        self.runs += other.runs
        self.verdicts += other.verdicts
        self.outcomes += other.outcomes
        self.rows_compared += other.rows_compared
        self.walls_s += other.walls_s
        self.failures += other.failures
        self.drawn += other.drawn
        for mine, theirs in ((self.properties, other.properties), (self.faults, other.faults)):
            for name, counts in theirs.items():
                mine.setdefault(name, Counter()).update(counts)

    @property
    def verdict(self) -> Verdict:
        """Broken when anything broke; held when something was checked and nothing broke; else not exercised."""
        if self.failures:
            return Verdict.BROKEN
        return Verdict.HELD if self.verdicts[Verdict.HELD.value] else Verdict.NOT_EXERCISED

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "runs": self.runs,
            "verdicts": dict(self.verdicts),
            "outcomes": dict(self.outcomes),
            "properties": {n: dict(c) for n, c in sorted(self.properties.items())},
            "faults": {n: dict(c) for n, c in sorted(self.faults.items())},
            "rows_compared": self.rows_compared,
            "wall_s": {"median": _median(self.walls_s), "max": max(self.walls_s, default=0.0)},
            "failures": self.failures,
            "drawn": sorted(self.drawn),
        }

    def print(self, out: Console) -> None:
        table = Table(box=None, pad_edge=False)
        for column in ("property", "held", "broken", "nothing to check"):
            table.add_column(column, justify="left" if column == "property" else "right")
        for name, counts in sorted(self.properties.items()):
            table.add_row(name, *(str(counts[v.value]) for v in (Verdict.HELD, Verdict.BROKEN, Verdict.NOT_EXERCISED)))
        out.print(table)
        table = Table(box=None, pad_edge=False)
        for column in ("fault", "fired in runs", "never fired in runs"):
            table.add_column(column, justify="left" if column == "fault" else "right")
        for name, counts in sorted(self.faults.items()):
            table.add_row(name, str(counts["fired"]), str(counts["never fired"]))
        out.print(table)
        verdicts = ", ".join(f"{n} {v}" for v, n in self.verdicts.most_common())
        outcomes = ", ".join(f"{n} {v}" for v, n in sorted(self.outcomes.items()))
        out.print(Text(f"{self.runs} runs: {verdicts}; jobs: {outcomes}"))
        out.print(
            Text(
                f"{self.rows_compared} rows compared bit by bit; run time median {_median(self.walls_s):.2f} s, "
                f"greatest {max(self.walls_s, default=0.0):.2f} s"
            )
        )
        for failure in self.failures:
            out.print(Text(f"BROKEN {', '.join(failure['broken'])}: {failure['message']}", "bold red"))
            out.print(Text(f"  smallest of {failure['shrink_runs'] + 1} runs; deltaproof replay {failure['path']}"))
            if "history" in failure:
                out.print(Text(f"  what was seen: deltaproof show {failure['history']}"))


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def campaign(
    *,
    target: str,
    count: int,
    seed: int,
    jobs: int,
    ranks_max: int,
    shrink_s: float,
    failures: Path,
    tell: Tell,
    devices: Devices = "cpu",
    backend: Backend = "gloo",
) -> Result:
    """Run ``count`` generated scenarios on ``jobs`` process engines. Raises KitError when an engine cannot go on."""
    shares = [count // jobs + (i < count % jobs) for i in range(jobs)]
    common = (ranks_max, shrink_s, failures, devices, backend)
    work = [_Share(target, n, seed + i * SEED_STRIDE, *common) for i, n in enumerate(shares) if n]
    if len(work) == 1:
        return _job(work[0], tell)
    total = Result()
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, Any] = {}
    done: Counter[Any] = Counter()
    for share in work:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_job_process, args=(share, theirs), name="deltaproof-explore")
        process.start()
        theirs.close()
        pipes[mine] = process
    try:
        waiting = dict(pipes)
        while waiting:
            for pipe in multiprocessing.connection.wait(list(waiting)):
                try:
                    kind, value = cast(Connection, pipe).recv()
                except EOFError:
                    process = waiting.pop(pipe)
                    process.join(10)
                    raise KitError(f"an explore job ended early with exit code {process.exitcode}") from None
                if kind == "tell":
                    done[pipe], text = value
                    tell(sum(done.values()), text)
                elif kind == "result":
                    total.merge(value)
                    waiting.pop(pipe)
                else:
                    raise KitError(value)
        for process in pipes.values():
            process.join(30)
        return total
    finally:
        for process in pipes.values():
            process.terminate()
        for process in pipes.values():
            process.join(10)
            process.kill()


@dataclass(frozen=True)
class _Share:
    """What one job of a campaign runs."""

    target: str
    count: int
    seed: int
    ranks_max: int
    shrink_s: float
    failures: Path
    devices: Devices
    backend: Backend


def _job_process(share: _Share, pipe: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        pipe.send(("result", _job(share, lambda done, text: pipe.send(("tell", (done, text))))))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _saved(report: Report, folder: Path) -> dict[str, str]:
    """Where the failure file is, and the history: on real processes, the next run may go another way."""
    try:
        path = save_failure(report, folder)
        history = path.with_suffix("")
        if not history.exists():  # the same scenario may have failed before
            report.history.save(history)
        return {"path": str(path), "history": str(history)}
    except OSError as error:
        # The scenario is in the result too; a campaign of hours must not end for want of a folder.
        return {"path": f"(not saved in {folder}: {error.strerror or error})"}


def _job(share: _Share, tell: Tell) -> Result:
    from ..simulator.processes.engine import ProcessEngine

    result = Result()
    with ProcessEngine() as engine:

        def judged(scenario: Scenario, shrinking: bool) -> bool:
            report = check(engine, scenario, share.target)
            result.add(report)
            tell(result.runs, f"{result.verdicts[Verdict.BROKEN.value]} broken")
            if report.verdict is Verdict.BROKEN:
                tell(result.runs, "shrinking")
                result.failures.append(_smallest(engine, report, share))
            return report.verdict is not Verdict.BROKEN

        # Hypothesis would shrink towards any failure that it meets on the way; `shrink` keeps to the one it was given.
        place = {"devices": share.devices, "backend": share.backend}
        drawn = wide_scenarios(world_size_max=share.ranks_max).map(lambda s: msgspec.structs.replace(s, **place))
        explore(judged, drawn, count=share.count, seed=share.seed, shrink_s=0)
    return result


def _smallest(engine: Engine, report: Report, share: _Share) -> dict[str, Any]:
    """The smallest scenario that still breaks what this one broke first, saved, and what a summary says of it."""
    scenario, broken = report.history.scenario, report.violations[0].property
    patience = scenario.deadlines
    if broken != "terminates":
        # A run that hangs shows another failure, and is not worth the time.
        patience = Deadlines(run_s=min(patience.run_s, max(10.0, 5 * report.history.wall_s)), grace_s=patience.grace_s)

    def judged(smaller: Scenario) -> Report | None:
        found = check_smaller(engine, msgspec.structs.replace(smaller, deadlines=patience), share.target)
        if found is not None:
            found.history.scenario = smaller
        return found

    smallest = shrink(judged, report, broken, share.shrink_s) if share.shrink_s else Smallest(report, 0)
    return {
        **_saved(smallest.report, share.failures),
        "broken": [f.property for f in smallest.report.findings if f.violations],
        "message": smallest.report.violations[0].message,
        "shrink_runs": smallest.runs,
        "found": scenario.to_json(),
    }

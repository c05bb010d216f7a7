"""A suite: one target, many scenarios, and what came of each. The command line and the pytest plugin both run suites.

A scenario that cannot be asked of a target, or that the kit failed at, is part of the suite as well: nothing that was
not judged is ever counted as held.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..simulator.errors import KitError, ScenarioError
from ..simulator.scenario import Scenario
from .check import Engine, check, save_failure
from .diagnosis import DIAGNOSES, diagnose
from .explain import as_dict, explain
from .properties import PROPERTIES
from .report.document import (
    Cell,
    Diagnosis,
    Document,
    Failure,
    FaultReport,
    FindingReport,
    PropertyReport,
    RankReport,
    RunReport,
    VerdictName,
    ViolationReport,
)
from .report.timeline import story, timeline
from .report.words import in_words
from .shrink import breaks, shrink
from .verdict import Finding, Report, Violation

#: The family of scenarios in which nothing goes wrong.
CALM = "none"
#: Diagnoses after which nothing else can be learnt of a target.
HOPELESS = {"factory-raises", "hangs-in-start"}
#: Runs that are kept whole of those that broke a property under the same kinds of fault: it takes one to explain it.
REPORTS_KEPT = 3
#: Failures of one property that get an explanation each, and how often the time for one they may all take together.
FAILURES_MAX, EXPLANATIONS = 6, 12
#: Reasons that are told of one cell.
REASONS_SHOWN = 3
#: In the order of DESIGN.md. Restarts are planned by a scenario's ``restarts`` as well as by faults.
FAMILIES = (CALM, "exhaustion", "rank", "clock", "names", "store", "credentials", "data", "disk", "restart")


def families(scenario: Scenario) -> tuple[str, ...]:
    """Families of the faults that a scenario plans, in the order of reports; (``none``,) when it plans none."""
    found = {fault.family for fault in scenario.faults} | ({"restart"} if scenario.restarts else set())
    order = [*FAMILIES, *sorted(found - set(FAMILIES))]
    return tuple(family for family in order if family in found) or (CALM,)


@dataclass(frozen=True)
class Run:
    """A scenario of a suite and what came of it: the judged ``report``; None when it was not run, or the kit failed."""

    scenario: Scenario
    told: RunReport
    report: Report | None = None


def run_one(engine: Engine | None, scenario: Scenario, target: str, missing: str | None = None, name: str = "") -> Run:
    """Run one scenario, and never call it held when it was not judged.

    ``missing``: why it cannot be asked of this target or engine, called ``name``; then it is *not tested*, and needs no
    engine. Raises ScenarioError for bad input, such as a target that cannot be imported.
    """
    if missing or engine is None:
        return Run(scenario, _unjudged(scenario, target, name, "not tested", missing or "no engine"))
    try:
        report = check(engine, scenario, target)
    except KitError as error:
        return Run(scenario, _unjudged(scenario, target, name, "kit error", str(error)))
    except ScenarioError:
        raise
    except Exception as error:
        # A fault of the kit, such as a property that cannot read a history.
        text = f"{type(error).__name__}: {error}"
        return Run(scenario, _unjudged(scenario, target, name, "kit error", text))
    return Run(scenario, describe(report), report)


def _unjudged(scenario: Scenario, target: str, engine: str, verdict: VerdictName, reason: str) -> RunReport:
    faults = [FaultReport(kind=f.kind, family=f.family, text=f.describe(), fired=0) for f in scenario.faults]
    return RunReport(
        name=scenario.name,
        seed=scenario.seed,
        families=list(families(scenario)),
        scenario=json.loads(scenario.to_json()),
        target=target,
        engine=engine,
        verdict=verdict,
        reason=reason,
        expected=scenario.expect,
        faults=faults,
    )


def describe(report: Report) -> RunReport:
    """A judged run as plain data."""
    history = report.history
    scenario = history.scenario
    told = _unjudged(scenario, history.target, history.engine, report.verdict.value, report.reason)
    for fault, fired in zip(told.faults, history.fired, strict=True):
        fault.fired = fired
    told.succeeded = history.succeeded
    told.outcome = report.outcome
    told.rows_compared = report.rows_compared
    told.ranks = [
        RankReport(rank=o.rank, status=o.status, exitcode=o.exitcode, error=o.error) for o in history.outcomes
    ]
    told.findings = [_finding(report, finding) for finding in report.findings]
    told.diagnoses = [Diagnosis(name=name, meaning=DIAGNOSES[name], seen=seen) for name, seen in diagnose(history)]
    told.wall_s = round(history.wall_s, 3)
    return told


def _finding(report: Report, finding: Finding) -> FindingReport:
    return FindingReport(
        property=finding.property,
        verdict=finding.verdict.value,
        checked=finding.checked,
        unit=finding.unit,
        reason=finding.reason,
        violations_total=finding.total,
        violations=[_violation(report, violation) for violation in finding.violations],
    )


def _violation(report: Report, violation: Violation) -> ViolationReport:
    plain = as_dict(violation)
    del plain["property"]
    text = explain(violation, report.history.start_ms)
    return ViolationReport(**plain, text=text, story=story(report.history, violation))


@dataclass
class Suite:
    """What a target was asked, and what came of it.

    ``scenarios``: all that the profile plans, whether run or not. ``program``: how ``deltaproof`` is called;
    ``repeat``: the command that runs all of it again.
    """

    target: str
    engine: str
    profile: str
    seed: int
    scenarios: Sequence[Scenario]
    program: str = "deltaproof"
    repeat: str = ""
    runs: dict[str, RunReport] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self._reports: dict[str, Report] = {}
        self._kept: Counter[tuple[str, frozenset[str]]] = Counter()

    def ask(self, engine: Engine | None, scenario: Scenario, missing: str | None = None) -> Run:
        """Run a scenario, or note why not, and count it. Raises ScenarioError for bad input.

        Of a target that cannot even be started, though no fault was planned, nothing more can be learnt: the rest is
        not tested, and says why.
        """
        calm = (run for run in self.runs.values() if not run.faults)
        hopeless = sorted(HOPELESS & {diagnosis.name for run in calm for diagnosis in run.diagnoses})
        if hopeless and not missing:
            missing = f"not asked: the target {hopeless[0]}"
        run = run_one(engine, scenario, self.target, missing, self.engine)
        self.add(run)
        return run

    def add(self, run: Run) -> None:
        """Count a run. Its history is kept while it may have to be explained: of runs that broke the same properties
        under the same faults, that is a few."""
        name, told, report = run.scenario.name, run.told, run.report
        self.runs[name] = told
        keys = [(finding.property, frozenset(_kinds(told))) for finding in told.findings if finding.violations]
        if report is not None and any(self._kept[key] < REPORTS_KEPT for key in keys):
            self._kept.update(keys)
            self._reports[name] = report
        else:
            for finding in told.findings:
                finding.violations = [
                    ViolationReport(message=v.message, text=[v.message]) for v in finding.violations[:1]
                ]

    def merge(self, runs: Iterable[RunReport], failures: Iterable[Failure]) -> None:
        """Count what another process of the same suite did. A run that both did counts once."""
        for run in runs:
            self.runs.setdefault(run.name, run)
        for failure in failures:
            if not any(_same(failure, mine) for mine in self.failures):
                self.failures.append(failure)

    def explain(
        self,
        run: Callable[[Scenario], Report | None],
        folder: Path | None,
        seconds: float,
        names: Iterable[str] = (),
        properties: Iterable[str] = tuple(PROPERTIES),
    ) -> None:
        """Find a smallest failing scenario for each broken property and cause, within about ``seconds`` each.

        ``run``: judges a scenario on this suite's engine and target, None when it cannot; ``folder``: where failure
        files go, if anywhere; ``names``: of the scenarios to explain, all when none is given, by what broke of
        ``properties``. A broken run needs no explanation of its own when the faults of a smaller failure of that
        property are among its own, nor when there are many of that property already.
        """
        known_runs: dict[str, Report | None] = {}

        def once(scenario: Scenario) -> Report | None:
            text = scenario.to_json()
            if text not in known_runs:
                known_runs[text] = run(scenario)
            return known_runs[text]

        until = time.monotonic() + EXPLANATIONS * seconds
        smaller: dict[str, list[Report]] = {}
        chosen = set(names) or set(self.runs)
        scenarios = sorted((s for s in self.scenarios if s.name in chosen and s.name in self.runs), key=_size)
        for property in properties:
            for scenario in scenarios:
                name = scenario.name
                told, report = self.runs[name], self._reports.get(name)
                if not any(f.property == property and f.violations for f in told.findings):
                    continue
                mine = [f for f in self.failures if f.property == property]
                if any(name == f.shrunk_from or name in f.also for f in mine):
                    continue
                known = next((f for f in mine if _kinds(f.run) <= _kinds(told)), None)
                if known is None and mine and (report is None or len(mine) >= FAILURES_MAX):
                    known = mine[0]
                if known is not None:
                    known.also.append(name)
                    continue
                if report is None:
                    continue  # another process of the suite has it
                # What one property's failure was made of often is all that another's needs.
                start = next((r for r in smaller.get(name, []) if breaks(r, property)), report)
                found = shrink(once, start, property, min(seconds, until - time.monotonic()))
                smaller.setdefault(name, []).append(found.report)
                self.failures.append(self._failure(property, found.report, name, found.runs, folder))

    def _failure(self, property: str, report: Report, shrunk_from: str, runs: int, folder: Path | None) -> Failure:
        violation = next(v for v in report.violations if v.property == property)
        failure = Failure(
            property=property,
            run=describe(report),
            in_words=in_words(report.history.scenario),
            timeline=timeline(report.history, violation),
            shrunk_from=shrunk_from,
            shrink_runs=runs,
        )
        # Where nothing can be written, the report has the scenario all the same.
        with contextlib.suppress(OSError):
            if folder is not None:
                failure.file = str(save_failure(report, folder))
                failure.replay = f"{self.program} replay {shlex.quote(failure.file)} --engine {self.engine}"
        return failure

    # ---------------------------------------------------------------------------------------------------- summary
    @property
    def verdict(self) -> VerdictName:
        """Kit error before broken before held before not exercised before not tested; of no run: not exercised."""
        verdicts = {run.verdict for run in self.runs.values()}
        order: tuple[VerdictName, ...] = ("kit error", "broken", "held", "not exercised", "not tested")
        return next((verdict for verdict in order if verdict in verdicts), "not exercised")

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What is wrong with the target itself, in the order of the runs that showed it first."""
        found: dict[str, Diagnosis] = {}
        for each in (d for run in self.runs.values() for d in run.diagnoses):
            known = found.get(each.name)
            runs = 1 if known is None else known.runs + 1
            found[each.name] = msgspec.structs.replace(known or each, runs=runs)
        return list(found.values())

    def cell(self, property: str, family: str) -> Cell:
        """One property under the faults of one family."""
        planned = [s.name for s in self.scenarios if family in families(s)]
        runs = [self.runs[name] for name in planned if name in self.runs]
        judged = [judge_cell(run, property) for run in runs]
        counts = Counter(verdict for verdict, _ in judged)
        verdict = next((v for v in ("kit error", "broken", "held", "not exercised") if counts[v]), "not tested")
        reasons = [reason for found, reason in judged if found == verdict and reason]
        if not planned:
            reasons = ["the profile has no scenario with such a fault"]
        elif not runs:
            reasons = ["not run: it was not selected"]
        return Cell(
            property=property,
            family=family,
            verdict=verdict,  # type: ignore[arg-type]
            held=counts["held"],
            broken=counts["broken"],
            not_exercised=counts["not exercised"],
            not_tested=counts["not tested"] + len(planned) - len(runs),
            kit_errors=counts["kit error"],
            reason=_few(reasons),
        )

    def document(self) -> Document:
        """The report so far."""
        from .. import __version__

        shown = [f for f in FAMILIES if any(f in families(s) for s in self.scenarios)]
        return Document(
            kit=__version__,
            target=self.target,
            engine=self.engine,
            profile=self.profile,
            seed=self.seed,
            verdict=self.verdict,
            began=self.began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            wall_s=round((datetime.now(UTC) - self.began).total_seconds(), 1),
            repeat=self.repeat,
            properties=[_property(name) for name in PROPERTIES],
            families=shown,
            diagnoses=self.diagnoses,
            cells=[self.cell(property, family) for property in PROPERTIES for family in shown],
            failures=sorted(self.failures, key=lambda f: list(PROPERTIES).index(f.property)),
            runs=[self.runs[s.name] for s in self.scenarios if s.name in self.runs],
        )


def judge_cell(run: RunReport, property: str) -> tuple[VerdictName, str]:
    """What one run says of one property, and why when it says nothing.

    A violation counts whatever else happened. A run in which a planned fault never struck holds nothing.
    """
    finding = run.finding(property)
    if finding is None:
        return run.verdict, run.reason
    if finding.verdict == "broken":
        return "broken", finding.violations[0].message if finding.violations else ""
    if run.verdict == "not exercised":
        return "not exercised", run.reason
    if idle := [fault.text for fault in run.faults if not fault.fired]:
        return "not exercised", f"never struck: {'; '.join(idle)}"
    return finding.verdict, finding.reason


def _few(reasons: Iterable[str]) -> str:
    """The first reasons, each once."""
    different = list(dict.fromkeys(reasons))
    more = f"; and {len(different) - REASONS_SHOWN} more" if len(different) > REASONS_SHOWN else ""
    return "; ".join(different[:REASONS_SHOWN]) + more


def _property(name: str) -> PropertyReport:
    text = " ".join((PROPERTIES[name].__doc__ or "").replace("``", "").split())
    rule, _, why = text.partition(". ")
    return PropertyReport(name=name, rule=rule.rstrip(".") + ".", why=why)


def _kinds(run: RunReport) -> set[str]:
    return {fault.kind for fault in run.faults}


def _size(scenario: Scenario) -> tuple[int, ...]:
    """Scenarios that say most about a cause come first: few faults, restarts, tables, ranks and steps."""
    return (
        len(scenario.faults),
        len(scenario.restarts),
        len(scenario.tables),
        scenario.world_size,
        scenario.workload.steps,
        scenario.seed,
    )


def _same(left: Failure, right: Failure) -> bool:
    return left.property == right.property and left.run.scenario == right.run.scenario

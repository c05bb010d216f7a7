"""pytest plugin: is this publisher or uploader sound? Registered by the installed package; docs/pytest.md.

    pytest --deltaproof-target=pkg.mod:make

adds one test for each property under the faults of each family, ``deltaproof/FAMILY::PROPERTY``. The scenarios of a
family are run once and shared by its tests. Importing this module costs next to nothing: the rest of the kit is
imported when a target is given or a fixture is used.
"""

from __future__ import annotations

import fnmatch
import importlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..simulator.scenario import Scenario
    from .report.document import Document
    from .suite import Suite
    from .verdict import Report

ENGINES = ("virtual", "processes")
PROFILES = ("smoke", "ci", "nightly")
FAILURES = "deltaproof-failures"
#: In what a worker process of pytest-xdist hands to the one that reports.
HANDED_OVER = "deltaproof"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all of which begin with ``--deltaproof-``."""
    group = parser.getgroup("deltaproof", "conformance of a publisher or uploader of embedding deltas")
    group.addoption(
        "--deltaproof-target", metavar="PKG.MOD:FACTORY", help="what to test; adds the kit's tests to the run"
    )
    group.addoption("--deltaproof-engine", choices=ENGINES, help="where scenarios run (default: as the target needs)")
    group.addoption(
        "--deltaproof-profile", choices=PROFILES, default="smoke", help="how much is tested (default: smoke)"
    )
    group.addoption("--deltaproof-seed", type=int, default=0, help="seed of what the profile generates (default: 0)")
    group.addoption("--deltaproof-report", metavar="DIR", help="folder for report.html, report.json and failure files")
    group.addoption(
        "--deltaproof-shrink-s",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds spent on making one failing scenario smaller (default: 10)",
    )
    parser.addini(
        "deltaproof_xfail",
        "tests of the kit that are known to fail, one a line: deltaproof/FAMILY::PROPERTY: REASON (* and ? match)",
        type="linelist",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the kit's tests when a target was given."""
    config.addinivalue_line(
        "markers", "deltaproof(property, family): a test of the conformance kit, made by --deltaproof-target"
    )
    if config.getoption("deltaproof_target"):
        config.pluginmanager.register(Kit(config), "deltaproof-kit")


class Told(pytest.fail.Exception):  # type: ignore[name-defined]
    """A failure whose text is all that a reader needs."""

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


class Broken(Told):
    """The target broke a property."""

    __module__ = "builtins"  # which pytest leaves out of what it prints


class KitFailure(Told):
    """The kit, not the target, is to blame, or the input is: nothing is known about the target."""

    __module__ = "builtins"


class Kit:
    """The suite of one pytest process, and the tests that it adds to the session."""

    def __init__(self, config: pytest.Config) -> None:
        from ..simulator.errors import ScenarioError
        from . import profiles, target
        from .suite import Suite

        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        _make_importable(config)
        self.target: str = config.getoption("deltaproof_target")
        profile, seed = config.getoption("deltaproof_profile"), config.getoption("deltaproof_seed")
        self.engines = Engines(_engine_name(config, self.target))
        if seed < 0:
            raise pytest.UsageError(f"deltaproof: --deltaproof-seed={seed}: want 0 or more")
        try:
            self.missing = target.missing(self.target, self.engines.name)
            scenarios = profiles.plan(profile, self.engines.name, seed, self.target)
        except ScenarioError as error:
            raise pytest.UsageError(f"deltaproof: {error}") from None
        self.suite: Suite = Suite(
            target=self.target,
            engine=self.engines.name,
            profile=profile,
            seed=seed,
            scenarios=scenarios,
            repeat=self._repeat(),
        )
        self.refused = self.unwritten = ""
        self.document: Document | None = None

    def _repeat(self) -> str:
        suite_options = {
            "target": self.target,
            "engine": self.engines.name,
            "profile": self.config.getoption("deltaproof_profile"),
            "seed": self.config.getoption("deltaproof_seed"),
        }
        return "pytest " + " ".join(f"--deltaproof-{name}={shlex.quote(str(v))}" for name, v in suite_options.items())

    # -------------------------------------------------------------------------------------------------- collection
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        known = _known_failures(self.config.getini("deltaproof_xfail"))
        for test in self._tests(session):
            for pattern, reason in known:
                if fnmatch.fnmatchcase(test.nodeid, pattern):
                    test.add_marker(pytest.mark.xfail(reason=reason, raises=Broken))
            items.append(test)

    def _tests(self, session: pytest.Session) -> Iterator[PropertyTest]:
        from .properties import PROPERTIES
        from .suite import FAMILIES, families

        planned = {family for scenario in self.suite.scenarios for family in families(scenario)}
        for family in (f for f in FAMILIES if f in planned):
            parent = Family.from_parent(session, name=family, nodeid=f"deltaproof/{family}")
            for property in PROPERTIES:
                yield PropertyTest.from_parent(parent, name=property, kit=self)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Let one worker run all tests of a family, which share its scenarios; other tests are dealt out as ever."""
        if config.getvalue("dist") not in ("load", "loadgroup"):
            return None
        scheduler: Any = importlib.import_module("xdist.scheduler")

        class ByFamily(scheduler.LoadGroupScheduling):
            def _split_scope(self, nodeid: str) -> str:
                if nodeid.startswith("deltaproof/"):
                    return nodeid.partition("::")[0]
                scope: str = super()._split_scope(nodeid)
                return scope

        return ByFamily(config, log)

    # ----------------------------------------------------------------------------------------------------- running
    def run(self, family: str) -> None:
        """Run the scenarios of a family that have not run yet. Raises KitFailure when the input is bad."""
        from ..simulator.errors import ScenarioError
        from .suite import families

        for scenario in self.suite.scenarios:
            if self.refused or family not in families(scenario) or scenario.name in self.suite.runs:
                continue
            try:
                lacking = self.missing(scenario)
                self.suite.ask(None if lacking else self.engines.running(), scenario, lacking)
            except ScenarioError as error:
                self.refused = str(error)
        if self.refused:
            raise KitFailure(f"deltaproof: {self.refused}")

    def explanation(self, property: str, family: str) -> str:
        """Why a property broke under the faults of a family, in the smallest scenario found."""
        from .report.terminal import failure_text
        from .suite import families

        names = [s.name for s in self.suite.scenarios if family in families(s)]
        self.suite.explain(self._judged, self.failures, self.config.getoption("deltaproof_shrink_s"), names, [property])
        mine = [f for f in self.suite.failures if f.property == property and {f.shrunk_from, *f.also} & set(names)]
        return "\n\n".join(failure_text(failure) for failure in mine[:1])

    def _judged(self, scenario: Scenario) -> Report | None:
        from .check import check_smaller

        return None if self.missing(scenario) else check_smaller(self.engines.running(), scenario, self.target)

    @property
    def failures(self) -> Path:
        """Where failure files go, as one may type it."""
        folder = self.config.getoption("deltaproof_report")
        path = Path(folder, "failures") if folder else self.config.rootpath / FAILURES
        return Path(os.path.relpath(path))

    # ------------------------------------------------------------------------------------------------------- report
    def pytest_report_header(self) -> str:
        suite = self.suite
        return (
            f"deltaproof: target {suite.target}, engine {suite.engine}, profile {suite.profile}, seed {suite.seed}: "
            f"{len(suite.scenarios)} scenarios"
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        # An expected failure is one of the target: what the kit gets wrong is an error all the same.
        if isinstance(item, PropertyTest) and call.excinfo is not None and call.excinfo.errisinstance(KitFailure):
            report.outcome = "failed"
            report.__dict__.pop("wasxfail", None)
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        handed = getattr(node, "workeroutput", {}).get(HANDED_OVER)
        if handed:
            from .report.document import from_json

            told = from_json(handed)
            self.suite.merge(told.runs, told.failures)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        from .report.document import to_json
        from .report.files import write

        self.engines.close()
        self.document = self.suite.document()
        if self.is_worker:
            self.config.workeroutput[HANDED_OVER] = to_json(self.document)  # type: ignore[attr-defined]
        elif self.suite.runs and (folder := self.config.getoption("deltaproof_report")):
            try:
                write(self.document, Path(folder))
            except OSError as error:
                self.unwritten = error.strerror or str(error)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from rich.console import Console

        from .report.terminal import print_summary

        if self.document is None or not self.suite.runs:
            return
        out = io.StringIO()
        width = max(100, terminalreporter._tw.fullwidth)
        print_summary(self.document, Console(file=out, width=width, force_terminal=terminalreporter.hasmarkup))
        terminalreporter.section(f"deltaproof: {self.target}")
        terminalreporter.write(out.getvalue())
        if folder := self.config.getoption("deltaproof_report"):
            what = f"none in {folder}: {self.unwritten}" if self.unwritten else os.path.join(folder, "report.html")
            terminalreporter.write_line(f"report: {what}")

    def pytest_unconfigure(self) -> None:
        self.engines.close()


class Family(pytest.Collector):
    """The tests of one fault family; its nodes are made by `Kit`."""

    def collect(self) -> Iterable[pytest.Item]:
        return []


class PropertyTest(pytest.Item):
    """One property under the faults of one family."""

    def __init__(self, *, kit: Kit, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.parent is not None
        self.kit, self.family = kit, self.parent.name
        self.add_marker(pytest.mark.deltaproof(property=self.name, family=self.family))
        # The engines have deadlines of their own, and the first test of a family runs all of its scenarios.
        if self.config.pluginmanager.hasplugin("timeout"):
            self.add_marker(pytest.mark.timeout(0))

    def setup(self) -> None:
        self.kit.run(self.family)
        cell = self.kit.suite.cell(self.name, self.family)
        if cell.verdict == "kit error":
            raise KitFailure(f"deltaproof itself failed, nothing is known about the target: {cell.reason}")

    def runtest(self) -> None:
        cell = self.kit.suite.cell(self.name, self.family)
        if cell.verdict == "broken":
            raise Broken(self.kit.explanation(self.name, self.family))
        if cell.verdict != "held":
            pytest.skip(f"{cell.verdict}: {cell.reason}")

    def reportinfo(self) -> tuple[Path, None, str]:
        faults = "without a fault" if self.family == "none" else f"under {self.family} faults"
        return self.config.rootpath / "deltaproof" / self.family, None, f"{self.name} {faults}"


class Engines:
    """The engine of this process, started when it is first needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine: Any = None
        self._undo = ExitStack()

    def running(self) -> Any:
        from .engines import running

        if self._engine is None:
            self._engine = self._undo.enter_context(running(self.name))
        return self._engine

    def close(self) -> None:
        self._engine = None
        self._undo.close()


def _make_importable(config: pytest.Config) -> None:
    """Let a target lie in the folder one works in, as with ``python -m``."""
    for folder in (str(config.rootpath), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)


def _known_failures(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(pattern, reason) of each line of the ini option. Raises pytest.UsageError."""
    from .properties import PROPERTIES
    from .suite import FAMILIES

    ids = [f"deltaproof/{family}::{property}" for family in FAMILIES for property in PROPERTIES]
    found = []
    for line in lines:
        pattern, _, reason = (part.strip() for part in line.partition(": "))
        if not reason:
            raise pytest.UsageError(f"deltaproof_xfail: {line!r}: want deltaproof/FAMILY::PROPERTY: REASON")
        if not fnmatch.filter(ids, pattern):
            raise pytest.UsageError(f"deltaproof_xfail: no test of the kit is called {pattern!r}")
        found.append((pattern, reason))
    return found


def _engine_name(config: pytest.Config, target: str) -> str:
    from .target import default_engine

    return config.getoption("deltaproof_engine") or default_engine(target)


# ------------------------------------------------------------------------------------------------------------ fixtures
@pytest.fixture(scope="session")
def deltaproof_target(request: pytest.FixtureRequest) -> str:
    """The target that ``--deltaproof-target`` names; the test is skipped when it names none."""
    target: str | None = request.config.getoption("deltaproof_target")
    if not target:
        pytest.skip("no --deltaproof-target was given")
    return target


@pytest.fixture(scope="session")
def deltaproof_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A running engine (``--deltaproof-engine``), one for all tests of this process."""
    kit = request.config.pluginmanager.get_plugin("deltaproof-kit")
    if isinstance(kit, Kit):
        yield kit.engines.running()
        return
    _make_importable(request.config)
    engines = Engines(_engine_name(request.config, request.config.getoption("deltaproof_target") or "reference"))
    yield engines.running()
    engines.close()


@pytest.fixture
def deltaproof_check(request: pytest.FixtureRequest, deltaproof_engine: Any) -> Callable[..., Report]:
    """``deltaproof_check(scenario, target=None)`` runs a scenario of your own and returns its report.

    The test fails when a property broke, and is skipped when a planned fault never struck or nothing was checked.
    """

    def checked(scenario: Scenario, target: str | None = None) -> Report:
        from .check import check, save_failure
        from .explain import explain
        from .verdict import Verdict

        chosen = target or request.getfixturevalue("deltaproof_target")
        report = check(deltaproof_engine, scenario.checked(), chosen)
        if report.verdict is Verdict.BROKEN:
            path = save_failure(report, Path(os.path.relpath(request.config.rootpath / FAILURES)))
            lines = explain(report.violations[0], report.history.start_ms)
            command = f"deltaproof replay {shlex.quote(str(path))} --engine {report.history.engine}"
            pytest.fail("\n".join([report.reason, *lines, f"repeat with: {command}"]), pytrace=False)
        if report.verdict is not Verdict.HELD:
            pytest.skip(f"{report.verdict.value}: {report.reason}")
        return report

    return checked

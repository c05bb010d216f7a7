"""The pytest plugin in a repository that is not this one: ids, skips, expected failures, kit errors, xdist, reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from deltaproof.conformance import profiles
from deltaproof.conformance.check import load
from deltaproof.conformance.plugin import Kit
from deltaproof.conformance.properties import PROPERTIES
from deltaproof.conformance.report.document import from_json
from deltaproof.simulator.virtual.engine import VirtualEngine

pytest_plugins = ["pytester"]

# Three small scenarios in place of a profile. What ran, and in which process, is written down.
CONFTEST = """
import os

from deltaproof.conformance import profiles
from deltaproof.simulator import faults
from deltaproof.simulator.errors import KitError, ScenarioError
from deltaproof.simulator.scenario import Scenario, Table, Workload
from deltaproof.simulator.virtual.engine import VirtualEngine

SMALL = dict(world_size=1, tables=(Table(name="item", rows=8),), workload=Workload(steps=4, batch_size=2))
PLAN = [
    Scenario(name="calm", **SMALL),
    Scenario(name="refused-once", faults=(faults.StoreError(),), **SMALL),
    Scenario(name="never-struck", faults=(faults.ClockJump(rank=0, step=9, seconds=-60.0),), **SMALL),
]
profiles.plan = lambda profile, engine, seed, target: PLAN
run = VirtualEngine.run

def noted(self, scenario, target="reference", **options):
    with open("ran.txt", "a") as ran:
        print(scenario.name, os.getpid(), file=ran)
    if os.environ.get("KIT_BREAKS_AT") == scenario.name:
        raise KitError("the store could not start")
    if os.environ.get("BAD_INPUT_AT") == scenario.name:
        raise ScenarioError("the target wants a package that is not there")
    return run(self, scenario, target, **options)

VirtualEngine.run = noted
"""
OWN_TEST = """
from deltaproof.simulator.scenario import Scenario, Workload

def test_own(deltaproof_check, deltaproof_target):
    report = deltaproof_check(Scenario(name="mine", workload=Workload(steps=2)), target="reference")
    assert report.rows_compared and deltaproof_target.startswith("specimen:")

def test_own_that_breaks(deltaproof_check):
    deltaproof_check(Scenario(name="mine", workload=Workload(steps=2)))
"""
#: pytest-asyncio warns without this line.
INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
#: The final flush is missing: every scenario shows it.
TARGET = "--deltaproof-target=specimen:S02"
QUICK = (TARGET, "--deltaproof-engine=virtual", "--deltaproof-shrink-s=0.2", "-p", "no:randomly")


@pytest.fixture
def foreign(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository with a conftest.py of its own. What that replaces in this process is put back afterwards."""
    monkeypatch.setattr(VirtualEngine, "run", VirtualEngine.run)
    monkeypatch.setattr(profiles, "plan", profiles.plan)
    pytester.makeconftest(CONFTEST)
    pytester.makeini(INI)
    return pytester


def ran(pytester: pytest.Pytester) -> list[str]:
    return [line.split()[0] for line in (pytester.path / "ran.txt").read_text().splitlines()]


def test_each_property_under_each_family_is_a_test(foreign: pytest.Pytester) -> None:
    foreign.makepyfile(test_own=OWN_TEST)
    done = foreign.runpytest_inprocess(*QUICK, "--junitxml=junit.xml", "--deltaproof-report=out", "-rA")
    tests = {
        (case.get("classname"), case.get("name")): case
        for case in ElementTree.parse(foreign.path / "junit.xml").iter("testcase")
    }
    assert {("deltaproof." + family, name) for family in ("none", "clock", "store") for name in PROPERTIES} <= set(
        tests
    )
    failed = {key for key, case in tests.items() if case.find("failure") is not None}
    assert {("deltaproof.none", "no-silent-loss"), ("deltaproof.store", "no-lost-rows")} <= failed
    assert ("test_own", "test_own_that_breaks") in failed
    assert ("test_own", "test_own") not in failed
    assert not [case for case in tests.values() if case.find("error") is not None]
    # A fault that never struck, and a rule with nothing to check, prove nothing: never a pass.
    for key, reason in (
        (("deltaproof.clock", "terminates"), "not exercised: never struck: clock-jump"),
        (("deltaproof.none", "restart-converges"), "not exercised: the job was not restarted"),
    ):
        skipped = tests[key].find("skipped")
        assert skipped is not None
        assert reason in (skipped.get("message") or "")
    text = tests["deltaproof.none", "no-silent-loss"].find("failure")
    assert text is not None
    repeat = re.search(r"repeat with: deltaproof replay (\S+) --engine virtual", text.text or "")
    assert repeat is not None
    saved = load(foreign.path / repeat[1])
    assert "no-silent-loss" in saved.broken
    assert saved.target == "specimen:S02"
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    report = from_json((foreign.path / "out" / "report.json").read_text())
    assert report.verdict == "broken"
    assert report.cell("terminates", "none").verdict == "held"
    assert report.cell("terminates", "clock").verdict == "not exercised"
    assert "no-silent-loss" in (foreign.path / "out" / "report.html").read_text()
    assert re.search(r"no-silent-loss +1/1 broken", done.stdout.str())
    assert "3 scenarios" in done.stdout.str()
    done.stdout.fnmatch_lines(["*all of it again: pytest --deltaproof-target=specimen:S02*--deltaproof-seed=0*"])


def test_known_failures_have_a_reason_and_must_fail(foreign: pytest.Pytester) -> None:
    lines = ["deltaproof/*::no-lost-rows: ticket 7", "deltaproof/none::no-*: ticket 7"]
    foreign.makeini(INI + "xfail_strict = true\ndeltaproof_xfail =\n  " + "\n  ".join(lines))
    done = foreign.runpytest_inprocess(*QUICK, "-m", "deltaproof(family='none')", "-rxX")
    outcomes = done.parseoutcomes()
    assert outcomes["xfailed"] == 2
    done.stdout.fnmatch_lines(["XFAIL deltaproof/none::no-silent-loss - ticket 7"])
    # It held, though a failure was expected: somebody mended it, and has to take the line out.
    done.stdout.fnmatch_lines(["*XPASS(strict)*ticket 7*"])
    assert ran(foreign)[0] == "calm"
    assert "refused-once" not in ran(foreign), "tests that were not selected must not run their scenarios"

    # The ids are the same again: what failed last time is run, and nothing else.
    again = foreign.runpytest_inprocess(*QUICK, "--lf")
    assert again.parseoutcomes()["failed"] == outcomes["failed"]
    assert set(again.parseoutcomes()) == {"failed", "deselected"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("deltaproof/none::no-lost-rows", "want deltaproof/FAMILY::PROPERTY: REASON"),
        ("deltaproof/none::no-lots-rows: ticket 7", "no test of the kit is called 'deltaproof/none::no-lots-rows'"),
    ],
)
def test_a_known_failure_that_says_nothing_is_refused(foreign: pytest.Pytester, line: str, message: str) -> None:
    foreign.makeini(f"{INI}deltaproof_xfail = {line}\n")
    done = foreign.runpytest_inprocess(*QUICK)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr.str()


def test_a_fault_of_the_kit_is_an_error_even_where_a_failure_is_expected(
    foreign: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.makeini(f"{INI}deltaproof_xfail = deltaproof/*: ticket 7\n")
    monkeypatch.setenv("KIT_BREAKS_AT", "refused-once")
    done = foreign.runpytest_inprocess(*QUICK, "-m", "deltaproof(family='store')")
    assert done.parseoutcomes() == {"errors": len(PROPERTIES), "deselected": 2 * len(PROPERTIES)}
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    assert "deltaproof itself failed, nothing is known about the target: the store could not start" in done.stdout.str()
    assert "Traceback" not in done.stdout.str()


def test_bad_input_is_an_error_told_in_a_line_and_a_report_that_cannot_be_written_too(
    foreign: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_INPUT_AT", "refused-once")
    (foreign.path / "out").write_text("a file where a folder should be")
    chosen = ["-m", "deltaproof(property='terminates')", "--deltaproof-report=out"]
    done = foreign.runpytest_inprocess(*QUICK, *chosen)
    outcomes = done.parseoutcomes()
    assert (outcomes["errors"], outcomes["passed"]) == (1, 1)  # families after the bad one are not run
    assert "deltaproof: the target wants a package that is not there" in done.stdout.str()
    assert "report: none in out: " in done.stdout.str()
    assert "Traceback" not in done.stdout.str()


@pytest.mark.parametrize("target", ["no.such.module:make", "json:__name__"])
def test_a_target_that_is_none_is_refused_in_one_line(foreign: pytest.Pytester, target: str) -> None:
    done = foreign.runpytest_inprocess(f"--deltaproof-target={target}", "--deltaproof-engine=virtual")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert target.partition(":")[0] in done.stderr.str()
    assert "Traceback" not in done.stderr.str()


def test_tests_of_a_family_go_to_one_worker_and_others_as_ever() -> None:
    options = {"dist": "load", "tx": ["popen"], "maxschedchunk": None}
    config: Any = SimpleNamespace(
        getvalue=options.__getitem__, getoption=options.get, option=SimpleNamespace(**options)
    )
    scheduler = Kit.pytest_xdist_make_scheduler(cast(Kit, None), config, None)
    scopes = [
        scheduler._split_scope(name) for name in ("deltaproof/store::a", "deltaproof/store::b", "t.py::c", "t.py::d")
    ]
    assert scopes == ["deltaproof/store", "deltaproof/store", "t.py::c", "t.py::d"]
    assert scheduler._split_scope("t.py::e@group") == "group"
    options["dist"] = "each"
    assert Kit.pytest_xdist_make_scheduler(cast(Kit, None), config, None) is None


@pytest.mark.soak
def test_under_xdist_one_worker_runs_the_scenarios_of_a_family(foreign: pytest.Pytester) -> None:
    foreign.makepyfile(test_more="def test_more(): ...")
    command = [sys.executable, "-P", "-m", "pytest", "-n", "2", *QUICK, "--deltaproof-report=out", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        command, cwd=foreign.path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for line in (foreign.path / "ran.txt").read_text().splitlines():
        name, pid = line.split()
        found.setdefault(name, set()).add(pid)
    assert {name: len(pids) for name, pids in found.items()} == {"calm": 1, "refused-once": 1, "never-struck": 1}
    report = json.loads((foreign.path / "out" / "report.json").read_text())
    assert sorted(run["name"] for run in report["runs"]) == ["calm", "never-struck", "refused-once"]
    assert report["failures"]
    assert "FAILED deltaproof/none::no-silent-loss - " in done.stdout, (
        "an id must not depend on how tests are dealt out"
    )


def test_without_a_target_nothing_is_added(foreign: pytest.Pytester) -> None:
    foreign.makepyfile(
        """
        def test_no_kit(pytestconfig):
            assert not pytestconfig.pluginmanager.hasplugin("deltaproof-kit")

        def test_asks_for_one(deltaproof_target): ...
        """
    )
    done = foreign.runpytest_inprocess("-rs")
    assert done.parseoutcomes() == {"passed": 1, "skipped": 1}
    assert "no --deltaproof-target was given" in done.stdout.str()


def test_the_fixtures_say_what_they_are(foreign: pytest.Pytester) -> None:
    told = foreign.runpytest_inprocess("--fixtures").stdout.str()
    for name in ("deltaproof_target", "deltaproof_engine", "deltaproof_check"):
        assert f"\n{name}" in told
        assert f"{name} -- no docstring" not in told

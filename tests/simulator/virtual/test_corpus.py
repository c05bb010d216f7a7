"""What both engines can run, both judge alike: the scenario files, and the known bugs in theirs."""

from pathlib import Path

import pytest

from deltaproof.conformance.judge import judge
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.scenario import Scenario
from deltaproof.simulator.virtual.engine import VirtualEngine, lacks

FILES = sorted((Path(__file__).parents[2] / "scenarios").glob("*.json"))
RUNS_MAX = 50


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_reference_holds(path: Path) -> None:
    scenario = Scenario.load(path)
    assert lacks(scenario) is None
    report = judge(VirtualEngine().run(scenario))
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])


@pytest.mark.parametrize("specimen", SPECIMENS)
def test_a_known_bug_is_found(specimen: str) -> None:
    known, engine = SPECIMENS[specimen], VirtualEngine()
    for variant in range(RUNS_MAX):
        report = judge(engine.run(known.scenario, f"specimen:{specimen}", variant=variant))
        if set(known.properties) <= {f.property for f in report.findings if f.violations}:
            break
    else:
        pytest.fail(f"{known.properties} did not report {specimen} in {RUNS_MAX} runs: {report.reason}")
    assert judge(engine.run(known.scenario)).verdict is Verdict.HELD, "the bug was left in the reference"

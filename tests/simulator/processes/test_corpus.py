"""tests/scenarios: what failed once, or is easy to get wrong, as scenario files that anyone can run by hand."""

from pathlib import Path

import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.scenario import Scenario

pytestmark = pytest.mark.xdist_group("corpus")

FILES = sorted((Path(__file__).parents[2] / "scenarios").glob("*.json"))


def test_there_is_a_corpus() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_reference_holds(engine, path: Path) -> None:
    scenario = Scenario.load(path)
    assert scenario.name == path.stem
    report = check(engine, scenario)
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    if scenario.expect == "tolerate":
        assert report.history.succeeded
        assert report.rows_compared > 0

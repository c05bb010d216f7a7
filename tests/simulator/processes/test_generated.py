"""Generated scenarios with every fault: the reference holds in each, nothing hangs, and nobody is left behind."""

import os
from collections import Counter

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from deltaproof.conformance.check import check
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.scenario import Scenario
from deltaproof.simulator.strategies import wide_scenarios

pytestmark = pytest.mark.xdist_group("processes")


def held_by(engine, count: int, ranks_max: int) -> Counter[str]:
    """Runs ``count`` generated scenarios; a broken one fails, and is printed by Hypothesis. Verdicts by number."""
    verdicts: Counter[str] = Counter()
    engine.release()
    before = {p.pid for p in psutil.Process().children(recursive=True)}

    @settings(max_examples=count, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
    @given(wide_scenarios(world_size_max=ranks_max, steps_max=8))
    def run(scenario: Scenario) -> None:
        report = check(engine, scenario)
        verdicts[report.verdict.value] += 1
        assert report.verdict in (Verdict.HELD, Verdict.NOT_EXERCISED), (
            [v.message for v in report.violations],
            scenario.to_json(),
        )

    run()
    engine.release()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "a rank was left behind"
    return verdicts


def test_a_few(engine) -> None:
    verdicts = held_by(engine, 12, 3)
    assert verdicts["held"] > 0


@pytest.mark.soak
def test_two_thousand(engine) -> None:
    count = int(os.environ.get("DELTAPROOF_SOAK_RUNS", "2000"))
    verdicts = held_by(engine, count, 8)
    print(f"{count} generated scenarios: {dict(verdicts)}")
    assert verdicts["held"] > count / 2

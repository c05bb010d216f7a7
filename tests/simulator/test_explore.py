"""A campaign draws what its seed says, runs its count, and makes a failing scenario smaller."""

import pytest

from deltaproof.simulator.errors import KitError
from deltaproof.simulator.explore import explore
from deltaproof.simulator.scenario import Scenario
from deltaproof.simulator.strategies import scenarios


def drawn(seed: int, count: int = 25) -> list[str]:
    seen: list[str] = []

    def check(scenario: Scenario, shrinking: bool) -> bool:
        seen.append(scenario.to_json())
        return True

    assert explore(check, scenarios(), count=count, seed=seed).runs == count
    return seen


def test_same_seed_same_scenarios_other_seed_others() -> None:
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_a_failure_is_kept_shrunk_and_the_campaign_goes_on() -> None:
    def fails_with_a_kill_on_three_ranks(scenario: Scenario, shrinking: bool) -> bool:
        return not (scenario.world_size >= 3 and any(f.kind == "rank-kill" for f in scenario.faults))

    campaign = explore(fails_with_a_kill_on_three_ranks, scenarios(), count=300, seed=1, shrink_s=20, failures_max=2)
    assert len(campaign.failures) == 2
    for failure in campaign.failures:
        assert failure.smallest.world_size == 3
        assert [f.kind for f in failure.smallest.faults] == ["rank-kill"]
        assert len(failure.smallest.tables) == 1
        assert failure.smallest.workload.steps == 1
        assert failure.shrink_runs > 0


def test_a_failure_that_does_not_repeat_is_kept_as_it_was_found() -> None:
    calls = []

    def fails_once(scenario: Scenario, shrinking: bool) -> bool:
        calls.append(scenario)
        return len(calls) != 5

    campaign = explore(fails_once, scenarios(), count=20, seed=1)
    assert campaign.runs == 20
    [failure] = campaign.failures
    assert failure.found == failure.smallest == calls[4]


def test_no_time_for_shrinking_keeps_what_was_found() -> None:
    campaign = explore(lambda s, shrinking: False, scenarios(), count=5, seed=1, shrink_s=0, failures_max=1)
    assert campaign.runs == 1
    assert campaign.failures[0].found == campaign.failures[0].smallest


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_check_that_breaks_down_ends_the_campaign_with_its_error(at: int) -> None:
    calls = []

    def breaks_down(scenario: Scenario, shrinking: bool) -> bool:
        calls.append(scenario)
        if len(calls) == at:
            raise KitError("the store is gone")
        return len(calls) != 3

    with pytest.raises(KitError, match="the store is gone"):
        explore(breaks_down, scenarios(), count=20, seed=1)
    assert len(calls) == at

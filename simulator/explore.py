"""A campaign: Hypothesis draws scenarios from a seed, each is run and judged, and a failing one is shrunk.

The judge is passed in, so this module knows no property. A campaign goes on after a failure until its count is reached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from .scenario import Scenario


@dataclass
class Failure:
    """``found``: the scenario as drawn; ``smallest``: the smallest that still fails; ``shrink_runs``: runs spent on
    it."""

    found: Scenario
    smallest: Scenario
    shrink_runs: int


@dataclass
class Campaign:
    """Result of a campaign: how many drawn scenarios were run, and what failed."""

    seed: int
    runs: int = 0
    failures: list[Failure] = field(default_factory=list)


class _Failed(Exception):
    pass


class _Enough(BaseException):
    """Leaves Hypothesis for good: the count is reached or the time for shrinking is over."""


def explore(
    check: Callable[[Scenario, bool], bool],
    strategy: SearchStrategy[Scenario],
    *,
    count: int,
    seed: int,
    shrink_s: float = 60.0,
    failures_max: int = 5,
) -> Campaign:
    """Run ``check(scenario, shrinking)`` on ``count`` drawn scenarios; it returns False when the scenario fails.

    Whatever ``check`` raises ends the campaign. At most ``shrink_s`` seconds are spent on making one failing scenario
    smaller. Stops after ``failures_max`` failures. The same seed, strategy and verdicts give the same scenarios.
    """
    campaign = Campaign(seed=seed)
    round_ = 0
    while campaign.runs < count and len(campaign.failures) < failures_max:
        before = campaign.runs
        _one_round(check, strategy, campaign, count, seed + round_, shrink_s)
        round_ += 1
        if campaign.runs == before:
            break  # the strategy has nothing more to draw
    return campaign


def _one_round(
    check: Callable[[Scenario, bool], bool],
    strategy: SearchStrategy[Scenario],
    campaign: Campaign,
    count: int,
    seed: int,
    shrink_s: float,
) -> None:
    failing: list[Scenario] = []
    broke_down: list[Exception] = []
    shrink_runs = 0
    limit = float("inf")

    def held(scenario: Scenario, shrinking: bool) -> bool:
        try:
            return check(scenario, shrinking)
        except Exception as error:
            # Not a finding about the target: Hypothesis would take it for one and shrink it.
            broke_down.append(error)
            raise _Enough from error

    @hypothesis_seed(seed)
    @settings(
        max_examples=count - campaign.runs,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def body(scenario: Scenario) -> None:
        nonlocal shrink_runs, limit
        if not failing:
            if campaign.runs >= count:
                raise _Enough
            campaign.runs += 1
            if held(scenario, False):
                return
            limit = time.monotonic() + shrink_s
        elif time.monotonic() > limit:
            raise _Enough
        else:
            shrink_runs += 1
            if held(scenario, True):
                return
        failing.append(scenario)
        raise _Failed

    # Flaky: a failure that did not repeat; the scenario is kept all the same, as found.
    with contextlib.suppress(_Failed, _Enough, Flaky):
        body()
    if broke_down:
        raise broke_down[0]
    if failing:
        smallest = min(failing, key=_size)
        campaign.failures.append(Failure(failing[0], smallest, shrink_runs))


def _size(scenario: Scenario) -> tuple[int, ...]:
    """What a reader has to take in, most important first."""
    return (
        len(scenario.faults),
        len(scenario.tables),
        scenario.world_size,
        scenario.workload.steps,
        len(scenario.to_json()),
    )

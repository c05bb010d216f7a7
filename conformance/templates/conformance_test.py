"""Asks the target everything in the kit's smoke profile: run ``pytest`` here. A test per scenario; those about what the
target does not claim are skipped. ``pytest --deltaproof-target`` gives a test per property instead (docs/pytest.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...simulator.scenario import Scenario
from ..engines import running
from ..profiles import plan
from ..target import missing

sys.path.insert(0, str(Path(__file__).parent))
TARGET = "adapter:Adapter"
ENGINE = "virtual"  # or "processes": real ranks, a real TorchRec model, HTTP


@pytest.fixture(scope="module")
def deltaproof_engine() -> Iterator[Any]:
    """What runs the scenarios."""
    with running(ENGINE) as engine:
        yield engine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each scenario of the profile."""
    scenarios = plan("smoke", ENGINE, seed=0, target=TARGET)
    metafunc.parametrize("scenario", scenarios, ids=[scenario.name for scenario in scenarios])


def test_no_row_is_lost(scenario: Scenario, deltaproof_check: Callable[..., object]) -> None:
    """Fails when a property broke, with the smallest story of it; skipped when the scenario never came to its point."""
    if reason := missing(TARGET, ENGINE)(scenario):
        pytest.skip(reason)
    deltaproof_check(scenario, TARGET)

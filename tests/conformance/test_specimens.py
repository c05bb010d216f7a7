"""Every specimen is reported by the properties that the catalogue of known bugs names, and the reference never is."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from deltaproof.conformance import specimens
from deltaproof.conformance.check import check
from deltaproof.conformance.properties import PROPERTIES
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.specimens.specimen import Patch
from deltaproof.conformance.verdict import Verdict
from deltaproof.reference.publisher import Publisher
from deltaproof.simulator.processes.engine import ProcessEngine

# A group of their own, so that the two workers of `make test` each have an engine and half of its work.
pytestmark = pytest.mark.xdist_group("specimens")


# Those that need what only real ranks have, or show on them what the deterministic engine has to agree with. That one
# finds all of them in every run of the suite (tests/simulator/virtual/test_corpus.py).
ON_REAL_RANKS = (
    *("S01", "S05", "S06", "S07", "S09", "S16", "S17", "S18", "S21"),
    *("S31", "S32", "S38", "S39", "S40"),
)


@pytest.mark.parametrize(
    "specimen_id", [pytest.param(s, marks=() if s in ON_REAL_RANKS else pytest.mark.soak) for s in SPECIMENS]
)
def test_a_specimen_is_caught_where_the_reference_holds(specimen_id: str, engine: ProcessEngine) -> None:
    specimen = SPECIMENS[specimen_id]
    sound = check(engine, specimen.scenario)
    assert [v.message for v in sound.violations] == []
    assert sound.verdict is Verdict.HELD
    report = check(engine, specimen.scenario, f"specimen:{specimen_id}")
    assert set(specimen.properties) <= {f.property for f in report.findings if f.violations}
    assert all(report.history.fired), "the bug must show under the fault that the scenario plans"
    assert all(v.events for v in report.violations)


def test_the_registry_is_in_order_and_every_scenario_is_possible() -> None:
    assert list(SPECIMENS) == sorted(SPECIMENS)
    # S43, a validation that takes quadratic time, is for benchmarks/bench_uploader.py to catch.
    assert {f"S{n:02d}" for n in range(1, 50) if n != 43} <= set(SPECIMENS)
    for specimen_id, specimen in SPECIMENS.items():
        assert specimen.id == specimen_id
        assert specimen.apply.__module__.endswith(f".{specimen_id.lower()}_{specimen.slug.replace('-', '_')}")
        assert set(specimen.properties) <= set(PROPERTIES)
        assert specimen.scenario.checked().name == f"{specimen_id}-{specimen.slug}"
        families = {f.family for f in specimen.scenario.faults}
        # What a workload, a topology or a restart brings needs no fault of its own.
        restarts = specimen.family == "restart" and specimen.scenario.restarts
        assert specimen.family in families or not families or restarts


class Recorder(Patch):
    """Notes what is replaced."""

    def __init__(self, undo: ExitStack) -> None:
        super().__init__(undo)
        self.replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        self.replaced.append((owner, name, vars(owner)[name]))
        return super().replace(owner, name, value)


@pytest.mark.parametrize("specimen_id", SPECIMENS)
def test_closing_a_specimen_takes_the_bug_out_again(specimen_id: str) -> None:
    with ExitStack() as undo:
        patch = Recorder(undo)
        SPECIMENS[specimen_id].apply(patch)
        assert len(patch.replaced) == 1, "the smallest mutation replaces one method"
        [(owner, name, original)] = patch.replaced
        assert vars(owner)[name] is not original
    assert vars(owner)[name] is original


def test_a_specimen_that_lost_its_method_says_so() -> None:
    with ExitStack() as undo, pytest.raises(AttributeError, match="Publisher has no 'no_such_method' to replace"):
        Patch(undo).replace(Publisher, "no_such_method", None)


def test_an_unknown_specimen_is_refused() -> None:
    with pytest.raises(KeyError, match="S99"):
        specimens.activate("S99")

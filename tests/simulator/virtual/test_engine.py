"""The deterministic engine runs the same scenarios to the same verdicts, and the same scenario to the same bytes."""

import hashlib
import logging
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from deltaproof.conformance.judge import judge
from deltaproof.conformance.verdict import Verdict
from deltaproof.reference import errors
from deltaproof.simulator.catalogue import demo_scenarios
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.explore import explore
from deltaproof.simulator.faults import DiskCrash, DiskError, RankKill, StoreError
from deltaproof.simulator.history import History
from deltaproof.simulator.scenario import Deadlines, PublisherConfig, Restart, Scenario, Table, Workload
from deltaproof.simulator.strategies import scenarios
from deltaproof.simulator.virtual.engine import VirtualEngine
from deltaproof.simulator.virtual.scheduler import ScheduleDiverged, SimulationError

HERE = Path(__file__).parent
SMALL = Scenario(
    name="small",
    tables=(Table(name="item", rows=40), Table(name="city", rows=20, sharding="data_parallel")),
    workload=Workload(steps=5),
    publisher=PublisherConfig(every_steps=2),
    faults=(StoreError(skip=1),),
)


#: Whatever else a run can have in it: files, machines that go down, a restart, int8 rows, memory that is counted.
RICH = Scenario(
    name="rich",
    tables=(Table(name="item", rows=40), Table(name="city", rows=20, sharding="data_parallel")),
    workload=Workload(steps=5, checkpoint_every_steps=2),
    publisher=PublisherConfig(
        every_steps=2, retain=True, spill=True, readback=True, embedding_type="int8", queue_bytes_max=100
    ),
    faults=(StoreError(skip=1), DiskError(rank=1, nth=2), DiskCrash(rank=0, nth=3)),
    restarts=(Restart(),),
)
#: And tables that make no checkpoints.
DYNAMIC = msgspec.structs.replace(
    SMALL,
    name="dynamic",
    tables=(*SMALL.tables, Table(name="ad", owner="dyn", rows=40, sharding="dynamic", capacity=8, missing=0.5)),
)


@pytest.fixture(autouse=True)
def _targets_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def target(name: str) -> str:
    return f"deltaproof_threaded_target:{name}"


def digest(history: History) -> str:
    """Of everything in a history but the real time it took."""
    made = hashlib.sha256()
    made.update(msgspec.json.encode([history.events, history.outcomes, history.fired, history.stacks], enc_hook=str))
    made.update(repr(history.schedule).encode())
    made.update(repr([(s.path, s.manifest, s.damage) for s in history.retained or []]).encode())
    for table in (history.writes, history.strays, history.final):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        made.update(sink.getvalue())
    for fqn, table in history.tables.items():
        for part in (table.initial, table.steps, table.keys, table.values, table.lookup_steps, table.lookup_keys):
            made.update(fqn.encode() + part.tobytes())
    return made.hexdigest()


@pytest.mark.parametrize("scenario", demo_scenarios(), ids=lambda s: s.name)
def test_the_reference_passes_the_demo(scenario: Scenario) -> None:
    report = judge(VirtualEngine().run(scenario))
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    if scenario.expect == "tolerate":
        assert report.history.succeeded
    if report.history.succeeded:
        touched = sum(len(t.last_lookup) for t in report.history.tables.values())
        assert report.rows_compared == touched > 0


@pytest.mark.parametrize("scenario", demo_scenarios(), ids=lambda s: s.name)
def test_code_that_knows_nothing_of_the_engine_passes_too(scenario: Scenario) -> None:
    report = judge(VirtualEngine().run(scenario, target("Threaded")))
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])


def test_another_seed_or_variant_is_another_order() -> None:
    engine = VirtualEngine()
    orders = {tuple(engine.run(SMALL, variant=v).schedule or ()) for v in range(5)}
    assert len(orders) == 5


def test_a_recorded_schedule_repeats_the_run() -> None:
    engine = VirtualEngine()
    first = engine.run(SMALL, variant=3)
    assert digest(engine.run(SMALL, schedule=first.schedule)) == digest(first)
    with pytest.raises(ScheduleDiverged):
        engine.run(SMALL, schedule=(first.schedule or [])[:-5])
    assert digest(engine.run(SMALL, variant=3)) == digest(first)  # the engine goes on after that


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(scenarios())
def test_the_same_scenario_gives_the_same_bytes(scenario: Scenario) -> None:
    engine = VirtualEngine()
    assert digest(engine.run(scenario)) == digest(engine.run(scenario))


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.ERROR])
def test_what_this_process_logs_does_not_show(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest(VirtualEngine().run(RICH))
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", level)
    root.manager._clear_cache()  # type: ignore[attr-defined]
    assert digest(VirtualEngine().run(RICH)) == expected
    assert root.level == level
    logging.disable(logging.CRITICAL)
    try:
        assert digest(VirtualEngine().run(RICH)) == expected
        assert not root.isEnabledFor(logging.CRITICAL)
    finally:
        logging.disable(logging.NOTSET)


def test_credentials_that_this_process_has_met_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be redacted from the errors of the ranks, which have not met them."""
    refused = next(s for s in demo_scenarios() if s.name == "store-403")
    monkeypatch.setattr(errors, "_remembered", deque())
    expected = digest(VirtualEngine().run(refused))
    errors.remember("planned fault")
    assert digest(VirtualEngine().run(refused)) == expected
    assert list(errors._remembered) == ["planned fault"]


def test_another_process_and_hash_seed_give_the_same_bytes() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_engine as t\n"
        "for scenario in (t.SMALL, t.RICH, t.DYNAMIC):\n"
        "    print(t.digest(t.VirtualEngine().run(scenario)))\n"
        "print(t.digest(t.VirtualEngine().run(t.SMALL, t.target('Threaded'))))"
    )
    sys.path.insert(0, str(HERE))
    runs = [(SMALL, "reference"), (RICH, "reference"), (DYNAMIC, "reference"), (SMALL, target("Threaded"))]
    expected = [digest(VirtualEngine().run(*run)) for run in runs]
    for hash_seed in ("0", "1", "12345"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        ran = subprocess.run(
            [sys.executable, "-c", program, str(HERE)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.stdout.split() == expected, ran.stderr


def test_a_killed_rank_leaves_its_peers_to_fail_and_the_job_to_end() -> None:
    scenario = msgspec.structs.replace(SMALL, faults=(RankKill(rank=1, point="train.after-step", nth=3),))
    history = VirtualEngine().run(scenario)
    assert [o.status for o in history.outcomes] == ["error", "killed"] or history.outcomes[0].status == "ended"
    assert judge(history).verdict is Verdict.HELD


def test_a_hang_is_reported_with_the_stacks_of_every_thread() -> None:
    scenario = msgspec.structs.replace(SMALL, faults=(), deadlines=Deadlines(run_s=30, grace_s=5))
    for variant in range(200):
        history = VirtualEngine().run(scenario, target("DeadLock"), variant=variant)
        if not history.succeeded:
            break
    else:
        pytest.fail("the deadlock never happened")
    stuck = [o.rank for o in history.outcomes if o.status == "deadlock"] or [
        o.rank for o in history.outcomes if o.status == "deadline"
    ]
    stacks = history.stacks[stuck[0]]
    assert "in submit" in stacks
    assert "in sent" in stacks
    assert "terminates" in judge(history).reason


TINY = Scenario(
    name="tiny",
    world_size=1,
    tables=(Table(name="item", rows=20),),
    workload=Workload(steps=3),
    publisher=PublisherConfig(every_steps=1),
)
BUGS = ["LostWakeUp", "Race", "DeadLock"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_threading_are_found_on_one_rank_in_three_steps(bug: str) -> None:
    engine = VirtualEngine()
    runs = (judge(engine.run(TINY, target(bug), variant=v)) for v in range(2000))
    found = next(report for report in runs if report.violations)
    # What was found can be had again, from the choices alone.
    again = judge(engine.run(TINY, target(bug), schedule=found.history.schedule))
    assert [v.message for v in again.violations] == [v.message for v in found.violations]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_threading_are_shrunk(bug: str) -> None:
    engine = VirtualEngine()

    def holds(scenario: Scenario, shrinking: bool) -> bool:
        variants = range(200 if shrinking else 1)
        return not any(judge(engine.run(scenario, target(bug), variant=v)).violations for v in variants)

    campaign = explore(holds, scenarios(), count=2000, seed=20261201, failures_max=1, shrink_s=300)
    [failure] = campaign.failures
    assert failure.smallest.world_size <= 2
    assert failure.smallest.workload.steps <= 3


def test_a_scenario_for_devices_is_refused() -> None:
    scenario = msgspec.structs.replace(SMALL, devices="shared")
    with pytest.raises(ScenarioError, match=r"the virtual engine has no devices.*'shared'; use the process engine"):
        VirtualEngine().run(scenario)


def test_what_cannot_be_simulated_fails_the_run_by_name() -> None:
    history = VirtualEngine().run(SMALL, target("UsesASocket"))
    assert SimulationError.__name__ in history.outcomes[0].error
    assert "socket" in history.outcomes[0].error

"""Real ranks against a real server: what is tolerated is tolerated, and whatever a target does, the harness ends."""

import multiprocessing.forkserver
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.evidence import survived
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.catalogue import MIXED, demo_scenarios
from deltaproof.simulator.errors import KitError, ScenarioError
from deltaproof.simulator.faults import Exhaustion, Policy, RankKill, RankRaise
from deltaproof.simulator.history import values_at
from deltaproof.simulator.processes import engine as engine_module
from deltaproof.simulator.processes import supervisor as supervisor_module
from deltaproof.simulator.scenario import Deadlines, Restart, Scenario, Table, Workload

pytestmark = pytest.mark.xdist_group("engine")

SHORT = Scenario(name="short", tables=MIXED, workload=Workload(steps=4), deadlines=Deadlines(run_s=30, grace_s=3))


def targeted(name: str) -> str:
    return f"deltaproof_test_targets:{name}"


# All of the demo is under soak; tests/scenarios/ has the same faults, three times each and more.
IN_EACH_RUN = (
    "calm",
    "client-raises-in-worker",
    "batch-partly-applied",
    "four-ranks-all-at-once",
    "four-ranks-one-killed",
)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, marks=() if s.name in IN_EACH_RUN else pytest.mark.soak) for s in demo_scenarios()],
    ids=lambda s: s.name,
)
def test_the_reference_passes_the_demo(engine, scenario: Scenario) -> None:
    report = check(engine, scenario)
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    assert all(n > 0 for n in report.history.fired)
    if scenario.expect == "tolerate":
        assert report.history.succeeded
    if report.history.succeeded:
        touched = sum(len(t.last_lookup) for t in report.history.tables.values())
        assert report.rows_compared == touched > 0


def test_one_rank_alone(engine) -> None:
    scenario = Scenario(world_size=1, tables=(Table(name="item"), Table(name="city", sharding="data_parallel")))
    assert check(engine, scenario).verdict is Verdict.HELD


def test_same_scenario_same_ledger_other_seed_another(engine) -> None:
    def final(seed: int) -> list[bytes]:
        history = engine.run(msgspec.structs.replace(SHORT, seed=seed))
        return [t.final.tobytes() for t in history.tables.values()]

    assert final(1) == final(1)
    assert final(1) != final(2)


def test_ranks_start_with_torch_in_memory(engine) -> None:
    starts = [e for e in engine.run(SHORT).events if e.kind == "rank-start"]
    assert len(starts) == 2
    assert all(e.data["preloaded"] for e in starts)


def test_a_publisher_that_publishes_nothing_is_found_out(engine) -> None:
    report = check(engine, SHORT, targeted("Silent"))
    assert report.verdict is Verdict.BROKEN
    assert {"no-lost-rows", "no-silent-loss"} <= {v.property for v in report.violations}


def test_a_target_that_hangs_is_ended_at_its_deadline_with_its_stack(engine) -> None:
    scenario = msgspec.structs.replace(SHORT, deadlines=Deadlines(run_s=3, grace_s=1))
    report = check(engine, scenario, targeted("HangsInStart"))
    history = report.history
    assert [o.status for o in history.outcomes] == ["deadline", "deadline"]
    assert "deltaproof_test_targets.py" in history.stacks[0]
    assert "terminates" in {v.property for v in report.violations}
    assert history.wall_s < 20


def test_a_rank_that_raised_but_does_not_exit_hangs(engine) -> None:
    report = check(engine, SHORT, targeted("RaisesButLives"))
    outcomes = report.history.outcomes
    assert outcomes[1].status == "deadline"
    assert "step 2" in outcomes[1].error
    assert outcomes[1].where == "after_step"
    assert "terminates" in {v.property for v in report.violations}


def test_a_rank_that_exits_without_a_word_is_no_success(engine) -> None:
    report = check(engine, SHORT, targeted("ExitsQuietly"))
    assert "vanished" in {o.status for o in report.history.outcomes}
    assert "fails-loudly" in {v.property for v in report.violations}


def test_the_steps_an_error_names_are_kept(engine) -> None:
    history = engine.run(SHORT, targeted("NamesSteps"))
    assert not history.succeeded
    assert history.outcomes[0].unacknowledged == (2, 3)
    assert history.outcomes[0].where == "finish"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("deltaproof_test_targets:nothing", "returned None: its factory has to return"),
        ("deltaproof_test_targets:absent", "cannot import target"),
        ("deltaproof_test_targets:not_callable", "not a callable"),
        ("no_such_module:make", "cannot import target"),
        ("gibberish", "neither 'reference'"),
        ("specimen:S99", "unknown specimen 'S99'"),
    ],
)
def test_a_target_that_is_none_is_bad_input(engine, target: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        engine.run(SHORT, target)


@pytest.mark.parametrize("policy", ["stop-together", "empty-batches"])
def test_a_rank_without_a_single_batch(engine, policy: Policy) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(Exhaustion(rank=1, batches=0, policy=policy),))
    report = check(engine, scenario)
    # Stopping together before the first step leaves nothing to publish, and that is not called a success.
    assert report.verdict is (Verdict.NOT_EXERCISED if policy == "stop-together" else Verdict.HELD), report.reason


def test_collectives_of_the_target_are_counted_by_call_site_and_those_of_the_model_are_not(engine) -> None:
    calls = [e for e in engine.run(SHORT, targeted("Votes")).events if e.kind == "after-step"]
    assert len(calls) == 8
    for call in calls:
        sites = call.data["collectives"]
        assert {(site.split()[0], n) for site, n in sites.items()} == {("allreduce", 1), ("barrier", 1)}
        assert all("deltaproof_test_targets.py" in site and site.endswith("in after_step") for site in sites)
    quiet = engine.run(SHORT, targeted("Silent")).events
    assert all(e.data["collectives"] == {} for e in quiet if e.kind == "after-step")


def test_a_secret_that_a_target_prints_is_found_in_its_log_and_not_repeated(engine) -> None:
    report = check(engine, SHORT, targeted("PrintsItsLogin"))
    leaks = [v for v in report.violations if v.property == "no-secret-leak"]
    assert {(v.rank, v.message) for v in leaks} == {
        (rank, f"rank{rank}.log has the value of FEATUREDB_PASSWORD") for rank in (0, 1)
    }
    assert all(v.found == "logging in with [FEATUREDB_PASSWORD]" for v in leaks)


RESTARTED = Scenario(
    name="restarted",
    tables=MIXED,
    workload=Workload(steps=5, checkpoint_every_steps=2),
    faults=(RankKill(rank=1, point="train.after-step", nth=4),),
    restarts=(Restart(world_size=3), Restart()),
    deadlines=Deadlines(run_s=30, grace_s=3),
)


def test_a_restarted_job_counts_its_steps_on_and_knows_which_of_them_survived(engine) -> None:
    history = engine.run(RESTARTED)
    assert history.succeeded
    first, second = history.starts
    assert (first.world_size, second.world_size) == (2, 3)
    assert [o.status for o in first.outcomes].count("killed") == 1
    assert (second.checkpoint_of, second.restored, second.since) == (0, 2, 5)
    moments = {history.moment(e) for e in history.events if e.kind == "step"}
    assert moments == {1, 2, 3, 4, 6, 7, 8}
    assert survived(history, np.arange(1, 9)).tolist() == [True, True, False, False, False, True, True, True]
    for ledger in history.tables.values():
        assert set(ledger.lookup_steps.tolist()) <= moments
        at_checkpoint, after_restore = values_at(ledger, 2), values_at(ledger, 5)
        assert at_checkpoint.tobytes() == after_restore.tobytes()


def test_a_restarted_target_gets_the_states_of_all_ranks(engine) -> None:
    assert engine.run(RESTARTED, targeted("Restarts")).succeeded


def test_a_target_that_cannot_restart_is_bad_input_where_it_has_to(engine) -> None:
    with pytest.raises(ScenarioError, match="which has no state_dict, load_state_dict, start_over"):
        engine.run(RESTARTED, targeted("Silent"))


def test_no_restart_is_made_when_none_is_needed(engine) -> None:
    calm = msgspec.structs.replace(RESTARTED, faults=(), workload=Workload(steps=2))
    assert not engine.run(calm).restarted


def test_a_fault_that_never_fires_makes_the_run_not_exercised(engine) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(RankKill(rank=0, point="train.after-step", nth=99),))
    report = check(engine, scenario)
    assert report.history.succeeded
    assert report.verdict is Verdict.NOT_EXERCISED
    assert "rank-kill" in report.reason


@pytest.mark.parametrize("point", ["publisher.start", "train.before-backward", "publish.after", "finish.before"])
@pytest.mark.parametrize("fault", [RankRaise, RankKill])
def test_a_rank_may_die_anywhere(engine, fault, point: str) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(fault(rank=1, point=point),))
    report = check(engine, scenario)
    assert report.verdict is Verdict.HELD, [v.message for v in report.violations]
    assert not report.history.succeeded
    assert report.history.outcomes[1].status == ("killed" if fault is RankKill else "error")


def test_no_process_of_a_run_outlives_it(engine) -> None:
    def others() -> set[int]:
        return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}

    before = others()
    engine.run(SHORT, targeted("RaisesButLives"))
    assert others() <= before


def test_a_store_that_was_killed_is_started_anew(engine) -> None:
    store = engine._store
    os.kill(store._process.pid, signal.SIGKILL)
    store._process.join(10)
    assert check(engine, SHORT).verdict is Verdict.HELD


def test_a_run_that_cannot_be_recorded_says_nothing_about_the_target(engine) -> None:
    with pytest.raises(KitError, match="could not record the run"):
        engine.run(SHORT, targeted("BreaksTheRecords"))


def test_rows_written_to_another_version_are_phantoms(engine) -> None:
    report = check(engine, SHORT, targeted("also_writes_elsewhere"))
    messages = [v.message for v in report.violations if v.property == "no-phantom-rows"]
    assert any("went to version 'default'" in m for m in messages), messages


def test_rows_that_went_to_another_version_alone_are_lost_even_when_a_peer_dies(engine) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(RankKill(rank=1, point="finish.after"),))
    report = check(engine, scenario, targeted("writes_elsewhere"))
    assert {"no-silent-loss", "no-phantom-rows"} <= {v.property for v in report.violations}


def test_a_stopped_forkserver_is_an_error_of_the_kit_within_its_deadline(engine, monkeypatch) -> None:
    engine.run(SHORT)
    engine.release()  # the next ranks have to be forked
    monkeypatch.setattr(supervisor_module, "START_S", 1.0)
    forkserver: Any = multiprocessing.forkserver._forkserver
    os.kill(forkserver._forkserver_pid, signal.SIGSTOP)
    with pytest.raises(KitError, match="no process could be started"):
        engine.run(SHORT)
    monkeypatch.undo()
    assert check(engine, SHORT).verdict is Verdict.HELD


def test_a_forkserver_that_dies_in_a_run_is_an_error_of_the_kit(engine) -> None:
    with pytest.raises(KitError, match="forkserver died"):
        engine.run(SHORT, targeted("KillsTheForkserver"))
    assert check(engine, SHORT).verdict is Verdict.HELD


def test_folders_of_killed_engines_are_swept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait(10)
    stale, mine, other = (tmp_path / f"deltaproof-{n}-x" for n in (gone.pid, os.getpid(), "y"))
    for folder in (stale, mine, other):
        folder.mkdir()
    engine_module._sweep()
    assert not stale.exists()
    assert mine.exists()
    assert other.exists()


def test_ctrl_c_reaches_no_child_at_any_moment_of_its_start(engine) -> None:
    """A rank that has only begun to start cannot ignore SIGINT yet: it must be born with the signal blocked."""
    engine.warm_up()
    children = [p for p in psutil.Process().children(recursive=True) if "forkserver" in " ".join(p.cmdline())]
    assert len(children) >= 2, "the forkserver and the store"
    for child in children:
        status = Path(f"/proc/{child.pid}/status").read_text()
        blocked = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
        assert blocked & 1 << signal.SIGINT - 1, child

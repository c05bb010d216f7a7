"""Ranks that run one scenario after another: nothing of a run is left for the next, and doubtful ones are ended."""

import importlib
import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.catalogue import MIXED
from deltaproof.simulator.faults import ClockOffset, DiskError, RankKill, RankRaise
from deltaproof.simulator.history import History, values_at
from deltaproof.simulator.processes import engine as engine_module
from deltaproof.simulator.processes import pool
from deltaproof.simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload

pytestmark = pytest.mark.xdist_group("processes")

FIRST = Scenario(name="first", tables=MIXED, workload=Workload(steps=3), deadlines=Deadlines(run_s=30, grace_s=3))
SECOND = Scenario(
    name="second",
    seed=5,
    tables=(Table(name="item", collection="ec", owner="ec"), Table(name="city", sharding="data_parallel")),
    workload=Workload(steps=4, eval_every_steps=2),
    deadlines=Deadlines(run_s=30, grace_s=3),
)


@pytest.fixture
def engine(engine):
    """With no process in its pool that another test left there."""
    engine.release()
    yield engine
    engine.release()


def pids(history: History) -> set[int]:
    return {e.data["pid"] for e in history.events if e.kind == "rank-start"}


def runs_before(history: History) -> set[int]:
    return {e.data["runs_before"] for e in history.events if e.kind == "rank-start"}


def seen(history: History) -> tuple:
    """What must not depend on what ran before."""
    ledger = {fqn: values_at(t, history.scenario.workload.steps).tobytes() for fqn, t in history.tables.items()}
    final = history.final.drop_columns("ts").sort_by([("pk", "ascending"), ("sk", "ascending")])
    calls = sorted((e.rank, e.step, str(e.data["collectives"])) for e in history.events if e.kind == "after-step")
    kinds = sorted((e.who, e.kind, e.step or 0) for e in history.events if e.kind not in ("request", "sdk-flush"))
    return ledger, final, calls, kinds, [o.status for o in history.outcomes]


def test_a_run_after_another_is_the_run_alone(engine) -> None:
    alone = check(engine, SECOND)
    assert runs_before(alone.history) == {0}
    engine.release()
    check(engine, FIRST)
    after = check(engine, SECOND)
    assert runs_before(after.history) == {1}
    assert seen(after.history) == seen(alone.history)
    assert (after.verdict, after.rows_compared) == (alone.verdict, alone.rows_compared)
    assert after.verdict is Verdict.HELD


def test_used_and_fresh_ranks_meet_in_one_job(engine) -> None:
    engine.run(FIRST)
    history = engine.run(msgspec.structs.replace(FIRST, world_size=3))
    assert history.succeeded
    assert runs_before(history) == {0, 1}


def test_threads_and_descriptors_do_not_grow(engine) -> None:
    def held() -> dict[int, tuple[int, int]]:
        return {
            pid: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
            for pid in engine._pool.idle_pids
        }

    for _ in range(3):
        engine.run(FIRST)
    before = held()
    for _ in range(4):
        engine.run(FIRST)
    after = held()
    assert after.keys() == before.keys()
    for pid, (descriptors, threads) in after.items():
        # What closes a moment later, in the collection behind a run, may or may not be gone.
        assert descriptors <= before[pid][0] + 6, (before, after)
        assert threads <= before[pid][1] + 2, (before, after)


@pytest.mark.parametrize("fault", [RankKill, RankRaise])
def test_ranks_of_a_job_that_failed_are_not_used_again(engine, fault) -> None:
    engine.run(FIRST)
    failed = engine.run(msgspec.structs.replace(FIRST, faults=(fault(rank=1, point="finish.after"),)))
    assert runs_before(failed) == {1}
    assert engine._pool.idle_pids == []
    assert runs_before(engine.run(FIRST)) == {0}
    assert not [pid for pid in pids(failed) if psutil.pid_exists(pid)]


def test_what_patches_a_process_and_what_is_no_reference_gets_a_process_of_its_own(engine) -> None:
    engine.run(FIRST)
    waiting = engine._pool.idle_pids
    skewed = engine.run(msgspec.structs.replace(FIRST, faults=(ClockOffset(rank=0, seconds=60.0),)))
    specimen = engine.run(FIRST, "specimen:S02")
    foreign = engine.run(FIRST, "deltaproof_test_targets:Silent")
    for history in (skewed, specimen, foreign):
        assert not pids(history) & set(waiting)
        assert runs_before(history) == {0}
    assert engine._pool.idle_pids == waiting


@pytest.mark.parametrize("fault", [ClockOffset(rank=0, seconds=60.0), DiskError(rank=0, nth=99)])
def test_a_process_whose_clock_or_disk_was_replaced_is_ended_even_if_nobody_expected_it(
    engine, fault: ClockOffset | DiskError, monkeypatch
) -> None:
    monkeypatch.setattr(engine_module, "may_share", lambda scenario, target: True)
    scenario = msgspec.structs.replace(FIRST, faults=(fault,), publisher=PublisherConfig(retain=True))
    assert engine.run(scenario).succeeded
    assert len(engine._pool.idle_pids) == 1  # that of rank 1


def test_a_rank_that_was_killed_while_it_waited_is_replaced(engine, monkeypatch) -> None:
    engine.run(FIRST)
    victim = engine._pool.idle_pids[0]
    # As if it died between the look whether it lives and the sending of its task.
    monkeypatch.setattr(type(engine._pool._idle[0].process), "is_alive", lambda self: True)
    os.kill(victim, signal.SIGKILL)
    psutil.Process(victim).wait(10)
    history = engine.run(FIRST)
    assert history.succeeded
    assert victim not in pids(history)


def test_a_process_is_ended_after_so_many_runs_or_when_it_has_grown(engine, monkeypatch) -> None:
    monkeypatch.setattr(pool, "RUNS_MAX", 2)
    engine.run(FIRST)
    assert len(engine._pool.idle_pids) == 2
    engine.run(FIRST)
    assert engine._pool.idle_pids == []
    monkeypatch.setattr(pool, "GROWTH_BYTES_MAX", 0)
    engine.run(FIRST)
    assert engine._pool.idle_pids == []


def test_a_rank_puts_back_what_a_run_may_change(engine) -> None:
    targets = importlib.import_module("deltaproof_test_targets")  # on sys.path by now (conftest.py)

    mine, theirs = engine._context.Pipe()
    process = engine._context.Process(target=targets.leave_things_behind_and_restore, args=(theirs,))
    process.start()
    theirs.close()
    assert mine.poll(60)
    before, changed, restored = mine.recv()
    process.join(10)
    process.close()
    mine.close()
    assert all(a != b for a, b in zip(before, changed, strict=True))
    assert restored == before


def test_closing_an_engine_ends_the_ranks_that_wait(engine) -> None:
    engine.run(FIRST)
    waiting = engine._pool.idle_pids
    assert len(waiting) == 2
    engine.release()
    assert not [pid for pid in waiting if Path(f"/proc/{pid}").exists() and psutil.Process(pid).is_running()]

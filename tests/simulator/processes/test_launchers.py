"""The same ranks under torchrun as under our own supervisor: same verdicts, and nothing left whoever is killed."""

import socket
import subprocess
from pathlib import Path

import msgspec
import psutil
import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.catalogue import MIXED
from deltaproof.simulator.errors import KitError, ScenarioError
from deltaproof.simulator.faults import RankKill, RankRaise
from deltaproof.simulator.history import EventWriter
from deltaproof.simulator.processes import launchers
from deltaproof.simulator.processes.engine import ProcessEngine
from deltaproof.simulator.processes.launchers import Torchrun, check_options
from deltaproof.simulator.processes.rank import RankSpec
from deltaproof.simulator.scenario import Deadlines, Restart, Scenario, Table, Workload

CORPUS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.json"))
SHORT = Scenario(name="short", tables=MIXED, workload=Workload(steps=4), deadlines=Deadlines(run_s=30, grace_s=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("slurm", 1, "torchrun"), "unknown launcher 'slurm'"),
        (("own", 1, "lenient"), "unknown supervision 'lenient'"),
        (("torchrun", 0, "torchrun"), "at least one node"),
        (("own", 2, "torchrun"), "need the launcher torchrun"),
        (("torchrun", 1, "strict"), "needs the launcher own"),
    ],
)
def test_options_that_do_not_go_together_are_bad_input(options, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        check_options(*options)


def test_a_reserved_port_is_kept_from_others_and_free_for_the_rendezvous() -> None:
    with launchers._reserve_port() as reserved, socket.socket() as other, socket.socket() as rendezvous:
        with pytest.raises(OSError, match="in use"):
            other.bind(reserved.getsockname())
        rendezvous.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rendezvous.bind(reserved.getsockname())
        rendezvous.listen()


def ended_job(folder: Path, records: list[str], *reports: dict[int, int] | None) -> Torchrun:
    """A job whose agents are gone. ``records``: of each rank, the kind of its last record; one report per node."""
    job = Torchrun([RankSpec("{}", rank, "", "", str(folder)) for rank in range(len(records))], len(reports))
    for rank, kind in enumerate(records):
        writer = EventWriter(folder / f"rank{rank}.events.jsonl", f"rank{rank}", rank)
        writer.write("rank-start", pid=2**30 + rank)  # greater than any the kernel gives
        writer.write(kind)
        writer.close()
    for node, report in enumerate(reports):
        if report is not None:
            job._report_file(node).write_bytes(msgspec.json.encode(report))
    return job


@pytest.mark.parametrize(
    ("records", "reports", "codes", "closed"),
    [
        # Everybody did well.
        (["rank-end", "rank-end"], [{}], [0, 0], []),
        # It exited with 0 and without a word.
        (["step", "rank-end"], [{}], [0, 0], []),
        # Rank 1 died of a signal, and its agent ended rank 0, which had said nothing of an end.
        (["step", "step"], [{0: -15, 1: -9}], [-15, -9], [0]),
        # An older torchrun does not list the ranks that it ended.
        (["step", "step"], [{1: -9}], [None, -9], [0]),
        # The signal met a rank that was about to exit anyway.
        (["error", "error"], [{0: -15, 1: 1}], [1, 1], []),
        # It crashed after all was done: only the agent knows.
        (["rank-end", "rank-end"], [{0: -11}], [-11, 0], []),
        # SIGTERM from somebody else is no end by the launcher.
        (["step", "rank-end"], [{0: -15}], [-15, 0], []),
        # Agents end the ranks of their own node only, and one of them was killed before it could say anything.
        (["error", "step", "rank-end"], [{0: 1, 1: -15}, None], [1, -15, 0], [1]),
        (["step", "bad-input"], [{0: -15, 1: 2}], [-15, 2], [0]),
    ],
)
def test_how_ranks_ended_is_put_together_from_their_records_and_the_agents(
    tmp_path, records, reports, codes, closed
) -> None:
    job = ended_job(tmp_path, records, *reports)
    assert [rank.pid is not None and rank.is_alive() for rank in job.ranks] == [False] * len(records)
    assert [rank.exitcode for rank in job.ranks] == codes
    assert [rank for rank in range(len(records)) if job.closed(rank)] == closed


def test_ranks_are_numbered_node_by_node(tmp_path) -> None:
    specs = [RankSpec("{}", rank, "", "", str(tmp_path)) for rank in range(5)]
    assert [rank.node for rank in Torchrun(specs, 3)._torchrun_ranks] == [0, 0, 1, 1, 2]
    assert Torchrun(specs[:2], 3).nodes == 2


def test_the_number_of_an_agent_that_is_gone_may_be_somebody_elses(tmp_path, monkeypatch) -> None:
    job = ended_job(tmp_path, ["rank-end"], {})
    with subprocess.Popen(["true"]) as gone:
        gone.wait(10)
    job._agents.append(gone)
    monkeypatch.setattr(psutil, "Process", lambda pid: pytest.fail(f"process {pid} was touched"))
    job.end()


@pytest.fixture(scope="module")
def torchrun():
    with ProcessEngine(launcher="torchrun") as running:
        yield running


@pytest.fixture(scope="module")
def two_nodes():
    with ProcessEngine(launcher="torchrun", nodes=2) as running:
        yield running


@pytest.fixture(scope="module")
def strict():
    with ProcessEngine(supervision="strict") as running:
        yield running


@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(300)
def test_the_reference_holds_under_torchrun(torchrun) -> None:
    report = check(torchrun, Scenario.load(next(p for p in CORPUS if p.stem == "json-retry-after-commit")))
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    history = report.history
    assert history.succeeded
    assert (history.launcher, history.nodes, history.supervision) == ("torchrun", 1, "torchrun")
    assert all(e.data["preloaded"] for e in history.events if e.kind == "rank-start")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_the_corpus_holds_under_torchrun(torchrun, path: Path) -> None:
    scenario = Scenario.load(path)
    report = check(torchrun, scenario)
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    if scenario.expect == "tolerate":
        assert report.history.succeeded


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_nodes_meet_at_a_static_rendezvous(two_nodes, world_size: int) -> None:
    tables = (Table(name="item"), Table(name="city", sharding="data_parallel"))
    report = check(two_nodes, msgspec.structs.replace(SHORT, world_size=world_size, tables=tables))
    assert report.verdict is Verdict.HELD, (report.reason, [v.message for v in report.violations])
    assert report.history.succeeded
    assert report.history.nodes == min(world_size, 2)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [RankRaise, RankKill])
@pytest.mark.parametrize("which", ["torchrun", "two_nodes"])
def test_a_rank_may_die_under_torchrun(request, which: str, fault) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(fault(rank=1, point="train.after-step", nth=2),))
    report = check(request.getfixturevalue(which), scenario)
    assert report.verdict is Verdict.HELD, [v.message for v in report.violations]
    first, second = report.history.outcomes
    assert second.status == ("killed" if fault is RankKill else "error")
    assert first.status in ("ended", "error")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["torchrun", "two_nodes"])
def test_a_job_is_restarted_under_torchrun_on_other_world_sizes(request, which: str) -> None:
    scenario = msgspec.structs.replace(
        SHORT,
        workload=Workload(steps=5, checkpoint_every_steps=2),
        faults=(RankKill(rank=1, point="train.after-step", nth=4),),
        restarts=(Restart(world_size=3),),
    )
    report = check(request.getfixturevalue(which), scenario)
    assert report.verdict is Verdict.HELD, [v.message for v in report.violations]
    assert [attempt.world_size for attempt in report.history.starts] == [2, 3]
    assert report.history.succeeded


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["HangsInStart", "RaisesButLives", "ExitsQuietly", "StopsItself", "IgnoresSigterm"])
def test_a_target_that_misbehaves_is_found_out_under_torchrun(torchrun, engine, target: str) -> None:
    scenario = msgspec.structs.replace(SHORT, deadlines=Deadlines(run_s=15, grace_s=3))
    there, here = (check(e, scenario, f"deltaproof_test_targets:{target}") for e in (torchrun, engine))
    assert there.verdict is here.verdict
    assert {v.property for v in there.violations} == {v.property for v in here.violations}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_bad_input_is_told_under_torchrun(torchrun) -> None:
    with pytest.raises(ScenarioError, match="cannot import target"):
        torchrun.run(SHORT, "no_such_module:make")


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("fault", [RankRaise, RankKill])
def test_under_strict_supervision_peers_of_a_dead_rank_end_by_themselves(strict, fault) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(fault(rank=1, point="train.after-step", nth=2),))
    report = check(strict, scenario)
    assert report.verdict is Verdict.HELD, [v.message for v in report.violations]
    assert report.history.outcomes[0].status == "error"
    assert report.history.supervision == "strict"


@pytest.mark.xdist_group("processes")
def test_under_strict_supervision_a_peer_that_waits_for_ever_is_found_out(strict, engine) -> None:
    scenario = msgspec.structs.replace(SHORT, deadlines=Deadlines(run_s=4, grace_s=1))
    lenient, report = (check(e, scenario, "deltaproof_test_targets:IgnoresSigterm") for e in (engine, strict))
    assert [o.status for o in lenient.history.outcomes] == ["ended", "error"]
    assert [o.status for o in report.history.outcomes] == ["deadline", "error"]
    assert "terminates" in {v.property for v in report.violations}
    assert "terminates" not in {v.property for v in lenient.violations}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_an_agent_that_was_killed_is_an_error_of_the_kit(torchrun) -> None:
    # The parent of a rank, which this target kills, is the agent here.
    with pytest.raises(KitError, match="launcher did not say how it ended"):
        torchrun.run(SHORT, "deltaproof_test_targets:KillsTheForkserver")
    assert check(torchrun, SHORT).verdict is Verdict.HELD

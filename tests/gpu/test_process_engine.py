"""The process engine on one CUDA device: the corpus and known bugs, with 1 to 8 ranks, over gloo and over NCCL.

`make gpu-test ARGS="-n 6"` shares the runs out over six engines, which share the device.
"""

import multiprocessing.forkserver
import os
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.faults import RankKill
from deltaproof.simulator.history import History
from deltaproof.simulator.scenario import Backend, Deadlines, Scenario, Table, Workload

# A job of eight ranks that share one device takes tens of seconds when six engines do so at a time.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FILES = sorted((Path(__file__).parents[1] / "scenarios").glob("*.json"))
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DEVICE_FAILS = Scenario(
    name="device-fails",
    tables=(Table(name="item"),),
    workload=Workload(steps=6),
    deadlines=Deadlines(run_s=30, grace_s=3),
)
SHORT = Scenario(name="short", tables=(Table(name="item"),), workload=Workload(steps=4))


def on_gpu(scenario: Scenario, backend: Backend, ranks: int | None = None) -> Scenario:
    """The scenario on the one device, with ``ranks`` ranks and more time. Raises ScenarioError where it has no sense
    with so many."""
    size = ranks or scenario.world_size
    return msgspec.structs.replace(
        scenario,
        devices="shared",
        backend=backend,
        world_size=size,
        tables=tuple(msgspec.structs.replace(t, rank=t.rank % size) for t in scenario.tables),
        deadlines=Deadlines(run_s=4 * scenario.deadlines.run_s, grace_s=4 * scenario.deadlines.grace_s),
    ).checked()


def data_of(history: History, kind: str) -> list[dict[str, Any]]:
    return [e.data for e in history.events if e.kind == kind]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_reference_holds(engine, path: Path, backend: Backend, ranks: int) -> None:
    scenario = Scenario.load(path)
    try:
        placed = on_gpu(scenario, backend, ranks)
    except ScenarioError as error:
        pytest.skip(f"has no sense on {ranks} ranks: {error}")
    report = check(engine, placed)
    # With another number of ranks a fault may find nothing to strike, or a table nothing to publish.
    fine = (Verdict.HELD,) if ranks == scenario.world_size else (Verdict.HELD, Verdict.NOT_EXERCISED)
    told = [v.message for v in report.violations], [o.error[:300] for o in report.history.outcomes]
    assert report.verdict in fine, (report.reason, *told)
    if placed.expect == "tolerate":
        assert report.history.succeeded, told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("specimen_id", ["S01", "S05", "S19", "S20", "S33"])
def test_a_known_bug_is_caught(engine, specimen_id: str, backend: Backend) -> None:
    specimen = SPECIMENS[specimen_id]
    report = check(engine, on_gpu(specimen.scenario, backend), f"specimen:{specimen_id}")
    assert set(specimen.properties) <= {f.property for f in report.findings if f.violations}, report.reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_used_is_in_the_history(engine, backend: Backend) -> None:
    import torch

    for used in data_of(engine.run(on_gpu(SHORT, backend)), "model-ready"):
        assert (used["device"], used["backend"]) == ("cuda:0", backend)
        assert used["device_name"] == torch.cuda.get_device_name(0)
        assert ("nccl" in used) == (backend == "nccl")


def cuda_begun(pid: int) -> bool:
    """Whether a process talks to the driver: this device node is opened when CUDA begins, and not by NVML."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    return any("nvidia-uvm" in name for name in found)


def test_cuda_begins_in_the_ranks_and_never_in_the_process_they_fork_from(engine) -> None:
    assert engine.run(on_gpu(SHORT, "nccl")).succeeded
    forkserver: Any = multiprocessing.forkserver._forkserver
    assert not cuda_begun(forkserver._forkserver_pid)
    assert engine._pool.idle_pids
    assert all(cuda_begun(pid) for pid in engine._pool.idle_pids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_run_again_on_the_device_and_keep_no_memory_of_it(engine, backend: Backend) -> None:
    import torch

    engine.release()
    scenario = on_gpu(SHORT, backend)
    free = []
    for number in range(5):
        history = engine.run(scenario)
        assert history.succeeded, [o.error for o in history.outcomes]
        assert {e["runs_before"] for e in data_of(history, "rank-start")} == {number}
        free.append(torch.cuda.mem_get_info()[0])
    # Other engines run beside this one (-n), so this is a bound, not an equality.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert free[1] - free[-1] < 256 << 20, free


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_death_of_a_peer_ends_the_job_within_its_deadline(engine, backend: Backend) -> None:
    dying = msgspec.structs.replace(SHORT, faults=(RankKill(rank=1, point="train.after-step", nth=2),))
    report = check(engine, on_gpu(dying, backend))
    assert report.verdict is Verdict.HELD, [v.message for v in report.violations]
    assert report.history.outcomes[1].status == "killed"
    assert report.history.outcomes[0].status != "deadline"
    assert report.history.wall_s < 60


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("target", "message"), [("OutOfMemory", "out of memory"), ("StickyError", "CUDA error")])
def test_a_device_that_fails_under_one_rank_ends_the_job_with_its_error(
    engine, target: str, message: str, backend: Backend
) -> None:
    report = check(engine, on_gpu(DEVICE_FAILS, backend), f"deltaproof_gpu_targets:{target}")
    peer, failed = report.history.outcomes
    # A broken device may abort the process at its end; what it died of is recorded by then.
    assert failed.status in ("error", "killed"), failed
    assert message in failed.error
    assert peer.status != "ok"
    # What is broken, if anything, is that rows went missing with the rank that failed: never that somebody hung.
    assert "terminates" not in {f.property for f in report.findings if f.violations}
    assert report.history.wall_s < 90


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_stops_coming_is_named_at_the_deadline(engine, backend: Backend) -> None:
    scenario = on_gpu(DEVICE_FAILS, backend)
    hung = msgspec.structs.replace(scenario, deadlines=Deadlines(run_s=45.0, grace_s=5.0))
    report = check(engine, hung, "deltaproof_gpu_targets:StopsComing")
    assert not report.history.succeeded
    assert "terminates" in {f.property for f in report.findings if f.violations}
    assert "StopsComing" in report.history.stacks[1] or "in fail" in report.history.stacks[1]
    assert report.history.wall_s < 90


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_for_each_rank(engine, backend: Backend) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    report = check(engine, msgspec.structs.replace(on_gpu(SHORT, backend), devices="per-rank"))
    assert report.verdict is Verdict.HELD, [o.error for o in report.history.outcomes]


def test_more_ranks_than_devices_are_refused_when_each_wants_its_own(engine) -> None:
    import torch

    size = torch.cuda.device_count() + 1
    tables = (Table(name="item", rows=200),)
    scenario = msgspec.structs.replace(SHORT, world_size=size, tables=tables, devices="per-rank", backend="nccl")
    with pytest.raises(ScenarioError, match=f"needs {size} CUDA devices"):
        engine.run(scenario)

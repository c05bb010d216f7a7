"""Where ranks compute. What needs a CUDA device is in tests/gpu."""

import importlib
import json
from importlib.metadata import version
from typing import Any

import msgspec
import pytest

from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.scenario import Deadlines, Scenario, Table, Workload

pytestmark = pytest.mark.xdist_group("processes")

SHORT = Scenario(
    name="short", tables=(Table(name="item"),), workload=Workload(steps=2), deadlines=Deadlines(run_s=60, grace_s=3)
)


def test_devices_are_part_of_a_scenario_and_older_files_mean_the_cpu() -> None:
    assert (SHORT.devices, SHORT.backend) == ("cpu", "gloo")
    assert "devices" not in json.loads(SHORT.to_json())
    placed = msgspec.structs.replace(SHORT, devices="shared", backend="nccl")
    assert Scenario.from_json(placed.to_json()) == placed
    assert placed.version == SHORT.version


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("devices", "tpu", "devices"), ("backend", "mpi", "backend"), ("backend", "nccl", "needs CUDA tensors")],
)
def test_devices_that_cannot_be_are_refused(field: str, value: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Scenario.from_json(json.dumps({"version": 1, field: value}))


def test_what_was_used_is_in_the_history(engine) -> None:
    events = engine.run(SHORT).events
    used = [e.data for e in events if e.kind == "model-ready"]
    assert [(u["device"], u["backend"], u["torch"]) for u in used] == [("cpu", "gloo", version("torch"))] * 2


@pytest.mark.parametrize("devices", ["per-rank", "shared"])
def test_cuda_where_there_is_none_is_bad_input(engine, devices) -> None:
    if asked(engine, "cuda_of_a_fork")["devices"]:
        pytest.skip("there is a CUDA device here")
    scenario = msgspec.structs.replace(SHORT, devices=devices, backend="nccl")
    needed = 2 if devices == "per-rank" else 1
    with pytest.raises(ScenarioError, match=f"needs {needed} CUDA device.* finds 0 here; --devices cpu"):
        engine.run(scenario)


def asked(engine, question: str, *args: Any) -> Any:
    """What a function of `deltaproof_test_targets` answers in a process that is forked as a rank is."""
    targets = importlib.import_module("deltaproof_test_targets")  # on sys.path by now (conftest.py)
    mine, theirs = engine._context.Pipe()
    process = engine._context.Process(target=getattr(targets, question), args=(theirs, *args))
    process.start()
    theirs.close()
    assert mine.poll(60)
    answer = mine.recv()
    process.join(10)
    process.close()
    mine.close()
    return answer


def test_ranks_fork_from_a_process_in_which_cuda_was_not_begun(engine) -> None:
    found = asked(engine, "cuda_of_a_fork")
    del found["devices"]
    assert found == {"preloaded": True, "initialized": False, "lost in the fork": False, "check by NVML": "1"}


@pytest.mark.parametrize(
    ("devices", "backend", "nccl", "told"),
    [
        ("shared", "nccl", (2, 28, 9), {"NCCL_HOSTID": "deltaproof-PID"}),
        ("shared", "nccl", (2, 31, 2), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        ("shared", "gloo", (2, 28, 9), {}),
        ("per-rank", "nccl", (2, 28, 9), {"CUDA_VISIBLE_DEVICES": "7"}),
    ],
)
def test_what_a_rank_on_cuda_tells_nccl(engine, devices, backend, nccl, told) -> None:
    """With a torch.cuda that pretends: rank 1 of a machine that shows devices 5 and 7."""
    scenario = msgspec.structs.replace(SHORT, devices=devices, backend=backend)
    device, current, environment = asked(engine, "placed", scenario.to_json(), nccl)
    assert (device, current) == ("cuda:0", [0])
    given = {"CUDA_VISIBLE_DEVICES": "5,7", "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
    assert environment == {**given, **told}

"""examples/train.py under real torchrun: killed with -9, started again with another number of ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.reference.settings import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 240
EVERY = 40  # steps between checkpoints
WEIGHTS = """
import sys, numpy, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
for folder in sys.argv[1:]:
    dcp_to_torch_save(folder, folder + "/whole.pt")
    whole = torch.load(folder + "/whole.pt", weights_only=True)["model"]
    numpy.savez(folder + "/whole.npz", **{name.removesuffix(".weight"): each.numpy() for name, each in whole.items()})
"""


def test_its_configuration_is_one() -> None:
    assert Settings.load(EXAMPLES / "train.toml").every_steps == 10


class Torchrun:
    """The example on some ranks; ends with the block, and every process of it."""

    def __init__(self, endpoint: str, folder: Path, ranks: int, steps: int) -> None:
        how = ["--standalone", "--nproc-per-node", str(ranks)]
        what = [str(EXAMPLES / "train.py"), "--steps", str(steps), "--config", str(folder / "train.toml")]
        what += ["--checkpoints", str(folder), "--checkpoint-every", str(EVERY)]
        environment = os.environ | {
            "DELTAPROOF_ENDPOINT": endpoint,
            "ALIBABA_CLOUD_ACCESS_KEY_ID": "deltaproof",
            "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "deltaproof",
            "FEATUREDB_USERNAME": "example",
            "FEATUREDB_PASSWORD": "password",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.log = folder / f"{ranks}-ranks.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *how, *what], env=environment, stdout=log, stderr=log
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # else it has ended its workers itself
            family = psutil.Process(self.process.pid)
            for member in [*family.children(recursive=True), family]:
                member.kill()
            self.process.wait(DEADLINE_S)

    def workers(self) -> list[psutil.Process]:
        return [
            child for child in psutil.Process(self.process.pid).children() if "train.py" in " ".join(child.cmdline())
        ]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, self.log.read_text()[-4000:]
            time.sleep(0.01)

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer() as running:
        yield running


def newest(folder: Path) -> Path | None:
    return max(folder.glob("step-*"), default=None)


def published_after_a_checkpoint(folder: Path, store: Any) -> Callable[[], bool]:
    """Says whether rows of steps after the newest checkpoint are in the store."""
    seen: list[tuple[Path | None, int]] = [(None, 0)]

    def condition() -> bool:
        checkpoint = newest(folder)
        if checkpoint is None:
            return False
        ts = store.high_water_ts("deltaproof", "two_towers", "example-1")
        if checkpoint != seen[-1][0]:
            seen.append((checkpoint, ts))
        return bool(ts > seen[-1][1] + 50)

    return condition


@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(3 * DEADLINE_S)
def test_the_store_ends_equal_to_the_model_after_kill_9_and_with_another_number_of_ranks(
    server: FeatureStoreServer, tmp_path: Path
) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("the extra `torch` is not installed")
    config = (EXAMPLES / "train.toml").read_text().replace("every_steps = 10", "every_steps = 3\nsettle_s = 0.5")
    (tmp_path / "train.toml").write_text(config)
    with Torchrun(server.endpoint, tmp_path, 2, 10**9) as job:
        job.until(published_after_a_checkpoint(tmp_path, server.store))
        job.workers()[1].send_signal(signal.SIGKILL)
        assert job.end() != 0
    restored = newest(tmp_path)
    assert restored is not None
    last = int(restored.name.removeprefix("step-")) + EVERY
    leavings = tmp_path / f"unfinished-{last:09d}"  # of a job with more ranks, killed in the middle of this checkpoint
    leavings.mkdir(exist_ok=True)
    (leavings / "publisher-3.pt").write_bytes(b"")
    with Torchrun(server.endpoint, tmp_path, 3, last) as job:
        assert job.end() == 0, job.log.read_text()[-4000:]
    said = job.log.read_text()
    assert all(f"rank {rank}: step {last} acknowledged" in said for rank in range(3)), said[-4000:]

    first, final = min(tmp_path.glob("step-*")), newest(tmp_path)
    assert final is not None
    assert final.name == f"step-{last:09d}"
    assert sorted(path.name for path in final.glob("publisher-*")) == [f"publisher-{rank}.pt" for rank in range(3)]
    subprocess.run([sys.executable, "-c", WEIGHTS, str(first), str(final)], check=True, timeout=DEADLINE_S)
    before, after = np.load(first / "whole.npz"), np.load(final / "whole.npz")
    stored = server.store.snapshot("deltaproof", "two_towers", "example-1").table()
    for name, weights in after.items():
        rows = stored.filter(np.array(stored["pk"].to_pylist()) == name)
        keys = rows["sk"].to_numpy()
        assert len(keys) > 100
        assert np.array_equal(np.stack(rows["embedding"].to_numpy()), weights[keys])
        changed = np.flatnonzero((before[name] != weights).any(axis=1))
        assert set(changed) <= set(keys.tolist())
    assert set(stored["pk"].to_pylist()) == set(after.keys())

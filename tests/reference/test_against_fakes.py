"""The reference on the fake store, over HTTP, with each kind of store fault; and the example, under real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaproof.fakes.feature_store_py import FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import DelayFault, PartialFault, ResetFault, StatusFault
from deltaproof.reference.delta import quantise
from deltaproof.reference.publisher import Publisher, PublisherError
from deltaproof.reference.uploader import UploadError

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
T = "m.ebc.embedding_bags.t"


@pytest.fixture
def server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer() as running:
        yield running


def publisher_on(kit: Any, server: FeatureStoreServer, clock: Any = time, **changes: Any) -> tuple[Any, Publisher]:
    source = kit.source({("m.ebc", "ebc", "t"): (60, 2, "row_wise")})
    client = FeatureStoreClient(
        access_key_id="deltaproof",
        access_key_secret="deltaproof",
        endpoint=server.endpoint,
        featuredb_username="rank0",
        featuredb_password="password",
    )
    settings = kit.settings(project="deltaproof", batch_size=7, max_workers=3, **changes)
    return source, Publisher(source, client, settings, rank=0, world_size=1, barrier=lambda: None, clock=clock)


def train(source: Any, publisher: Publisher, steps: int) -> None:
    for step in range(1, steps + 1):
        source.train(T, list(range(step, 60, 3)), float(step))
        publisher.after_step(step)


def stored(server: FeatureStoreServer) -> dict[int, list[float]]:
    view = server.store.snapshot("deltaproof", "v", "v1").table()
    assert set(view["pk"].to_pylist()) <= {T}
    return dict(zip(view["sk"].to_pylist(), view["embedding"].to_pylist(), strict=True))


@pytest.mark.parametrize("upload_format", ["arrow", "json"])
@pytest.mark.parametrize(
    "fault",
    [
        StatusFault(id="busy", code=503, skip=1, count=3),
        StatusFault(id="late", code=503, when="after-commit", skip=2, count=2),
        StatusFault(id="throttled", code=429, retry_after_s=0.01, count=2),
        ResetFault(id="cut", when="before-commit", skip=3, count=2),
        ResetFault(id="unseen", when="after-commit", count=2),
        PartialFault(id="half", rows_failed=3, skip=1, count=2),
        DelayFault(id="slow", delay_ms=20, count=5),
    ],
    ids=lambda fault: fault.id,
)
def test_the_store_ends_equal_to_the_model_whatever_it_answered(
    kit: Any, server: FeatureStoreServer, fault: Any, upload_format: str
) -> None:
    source, publisher = publisher_on(kit, server, upload_format=upload_format)
    with publisher:
        publisher.start()
        server.add_fault(fault)
        train(source, publisher, 12)
        publisher.finish(12)
    assert server.faults()[0].fired == fault.count
    assert stored(server) == {key: source.weights[T][key].tolist() for key in range(1, 60)}


@pytest.mark.parametrize("upload_format", ["arrow", "json"])
def test_int8_rows_reach_the_store_as_they_were_quantised(
    kit: Any, server: FeatureStoreServer, upload_format: str
) -> None:
    source, publisher = publisher_on(kit, server, upload_format=upload_format, embedding_type="int8")
    with publisher:
        publisher.start()
        train(source, publisher, 12)
        publisher.finish(12)
    held = source.weights[T][1:]
    assert stored(server) == dict(enumerate(quantise(held).tolist(), start=1))
    _, other = publisher_on(kit, server)
    with pytest.raises(PublisherError, match=r"holds ARRAY<UINT8>, these rows are float32"):
        other.start()


def test_a_refused_login_ends_the_job_with_the_steps_named(kit: Any, server: FeatureStoreServer) -> None:
    source, publisher = publisher_on(kit, server)
    publisher.start()
    server.add_fault(StatusFault(id="no", code=403, count=100))
    train(source, publisher, 4)
    with pytest.raises(UploadError, match=r"403|AccessDenied") as caught:
        publisher.finish(4)
    assert caught.value.unacknowledged == (4,)
    assert server.faults()[0].fired <= 3  # one window, no retry


def test_a_run_whose_clock_is_behind_still_writes_above_what_the_store_holds(
    kit: Any, server: FeatureStoreServer
) -> None:
    for value, clock in ((1.0, time), (2.0, types.SimpleNamespace(time=lambda: 5.0, monotonic=time.monotonic))):
        source, publisher = publisher_on(kit, server, clock)
        with publisher:
            publisher.start()
            source.train(T, list(range(20)), value)
            publisher.finish(1)
    assert stored(server) == {key: [2.0, 2.0] for key in range(20)}


def environment_of(server: FeatureStoreServer) -> dict[str, str]:
    return {
        "DELTAPROOF_ENDPOINT": server.endpoint,
        "ALIBABA_CLOUD_ACCESS_KEY_ID": "deltaproof",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "deltaproof",
        "FEATUREDB_USERNAME": "example",
        "FEATUREDB_PASSWORD": "password",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def check_the_examples_rows(server: FeatureStoreServer) -> None:
    log = server.store.log("deltaproof", "two_towers")
    assert set(log["pk"].to_pylist()) == {"ebc.embedding_bags.user", "ebc.embedding_bags.item"}
    assert set(log["version"].to_pylist()) == {"example-1"}
    assert log.num_rows > 500


@pytest.mark.xdist_group("processes")
def test_the_example_publishes_from_two_ranks(
    server: FeatureStoreServer, ranks: Any, tmp_path: Path, free_port: int
) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)} | environment_of(server)
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    ranks("example")
    check_the_examples_rows(server)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_example_runs_under_torchrun(server: FeatureStoreServer) -> None:
    # --standalone takes a free port.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | environment_of(server)
    done = subprocess.run([*launch, "--steps", "12"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0: step 12 acknowledged" in done.stdout
    assert "rank 1: step 12 acknowledged" in done.stdout
    check_the_examples_rows(server)

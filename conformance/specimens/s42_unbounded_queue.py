"""S42: pending deltas grow without limit while the store is slow."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StoreSlow
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let there always be room."""

    def has_room(uploader: Any, job: Any) -> bool:
        return True

    patch.replace(Uploader, "_has_room", has_room)


SPECIMEN = Specimen(
    id="S42",
    slug="unbounded-queue",
    title="pending deltas grow without limit while the store is slow",
    cause="The queue between training and upload has no bound, so that training never waits. When the store slows "
    "down, every dump stays in memory beside the ones before it. Some time later the process is killed for "
    "want of memory, far from the cause, and nothing of what was queued was ever sent.",
    family="store",
    properties=("bounded-memory",),
    scenario=Scenario(
        name="S42-unbounded-queue",
        seed=42,
        world_size=1,
        tables=(Table(name="item", rows=2048, dim=256),),
        workload=Workload(steps=40, batch_size=256, ids_per_sample_max=16, zipf_exponent=0.0),
        publisher=PublisherConfig(every_steps=1, batch_size=1000, queue_bytes_max=4 << 20),
        faults=(StoreSlow(delay_ms=2500),),
    ),
    apply=apply,
)

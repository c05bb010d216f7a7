"""S40: readback trusts a shard that is not what its manifest vouches for."""

from __future__ import annotations

from typing import Any

from ...reference.readback import Survey
from ...simulator.faults import ShardCorrupted
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen

DAMAGED = Scenario(
    name="S40-readback-stale",
    seed=40,
    tables=(Table(name="item", rows=12, dim=64),),
    workload=Workload(steps=6, batch_size=8),
    publisher=PublisherConfig(every_steps=2, retain=True, readback=True),
    faults=(ShardCorrupted(nth=-1),),
)


def apply(patch: Patch) -> None:
    """Take a shard for sound when it is there."""

    def is_sound(survey: Any, entry: Any) -> bool:
        return True

    patch.replace(Survey, "_is_sound", is_sound)


SPECIMEN = Specimen(
    id="S40",
    slug="readback-stale",
    title="readback trusts a shard that is not what its manifest vouches for",
    cause="A bit has flipped on the disk. The manifest holds the checksum, and readback does not look at it: it "
    "compares the store with rows that nobody ever published and reports the store. Somebody repairs the store "
    "from the damaged copy.",
    family="disk",
    properties=("readback-agrees",),
    scenario=DAMAGED,
    apply=apply,
)

"""S03: a final flush on a step already dumped replaces the shard of that step."""

from __future__ import annotations

from typing import Any

from ...reference.shards import ShardWriter
from ...simulator.faults import Exhaustion
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Name a shard by its step and rank, and nothing else."""

    def path(writer: Any, step: int, seq: int) -> str:
        return f"{writer._folder}/step-{step:012d}/rank-{writer._rank:05d}-of-{writer._world_size:05d}"

    patch.replace(ShardWriter, "_path", path)


SPECIMEN = Specimen(
    id="S03",
    slug="empty-overwrite",
    title="a final flush on a step already dumped replaces the shard of that step",
    cause="Shards are named by step and rank. The last dump falls on the last step, and the final flush comes under "
    "the same step with what little is left, or nothing: it takes the name of the full shard. The store has all "
    "rows, the copy on disk lost the last dump, and whoever rebuilds from it restores older rows.",
    family="exhaustion",
    properties=("retained-equals-store",),
    scenario=Scenario(
        name="S03-empty-overwrite",
        seed=3,
        tables=(Table(name="item", rows=40), Table(name="city", rows=16, sharding="data_parallel")),
        workload=Workload(steps=9),
        publisher=PublisherConfig(every_steps=3, retain=True),
        faults=(Exhaustion(rank=1, batches=6),),
    ),
    apply=apply,
)

"""S39: the manifest appears before its shard."""

from __future__ import annotations

from typing import Any

from ...reference.shards import ShardWriter
from ...simulator.faults import DiskCrash
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Write the manifest, then what it vouches for."""

    def publish(writer: Any, shard: Any, entry: Any) -> None:
        writer._files.write(entry.path, entry.manifest.encode())
        writer._files.write(entry.shard, shard)

    patch.replace(ShardWriter, "_publish", publish)


SPECIMEN = Specimen(
    id="S39",
    slug="manifest-first",
    title="the manifest appears before its shard",
    cause="Rows, checksum and ts are known before the shard is written, so the manifest goes first. Whoever looks "
    "in between finds a promise without a file; after a crash in between it stays that way, and nobody can tell "
    "a shard that was never written from one that somebody deleted.",
    family="disk",
    properties=("retained-equals-store",),
    scenario=Scenario(
        name="S39-manifest-first",
        seed=39,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=2, retain=True),
        faults=(DiskCrash(rank=1, nth=4),),
    ),
    apply=apply,
)

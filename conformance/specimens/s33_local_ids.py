"""S33: row-wise ids are published without the shard's offset."""

from __future__ import annotations

from typing import Any

import msgspec

from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Take every shard for one that begins at row 0 of its table."""
    from ...reference.tracker import TorchRecSource

    def shard(source: Any, key: str) -> Any:
        return msgspec.structs.replace(original(source, key), first_row=0)

    original = patch.replace(TorchRecSource, "_shard", shard)


SPECIMEN = Specimen(
    id="S33",
    slug="local-ids",
    title="row-wise ids published without the shard's offset",
    cause="A row-wise shard sees ids that count from its own first row. Published as they are, the rows of rank "
    "1 land on the keys of rank 0: key 3 of the table holds, depending on who published last, row 3 or "
    "row 23. With one rank, or with table-wise sharding, nothing shows.",
    family="any",
    properties=("no-phantom-rows",),
    scenario=Scenario(
        name="S33-local-ids",
        seed=33,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3),
    ),
    apply=apply,
)

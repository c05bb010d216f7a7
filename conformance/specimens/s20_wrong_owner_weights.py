"""S20: ids of one owner are looked up in the other owner's weights."""

from __future__ import annotations

from typing import Any

from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Find the weights by bare table name: those of the first owner."""
    from ...reference.tracker import TorchRecSource

    def weights(source: Any, key: str) -> Any:
        table = source._tables[key].table
        return original(source, next(k for k, info in source._tables.items() if info.table == table))

    original = patch.replace(TorchRecSource, "_weights", weights)


SPECIMEN = Specimen(
    id="S20",
    slug="wrong-owner-weights",
    title="ids of one owner are looked up in the other owner's weights",
    cause="Ids are kept apart by owner, but the weights they are read from are found by bare table name. The "
    "rows of the second 'item' table are published under their right name and key with the values of the "
    "first. Nothing is missing and nothing fails; serving computes with vectors of another table.",
    family="names",
    properties=("no-phantom-rows",),
    scenario=Scenario(
        name="S20-wrong-owner-weights",
        seed=20,
        tables=(Table(name="item", rows=40), Table(name="item", owner="tower.ebc", rows=40)),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

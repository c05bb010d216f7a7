"""S22: exporter and publisher derive names with two copies of the algorithm that differ on collisions."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Give the publisher a copy of role naming that suffixes only the later ones of equal names."""

    def embedding_names(publisher: Any) -> dict[str, str]:
        names: dict[str, str] = {}
        for fqn, info in publisher._tables.items():
            is_taken = info.table in names.values()
            names[fqn] = f"{info.table}__{info.collection}" if is_taken else info.table
        return names

    patch.replace(Publisher, "_embedding_names", embedding_names)


SPECIMEN = Specimen(
    id="S22",
    slug="name-drift",
    title="exporter and publisher derive names with two copies of the algorithm",
    cause="The exporter suffixes every table whose name is used in two roles ('item__ebc', 'item__ec'); the "
    "publisher's copy of the algorithm suffixes only the second it meets ('item', 'item__ec'). As long as "
    "names are unique the two agree. On the first collision half of the rows go to a name that serving "
    "never asks for.",
    family="names",
    properties=("names-match-export",),
    scenario=Scenario(
        name="S22-name-drift",
        seed=22,
        tables=(Table(name="item", rows=40), Table(name="item", owner="ec", collection="ec", rows=40)),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3, naming="role"),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

"""S24: the suffix of role naming meets a raw table of that very name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Suffix a name that two roles use, without a look at who has the suffixed name already."""

    def embedding_names(publisher: Any) -> dict[str, str]:
        infos = publisher._tables
        uses = Counter(info.table for info in infos.values())
        return {f: f"{i.table}__{i.collection}" if uses[i.table] > 1 else i.table for f, i in infos.items()}

    patch.replace(Publisher, "_embedding_names", embedding_names)


SPECIMEN = Specimen(
    id="S24",
    slug="suffix-collision",
    title="the suffix of role naming meets a raw table of that very name",
    cause="'item' is used in two roles and becomes 'item__ebc' and 'item__ec'. The model also has a table that "
    "somebody called 'item__ec'. Two tables are published under one name, each overwriting the other's "
    "rows key by key, and the name that the exporter gave to one of them stays empty.",
    family="names",
    properties=("names-match-export",),
    scenario=Scenario(
        name="S24-suffix-collision",
        seed=24,
        tables=(
            Table(name="item", rows=40),
            Table(name="item", owner="ec", collection="ec", rows=40),
            Table(name="item__ec", rows=40),
        ),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3, naming="role"),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

"""S19: state keyed by bare table name, so that two owners share one entry."""

from __future__ import annotations

from typing import Any

from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Keep the ids of all tables of one bare name in the entry of the first."""
    from ...reference.tracker import TorchRecSource

    def entry(source: Any, key: str) -> Any:
        table = source._tables[key].table
        return original(source, next(k for k, info in source._tables.items() if info.table == table))

    original = patch.replace(TorchRecSource, "_entry", entry)


SPECIMEN = Specimen(
    id="S19",
    slug="name-collapse",
    title="state keyed by bare table name: two owners share one entry",
    cause="Recorded ids are kept in a dictionary by table name. Two collections of one model may both have a "
    "table called 'item'; the second overwrites or joins the first one's entry, and its rows are never "
    "published. Serving reads the second table at the values of the last full export, for ever.",
    family="names",
    properties=("no-lost-rows", "names-match-export"),
    scenario=Scenario(
        name="S19-name-collapse",
        seed=19,
        tables=(Table(name="item", rows=40), Table(name="item", owner="tower.ebc", rows=40)),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

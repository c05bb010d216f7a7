"""S21: a table whose shard lives on another rank makes the dump raise."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.dumper import Dumper
from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let a dump read every table of the model, wherever its rows live."""

    def targets(dumper: Any, touched: dict[str, np.ndarray]) -> list[str]:
        for fqn in dumper._tables:
            touched.setdefault(fqn, np.empty(0, np.int64))
        return sorted(dumper._tables)

    patch.replace(Dumper, "_targets", targets)


SPECIMEN = Specimen(
    id="S21",
    slug="remote-owner-crash",
    title="a table whose shard lives on another rank makes the dump raise",
    cause="The dump goes through all tables of the model and asks for their weights. A table-wise table has them "
    "on one rank only; on every other rank the dump raises and training stops, although nothing was wrong "
    "and that rank had nothing to publish of it.",
    family="names",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S21-remote-owner-crash",
        seed=21,
        tables=(
            Table(name="item", rows=40),
            Table(name="item", owner="tower.ebc", rows=40, sharding="table_wise", rank=1),
        ),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

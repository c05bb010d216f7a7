"""S25: a table without new ids in an interval makes the tracker raise."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.dumper import Dumper
from ...simulator.faults import QuietTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Join the ids of each hosted table as if there always were some."""

    def targets(dumper: Any, touched: dict[str, np.ndarray]) -> list[str]:
        for fqn, info in dumper._tables.items():
            if info.hosted and not len(touched.get(fqn, ())):
                raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
        found: list[str] = original(dumper, touched)
        return found

    original = patch.replace(Dumper, "_targets", targets)


SPECIMEN = Specimen(
    id="S25",
    slug="quiet-table",
    title="a table without new ids in an interval makes the tracker raise",
    cause="TorchRec's own get_unique() concatenates the ids recorded since the last call, and fails when there are "
    "none. A table that no sample of an interval used (a rare category, a campaign that ended) brings the "
    "whole job down.",
    family="data",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S25-quiet-table",
        seed=25,
        tables=(Table(name="item", rows=12), Table(name="user", rows=12)),
        workload=Workload(steps=6, batch_size=8),
        publisher=PublisherConfig(every_steps=2),
        faults=(QuietTable(table="user", step=3, steps=2),),
    ),
    apply=apply,
)

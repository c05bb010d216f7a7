"""S26: a quiet interval advances a table's cursor, and its next ids are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.dumper import Dumper
from ...simulator.faults import QuietTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Count a quiet interval as read, so that the next one is taken for it."""

    def collect(dumper: Any) -> dict[str, np.ndarray]:
        touched: dict[str, np.ndarray] = original(dumper)
        ahead = dumper.__dict__.setdefault("_ahead", set())
        for fqn in dumper._tables:
            if not len(touched.get(fqn, ())):
                ahead.add(fqn)
            elif fqn in ahead:
                ahead.remove(fqn)
                del touched[fqn]
        return touched

    original = patch.replace(Dumper, "_collect", collect)


SPECIMEN = Specimen(
    id="S26",
    slug="quiet-shifts-cursor",
    title="a quiet interval advances a table's cursor, and its next ids are skipped",
    cause="Each table has a cursor into the record of ids. An interval in which the table was not used still moves "
    "the cursor on, by one entry that was never written, and the ids of the following interval lie behind "
    "it. They are never published, unless training happens to touch them again.",
    family="data",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S26-quiet-shifts-cursor",
        seed=26,
        tables=(Table(name="item", rows=12), Table(name="user", rows=40)),
        workload=Workload(steps=6, batch_size=8),
        publisher=PublisherConfig(every_steps=2),
        faults=(QuietTable(table="user", step=3, steps=2),),
    ),
    apply=apply,
)

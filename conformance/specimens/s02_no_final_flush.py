"""S02: the trailing partial interval is never flushed."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import Exhaustion
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Make the final flush do nothing."""

    def flush_last(publisher: Any, step: int) -> None:
        """Every dump was made on its boundary, so nothing seems to be left."""

    patch.replace(Publisher, "_flush_last", flush_last)


SPECIMEN = Specimen(
    id="S02",
    slug="no-final-flush",
    title="the trailing partial interval is never flushed",
    cause="Dumps are made every 3 steps and only then. When the data ends between two of them, what changed "
    "since the last one is still tracked, and nobody dumps it: finish() waits for the uploads that were "
    "queued and reports success. The rows of the last one or two steps stay in the store at their older "
    "values, or are absent.",
    family="exhaustion",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S02-no-final-flush",
        seed=2,
        tables=(Table(name="item", rows=60), Table(name="user", rows=40, sharding="table_wise", rank=1)),
        workload=Workload(steps=10),
        publisher=PublisherConfig(every_steps=3),
        faults=(Exhaustion(rank=1, batches=8),),
    ),
    apply=apply,
)

"""S07: other ranks open the view before rank 0 has created it."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import StoreSlow
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let all ranks but 0 open the view on their way to the barrier."""

    def meet(publisher: Any) -> None:
        if publisher._rank:
            publisher._open_view()
        original(publisher)

    original = patch.replace(Publisher, "_meet", meet)


SPECIMEN = Specimen(
    id="S07",
    slug="open-before-create",
    title="other ranks open the view before rank 0 has created it",
    cause="All ranks open the view as they start, and rank 0 creates it first. With a store that answers at once "
    "that works by luck. When the store takes a second to create the view, the others find none and give up; "
    "the job fails now and then, and always on the busiest days.",
    family="store",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S07-open-before-create",
        seed=7,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
        faults=(StoreSlow(rank=0, route="create_view", delay_ms=800),),
    ),
    apply=apply,
)

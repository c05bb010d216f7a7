"""S06: rank 0 cannot create the view and never joins the start-up barrier."""

from __future__ import annotations

import time
from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import StoreError
from ...simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let rank 0 try until the view is there."""

    def create_view_first(publisher: Any) -> None:
        while original(publisher) is not None:
            time.sleep(0.2)

    original = patch.replace(Publisher, "_create_view_first", create_view_first)


SPECIMEN = Specimen(
    id="S06",
    slug="barrier-skipped",
    title="rank 0 cannot create the view and never joins the start-up barrier",
    cause="Rank 0 creates the view while all other ranks wait for it at a barrier. The store refuses, for want of a "
    "permission. Rank 0 takes that for an outage and tries again for ever; the barrier is never reached. "
    "Hundreds of machines wait for one that does not say what it is doing.",
    family="store",
    properties=("terminates",),
    scenario=Scenario(
        name="S06-barrier-skipped",
        seed=6,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
        faults=(StoreError(rank=0, route="create_view", status=403, count=1000),),
        deadlines=Deadlines(run_s=6.0, grace_s=5.0),
    ),
    apply=apply,
)

"""S47: a refusal for good is tried again as if it were an outage."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StoreError
from ...simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Try again whatever the store says."""

    def is_retriable(uploader: Any, error: object) -> bool:
        return True

    patch.replace(Uploader, "_is_retriable", is_retriable)


SPECIMEN = Specimen(
    id="S47",
    slug="fatal-retried",
    title="a refusal for good is tried again as if it were an outage",
    cause="The account may not write. Another attempt cannot change that, but the uploader knows one kind of error "
    "only and backs off, longer each time, for as long as it would for an outage. The job goes on training "
    "towards a final wait in which nothing will ever be acknowledged.",
    family="store",
    properties=("terminates",),
    scenario=Scenario(
        name="S47-fatal-retried",
        seed=47,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2, retry_attempts_max=100, retry_delay_ms_max=60_000),
        faults=(StoreError(rank=1, status=403, count=1000),),
        deadlines=Deadlines(run_s=6.0, grace_s=5.0),
    ),
    apply=apply,
)

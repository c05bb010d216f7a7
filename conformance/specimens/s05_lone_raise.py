"""S05: the rank that sees the upload error waits for peers that know of none."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...reference.uploader import UploadError
from ...simulator.faults import StoreError
from ...simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Meet all ranks at a barrier before raising."""

    def after_step(publisher: Any, step: int) -> None:
        try:
            original(publisher, step)
        except UploadError:
            publisher._barrier()
            raise

    original = patch.replace(Publisher, "after_step", after_step)


SPECIMEN = Specimen(
    id="S05",
    slug="lone-raise",
    title="the rank that sees the upload error waits for peers that know of none",
    cause="An upload fails on one rank. So that all ranks end together, it first enters a barrier. Its peers had no "
    "error: they are in the next step's lookups, which wait for the failed rank's part. Both wait for ever, "
    "nobody has raised, and the launcher sees a job at work.",
    family="store",
    properties=("terminates",),
    scenario=Scenario(
        name="S05-lone-raise",
        seed=5,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=200),
        publisher=PublisherConfig(every_steps=1),
        faults=(StoreError(rank=1, status=403),),
        deadlines=Deadlines(run_s=6.0, grace_s=5.0),
    ),
    apply=apply,
)

"""S46: two submissions for one step are taken for one."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import Exhaustion
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Drop a submission whose step was submitted before."""

    def submit(uploader: Any, step: int, table: Any) -> None:
        if step not in uploader.pending_steps() and step != uploader.acknowledged_step:
            original(uploader, step, table)

    original = patch.replace(Uploader, "submit", submit)


SPECIMEN = Specimen(
    id="S46",
    slug="duplicate-step-dropped",
    title="two submissions for one step are taken for one",
    cause="To make a repeated call harmless, the uploader remembers steps and drops one that it has had. But a "
    "step number does not tell two deltas apart: a rank whose data ended on a dump boundary keeps that step "
    "number while its peers go on and change rows that it hosts, and its final flush comes under the step "
    "that it has dumped already. Those rows are never sent.",
    family="exhaustion",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S46-duplicate-step-dropped",
        seed=46,
        tables=(Table(name="item", rows=60),),
        workload=Workload(steps=9),
        publisher=PublisherConfig(every_steps=3),
        faults=(Exhaustion(rank=1, batches=6, policy="empty-batches"),),
    ),
    apply=apply,
)

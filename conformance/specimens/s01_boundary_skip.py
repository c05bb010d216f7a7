"""S01: a rank adopts the highest step of all ranks and skips its final flush when that lies on a dump boundary."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import Exhaustion
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Skip the final flush when the highest step of all ranks is a dump boundary."""

    def flush_last(publisher: Any, step: int) -> None:
        if _highest_of_all_ranks(step) % publisher._settings.every_steps:
            original(publisher, step)

    original = patch.replace(Publisher, "_flush_last", flush_last)


def _highest_of_all_ranks(step: int) -> int:
    import torch
    import torch.distributed as dist

    highest = torch.tensor([step])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


SPECIMEN = Specimen(
    id="S01",
    slug="boundary-skip",
    title="final flush skipped when the highest step of all ranks lies on a dump boundary",
    cause="At the end the final step is max-reduced over the ranks, and a final flush on a dump boundary is "
    "skipped, because a dump has just been made there. It has, by the ranks that got that far: a rank "
    "whose data ended at step 7 adopts step 9 from its peer, takes it for a boundary it dumped at, and "
    "the rows of its trailing steps are never published. The job succeeds.",
    family="exhaustion",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S01-boundary-skip",
        seed=1,
        tables=(Table(name="item", rows=60),),
        workload=Workload(steps=9),
        publisher=PublisherConfig(every_steps=3),
        faults=(Exhaustion(rank=1, batches=7, policy="empty-batches"),),
    ),
    apply=apply,
)

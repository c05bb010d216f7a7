"""S18: ranks vote by a collective, each step, whether a dump is due."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Add up, over all ranks and in every step, who would dump now."""

    def after_step(publisher: Any, step: int) -> None:
        _vote(step)
        original(publisher, step)

    original = patch.replace(Publisher, "after_step", after_step)


def _vote(step: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.tensor([step]))


SPECIMEN = Specimen(
    id="S18",
    slug="per-step-collective",
    title="ranks vote by a collective, each step, whether a dump is due",
    cause="So that all ranks dump at the same step, they agree by an all-reduce after each step. Every step now "
    "waits for the slowest rank a second time; nothing is lost, and nobody finds out why training became "
    "slower. With uneven data the vote is also one more place to wait for a rank that is gone.",
    family="any",
    properties=("quiet-hot-path",),
    scenario=Scenario(
        name="S18-per-step-collective",
        seed=18,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
    ),
    apply=apply,
)

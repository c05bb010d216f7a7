"""S29: the lookups of evaluation are recorded like those of training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...simulator.faults import EvaluationRaises
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen

EVALUATED = Scenario(
    name="S29-eval-recorded",
    seed=29,
    tables=(Table(name="item", rows=60),),
    workload=Workload(steps=6, eval_every_steps=2),
    publisher=PublisherConfig(every_steps=3),
    faults=(EvaluationRaises(rank=1, step=4),),
)


def apply(patch: Patch) -> None:
    """Let pausing do nothing."""
    from ...reference.tracker import TorchRecSource

    def paused(source: Any) -> AbstractContextManager[None]:
        return nullcontext()

    patch.replace(TorchRecSource, "paused", paused)


SPECIMEN = Specimen(
    id="S29",
    slug="eval-recorded",
    title="the lookups of evaluation are recorded like those of training",
    cause="The tracker hangs on the model's lookups and cannot tell what they are for. Evaluation between two steps "
    "looks up rows that training never touched; they are published as if they were new, which for a large "
    "evaluation set is most of the table, at every dump.",
    family="data",
    properties=("no-phantom-rows",),
    scenario=EVALUATED,
    apply=apply,
)

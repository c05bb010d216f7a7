"""S32: rows published after the checkpoint keep values that the restored model never had."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.publisher import Publisher
from ...simulator.faults import RankKill
from ...simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Do not look for what the store received after the checkpoint."""

    def discarded(publisher: Any, ts_min: int, ts_max: int) -> dict[str, np.ndarray]:
        return {}

    patch.replace(Publisher, "_discarded", discarded)


SPECIMEN = Specimen(
    id="S32",
    slug="discarded-future",
    title="rows published after the checkpoint keep values that the restored model never had",
    cause="The job dies some steps after its checkpoint and goes on from there, on other batches. The store still has "
    "the rows of the steps in between. The model never made them, as far as it knows; it does not touch those "
    "rows again, and serving mixes vectors of two trainings.",
    family="restart",
    properties=("restart-converges",),
    scenario=Scenario(
        name="S32-discarded-future",
        seed=32,
        tables=(Table(name="item", rows=200),),
        workload=Workload(steps=9, zipf_exponent=0.0, checkpoint_every_steps=4),
        publisher=PublisherConfig(every_steps=1, queue_steps_max=1),
        faults=(RankKill(rank=0, point="train.after-step", nth=8),),
        restarts=(Restart(world_size=3),),
    ),
    apply=apply,
)

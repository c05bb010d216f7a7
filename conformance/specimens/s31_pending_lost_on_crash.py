"""S31: rows dumped before the checkpoint and not yet acknowledged are never sent again."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import RankKill, StoreError
from ...simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Put into the checkpoint what waits for the next dump, and not what waits for the store."""

    def pending(publisher: Any, uploader: Any) -> Any:
        return publisher._dumper.tracked()

    patch.replace(Publisher, "_pending", pending)


SPECIMEN = Specimen(
    id="S31",
    slug="pending-lost-on-crash",
    title="rows dumped before the checkpoint and not yet acknowledged are never sent again",
    cause="A dump hands its rows to the uploader and forgets them. While the store is away they wait in memory; the "
    "checkpoint is made, the job dies, and the restored model holds values that nobody remembers to publish. "
    "Every row that training does not touch again keeps its older value in the store.",
    family="restart",
    properties=("restart-converges",),
    scenario=Scenario(
        name="S31-pending-lost-on-crash",
        seed=31,
        tables=(Table(name="item", rows=200),),
        workload=Workload(steps=6, zipf_exponent=0.0, checkpoint_every_steps=4),
        publisher=PublisherConfig(every_steps=2, batch_size=64),
        faults=(
            StoreError(rank=1, status=503, skip=1, retry_after_s=60.0),
            RankKill(rank=0, point="train.after-step", nth=5),
        ),
        restarts=(Restart(),),
    ),
    apply=apply,
)

"""S49: shards left by an interrupted earlier start are taken for this one's."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import DiskCrash, RankKill
from ...simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Call every start of the job by one name."""

    def new_generation(publisher: Any) -> str:
        return "only"

    patch.replace(Publisher, "_new_generation", new_generation)


SPECIMEN = Specimen(
    id="S49",
    slug="earlier-run-shards",
    title="shards left by an interrupted earlier start are taken for this one's",
    cause="The job is interrupted and starts again, and writes its shards where the earlier start left its own: same "
    "step, same rank, same number. It dies once more between shard and manifest, and the new shard lies beside "
    "the old manifest. What readback makes of that, or a resend, depends on which of the two it believes.",
    family="restart",
    properties=("retained-equals-store", "readback-agrees"),
    scenario=Scenario(
        name="S49-earlier-run-shards",
        seed=49,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=1, queue_steps_max=1, retain=True, readback=True),
        faults=(
            RankKill(rank=0, point="train.after-step", nth=4),
            DiskCrash(rank=1, nth=2, attempt=1),
        ),
        restarts=(Restart(), Restart(world_size=3)),
    ),
    apply=apply,
)

"""S16: a restarted rank whose clock is behind publishes into the past."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import ClockOffset, RankKill
from ...simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Do not ask the store which ts it has."""

    def high_water_ts(uploader: Any) -> int:
        return 0

    patch.replace(Uploader, "_high_water_ts", high_water_ts)


SPECIMEN = Specimen(
    id="S16",
    slug="restart-behind",
    title="a restarted rank whose clock is behind publishes into the past",
    cause="The job is started again on other machines, and their clocks are an hour behind. Every row gets a ts of an "
    "hour ago; the store has newer ones from before the crash and keeps them. It accepts what it is sent and "
    "serves the old rows, for an hour, and of rows that are not touched again for ever.",
    family="restart",
    properties=("restart-converges",),
    scenario=Scenario(
        name="S16-restart-behind",
        seed=16,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=9, checkpoint_every_steps=4),
        publisher=PublisherConfig(every_steps=1, queue_steps_max=1),
        faults=(
            RankKill(rank=0, point="train.after-step", nth=8),
            ClockOffset(rank=0, seconds=-3600.0, attempt=1),
            ClockOffset(rank=1, seconds=-3600.0, attempt=1),
        ),
        restarts=(Restart(),),
    ),
    apply=apply,
)

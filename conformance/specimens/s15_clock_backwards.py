"""S15: ts follow the wall clock, which steps back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import ClockJump
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Take each ts from the wall clock as it is."""

    def stamps(uploader: Any, job: Any) -> Sequence[int]:
        first = uploader._wall_ms()
        return range(first, first + len(list(uploader._batches(job.table))))

    patch.replace(Uploader, "_stamps", stamps)


SPECIMEN = Specimen(
    id="S15",
    slug="clock-backwards",
    title="ts follow the wall clock, which steps back",
    cause="Each batch is stamped with the time of day. When NTP or an operator sets the rank's clock back by "
    "ten minutes, everything it publishes in the next ten minutes is older, to the store, than what is "
    "already there. The store accepts the rows, says so, and keeps serving the old ones.",
    family="clock",
    properties=("no-lost-rows",),
    scenario=Scenario(
        name="S15-clock-backwards",
        seed=15,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=9),
        publisher=PublisherConfig(every_steps=2, queue_steps_max=1),
        # With room for one delta, that of step 2 has its ts before the clock jumps.
        faults=(ClockJump(rank=1, step=6, seconds=-600.0),),
    ),
    apply=apply,
)

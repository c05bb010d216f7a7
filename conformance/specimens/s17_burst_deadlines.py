"""S17: minute deadlines that were missed fire one after another."""

from __future__ import annotations

from typing import Any

from ...reference.dumper import Cadence
from ...simulator.faults import ClockStall
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Move the deadline on by one period, however late it is."""

    def due_by_time(cadence: Any) -> bool:
        if cadence._clock.monotonic() < cadence._deadline_s:
            return False
        cadence._deadline_s += cadence._period_s
        return True

    patch.replace(Cadence, "_due_by_time", due_by_time)


SPECIMEN = Specimen(
    id="S17",
    slug="burst-deadlines",
    title="minute deadlines that were missed fire one after another",
    cause="Deadlines follow each other at a fixed rate, and each that is past fires. After the rank stood still "
    "for minutes (a checkpoint, a paused machine) every step is a dump until the deadlines have caught up "
    "with the clock. Training crawls just when it should make up for lost time, and the store is flooded.",
    family="clock",
    properties=("quiet-hot-path",),
    scenario=Scenario(
        name="S17-burst-deadlines",
        seed=17,
        tables=(Table(name="item", rows=12),),
        workload=Workload(steps=12, step_seconds=10.0),
        publisher=PublisherConfig(every_minutes=0.5),
        faults=(ClockStall(rank=1, step=4, seconds=240.0),),
    ),
    apply=apply,
)

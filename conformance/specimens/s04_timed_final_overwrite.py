"""S04: a timed dump lands on the last step, and the final flush replaces its shard."""

from __future__ import annotations

from typing import Any

from ...reference.shards import ShardWriter
from ...simulator.faults import ClockStall
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Count submissions by step: there is one dump per step, at most."""

    def path(writer: Any, step: int, seq: int) -> str:
        found: str = original(writer, step, step)
        return found

    original = patch.replace(ShardWriter, "_path", path)


SPECIMEN = Specimen(
    id="S04",
    slug="timed-final-overwrite",
    title="a timed dump lands on the last step, and the final flush replaces its shard",
    cause="With a cadence in minutes nobody knows at which step a dump will be due. When one happens to be due at the "
    "last step, the final flush follows under the same number a moment later, and its shard replaces that of "
    "the dump. It happens to one job in a few hundred, and only the copies suffer.",
    family="clock",
    properties=("retained-equals-store",),
    scenario=Scenario(
        name="S04-timed-final-overwrite",
        seed=4,
        tables=(Table(name="item", rows=40), Table(name="city", rows=16, sharding="data_parallel")),
        workload=Workload(steps=6, step_seconds=5.0),
        publisher=PublisherConfig(every_minutes=1.0, retain=True),
        faults=(ClockStall(rank=1, step=6, seconds=60.0),),
    ),
    apply=apply,
)

"""S30: ids of the warm-up batch before a restore are published."""

from __future__ import annotations

from typing import Any

from ...reference.dumper import Dumper
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Keep what was recorded before the publisher started."""

    def discard(dumper: Any) -> None:
        """Whatever was looked up so far was looked up by this model, after all."""

    patch.replace(Dumper, "discard", discard)


SPECIMEN = Specimen(
    id="S30",
    slug="restore-dummy",
    title="ids of the warm-up batch before a restore are published",
    cause="Before a checkpoint is loaded, a job trains on a made-up batch so that optimizer state and graphs exist. "
    "The tracker has recorded its ids; the first dump publishes those rows although no sample ever used "
    "them, at the restored values, as if they were news.",
    family="restart",
    properties=("no-phantom-rows",),
    scenario=Scenario(
        name="S30-restore-dummy",
        seed=30,
        tables=(Table(name="item", rows=60),),
        workload=Workload(steps=4, warmup_batches=2),
        publisher=PublisherConfig(every_steps=2),
    ),
    apply=apply,
)

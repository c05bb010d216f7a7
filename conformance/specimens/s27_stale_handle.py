"""S27: weight tensors are looked up once and kept."""

from __future__ import annotations

from typing import Any

from ...simulator.faults import StorageReplaced
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Keep each table's weights from the first time they are asked for."""
    from ...reference.tracker import TorchRecSource

    def weights(source: Any, key: str) -> Any:
        handles = source.__dict__.setdefault("_handles", {})
        if key not in handles:
            handles[key] = original(source, key)
        return handles[key]

    original = patch.replace(TorchRecSource, "_weights", weights)


SPECIMEN = Specimen(
    id="S27",
    slug="stale-handle",
    title="weight tensors are looked up once and kept",
    cause="The publisher asks for a table's weight tensor at its first dump and reads from it ever after. A restore "
    "or a growth of the table puts the weights into other memory; the old tensor lives on, because somebody "
    "holds it, with the values it had at that moment. From then on every dump publishes the past.",
    family="restart",
    properties=("no-lost-rows",),
    scenario=Scenario(
        name="S27-stale-handle",
        seed=27,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=8),
        publisher=PublisherConfig(every_steps=2),
        faults=(StorageReplaced(rank=1, step=5),),
    ),
    apply=apply,
)

"""S28: a dynamic key that was evicted is published as zeros."""

from __future__ import annotations

from typing import Any

from ...reference.dynamic import DynamicSource
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Take zeros for the row of a key that has none."""

    def row_when_missing(source: Any, fqn: str) -> float:
        return 0.0

    patch.replace(DynamicSource, "_row_when_missing", row_when_missing)


SPECIMEN = Specimen(
    id="S28",
    slug="zeros-for-missing",
    title="a dynamic key that was evicted is published as zeros",
    cause="The table has no room and gives up a key that was published before. The publisher asks for its row, finds "
    "none, and sends what the buffer was filled with: zeros. Serving's own rule for keys without a row is "
    "another, a constant that the model was evaluated with; from now on the two disagree about the key.",
    family="data",
    properties=("no-phantom-rows", "no-lost-rows"),
    scenario=Scenario(
        name="S28-zeros-for-missing",
        seed=28,
        tables=(
            Table(name="item", rows=12),
            Table(name="ad", owner="dyn", rows=60, sharding="dynamic", capacity=10, missing=0.25),
        ),
        workload=Workload(steps=6, zipf_exponent=0.0),
        publisher=PublisherConfig(every_steps=2),
    ),
    apply=apply,
)

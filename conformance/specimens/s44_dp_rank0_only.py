"""S44: only rank 0 publishes data-parallel tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...reference.dumper import Dumper
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Leave replicated tables out of every dump but rank 0's."""

    def targets(dumper: Any, touched: dict[str, np.ndarray]) -> list[str]:
        found: list[str] = original(dumper, touched)
        return [fqn for fqn in found if dumper._rank == 0 or dumper._tables[fqn].sharding != "data_parallel"]

    original = patch.replace(Dumper, "_targets", targets)


SPECIMEN = Specimen(
    id="S44",
    slug="dp-rank0-only",
    title="only rank 0 publishes data-parallel tables",
    cause="Every rank holds the whole of a data-parallel table, so it seems enough that one publishes it. But a "
    "rank records the ids of its own batch only. A key that rank 1 alone looked up changes on all ranks, "
    "and rank 0 does not know; nobody publishes it.",
    family="any",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S44-dp-rank0-only",
        seed=44,
        tables=(Table(name="item", rows=40), Table(name="city", rows=200, sharding="data_parallel")),
        workload=Workload(steps=6, zipf_exponent=0.0),
        publisher=PublisherConfig(every_steps=3),
    ),
    apply=apply,
)

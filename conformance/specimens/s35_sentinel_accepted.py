"""S35: rows that must not be sent are sent."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import BadRow
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Make the check of a delta do nothing."""

    def check_rows(uploader: Any, step: int, table: Any) -> None:
        """The rows come from a model, so what could be wrong with them?"""

    patch.replace(Uploader, "_check_rows", check_rows)


SPECIMEN = Specimen(
    id="S35",
    slug="sentinel-accepted",
    title="rows that must not be sent are sent",
    cause="A model diverges, and some rows hold NaN. The publisher sends them as they are. This store refuses the "
    "batch, long after the step that made them, and knows neither table nor step; another one takes them, "
    "and every request that meets such a row scores NaN.",
    family="data",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S35-sentinel-accepted",
        seed=35,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=2),
        faults=(BadRow(rank=1, table="item", step=3),),
    ),
    apply=apply,
)

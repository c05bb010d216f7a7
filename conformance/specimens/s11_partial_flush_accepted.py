"""S11: a flush summary with failed rows or batches counts as success."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StorePartial
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Make the check of the flush summary do nothing."""

    def check_summary(uploader: Any, summary: object, rows: int, batches: int) -> None:
        """write_flush() returned, so the window seems to be done."""

    patch.replace(Uploader, "_check_summary", check_summary)


SPECIMEN = Specimen(
    id="S11",
    slug="partial-flush-accepted",
    title="a flush summary with failed rows or batches counts as success",
    cause="write_flush() does not raise when rows were refused: it returns a summary that counts them. A "
    "publisher that does not read it, or only looks whether anything succeeded, acknowledges the step. "
    "The refused rows are not in the store until training happens to touch them again, which for most "
    "rows of a large table is never.",
    family="store",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S11-partial-flush-accepted",
        seed=11,
        tables=(Table(name="item", rows=200),),
        workload=Workload(steps=9, zipf_exponent=0.0),
        publisher=PublisherConfig(every_steps=3),
        faults=(StorePartial(rank=1, rows_failed=4),),
    ),
    apply=apply,
)

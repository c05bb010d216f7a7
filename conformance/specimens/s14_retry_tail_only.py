"""S14: a retry sends only what came after the failed window."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StorePartial
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Remember how many windows of a step were handed over, and begin the next attempt behind them."""

    def send(uploader: Any, job: Any) -> None:
        if getattr(uploader, "_handed_over_of", None) is not job:
            uploader._handed_over_of, uploader._handed_over = job, 0
        batches, stamps = list(uploader._batches(job.table)), list(uploader._stamps(job))
        width = uploader._settings.max_workers
        for start in range(uploader._handed_over * width, len(batches), width):
            uploader._handed_over += 1  # before the window is known to have succeeded
            uploader._window(batches[start : start + width], stamps[start : start + width])

    patch.replace(Uploader, "_send", send)


SPECIMEN = Specimen(
    id="S14",
    slug="retry-tail-only",
    title="a retry sends only what came after the failed window",
    cause="A step goes out in windows of several batches, and the uploader remembers how far it got. The mark "
    "moves when a window is handed over instead of when its summary is clean, so the retry after a partly "
    "applied window begins with the next one. The step is acknowledged without the rows that made it "
    "fail.",
    family="store",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S14-retry-tail-only",
        seed=14,
        tables=(Table(name="item", rows=200),),
        workload=Workload(steps=9, zipf_exponent=0.0),
        publisher=PublisherConfig(every_steps=3, batch_size=4, max_workers=1),
        faults=(StorePartial(rank=1, rows_failed=4),),
    ),
    apply=apply,
)

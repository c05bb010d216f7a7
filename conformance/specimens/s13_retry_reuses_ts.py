"""S13: a retry replays a step under the ts of the failed attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StorePartial
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Give a step its ts once."""

    def stamps(uploader: Any, job: Any) -> Sequence[int]:
        if getattr(uploader, "_stamped", (None,))[0] is not job:
            uploader._stamped = job, original(uploader, job)
        found: Sequence[int] = uploader._stamped[1]
        return found

    original = patch.replace(Uploader, "_stamps", stamps)


SPECIMEN = Specimen(
    id="S13",
    slug="retry-reuses-ts",
    title="a retry replays a step under the ts of the failed attempt",
    cause="A batch is partly applied; the store says so, and the step is sent again as it was. Every row arrives, "
    "and a lookup finds it. But an incremental reader that polled in between has read the rows which came "
    "first, under that very ts, and asks from there on for greater ones: the rest it never sees.",
    family="store",
    properties=("incremental-read-complete",),
    scenario=Scenario(
        name="S13-retry-reuses-ts",
        seed=13,
        tables=(Table(name="item", rows=200),),
        workload=Workload(steps=6, zipf_exponent=0.0),
        # One request at a time: were the step's short last batch the first to arrive, none of it would be applied.
        publisher=PublisherConfig(every_steps=3, max_workers=1),
        faults=(StorePartial(rank=1, rows_failed=4),),
    ),
    apply=apply,
)

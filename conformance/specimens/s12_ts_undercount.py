"""S12: fewer ts are reserved for a step than it has batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import ClockJump
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Reserve as many ts as rows / batch size gives, and use one per batch all the same."""

    def stamps(uploader: Any, job: Any) -> Sequence[int]:
        first = max(uploader._ts_last + 1, uploader._wall_ms())
        uploader._ts_last = first - 1 + -(-job.table.num_rows // uploader._batch_size)
        return range(first, first + job.table.num_rows)

    patch.replace(Uploader, "_stamps", stamps)


SPECIMEN = Specimen(
    id="S12",
    slug="ts-undercount",
    title="fewer ts are reserved for a step than it has batches",
    cause="The range of ts of a step is reserved from rows / batch size. A delta comes in chunks, one per table at "
    "least, and batches are not made across chunks, so there are more of them. The last batches of a step "
    "take ts that the next step takes again; while the clock stands still, or is behind, an incremental "
    "reader has passed them by then and never sees those rows of the next step.",
    family="clock",
    properties=("incremental-read-complete",),
    scenario=Scenario(
        name="S12-ts-undercount",
        seed=12,
        tables=tuple(Table(name=f"t{n}", rows=12) for n in range(6)),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=1, batch_size=64, queue_steps_max=1),
        # With room for one delta, that of step 2 has its ts before the clock jumps.
        faults=(ClockJump(rank=1, step=4, seconds=-600.0),),
    ),
    apply=apply,
)

"""S45: a submission that meets a closing uploader is dropped without a word."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...reference.uploader import Uploader, UploadError
from ...simulator.faults import CloseRaces, StoreSlow
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Take the refusal of an uploader that is being closed for the end of business."""

    def submit(uploader: Any, step: int, table: Any) -> None:
        try:
            original(uploader, step, table)
        except UploadError:
            if uploader._open or uploader._failure is not None:
                raise
            with uploader._changed:
                uploader._jobs = deque(job for job in uploader._jobs if job.table is not table)

    original = patch.replace(Uploader, "submit", submit)


SPECIMEN = Specimen(
    id="S45",
    slug="post-close-submit",
    title="a submission that meets a closing uploader is dropped without a word",
    cause="The machine is about to be taken away, and a handler closes the publisher while the training thread "
    "waits to submit its final delta. The uploader takes no more; submit() returns as if it had, close() "
    "waits for what it knows of, and both threads are content. The final delta was in neither.",
    family="rank",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S45-post-close-submit",
        seed=45,
        world_size=1,  # no peer to wait for between the last dump and finish()
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=3, queue_steps_max=1),
        faults=(StoreSlow(rank=0, delay_ms=1000), CloseRaces(rank=0, delay_ms=200)),
    ),
    apply=apply,
)

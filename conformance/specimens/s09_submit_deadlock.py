"""S09: submit waits for room in the queue of a thread that is dead."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StoreError, StoreSlow
from ...simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Wait for room without a look at whether the thread still lives."""

    def wait_for_room(uploader: Any, job: Any) -> None:
        while not uploader._has_room(job):
            uploader._changed.wait()

    patch.replace(Uploader, "_wait_for_room", wait_for_room)


SPECIMEN = Specimen(
    id="S09",
    slug="submit-deadlock",
    title="submit waits for room in the queue of a thread that is dead",
    cause="The queue is full, so submit() waits until the upload thread takes something out. Just then the store "
    "refuses a step for good and the thread ends. It will never make room; the training thread waits for "
    "ever, and its peers wait for it in the next step.",
    family="store",
    properties=("terminates",),
    scenario=Scenario(
        name="S09-submit-deadlock",
        seed=9,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=1, queue_steps_max=1),
        faults=(StoreSlow(rank=1, delay_ms=1000), StoreError(rank=1, status=403)),
        deadlines=Deadlines(run_s=6.0, grace_s=5.0),
    ),
    apply=apply,
)

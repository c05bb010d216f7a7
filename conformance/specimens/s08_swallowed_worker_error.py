"""S08: the background thread dies and nobody is told."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...reference.uploader import Uploader
from ...simulator.faults import StoreError
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let the thread end on an error without keeping it, and let what is queued for the dead thread be forgotten."""

    def fail(uploader: Any, job: object, error: Exception) -> None:
        with uploader._changed:
            uploader._jobs = deque(maxlen=0)  # submit still appends, drain finds nothing to wait for
            uploader._abandoned = True
            uploader._changed.notify_all()

    patch.replace(Uploader, "_fail", fail)


SPECIMEN = Specimen(
    id="S08",
    slug="swallowed-worker-error",
    title="the background thread dies and nobody is told",
    cause="The store refuses one step for good, the upload thread raises, and the exception ends with the "
    "thread. The training thread never looks: submit() goes on appending to a queue that nobody reads, "
    "and close() joins a thread that is already gone. Training succeeds, and from that step on the rank "
    "has published nothing.",
    family="store",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S08-swallowed-worker-error",
        seed=8,
        tables=(Table(name="item", rows=60),),
        workload=Workload(steps=9),
        publisher=PublisherConfig(every_steps=3),
        faults=(StoreError(rank=1, status=403, skip=1),),
    ),
    apply=apply,
)

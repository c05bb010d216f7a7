"""S10: the final wait ends at its deadline without naming what was not acknowledged."""

from __future__ import annotations

from typing import Any

from ...reference.uploader import Uploader, UploadError
from ...simulator.faults import StoreSlow
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Give up what is left when the deadline passes, and return."""

    def drain(uploader: Any) -> None:
        try:
            original(uploader)
        except UploadError:
            with uploader._changed:
                uploader._jobs.clear()
                uploader._failure = None

    original = patch.replace(Uploader, "drain", drain)


SPECIMEN = Specimen(
    id="S10",
    slug="close-forgets",
    title="the final wait ends at its deadline without naming what was not acknowledged",
    cause="At the end of training the publisher waits for the store, though not for ever. When the time is over "
    "it returns as if all were well: the process ends, and with it whatever was still queued. A slow evening "
    "of the store costs the last minutes of training, and no log says so.",
    family="store",
    properties=("no-silent-loss",),
    scenario=Scenario(
        name="S10-close-forgets",
        seed=10,
        world_size=1,  # no peer to wait for between the last dump and finish()
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=3, close_timeout_s=0.3),
        faults=(StoreSlow(rank=0, delay_ms=1000),),
    ),
    apply=apply,
)

"""S37: the text of an error carries a credential into the log."""

from __future__ import annotations

from ...reference.uploader import Uploader
from ...simulator.faults import LeakyError
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Pass the text of an error on as it is."""

    def redact(error: object) -> str:
        return str(error)

    patch.replace(Uploader, "_redact", staticmethod(redact))


SPECIMEN = Specimen(
    id="S37",
    slug="secret-in-error",
    title="the text of an error carries a credential into the log",
    cause="A connection fails, and the client's exception has the whole URL in its text, login and all. The retry "
    "succeeds, nobody looks at it again; but the warning with that text is in the log, which the whole "
    "company can read and keeps for years.",
    family="credentials",
    properties=("no-secret-leak",),
    scenario=Scenario(
        name="S37-secret-in-error",
        seed=37,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
        faults=(LeakyError(rank=1),),
    ),
    apply=apply,
)

"""S48: the version that serving reads by default is accepted."""

from __future__ import annotations

from ...reference import settings
from ...simulator.faults import RefusedVersion
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Make the check of the version do nothing."""

    def check_version(version: str) -> None:
        """A version is a version."""

    patch.replace(settings, "check_version", check_version)


SPECIMEN = Specimen(
    id="S48",
    slug="version-default",
    title="the version that serving reads by default is accepted",
    cause="A configuration leaves the version out, or names 'default'. The job publishes, row by row, over the "
    "version that serving reads at this moment: half-trained rows go live at once, and there is no older "
    "version to go back to.",
    family="data",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S48-version-default",
        seed=48,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=4),
        publisher=PublisherConfig(every_steps=2),
        faults=(RefusedVersion(),),
    ),
    apply=apply,
)

"""S23: user-side twin modules publish under their own name."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import DuplicateTable
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Publish every table under the name by which this model knows it."""

    def embedding_names(publisher: Any) -> dict[str, str]:
        return {fqn: fqn for fqn in publisher._tables}

    patch.replace(Publisher, "_embedding_names", embedding_names)


SPECIMEN = Specimen(
    id="S23",
    slug="twin-not-mapped",
    title="user-side twin modules publish under their own name",
    cause="A model that is split for serving has a user-side copy of a collection: 'ebc_user' beside 'ebc'. The "
    "exporter writes one name for both, that of 'ebc'. A publisher that takes the module path as it is "
    "sends the rows of 'ebc_user' to a name that serving never asks for.",
    family="names",
    properties=("names-match-export",),
    scenario=Scenario(
        name="S23-twin-not-mapped",
        seed=23,
        tables=(Table(name="item", owner="ebc_user", rows=40), Table(name="item", owner="tower.ebc", rows=40)),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=3),
        faults=(DuplicateTable(table="item"),),
    ),
    apply=apply,
)

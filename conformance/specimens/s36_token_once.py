"""S36: credentials are resolved once, when the job starts."""

from __future__ import annotations

from typing import Any

from ...reference.publisher import Publisher
from ...simulator.faults import StoreTokenRevoked
from ...simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """When a token is refused, go on with the client that has it."""

    def reopen_view(publisher: Any) -> Any:
        return publisher._view

    patch.replace(Publisher, "_reopen_view", reopen_view)


SPECIMEN = Specimen(
    id="S36",
    slug="token-once",
    title="credentials are resolved once, when the job starts",
    cause="The client is made at the start, with the token of that hour, and kept. Tokens expire, and are replaced "
    "when they have leaked. A job that trains for days fails at the first upload after that, although the "
    "new token was there for the asking.",
    family="credentials",
    properties=("fails-loudly",),
    scenario=Scenario(
        name="S36-token-once",
        seed=36,
        tables=(Table(name="item", rows=40),),
        workload=Workload(steps=6),
        publisher=PublisherConfig(every_steps=2),
        faults=(StoreTokenRevoked(skip=2),),
    ),
    apply=apply,
)

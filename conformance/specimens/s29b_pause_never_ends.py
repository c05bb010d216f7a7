"""S29b: a pause for evaluation never ends when the evaluation raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from .s29_eval_recorded import EVALUATED
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Let training go on only where the block ends well."""
    from ...reference.dumper import Pause

    @contextmanager
    def paused(pause: Any) -> Iterator[None]:
        token = pause._held.set(True)
        yield
        pause._held.reset(token)

    patch.replace(Pause, "__call__", paused)


SPECIMEN = Specimen(
    id="S29b",
    slug="pause-never-ends",
    title="a pause for evaluation never ends when the evaluation raised",
    cause="A metric fails on one rank, the training loop notes it and goes on. The code that ends the pause comes "
    "after the evaluation and was not reached: from then on this rank records nothing, dumps nothing, and "
    "finishes well.",
    family="data",
    properties=("no-lost-rows",),
    scenario=msgspec.structs.replace(EVALUATED, name="S29b-pause-never-ends"),
    apply=apply,
)

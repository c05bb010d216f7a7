"""S29b: a pause for evaluation never ends when the evaluation raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from .s29_eval_recorded import EVALUATED
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Count the pause down only where the block ends well."""
    from ...reference.tracker import TorchRecSource

    @contextmanager
    def paused(source: Any) -> Iterator[None]:
        source._paused += 1
        yield
        source._paused -= 1

    patch.replace(TorchRecSource, "paused", paused)


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

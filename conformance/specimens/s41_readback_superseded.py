"""S41: readback calls a row that was updated since a mismatch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ...reference.readback import DIFFERENT, SUPERSEDED, Readback
from .s40_readback_stale import DAMAGED
from .specimen import Patch, Specimen


def apply(patch: Patch) -> None:
    """Ask whether the rows are equal, and not which of them is newer."""

    def verdicts(readback: Any, *columns: np.ndarray) -> np.ndarray:
        found: np.ndarray = original(readback, *columns)
        return np.where(found == SUPERSEDED, DIFFERENT, found)

    original = patch.replace(Readback, "_verdicts", verdicts)


SPECIMEN = Specimen(
    id="S41",
    slug="readback-superseded",
    title="readback calls a row that was updated since a mismatch",
    cause="A retained row is compared with what the store serves, which differs: a later dump has replaced it, and the "
    "shard of that dump is not among those compared. Nothing is wrong. Readback reports thousands of mismatches, "
    "and from then on nobody believes it.",
    family="disk",
    properties=("readback-agrees",),
    scenario=msgspec.structs.replace(DAMAGED, name="S41-readback-superseded"),
    apply=apply,
)

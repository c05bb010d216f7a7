"""What a rank leaves in a checkpoint for a restarted job, and how that reads it. Why it converges: docs/restart.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .contract import Naming
from .delta import Keys
from .dumper import merge_keys
from .settings import Settings

TARGET = ("project", "view", "version", "naming")  # settings that a restarted job must keep


class RestartError(ValueError):
    """The states cannot be continued from. Usual causes: a file of one rank is missing, or is of another checkpoint."""


class RankState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's publisher at one step boundary. Keys are little-endian int64, per table FQN."""

    format: Literal[1] = 1
    rank: int
    world_size: int
    step: int
    project: str
    view: str
    version: str
    naming: Naming
    watermark_ms: int  # every row this rank submitted later has a greater ts
    pending: dict[str, bytes]  # keys whose present rows the store may not have
    replicated: dict[str, bytes]  # data-parallel keys ever published

    def to_dict(self) -> dict[str, Any]:
        """As int, str, bytes and dict only: `torch.load(weights_only=True)` and most checkpoint formats take these."""
        state: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return state


class Restart(msgspec.Struct, frozen=True):
    """The states of all ranks as one; the defaults say that there was no checkpoint."""

    ts_min: int = 0  # what the store received above it may be of the discarded future
    ts_max: int = 0
    pending: Mapping[str, Keys] = {}
    replicated: Mapping[str, Keys] = {}


def pack(keys: Mapping[str, Keys]) -> dict[str, bytes]:
    """Keys as RankState holds them."""
    return {fqn: each.astype("<i8").tobytes() for fqn, each in keys.items() if len(each)}


def join(states: Sequence[Mapping[str, Any]], settings: Settings) -> Restart:
    """Put the states of all ranks of one checkpoint together.

    Raises:
        RestartError: a rank is missing or there twice, or the states are of several checkpoints or another target.
    """
    try:
        ranks = [msgspec.convert(state, RankState) for state in states]
    except msgspec.ValidationError as error:
        raise RestartError(f"a state was not made by a publisher of this version: {error}") from None
    if not ranks:
        raise RestartError("no states; pass those of all ranks, or call start_over() when there is no checkpoint")
    for name in ("world_size", "step", *TARGET):
        values = sorted({getattr(rank, name) for rank in ranks})
        if len(values) > 1:
            raise RestartError(f"the states are of different checkpoints: {name} is {values}; pass those of one")
        if (wanted := getattr(settings, name, values[0])) != values[0]:
            raise RestartError(
                f"the checkpoint was published with {name} {values[0]!r}, the settings say {wanted!r}: rows the store "
                "acknowledged there would be missing here; keep the setting, or publish the whole model again"
            )
    found, world_size = sorted(rank.rank for rank in ranks), ranks[0].world_size
    if len(found) != world_size or found != list(range(world_size)):
        raise RestartError(f"states of ranks {found}, expected each of 0 to {world_size - 1} once: load those of all")
    marks = [rank.watermark_ms for rank in ranks]
    pending = merge_keys(*(_unpack(rank.pending) for rank in ranks))
    return Restart(min(marks), max(marks), pending, merge_keys(*(_unpack(rank.replicated) for rank in ranks)))


def _unpack(packed: Mapping[str, bytes]) -> dict[str, Keys]:
    for fqn, each in packed.items():
        if len(each) % 8:
            raise RestartError(f"the keys of table {fqn!r} are cut off: {len(each)} bytes; the checkpoint is damaged")
    return {fqn: np.frombuffer(each, "<i8").astype(np.int64) for fqn, each in packed.items()}

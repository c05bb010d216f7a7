"""The adapter of a publisher: between your code, which follows what training changes and sends it to a store, and
deltaproof, which asks what became of it. As it stands it wraps deltaproof's reference publisher, and holds; put yours
in its place, then run

    pytest
    deltaproof conform adapter:Adapter --engine processes --report report

Your publisher gets a real model, TorchRec's `DistributedModelParallel`, on the process engine. On the virtual engine
(no torch, hundreds of runs a second) `context.model` is a `deltaproof.reference.dumper.TableSource` that stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...reference.publisher import Publisher
from ...simulator.target import source_of
from ..target import RankContext, claims


# What this publisher can do (docs/conformance.md). What you leave out is reported as not tested, never as held.
@claims("feature-store", "sdk", "arrow", "json", "minutes", "role-names", "restart", "retain", "spill")
class Adapter:
    """One of these is made for each rank, by calling it with a `RankContext`: rank, tables, settings, store, clock."""

    def __init__(self, context: RankContext) -> None:
        self._publisher = Publisher(
            source_of(context.model),
            None,
            context.settings,  # cadence, names, batch size and retries, as the scenario asks for them: heed them
            rank=context.rank,
            world_size=context.world_size,
            barrier=context.barrier,
            connect=context.client_factory,
        )

    def start(self) -> None:
        """Before the first step: make the view, or open it; all ranks call this."""
        self._publisher.start()

    def after_step(self, step: int) -> None:
        """After each of this rank's own optimizer steps, 1, 2, ... No collectives: ranks may stop at other steps."""
        self._publisher.after_step(step)

    def paused(self) -> AbstractContextManager[object]:
        """Around evaluation: its lookups are no training."""
        return self._publisher.paused()

    def finish(self, step: int) -> None:
        """Training is over: return when everything is acknowledged, or raise."""
        self._publisher.finish(step)

    def close(self) -> None:
        """The last call, also after an error of the training loop, when it must not wait."""
        self._publisher.close(drain=False)

    # The rest is for those that claim "restart".
    def state_dict(self, step: int) -> Mapping[str, Any]:
        """What this rank must find in the checkpoint that is made after `step`."""
        return self._publisher.state_dict(step)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Before `start` of a restarted job: the states of all ranks of its checkpoint, of another number perhaps."""
        self._publisher.load_state_dict(states)

    def start_over(self) -> None:
        """In its place when there was no checkpoint yet."""
        self._publisher.start_over()

"""Collectives of simulated ranks, with the semantics of gloo: all meet, or those who wait learn that a peer is gone.

The n-th collective of a rank meets the n-th of every other. Ranks that disagree about which collective that is wait for
one another for ever, as real ones do. When a rank's process is gone, whoever waits for it gets an error: its
connections are closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .primitives import running
from .scheduler import Scheduler, Task


class PeerLost(RuntimeError):
    """A collective cannot end: the process of a peer is gone. gloo says "Connection closed by peer"."""


class _Meeting:
    __slots__ = ("arrived", "call", "results", "waiting")

    def __init__(self) -> None:
        self.arrived: dict[int, tuple[str, Any]] = {}
        self.waiting: list[Task] = []
        self.results: list[Any] | None = None


class Group:
    """All ranks of a run. ``called(rank, call)`` is told about every collective that starts."""

    def __init__(self, scheduler: Scheduler, world_size: int, called: Callable[[int, str], None] | None = None) -> None:
        self._scheduler, self.world_size, self._called = scheduler, world_size, called
        self._meetings: dict[int, _Meeting] = {}
        self._count = [0] * world_size
        self._gone: set[int] = set()

    def exchange(self, rank: int, call: str, value: Any = None) -> list[Any]:
        """Every rank's ``value``, by rank. ``call`` names the collective in reports, and must agree.

        Raises:
            PeerLost: a peer's process ended before it arrived.
        """
        scheduler = self._scheduler
        number = self._count[rank]
        self._count[rank] += 1
        if self._called is not None:
            self._called(rank, call)
        meeting = self._meetings.setdefault(number, _Meeting())
        meeting.arrived[rank] = call, value
        scheduler.point()
        agreed = len({name for name, _ in meeting.arrived.values()}) == 1
        if meeting.results is None and agreed and len(meeting.arrived) == self.world_size:
            meeting.results = [meeting.arrived[r][1] for r in range(self.world_size)]
            for task in meeting.waiting:
                scheduler.wake(task)
        while meeting.results is None:
            lost = sorted(self._gone - meeting.arrived.keys())
            if lost:
                raise PeerLost(f"rank {rank}: {call}: connection closed by peer: the process of rank {lost[0]} is gone")
            assert scheduler.current is not None
            meeting.waiting.append(scheduler.current)
            scheduler.wait(self._why(rank, number, call, meeting))
        return meeting.results

    def _why(self, rank: int, number: int, call: str, meeting: _Meeting) -> str:
        missing = [r for r in range(self.world_size) if r not in meeting.arrived]
        others = {r: name for r, (name, _) in meeting.arrived.items() if name != call}
        return f"{call}, collective {number} of rank {rank}; missing ranks: {missing}; in another call: {others}"

    def leave(self, rank: int) -> None:
        """The process of ``rank`` is gone."""
        self._gone.add(rank)
        for meeting in self._meetings.values():
            if meeting.results is None:
                for task in meeting.waiting:
                    self._scheduler.wake(task)

    # -- torch.distributed ---------------------------------------------------------------------------------------------

    def torch_replacements(self) -> list[tuple[Any, str, Any]]:
        """(module, name, fake) for `torch.distributed`, when it was imported; else nothing.

        Replaced: what publishers use. Groups other than the default one are refused by torch itself.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available():
            return []
        import torch

        def rank() -> int:
            scheduler = running()
            task = None if scheduler is None else scheduler.current
            if task is None or task.rank is None:
                raise RuntimeError("torch.distributed was called outside of a simulated rank")
            return task.rank

        def reduced(values: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
            stacked = torch.stack([value.clone() for value in values])
            name = str(op).rpartition(".")[2]
            kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "SUM": lambda t: t.sum(0).to(t.dtype),
                "MAX": lambda t: t.amax(0),
                "MIN": lambda t: t.amin(0),
                "PRODUCT": lambda t: t.prod(0).to(t.dtype),
                "AVG": lambda t: t.sum(0) / self.world_size,
            }
            if name not in kinds:
                raise RuntimeError(f"all_reduce with {op} is not simulated; use one of {', '.join(kinds)}")
            return kinds[name](stacked)

        def barrier(*_: Any, **__: Any) -> None:
            self.exchange(rank(), "barrier")

        def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
            tensor.copy_(reduced(self.exchange(rank(), "all_reduce", tensor.clone()), op))

        def broadcast(tensor: Any, src: int = 0, *_: Any, **__: Any) -> None:
            tensor.copy_(self.exchange(rank(), "broadcast", tensor.clone())[src])

        def all_gather(tensors: list[Any], tensor: Any, *_: Any, **__: Any) -> None:
            for mine, theirs in zip(tensors, self.exchange(rank(), "all_gather", tensor.clone()), strict=True):
                mine.copy_(theirs)

        def all_gather_object(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
            objects[:] = self.exchange(rank(), "all_gather_object", value)

        def broadcast_object_list(objects: list[Any], src: int = 0, *_: Any, **__: Any) -> None:
            objects[:] = self.exchange(rank(), "broadcast_object_list", list(objects))[src]

        fakes: dict[str, Callable[..., Any]] = {
            "barrier": barrier,
            "all_reduce": all_reduce,
            "broadcast": broadcast,
            "all_gather": all_gather,
            "all_gather_object": all_gather_object,
            "broadcast_object_list": broadcast_object_list,
            "get_rank": lambda *_, **__: rank(),
            "get_world_size": lambda *_, **__: self.world_size,
            "is_initialized": lambda: True,
        }
        return [(dist, name, fake) for name, fake in fakes.items()]

"""Collectives of simulated ranks, with the semantics of gloo: all meet, or those who wait learn that a peer is gone.

The n-th collective of a rank meets the n-th of every other. Ranks that disagree about which collective that is wait for
one another for ever, as real ones do. When a rank's process is gone, whoever waits for it gets an error: its
connections are closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .primitives import running
from .scheduler import Scheduler, Task

_HERE = os.path.dirname(__file__)


class PeerLost(RuntimeError):
    """A collective cannot end: the process of a peer is gone. gloo says "Connection closed by peer"."""


class _Meeting:
    __slots__ = ("arrived", "call", "results", "waiting")

    def __init__(self) -> None:
        self.arrived: dict[int, tuple[str, Any]] = {}
        self.waiting: list[Task] = []
        self.results: list[Any] | None = None


class Group:
    """All ranks of a run."""

    def __init__(self, scheduler: Scheduler, world_size: int) -> None:
        self._scheduler, self.world_size = scheduler, world_size
        self._counts: dict[Task, Counter[str]] = {}
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
        if self._counts and (counts := self._counts.get(scheduler.current)) is not None:  # type: ignore[arg-type]
            counts[f"{call} at {_call_site()}"] += 1
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

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Counts the running task's collectives inside: ``"barrier at trainer.py:12 in vote"`` -> number."""
        task = self._scheduler.current
        assert task is not None
        counts = self._counts[task] = Counter()
        try:
            yield counts
        finally:
            self._counts.pop(task, None)

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

    def barrier(self, rank: int) -> None:
        """A collective that carries nothing."""
        self.exchange(rank, "barrier")


def torch_replacements(group: Callable[[], Group]) -> list[tuple[Any, str, Any]]:
    """(module, name, fake) for `torch.distributed`, when it was imported; else nothing.

    Replaced: what publishers use, on the default group (``group()``). Other groups are refused by torch itself.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not hasattr(dist, "all_gather_object") or not dist.is_available():
        return []
    if _fakes:
        _current[0] = group
        return _fakes
    torch = sys.modules["torch"]
    _current[0] = group

    def exchange(call: str, value: Any = None) -> list[Any]:
        return _current[0]().exchange(rank(), call, value)

    def rank() -> int:
        scheduler = running()
        task = None if scheduler is None else scheduler.current
        if task is None or task.rank is None:
            raise RuntimeError("torch.distributed was called outside of a simulated rank")
        return task.rank

    def reduced(values: Sequence[Any], op: Any) -> Any:
        stacked = torch.stack(list(values))
        name = str(op).rpartition(".")[2]
        kinds: dict[str, Callable[[Any], Any]] = {
            "SUM": lambda t: t.sum(0).to(t.dtype),
            "MAX": lambda t: t.amax(0),
            "MIN": lambda t: t.amin(0),
            "PRODUCT": lambda t: t.prod(0).to(t.dtype),
            "AVG": lambda t: t.sum(0) / len(values),
        }
        if name not in kinds:
            raise RuntimeError(f"all_reduce with {op} is not simulated; use one of {', '.join(kinds)}")
        return kinds[name](stacked)

    def barrier(*_: Any, **__: Any) -> None:
        exchange("barrier")

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
        tensor.copy_(reduced(exchange("allreduce", tensor.clone()), op))

    def broadcast(tensor: Any, src: int = 0, *_: Any, **__: Any) -> None:
        tensor.copy_(exchange("broadcast", tensor.clone())[src])

    def all_gather(tensors: list[Any], tensor: Any, *_: Any, **__: Any) -> None:
        for mine, theirs in zip(tensors, exchange("allgather", tensor.clone()), strict=True):
            mine.copy_(theirs)

    def all_gather_object(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
        objects[:] = exchange("allgather (object)", value)

    def broadcast_object_list(objects: list[Any], src: int = 0, *_: Any, **__: Any) -> None:
        objects[:] = exchange("broadcast (object)", list(objects))[src]

    fakes: dict[str, Callable[..., Any]] = {
        "barrier": barrier,
        "all_reduce": all_reduce,
        "broadcast": broadcast,
        "all_gather": all_gather,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": broadcast_object_list,
        "get_rank": lambda *_, **__: rank(),
        "get_world_size": lambda *_, **__: _current[0]().world_size,
        "is_initialized": lambda: True,
    }
    _fakes.extend((dist, name, fake) for name, fake in fakes.items())
    return _fakes


_fakes: list[tuple[Any, str, Any]] = []
_current: list[Callable[[], Group]] = [lambda: None]  # type: ignore[list-item, return-value]


def _call_site() -> str:
    """Where, outside of this package, the collective was called."""
    frame = sys._getframe(2)
    while os.path.dirname(frame.f_code.co_filename) == _HERE and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"

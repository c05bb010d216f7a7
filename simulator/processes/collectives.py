"""Counts the collectives that a target issues in the training thread, by operation and call site, and keeps in a file
which one this rank is in.

Collectives of the model itself are its own affair; those that a publisher adds to a step make every rank wait for the
slowest one. Only what goes through Python is seen, which is all that a publisher can call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from .hang import Call, FlightWriter

#: Methods of a process group that every member has to call; the torch at hand may lack some.
OPERATIONS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
#: Names that torch.distributed has for some of them.
PUBLIC = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
#: torch and torchrec, and what torch's functions are wrapped in.
_TORCH = (str(Path(torch.__file__).parent), str(typing_extensions.__file__))


class Collectives:
    """One per run, made in the training thread. ``flight`` is where the file lies."""

    def __init__(self, flight: Path) -> None:
        self._thread = threading.get_ident()
        self._counts: Counter[str] | None = None
        self._flight = FlightWriter(flight)
        #: What was begun and not waited for yet, by identity of torch's handle, which lives as long as it may be.
        self._begun: dict[int, Call] = {}

    def install(self) -> Callable[[], None]:
        """Replace the operations by recorded ones; what is returned puts them back."""
        originals = {n: getattr(dist.ProcessGroup, n) for n in OPERATIONS if hasattr(dist.ProcessGroup, n)}
        for name, operation in originals.items():
            setattr(dist.ProcessGroup, name, self._recorded(name, operation))
        wait = dist.Work.wait
        dist.Work.wait = self._waited(wait)  # type: ignore[method-assign]

        def undo() -> None:
            for name, operation in originals.items():
                setattr(dist.ProcessGroup, name, operation)
            dist.Work.wait = wait  # type: ignore[method-assign]
            self._flight.close()

        return undo

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """While inside, collectives of this thread are counted: ``"allreduce at trainer.py:12 in vote"`` -> number."""
        self._counts = counts = Counter[str]()
        try:
            yield counts
        finally:
            self._counts = None

    def _recorded(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            site = _call_site()
            if self._counts is not None and threading.get_ident() == self._thread:
                self._counts[f"{name} at {site}"] += 1
            call = self._flight.begin(PUBLIC.get(name, name), site)
            try:
                work = operation(group, *args, **kwargs)
            finally:
                self._flight.leave(call)
            self._begun[id(work)] = call
            return work

        return recorded

    def _waited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._begun.pop(id(work), None)
            if call is None:
                return wait(work, *args, **kwargs)
            self._flight.enter(call)
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._flight.leave(call)

        return waited


def _call_site() -> str:
    """Where in the code outside torch the collective was called."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"

"""Counts the collectives that a target issues in the training thread, by operation and call site.

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
_TORCH = str(Path(torch.__file__).parent)


class Collectives:
    """One per run, made in the training thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._counts: Counter[str] | None = None

    def install(self) -> Callable[[], None]:
        """Replace the operations by counted ones; what is returned puts them back."""
        originals = {n: getattr(dist.ProcessGroup, n) for n in OPERATIONS if hasattr(dist.ProcessGroup, n)}
        for name, operation in originals.items():
            setattr(dist.ProcessGroup, name, self._counted(name, operation))

        def undo() -> None:
            for name, operation in originals.items():
                setattr(dist.ProcessGroup, name, operation)

        return undo

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """While inside, collectives of this thread are counted: ``"allreduce at trainer.py:12 in vote"`` -> number."""
        self._counts = counts = Counter[str]()
        try:
            yield counts
        finally:
            self._counts = None

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._counts is not None and threading.get_ident() == self._thread:
                self._counts[f"{name} at {_call_site()}"] += 1
            return operation(group, *args, **kwargs)

        return counted


def _call_site() -> str:
    """Where in the code outside torch the collective was called."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"

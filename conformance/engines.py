"""An engine by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..simulator.errors import ScenarioError
from .check import Engine

ENGINES = ("virtual", "processes")


@contextmanager
def running(name: str) -> Iterator[Engine]:
    """A running engine, gone with all it started when the block ends. Raises ScenarioError for an unknown name, or
    where torch is not installed, which the process engine needs."""
    if name == "virtual":
        from ..simulator.virtual.engine import VirtualEngine

        yield VirtualEngine()
    elif name == "processes":
        from ..simulator.processes.engine import ProcessEngine

        with ProcessEngine() as engine:
            yield engine
    else:
        raise ScenarioError(f"unknown engine {name!r}; known engines: {', '.join(ENGINES)}")

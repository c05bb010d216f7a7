"""An engine by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..simulator.errors import ScenarioError
from .check import Engine

ENGINES = ("virtual", "processes")


@contextmanager
def running(name: str, **options: Any) -> Iterator[Engine]:
    """A running engine, gone with all it started when the block ends; ``options`` are the process engine's. Raises
    ScenarioError for an unknown name, or where torch is not installed, which the process engine needs."""
    if name == "virtual":
        from ..simulator.virtual.engine import VirtualEngine

        yield VirtualEngine()
    elif name == "processes":
        from ..simulator.processes.engine import ProcessEngine

        with ProcessEngine(**options) as engine:
            yield engine
    else:
        raise ScenarioError(f"unknown engine {name!r}; known engines: {', '.join(ENGINES)}")

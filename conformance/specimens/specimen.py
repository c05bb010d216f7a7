"""What a specimen is: a known bug as the smallest mutation of the reference, with the scenario that brings it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...simulator.scenario import Scenario


class Patch:
    """Replaces attributes of classes and modules, and puts the originals back when ``undo`` closes.

    ``stand_ins``: by name of a class of the reference, the class to mutate in its place.
    """

    def __init__(self, undo: ExitStack, stand_ins: Mapping[str, type] | None = None) -> None:
        self._undo, self._stand_ins = undo, stand_ins or {}

    def replace(self, owner: type | ModuleType, name: str, value: Any) -> Any:
        """Set ``owner.name`` to ``value`` and return the original.

        Raises AttributeError when the owner itself has no such attribute: a specimen that mutates nothing would prove
        nothing.
        """
        owner = self._stand_ins.get(owner.__name__, owner)
        if name not in vars(owner):
            where = getattr(owner, "__qualname__", owner.__name__)
            raise AttributeError(f"{where} has no {name!r} to replace; the specimen must follow the reference")
        original = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.callback(setattr, owner, name, original)
        return original


@dataclass(frozen=True)
class Specimen:
    """A known bug. ``title`` says it in one line, ``cause`` tells cause and consequence in a paragraph.

    ``family``: of the faults that bring it out; ``properties``: those that must report it in ``scenario``;
    ``apply(patch)``: puts the bug into the reference classes of this process.
    """

    id: str
    slug: str
    title: str
    cause: str
    family: str
    properties: tuple[str, ...]
    scenario: Scenario
    apply: Callable[[Patch], None]

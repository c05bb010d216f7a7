"""Known bugs, each a small mutation of the reference that a named property must catch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import ExitStack

from .specimen import Patch, Specimen

#: Id -> specimen, in order of ids. Each is a module ``s<number>_<slug>.py`` of this package with a ``SPECIMEN`` in it.
SPECIMENS: dict[str, Specimen] = {
    specimen.id: specimen
    for name in sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "specimen")
    if isinstance(specimen := importlib.import_module(f".{name}", __name__).SPECIMEN, Specimen)
}


def activate(specimen_id: str, stand_ins: Mapping[str, type] | None = None) -> ExitStack:
    """Put a known bug into the reference classes of this process; closing what is returned takes it out again.

    ``stand_ins``: by name of a class of the reference, the class that an engine uses in its place.

    Raises KeyError for an unknown id, AttributeError when the reference no longer has what the specimen replaces.
    """
    with ExitStack() as undo:
        SPECIMENS[specimen_id].apply(Patch(undo, stand_ins))
        return undo.pop_all()
    raise AssertionError("unreachable: ExitStack swallows nothing here")

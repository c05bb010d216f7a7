"""From what a target's factory returns to what the training loop calls: both seams, their capabilities, their checks.

A factory returns a *publisher* (`target.PublisherTarget`), or an *uploader* (`target.UploaderTarget`), which is fed by
the reference's own dumper. What else it can do it claims; what it does not claim it is never asked.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, TypeVar, cast

import numpy as np
import pyarrow as pa

from ..reference.dumper import Cadence, Dumper, Source
from .errors import ScenarioError
from .history import FINAL_SCHEMA
from .scenario import Scenario
from .target import VERSION, PublisherTarget, RankContext, UploaderTarget, reference_publisher, settings_of

F = TypeVar("F", bound=Callable[..., Any])
Seam = Literal["publisher", "uploader"]

#: What a target may claim, and what it then gets to do.
CAPABILITIES: Final = MappingProxyType(
    {
        "feature-store": "publishes to the Feature Store that the context names, over whichever of its interfaces",
        "sdk": "reaches that store through `client_factory()` or `open_view()`, so that the SDK can be made to fail",
        "arrow": "uploads with write_features_arrow when `config.upload_format` is arrow",
        "json": "uploads with write_features when `config.upload_format` is json",
        "int8": "publishes rowwise int8 when `config.embedding_type` is int8",
        "minutes": "dumps by minutes of the rank's own clock when `config.every_minutes` is set",
        "role-names": "publishes under role names when `config.naming` is role",
        "dynamic": "publishes the context's dynamic tables",
        "retain": "keeps copies of acknowledged deltas in the context's folder `retain`",
        "spill": "keeps what it could not deliver in the context's folder `spill`",
        "readback": "has a `readback(context)` that compares its retained shards with the store",
        "restart": "has state_dict, load_state_dict and start_over, and converges after a crash",
    }
)
#: Claimed by who claims nothing.
DEFAULT: Final = frozenset({"feature-store", "sdk", "arrow"})
#: What the kit's own dumper does for an uploader.
DUMPED_BY_KIT: Final = frozenset({"minutes", "role-names", "dynamic"})
UPLOADER_CALLS: Final = {"start": 0, "submit": 2, "check_error": 0, "close": 1}
PUBLISHER_CALLS: Final = {"start": 0, "after_step": 1, "paused": 0, "finish": 1, "close": 0}
RESTART_CALLS: Final = {"state_dict": 1, "load_state_dict": 1, "start_over": 0}


def claims(*capabilities: str) -> Callable[[F], F]:
    """Decorator for a factory (a function or a class): what the target can do, of `CAPABILITIES`, and nothing else."""

    def mark(factory: F) -> F:
        factory.capabilities = frozenset(capabilities)  # type: ignore[attr-defined]
        return factory

    return mark


def claimed(factory: Callable[..., Any], name: str) -> frozenset[str]:
    """Capabilities of a factory that users call ``name``. Raises ScenarioError when it claims what there is not."""
    found = getattr(factory, "capabilities", DEFAULT)
    try:
        found = frozenset(found() if callable(found) else found)
    except TypeError:
        raise ScenarioError(f"target {name!r}: its capabilities are {found!r}; want names in a set") from None
    if unknown := sorted(str(each) for each in found - CAPABILITIES.keys()):
        raise ScenarioError(
            f"target {name!r} claims {', '.join(map(repr, unknown))}; known capabilities: {', '.join(CAPABILITIES)}"
        )
    return found | DUMPED_BY_KIT if seam_of(factory) == "uploader" else found


def seam_of(factory: Callable[..., Any]) -> Seam | None:
    """Which seam a factory's products have, as far as a class or a return annotation tells; None when neither does."""
    made: Any = factory
    if not inspect.isclass(factory):
        try:
            made = typing.get_type_hints(factory).get("return")
        except Exception:  # annotations that name nothing: they are the user's, and no more than a hint
            made = None
    if hasattr(made, "after_step"):
        return "publisher"
    return "uploader" if hasattr(made, "submit") else None


def check_factory(factory: Callable[..., Any], name: str) -> None:
    """Raises ScenarioError when a factory cannot be called with a context."""
    if mismatch := _mismatch(factory, 1):
        raise ScenarioError(
            f"wrong signature: target {name!r} is called with one argument, the RankContext: {mismatch}"
        )


def _mismatch(call: Callable[..., Any], arguments: int) -> str:
    """Why something cannot be called with so many arguments; "" when it can, or when nobody can tell."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # written in C, say
        return ""
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""


def check_calls(made: Any, name: str, *, restart: bool = False) -> Seam:
    """The seam of what a factory returned. Raises ScenarioError for what has neither, or calls of other arguments.

    ``restart``: the calls that a restart needs are needed too.
    """
    kind = type(made).__name__
    if made is None:
        raise ScenarioError(f"target {name!r} returned None: its factory has to return the publisher or uploader")
    seam: Seam = "uploader" if hasattr(made, "submit") and not hasattr(made, "after_step") else "publisher"
    needed = UPLOADER_CALLS if seam == "uploader" else PUBLISHER_CALLS | (RESTART_CALLS if restart else {})
    if missing := [call for call in needed if not callable(getattr(made, call, None))]:
        raise ScenarioError(
            f"target {name!r} returned {kind}, which has no {', '.join(missing)}; a publisher has "
            f"{', '.join(PUBLISHER_CALLS)}"
            + (f", {', '.join(RESTART_CALLS)} (for a restart)" if restart else "")
            + f"; an uploader has {', '.join(UPLOADER_CALLS)}"
        )
    for call, arguments in needed.items():
        if mismatch := _mismatch(getattr(made, call), arguments):
            raise ScenarioError(
                f"wrong signature: {kind}.{call} of target {name!r} is called with {arguments} arguments: {mismatch}"
            )
    return seam


def adapt(
    factory: Callable[[RankContext], Any], name: str, context: RankContext, scenario: Scenario
) -> PublisherTarget:
    """Call the factory and return what the training loop calls. Raises ScenarioError for a product without a seam."""
    made = factory(context)
    if check_calls(made, name, restart=scenario.workload.checkpoint_every_steps > 0) == "publisher":
        return cast(PublisherTarget, made)
    # Who has to be asked what it can do, a program, writes to the fake: it has no way to say what another store holds.
    to_fake = callable(getattr(factory, "capabilities", None)) or "feature-store" in claimed(factory, name)
    fed = FedUploader(made, context, opens_view=to_fake)
    return cast(PublisherTarget, fed)  # without the calls of a restart, which no uploader is asked


class FedUploader:
    """A publisher made of a foreign uploader and the reference's dumper: `submit` gets what the reference's would.

    ``opens_view``: entity and view are made before `start`, by rank 0, as every publisher does it.
    """

    def __init__(self, uploader: UploaderTarget, context: RankContext, opens_view: bool = True) -> None:
        self._uploader, self._opens_view, self._closed = uploader, opens_view, False
        ours = dataclasses.replace(context, version=VERSION)  # to refuse another one is the uploader's to do
        self._publisher = reference_publisher(ours)  # for its source and its way to make a view
        self._source, self._settings = self._publisher._source, settings_of(ours)
        self._dumper = Dumper(self._source, self._settings, context.rank, context.world_size)
        self._cadence: Cadence

    def __repr__(self) -> str:
        return f"{type(self._uploader).__name__} (an uploader)"

    def start(self) -> None:
        if self._opens_view:
            error = self._publisher._create_view_first()
            self._publisher._meet()
            if error is not None:
                raise error
        self._uploader.start()
        self._dumper.discard()
        self._cadence = Cadence(self._settings)

    def after_step(self, step: int) -> None:
        self._uploader.check_error()
        if self._cadence.due(step):
            self._submit(step, "dump")

    def paused(self) -> AbstractContextManager[object]:
        return self._source.paused()

    def finish(self, step: int) -> None:
        self._submit(step, "final")
        self._closed = True
        self._uploader.close(True)
        self._uploader.check_error()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._uploader.close(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _submit(self, step: int, source: Source) -> None:
        table = self._dumper.dump(step, source)
        if table is not None:
            self._uploader.submit(step, table)
        self._dumper.submitted()


def contents(factory: Callable[..., Any], name: str, context: RankContext) -> pa.Table | None:
    """What a target's own store holds (`history.FINAL_SCHEMA`), as its `contents(context)` tells; None without one.

    Raises ScenarioError when it raises, or returns what is no rows.
    """
    read = getattr(factory, "contents", None)
    if read is None:
        return None
    try:
        rows: list[tuple[str, int, Iterable[float]]] = list(read(context))
        names, keys, values = zip(*rows, strict=True) if rows else ((), (), ())
        return pa.table(
            {
                "pk": pa.array(names, pa.string()),
                "sk": pa.array(keys, pa.int64()),
                "embedding": pa.array([np.asarray(value, np.float32) for value in values], pa.list_(pa.float32())),
                "ts": pa.array([0] * len(rows), pa.int64()),
            },
            schema=FINAL_SCHEMA,
        )
    except Exception as error:
        raise ScenarioError(
            f"target {name!r}: contents() has to return (embedding_name, key, values) of all rows of its store: "
            f"{type(error).__name__}: {error}"
        ) from error

"""The seam between the simulator and the publisher under test.

A target is named by a string: ``reference``, ``specimen:S02`` (the reference with a known bug put back) or
``package.module:factory``, a callable that takes a ``RankContext`` and returns a publisher.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from .dynamic import DynamicHandle
from .errors import ScenarioError
from .scenario import PublisherConfig, Table

#: Where runs publish to in the fake store.
PROJECT, VIEW, ENTITY, VERSION = "deltaproof", "deltaproof_view", "default_dynemb_entity", "run-1"
#: The environment variable with the ranks' FeatureDB password, the same that a real trainer reads.
PASSWORD = "FEATUREDB_PASSWORD"


class PublisherTarget(Protocol):
    """What a training loop calls. Any method may raise; an exception ends the rank, as it would end a trainer.
    Scenarios without checkpoints need no ``state_dict``, ``load_state_dict`` and ``start_over``.

    An exception's attribute ``unacknowledged`` (steps) is kept in the history when it has one.
    """

    def start(self) -> object: ...

    def after_step(self, step: int) -> object:
        """The rank finished its own step ``step`` (1, 2, …); not called for batches that a rank only takes part in."""

    def paused(self) -> AbstractContextManager[object]:
        """Within it, forwards are evaluation and must not be published."""

    def finish(self, step: int) -> object:
        """Training is over at the rank's own step; returns when everything is acknowledged, or raises."""

    def state_dict(self, step: int) -> Mapping[str, Any]:
        """What this rank must find again in the checkpoint that is made after lockstep ``step``."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> object:
        """Called before ``start`` in a restarted job, with the states of all ranks of its checkpoint."""

    def start_over(self) -> object:
        """Called in place of ``load_state_dict`` when the restarted job has no checkpoint."""

    def close(self) -> object:
        """Called after ``finish``. When the loop raised, ``__exit__`` is called instead, if the target has one."""


@dataclass(frozen=True)
class RankContext:
    """All that a factory is told. ``model`` is the sharded TorchRec model, or, on the virtual engine, a table source
    (`reference.dumper.TableSource`) that stands for it; ``client_factory()`` gives a client with the
    ``feature_store_py`` interface, logged in as this rank; ``barrier()`` is a collective over all ranks. ``retain`` and
    ``spill``: folders for copies of what was acknowledged, and of what could not be delivered. ``dynamic``: this rank's
    dynamic tables, which no TorchRec module knows."""

    rank: int
    world_size: int
    tables: Sequence[Table]
    config: PublisherConfig
    model: Any
    client_factory: Callable[[], Any]
    barrier: Callable[[], None]
    endpoint: str
    project: str = PROJECT
    view: str = VIEW
    entity: str = ENTITY
    version: str = VERSION
    retain: str | None = None
    spill: str | None = None
    dynamic: Sequence[DynamicHandle] = ()


def resolve(target: str) -> Callable[[RankContext], PublisherTarget]:
    """The factory that a target string names. Raises ScenarioError when there is none."""
    if target == "reference":
        return reference
    kind, _, rest = target.partition(":")
    if kind == "specimen":
        specimens = importlib.import_module("..conformance.specimens", __package__)
        if rest not in specimens.SPECIMENS:
            raise ScenarioError(f"unknown specimen {rest!r}; known: {', '.join(specimens.SPECIMENS)}")

        def mutated(context: RankContext) -> PublisherTarget:
            specimens.activate(rest)
            return reference(context)

        return mutated
    if not rest:
        raise ScenarioError(f"target {target!r} is neither 'reference', 'specimen:ID' nor 'package.module:factory'")
    try:
        factory: Callable[[RankContext], PublisherTarget] = getattr(importlib.import_module(kind), rest)
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"cannot import target {target!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ScenarioError(f"target {target!r} is a {type(factory).__name__}, not a callable that takes a RankContext")
    return factory


def reference(context: RankContext) -> PublisherTarget:
    """The reference publisher on the context's model and store."""
    from ..reference.publisher import Publisher

    return Publisher(
        _with_dynamic(source_of(context.model), context),
        context.client_factory(),
        _settings(context),
        rank=context.rank,
        world_size=context.world_size,
        barrier=context.barrier,
        connect=context.client_factory,
    )


def readback(target: str, context: RankContext) -> dict[str, Any] | None:
    """Compare the retained shards with the store, as the target does it; None for one that cannot.

    A report has ``agrees`` and, by verdict, the number of keys: docs/readback.md.
    """
    from ..reference.readback import Readback, StoreReader, choose
    from ..reference.shards import Files, find

    if context.retain is None or not (target == "reference" or target.startswith("specimen:")):
        return None
    settings = _settings(context)
    project = context.client_factory().get_project(settings.project)
    view = project.get_dynamic_embedding_feature_view(settings.view)
    files = Files(context.retain)
    report = Readback(files, choose(find(files)), StoreReader(view, settings, context.rank, context.world_size)).run()
    return {**msgspec.to_builtins(report), "agrees": report.agrees}


def _settings(context: RankContext) -> Any:
    from ..reference.settings import Settings

    config = context.config
    return Settings(
        project=context.project,
        view=context.view,
        entity=context.entity,
        version=context.version,
        every_steps=config.every_steps if config.every_minutes is None else None,
        every_minutes=config.every_minutes,
        upload_format=config.upload_format,
        naming=config.naming,
        batch_size=config.batch_size,
        max_workers=config.max_workers,
        retry_attempts_max=config.retry_attempts_max,
        retry_delay_ms_min=config.retry_delay_ms_min,
        retry_delay_ms_max=config.retry_delay_ms_max,
        queue_steps_max=config.queue_steps_max,
        queue_bytes_max=config.queue_bytes_max,
        flush_timeout_s=config.flush_timeout_s,
        close_timeout_s=config.close_timeout_s,
        settle_s=config.settle_s,
        retain=context.retain,
        spill=context.spill,
    )


def _with_dynamic(source: Any, context: RankContext) -> Any:
    """The source, together with that of the rank's dynamic tables when it has some."""
    if not context.dynamic:
        return source
    from ..reference.contract import TableRef
    from ..reference.dynamic import CombinedSource, DynamicSource, DynamicSpec

    specs = []
    for handle in context.dynamic:
        ref = TableRef(owner=handle.spec.owner, collection=handle.spec.collection, table=handle.spec.name)
        specs.append(DynamicSpec(ref, handle.table, handle.spec.feature_names, handle.missing))
    dynamic = DynamicSource(specs, context.rank, context.world_size)
    for handle in context.dynamic:
        handle.listeners.append(functools.partial(dynamic.record, handle.spec.fqn))
    return CombinedSource([source, dynamic])


def source_of(model: Any) -> Any:
    """Table source of a context's model."""
    if hasattr(model, "drain"):
        return model
    from ..reference.tracker import TorchRecSource

    return TorchRecSource(model)

"""The seam between the simulator and the publisher under test.

A target is named by a string: ``reference``, ``specimen:S02`` (the reference with a known bug put back),
``package.module:factory``, a callable that takes a ``RankContext`` and returns a publisher or an uploader, or
``exec:COMMAND``, a program that speaks docs/protocol.md.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from ..reference.contract import TableRef, embedding_names
from .dynamic import DynamicHandle
from .errors import ScenarioError
from .scenario import PublisherConfig, Scenario, Table

if TYPE_CHECKING:
    from ..reference.publisher import Publisher
    from ..reference.settings import Settings

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


class UploaderTarget(Protocol):
    """What sends deltas to a store, and nothing else: ids and rows come from the reference's dumper, which also decides
    when. Any method may raise, as of a publisher; ``unacknowledged`` is kept as well.
    """

    def start(self) -> object:
        """Training is about to begin. Entity and view exist."""

    def submit(self, step: int, table: pa.Table) -> object:
        """Send these rows (`reference.delta.DELTA_SCHEMA`, one for each table and key), now or in the background.

        Their values must not be looked at later than those of a later call. A step may come twice.
        """

    def check_error(self) -> object:
        """Called after every step, and once more after ``close(True)``: raises when an earlier step went wrong."""

    def close(self, drain: bool) -> object:
        """The last call, once. With ``drain`` it returns when the store has acknowledged everything, or it raises;
        without, training has failed, and it gives up at once."""


@dataclass(frozen=True)
class RankContext:
    """All that a factory is told. ``model`` is the sharded TorchRec model, or, on the virtual engine, a table source
    (`reference.dumper.TableSource`) that stands for it; ``client_factory()`` gives a client with the
    ``feature_store_py`` interface, logged in as this rank; ``barrier()`` is a collective over all ranks. ``retain`` and
    ``spill``: folders for copies of what was acknowledged, and of what could not be delivered. ``dynamic``: this rank's
    dynamic tables, which no TorchRec module knows.

    ``process_group`` is torch's, None on the virtual engine. ``clock`` is what this rank's time is read from. For
    a target that brings its own store: ``shared`` is a dictionary that the ranks of a run have in common, on the
    virtual engine; on the process engine it is None and ``run`` another text in each run, for a store that outlives it.
    """

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
    process_group: Any = None
    clock: Any = time
    run: str = ""
    shared: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def names(self) -> dict[str, str]:
        """Published embedding_name of each table FQN, as an exporter of the model derives it."""
        refs = [TableRef(owner=t.owner, collection=t.collection, table=t.name) for t in self.tables]
        return embedding_names(refs, self.config.naming)

    @property
    def dims(self) -> dict[str, int]:
        """Embedding dimension of each table FQN."""
        return {table.fqn: table.dim for table in self.tables}

    @property
    def settings(self) -> Settings:
        """``config``, and where to publish, as settings of the reference publisher."""
        return settings_of(self)

    @classmethod
    def reader(cls, scenario: Scenario, run: str, shared: dict[str, Any] | None, endpoint: str = "") -> RankContext:
        """The context of a target's ``contents``, in no rank: it has no model, client or barrier."""

        def none() -> Any:
            raise LookupError("contents() is called in no rank: its context has no client and no barrier")

        size, tables, config = scenario.world_size, scenario.tables, scenario.publisher
        return cls(0, size, tables, config, None, none, none, endpoint, run=run, shared=shared)

    def open_view(self) -> Any:
        """The view to publish to, through a new client. Raises LookupError where there is none."""
        project = self.client_factory().get_project(self.project)
        view = project and project.get_dynamic_embedding_feature_view(self.view)
        if view is None:
            raise LookupError(f"there is no view {self.view!r} in project {self.project!r}")
        return view


def make_publisher(target: str, context: RankContext, scenario: Scenario) -> PublisherTarget:
    """The publisher of this rank. Raises ScenarioError when the target names none, or makes what is none."""
    from . import seams

    factory = resolve(target)
    if is_ours(target):
        return factory(context)
    return seams.adapt(factory, target, context, scenario)


def contents(target: str, context: RankContext) -> pa.Table | None:
    """What the target's own store holds (`history.FINAL_SCHEMA`); None for one that publishes to the fake.

    Raises ScenarioError when the target cannot say.
    """
    from . import seams

    if is_ours(target):
        return None
    return seams.contents(resolve(target), target, context)


def is_ours(target: str) -> bool:
    """Whether it is the reference, or the reference with a known bug."""
    return target == "reference" or target.startswith("specimen:")


def require(target: str) -> None:
    """Raises ScenarioError when a target string names nothing, as far as that shows without importing it."""
    kind, _, rest = target.partition(":")
    if kind == "specimen" or not rest:
        resolve(target)
    elif kind != "exec":
        package = kind.partition(".")[0]
        if not package.isidentifier() or importlib.util.find_spec(package) is None:
            raise ScenarioError(f"cannot import target {target!r}: there is no module {package!r}")


def resolve(target: str) -> Callable[[RankContext], Any]:
    """The factory that a target string names. Raises ScenarioError when there is none, or it cannot be called."""
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
    if kind == "exec":
        return importlib.import_module("..conformance.subprocess_target", __package__).factory(rest)
    if not rest:
        raise ScenarioError(
            f"target {target!r} is neither 'reference', 'specimen:ID', 'package.module:factory' nor 'exec:COMMAND'"
        )
    try:
        factory: Callable[[RankContext], Any] = getattr(importlib.import_module(kind), rest)
    except (Exception, SystemExit) as error:
        raise ScenarioError(f"cannot import target {target!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ScenarioError(f"target {target!r} is a {type(factory).__name__}, not a callable that takes a RankContext")
    importlib.import_module(".seams", __package__).check_factory(factory, target)
    return factory


def reference(context: RankContext) -> PublisherTarget:
    """The reference publisher on the context's model and store."""
    return reference_publisher(context)


def reference_publisher(context: RankContext) -> Publisher:
    """The same, as what it is."""
    from ..reference.publisher import Publisher

    return Publisher(
        _with_dynamic(source_of(context.model), context),
        context.client_factory(),
        settings_of(context),
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

    if context.retain is None or not is_ours(target):
        return None
    settings = settings_of(context)
    project = context.client_factory().get_project(settings.project)
    view = project.get_dynamic_embedding_feature_view(settings.view)
    files = Files(context.retain)
    report = Readback(files, choose(find(files)), StoreReader(view, settings, context.rank, context.world_size)).run()
    return {**msgspec.to_builtins(report), "agrees": report.agrees}


def settings_of(context: RankContext) -> Settings:
    """What the scenario asks for, as settings of the reference publisher. Raises ValueError for a refused version."""
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
        embedding_type=config.embedding_type,
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

"""The one object a training loop holds: `for_model`, `start`, `after_step`, `finish`."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy as np

from .connect import connect
from .contract import ContractError, Manifest, TableRef, embedding_names
from .delta import DeltaError, Keys
from .dumper import Cadence, Dumper, Source, TableSource, keys_of, merge_keys
from .dynamic import CombinedSource, DynamicSource
from .errors import PublisherError, redact, wrapped
from .restart import TARGET, RankState, Restart, join, pack
from .settings import Settings
from .shards import Files, ShardWriter, State
from .uploader import Uploader, UploadError

__all__ = ["Publisher", "PublisherError", "connect"]

log = logging.getLogger("deltaproof.reference")

PK, SK, VALUE = "embedding_name", "key_id", "embedding"
VALUE_TYPES = {"float32": "ARRAY<FLOAT>", "int8": "ARRAY<UINT8>"}


class Publisher:
    """Publishes what one rank changed. The same calls on every rank; after `start`, no rank waits for another.

    As a context manager it closes itself: it drains after a normal exit, and does not wait when training raised.

    Args:
        source: where touched ids and rows come from.
        client: a `feature_store_py` client, or None when `connect` makes one: in `start`, and when a token has expired.
        barrier: returns when every rank called it; called exactly once, in `start`.
        release: called by `close`, for a source that nobody else uses.
        clock: a module-like object with `time()` and `monotonic()` in seconds.
    """

    def __init__(
        self,
        source: TableSource,
        client: Any,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        barrier: Callable[[], object],
        connect: Callable[[], Any] | None = None,
        release: Callable[[], object] = lambda: None,
        clock: Any = time,
    ) -> None:
        self._source, self._client, self._connect, self._settings = source, client, connect, settings
        self._rank, self._world_size, self._barrier, self._clock = rank, world_size, barrier, clock
        self._release = release
        self._tables = dict(source.tables())
        self._names = self._embedding_names()
        self._dumper = Dumper(source, settings, rank, world_size)
        self._cadence: Cadence  # made by `start`
        self._uploader: Uploader | None = None
        self._view: Any = None
        self._spill: ShardWriter | None = None
        self._step = 0
        self._restart: Restart | None = None  # the state loaded last
        self._repairing = self._finished = self._closed = self._released = False
        self._earlier_ts = 0  # newest ts of rows that no loaded state accounts for
        self.generation: str | None = None  # names this start of this rank in shards and logs

    @classmethod
    def for_model(
        cls, model: Any, settings: Settings, client: Any = None, dynamic: DynamicSource | None = None
    ) -> Self:
        """Publisher of this rank for a TorchRec model (DistributedModelParallel), from torch.distributed's state.

        `dynamic` has the rows of the model's dynamic tables, when it has such.

        Raises:
            TrackerError: a table whose sharding cannot be followed. ContractError: names that collide.
        """
        import torch.distributed as dist

        from .tracker import TorchRecSource

        grouped = dist.is_available() and dist.is_initialized()
        source = TorchRecSource(model, dynamic)
        try:
            return cls(
                source if dynamic is None else CombinedSource([source, dynamic]),
                client,
                settings,
                rank=dist.get_rank() if grouped else 0,
                world_size=dist.get_world_size() if grouped else 1,
                barrier=dist.barrier if grouped else lambda: None,
                connect=(lambda: connect(settings)) if client is None else None,
                release=source.release,
            )
        except BaseException:
            source.release()
            raise

    def start(self) -> None:
        """Create (rank 0) and open the view, then begin to record: ids looked up before are a warm-up and forgotten.

        Raises:
            PublisherError: the view cannot be created or opened, or is of another shape.
            UploadError: the store's greatest ts cannot be read. ShardError: `retain` or `spill` is no usable place.
            A publisher whose start failed is closed: make another.
        """
        if self.generation is not None or self._closed:
            raise PublisherError(f"rank {self._rank}: a publisher starts once; make a new one")
        self.generation = self._new_generation()
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(Exception):  # whatever it says, the first error is the one to raise
                self.close(drain=False)
            self._uploader = None  # and there is no state to save
            raise

    def _start(self) -> None:
        error = self._create_view_first()
        self._meet()
        error = error or self._error_of("open", self._use_view)
        if error is not None:  # raised from here: no error of the SDK, which may quote a secret, is its context
            raise error
        self._spill = self._shards(self._settings.spill, "spilled")
        self._uploader = Uploader(
            self._view,
            self._settings,
            self._rank,
            self._world_size,
            self._clock,
            names=self._names,
            dims={fqn: info.dim for fqn, info in self._tables.items()},
            reconnect=None if self._connect is None else self._reopen_view,
            retain=self._shards(self._settings.retain, "acknowledged"),
            spill=self._spill,
        )
        self._uploader.start()
        self._dumper.discard()
        if self._restart is not None:
            self._begin_restart(self._uploader, self._restart)
        elif self._rank == 0:
            self._earlier_ts = self._uploader.ts_last
        if self._spill is not None:
            self._uploader.catch_up(self._spill.ts_floor())
        self._cadence = Cadence(self._settings, self._clock)

    def after_step(self, step: int) -> None:
        """Call after each of this rank's optimizer steps. Dumps and queues when the cadence says so.

        Raises:
            UploadError: an earlier step could not be sent. DeltaError: a row that must not be sent.
        """
        self._running().check_error()
        self._step, self._finished = (step := operator.index(step)), False
        if self._cadence.due(step) or self._repairing:
            self._publish(step, "restore" if self._repairing else "dump")

    def paused(self) -> AbstractContextManager[None]:
        """Wrap evaluation in this: its lookups, those of the calling thread, change nothing and are not recorded."""
        return self._source.paused()

    def finish(self, step: int) -> None:
        """Final flush of this rank, then wait until the store acknowledged everything. Rank-local.

        Whatever is still tracked goes out, whatever step this rank stopped at, dump boundary or not.

        Raises:
            UploadError: names every step that is not acknowledged.
        """
        uploader = self._running()
        self._flush_last(operator.index(step))
        uploader.drain()
        self._finished = True

    def close(self, drain: bool = True) -> None:
        """Stop the uploader, leave the model to the next publisher. Idempotent. `drain=False` gives up what is pending
        at once, for a rank that failed.

        Raises:
            UploadError: steps are not acknowledged. PublisherError: rows were touched and `finish` was not called.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._uploader is not None:
                self._uploader.close(drain)
        finally:
            self._released = True
            self._let_go()  # nothing is pending any more, or it was given up
            self._release()
        if (
            self._uploader is not None
            and not self._finished
            and (rows := sum(map(len, self._dumper.tracked().values())))
        ):
            raise PublisherError(
                f"rank {self._rank}: {rows} rows changed since the last dump and were not published; "
                "call finish(step) before close()"
            )

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """What this rank must find in a checkpoint; save it beside the model, at the same step boundary, on every rank.

        No collective, no request, and nothing is taken away. `step`: the checkpoint's, the same on all ranks; by
        default the last one this rank made. A dict of int, str, bytes and dict (`restart.RankState`).
        """
        if self._uploader is None:
            raise PublisherError(f"rank {self._rank}: a publisher has no state before start()")
        return RankState(
            rank=self._rank,
            world_size=self._world_size,
            step=self._step if step is None else operator.index(step),
            watermark_ms=self._uploader.watermark_ms(),
            pending=pack(self._pending(self._uploader)),
            replicated=pack(self._dumper.replicated),
            **{name: getattr(self._settings, name) for name in TARGET},
        ).to_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
        """Continue from a checkpoint, with the states of *all* its ranks, whatever this job's number of ranks.

        Call it on every rank, before `start` or after it. What was tracked so far is forgotten. What the store lacks or
        has of the discarded future is published by the first `after_step` (or `finish`), so restore the model before.

        Raises:
            RestartError: a rank's state is missing, or they are not of one checkpoint of this view and version.
            PublisherError: the SDK cannot list changed rows. UploadError: what was queued cannot be delivered.
            ShardError: `spill` cannot be read.
        """
        self._load(join([states] if isinstance(states, Mapping) else states, self._settings))

    def start_over(self) -> None:
        """Instead of `load_state_dict` when there is no checkpoint: every row that the version holds is of a discarded
        future, and is published again as this model has it. Raises what `load_state_dict` raises.
        """
        self._load(Restart())

    def manifest(self) -> dict[str, str]:
        """Published name per table FQN, as an exporter of this model derives it."""
        return dict(self._names)

    def write_manifest(self, path: str) -> None:
        """Write names, dimensions and type of all tables as JSON: the bytes that an exporter of this model writes."""
        dims = {TableRef(info.owner, info.collection, info.table): info.dim for info in self._tables.values()}
        Manifest.of(dims, self._settings.naming, self._settings.embedding_type).write(path)

    @property
    def acknowledged(self) -> int | None:
        """Last step that the store acknowledged, None before the first."""
        return None if self._uploader is None else self._uploader.acknowledged_step

    @property
    def uploader(self) -> Uploader:
        """The running uploader, for its counters and pending steps."""
        return self._running()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close(drain=error is None)
        except (RuntimeError, DeltaError) as left:  # UploadError, PublisherError, and what the source says
            if error is None:
                raise
            if str(left) != str(error):
                error.add_note(f"while closing the publisher: {left}")

    def _flush_last(self, step: int) -> None:
        self._publish(step, "final")

    def _publish(self, step: int, source: Source) -> None:
        if self._earlier_ts:
            log.warning(
                "version %r holds rows of an earlier run (newest ts %d) and no state was loaded: what this run never "
                "touches keeps the values of that one. Call load_state_dict(), or start_over() when there is no "
                "checkpoint, or publish to a new version",
                self._settings.version,
                self._earlier_ts,
            )
            self._earlier_ts = 0
        table = self._dumper.dump(step, source)
        try:
            if table is not None:
                self._running().submit(step, table)
        except UploadError:
            self._dumper.submitted()  # pending, and named; after any other error, a signal handler's too, still tracked
            raise
        self._dumper.submitted()
        self._repairing = False

    def _pending(self, uploader: Uploader) -> dict[str, Keys]:
        """Keys whose present rows the store may not have: tracked, or submitted and not acknowledged."""
        return merge_keys(self._dumper.tracked(), *(keys_of(table) for _, table in uploader.pending()))

    def _load(self, restart: Restart) -> None:
        self._restart = restart
        if self._uploader is not None:
            self._begin_restart(self._running(), restart)

    def _begin_restart(self, uploader: Uploader, restart: Restart) -> None:
        """Track again what the checkpoint says the store lacks, and what was published or spilled after it."""
        self._earlier_ts, self._finished = 0, False
        uploader.drain()  # when a running job goes back, what it queued must be in the store before that is read
        self._settle()
        uploader.catch_up(restart.ts_max)
        discarded = self._discarded(restart.ts_min, uploader)
        spilled = [] if self._spill is None else map(keys_of, self._spill.keys_after(restart.ts_min))
        owed = merge_keys(restart.pending, discarded, *spilled)
        self._dumper.discard()  # not sooner: a load that fails forgets nothing
        rows = self._dumper.take_over(owed, restart.replicated)
        self._repairing = rows > 0
        log.info("rank %d, generation %s: %d rows to publish again after a restart", self._rank, self.generation, rows)

    def _settle(self) -> None:
        """Let the last requests of a job that was killed land: what lands later than the next read goes unseen."""
        time.sleep(self._settings.settle_s)

    def _discarded(self, ts_min: int, uploader: Uploader) -> dict[str, Keys]:
        """Keys per FQN of the rows that the store received after the checkpoint: their values may be of steps that the
        restored model never made. Other ranks' are among them. Read in as many portions as the view gives.
        """
        if not hasattr(self._view, "read_changes") or not hasattr(self._view, "high_water_ts"):
            if self._settings.restart == "pending-only":
                return {}
            raise PublisherError(
                f"rank {self._rank}: this SDK cannot list the rows that changed after the checkpoint, so rows of steps "
                'that were lost would stay in the store; set restart = "pending-only" to accept that, or publish the '
                "whole model to a new version"
            )
        found: dict[str, Keys] = {}
        cursor, more = ts_min, True
        while more:
            changed, cursor = uploader.read_changes(cursor)
            found = merge_keys(found, keys_of(changed, "pk", "sk"))
            more = changed.num_rows > 0 and cursor < uploader.ts_last  # above it is only what this job publishes by now
        ends = {self._names[fqn]: info.rows for fqn, info in self._tables.items()}
        outside = {
            name: int(np.count_nonzero((keys < 0) | (keys >= end)))
            for name, keys in found.items()
            if (end := ends.get(name, 0)) is not None
        }
        if self._rank == 0 and any(outside.values()):
            foreign = {name: count for name, count in outside.items() if count}
            log.warning("rows that this model has no place for stay in the store as they are, by table: %s", foreign)
        return {fqn: found[name] for fqn, name in self._names.items() if name in found}

    def _shards(self, where: str | None, state: State) -> ShardWriter | None:
        """Keeps deltas under this generation's name."""
        if where is None or self.generation is None:
            return None
        files, owner = Files(where), (self._settings, self._rank, self._world_size, self.generation)
        files.prepare()
        return ShardWriter(files, *owner, names=self._names, state=state)

    def _new_generation(self) -> str:
        return f"{int(self._clock.time() * 1000):013d}-{uuid.uuid4().hex[:8]}"

    def _running(self) -> Uploader:
        if self._uploader is None or self._closed:
            what = "is closed; make a new one" if self._closed else "is not running; call start() first"
            raise PublisherError(f"rank {self._rank}: the publisher {what}")
        return self._uploader

    def _embedding_names(self) -> dict[str, str]:
        refs = [TableRef(info.owner, info.collection, info.table) for info in self._tables.values()]
        names = embedding_names(refs, self._settings.naming)
        last = {name: fqn for fqn, name in names.items()}
        for fqn, name in names.items():
            if (other := last[name]) != fqn:
                raise ContractError(f"{other!r} and {fqn!r} are both trained and would both be published as {name!r}")
        return names

    def _create_view_first(self) -> Exception | None:
        """Rank 0 creates entity and view when absent; its error is kept until every rank has met."""
        return self._error_of("create", self._create_view) if self._rank == 0 else None

    def _error_of(self, verb: str, call: Callable[[], object]) -> PublisherError | None:
        """What kept the view from being created or opened, without the SDK's own error, which may quote a secret."""
        try:
            call()
        except PublisherError as error:
            return error
        except Exception as error:
            return wrapped(f"rank {self._rank} could not {verb} view {self._settings.view!r}", error)
        return None

    def _create_view(self) -> None:
        settings, project = self._settings, self._project()
        if project.get_entity(settings.entity) is None:
            project.create_entity(settings.entity, join_id=PK, parent_feature_entity_name=None)
        if project.get_dynamic_embedding_feature_view(settings.view) is None:
            project.create_dynamic_embedding_feature_view(
                name=settings.view,
                entity=settings.entity,
                pk_field_name=PK,
                sk_field_name=SK,
                embedding_field_name=VALUE,
                pk_field_type="STRING",
                sk_field_type="INT64",
                ttl=settings.ttl_s,
                shard_count=settings.shard_count,
                replication_count=settings.replication_count,
                embedding_field_type=VALUE_TYPES[settings.embedding_type],
            )

    def _meet(self) -> None:
        self._barrier()

    def _project(self) -> Any:
        if self._client is None:
            if self._connect is None:
                raise PublisherError("a publisher needs a client, or connect to make one")
            self._client = self._connect()
        project = self._client.get_project(self._settings.project)
        if project is None:
            raise PublisherError(f"rank {self._rank}: there is no project {self._settings.project!r}; create it first")
        return project

    def _open_view(self) -> Any:
        name = self._settings.view
        view = self._project().get_dynamic_embedding_feature_view(name)
        if view is None:
            raise PublisherError(
                f"rank {self._rank}: there is no view {name!r}; see rank 0's error, it creates the view"
            )
        kind = getattr(view, "embedding_field_type", None)  # SDKs before 2.2.8 do not say
        wanted = self._settings.embedding_type
        if kind is not None and str(getattr(kind, "value", kind)) != VALUE_TYPES[wanted]:
            what = f"view {name!r} holds {kind}, these rows are {wanted}; publish to another view"
            raise PublisherError(f"rank {self._rank}: {what}")
        return view

    def _use_view(self) -> None:
        self._view = self._open_view()

    def _reopen_view(self) -> Any:
        """The view through a new client, whose credentials are fresh. Called by the uploader's thread."""
        self._let_go()
        self._client = None
        self._use_view()
        if self._released:  # `close` did not wait for this
            self._let_go()
        return self._view

    def _let_go(self) -> None:
        """Release the threads of the view and the connections of a client made here, where the SDK can."""
        try:
            if hasattr(self._view, "close"):
                self._view.close(wait=False)
            if self._connect is not None and hasattr(self._client, "close"):
                self._client.close()
        except Exception as error:  # what it fails to release must hide no error that matters, nor quote a secret
            log.warning("rank %d: view or client could not be closed: %s", self._rank, redact(error))

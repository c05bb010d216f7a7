"""The one object a training loop holds: `for_model`, `start`, `after_step`, `finish`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from .contract import ContractError, TableRef, embedding_names
from .dumper import Cadence, Dumper, TableSource
from .settings import Settings
from .uploader import Uploader, UploadError

PK, SK, VALUE = "embedding_name", "key_id", "embedding"
VALUE_TYPE = "ARRAY<FLOAT>"


class PublisherError(RuntimeError):
    """The publisher was set up or used in a way that could lose rows. The message says what to do."""


class Publisher:
    """Publishes what one rank changed. The same calls on every rank; after `start`, no rank waits for another.

    As a context manager it closes itself: it drains after a normal exit, and does not wait when training raised.

    Args:
        source: where touched ids and rows come from. client: a `feature_store_py` client.
        barrier: returns when every rank called it; called exactly once, in `start`.
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
        clock: Any = time,
    ) -> None:
        self._source, self._client, self._settings = source, client, settings
        self._rank, self._world_size, self._barrier, self._clock = rank, world_size, barrier, clock
        self._tables = dict(source.tables())
        self._names = self._embedding_names()
        self._dumper = Dumper(source, settings, rank, world_size)
        self._cadence: Cadence | None = None
        self._uploader: Uploader | None = None
        self._view: Any = None
        self._finished = self._closed = False

    @classmethod
    def for_model(cls, model: Any, settings: Settings, client: Any = None) -> Self:
        """Publisher of this rank for a TorchRec model (DistributedModelParallel), from torch.distributed's state.

        Raises:
            TrackerError: a table whose sharding cannot be followed. ContractError: names that collide.
        """
        import torch.distributed as dist

        from .tracker import TorchRecSource

        grouped = dist.is_available() and dist.is_initialized()
        return cls(
            TorchRecSource(model),
            connect(settings) if client is None else client,
            settings,
            rank=dist.get_rank() if grouped else 0,
            world_size=dist.get_world_size() if grouped else 1,
            barrier=dist.barrier if grouped else _no_barrier,
        )

    def start(self) -> None:
        """Create (rank 0) and open the view, then begin to record: ids looked up before are a warm-up and forgotten.

        Raises:
            PublisherError: the view is missing or of another shape. Whatever rank 0 met while it created the view.
        """
        error = self._create_view_first()
        self._meet()
        if error is not None:
            raise error
        self._view = self._open_view()
        dims = {fqn: info.dim for fqn, info in self._tables.items()}
        self._uploader = Uploader(
            self._view, self._settings, self._rank, self._world_size, self._clock, names=self._names, dims=dims
        )
        self._uploader.start()
        self._dumper.discard()
        self._cadence = Cadence(self._settings, self._clock)

    def after_step(self, step: int) -> None:
        """Call after each of this rank's optimizer steps. Dumps and queues when the cadence says so.

        Raises:
            UploadError: an earlier step could not be sent. DeltaError: a row that must not be sent.
        """
        uploader = self._running()
        uploader.check_error()
        assert self._cadence is not None
        self._finished = False
        if self._cadence.due(step):
            self._publish(step, final=False)

    def paused(self) -> AbstractContextManager[None]:
        """Wrap evaluation in this: its lookups change nothing and are not recorded."""
        return self._source.paused()

    def finish(self, step: int) -> None:
        """Final flush of this rank, then wait until the store acknowledged everything. Rank-local.

        Whatever is still tracked goes out, whatever step this rank stopped at, dump boundary or not.

        Raises:
            UploadError: names every step that is not acknowledged.
        """
        uploader = self._running()
        self._flush_last(step)
        uploader.drain()
        self._finished = True

    def close(self, drain: bool = True) -> None:
        """Stop the uploader. Idempotent. `drain=False` gives up what is pending at once, for a rank that failed.

        Raises:
            UploadError: steps are not acknowledged. PublisherError: rows were touched and `finish` was not called.
        """
        if self._uploader is None or self._closed:
            return
        self._closed = True
        try:
            self._uploader.close(drain)
        finally:
            if (close_view := getattr(self._view, "close", None)) is not None:
                close_view(wait=False)  # nothing is pending any more, or it was given up
        if not self._finished and (rows := self._dumper.tracked_rows()):
            raise PublisherError(
                f"rank {self._rank}: {rows} rows changed since the last dump and were not published; "
                "call finish(step) before close()"
            )

    def manifest(self) -> dict[str, str]:
        """Published name per table FQN, as an exporter of this model derives it."""
        return dict(self._names)

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
        except (UploadError, PublisherError) as left:
            if error is None:
                raise
            error.add_note(f"while closing the publisher: {left}")

    def _flush_last(self, step: int) -> None:
        self._publish(step, final=True)

    def _publish(self, step: int, final: bool) -> None:
        table = self._dumper.dump(step, final=final)
        if table is not None:
            self._running().submit(step, table)

    def _running(self) -> Uploader:
        if self._uploader is None or self._closed:
            what = "is closed; make a new one" if self._closed else "is not running; call start() first"
            raise PublisherError(f"rank {self._rank}: the publisher {what}")
        return self._uploader

    def _embedding_names(self) -> dict[str, str]:
        refs = [TableRef(info.owner, info.collection, info.table) for info in self._tables.values()]
        names = embedding_names(refs, self._settings.naming)
        sharers: dict[str, str] = {}
        for fqn, name in names.items():
            if (other := sharers.setdefault(name, fqn)) != fqn:
                raise ContractError(f"{other!r} and {fqn!r} are both trained and would both be published as {name!r}")
        return names

    def _create_view_first(self) -> Exception | None:
        """Rank 0 creates entity and view when absent; its error is kept until every rank has met."""
        if self._rank != 0:
            return None
        try:
            self._create_view()
        except Exception as error:
            return error
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
                embedding_field_type=VALUE_TYPE,
            )

    def _meet(self) -> None:
        self._barrier()

    def _project(self) -> Any:
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
        if kind is not None and str(getattr(kind, "value", kind)) != VALUE_TYPE:
            raise PublisherError(f"view {name!r} holds {kind}, this model has float32 rows; publish to another view")
        return view


def connect(settings: Settings) -> Any:
    """A `feature_store_py` client, with fresh credentials from the default chain and the FeatureDB login variables.

    Raises:
        PublisherError: a package is missing.
    """
    try:
        from alibabacloud_credentials.client import Client as CredentialClient
        from feature_store_py import FeatureStoreClient
    except ImportError as error:
        remedy = "install it"
        if error.name == "feature_store_py":
            remedy = (
                "install Alibaba's SDK or, for the fake store, call deltaproof.fakes.feature_store_py.install() first"
            )
        raise PublisherError(f"{error.name} is not installed, and is needed to reach the store: {remedy}") from error
    credential = CredentialClient().get_credential()
    return FeatureStoreClient(
        access_key_id=credential.access_key_id,
        access_key_secret=credential.access_key_secret,
        region=settings.region,
        endpoint=settings.endpoint,
        security_token=credential.security_token,
        featuredb_username=os.environ.get("FEATUREDB_USERNAME"),
        featuredb_password=os.environ.get("FEATUREDB_PASSWORD"),
    )


def _no_barrier() -> None:
    """A single process meets itself."""

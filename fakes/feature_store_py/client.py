"""The SDK's objects: client, project, entity, view. Interface: docs/feature-store.md, "The SDK"."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, SupportsIndex

import pyarrow as pa

from ..errors import Applied, EntityNotFound, FakeError
from ..server.faults import FaultPlan
from ..store import EntitySpec, Store, ViewSpec, shown
from . import inputs
from .transport import (
    READ_TIMEOUT_S,
    Batches,
    Credential,
    HttpTransport,
    StoreTransport,
    Transport,
    TransportError,
    default_credential,
)

FIELD_TYPES: Final = {"ARRAY<FLOAT>": "float32", "ARRAY<UINT8>": "uint8"}


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What is refused here is refused as the service would refuse it."""
    try:
        yield
    except FakeError as error:
        raise TransportError(error.code, str(error)) from None


class WriteError(str):
    """One failed request of a flush: its text, and what a retry needs to know.

    ``status`` HTTP status or None without a reply; ``applied`` whether its ``rows`` happened ("no", "yes",
    "unknown"); ``retriable``; ``retry_after_s`` as asked by the store; ``code`` a row of ``fakes.errors.ERRORS``.
    """

    status: int | None
    retriable: bool
    applied: Applied
    retry_after_s: float | None
    rows: int
    code: str

    @classmethod
    def of(cls, error: TransportError, rows: int) -> WriteError:
        made = cls(f"{rows} rows: {error}")
        made.status, made.retriable, made.applied = error.status, error.retriable, error.applied
        made.retry_after_s, made.rows, made.code = error.retry_after_s, rows, error.code
        return made


class Entity:
    """A feature entity. ``feature_entity_name`` and ``name`` are the same thing."""

    def __init__(self, spec: EntitySpec) -> None:
        self.name = spec.name
        self.feature_entity_name = spec.name
        self.join_id = spec.join_id
        self.parent_feature_entity_name = spec.parent or None


class DynamicEmbeddingFeatureView:
    """A view: asynchronous writes, ``write_flush`` to settle them, reads.

    ``_batch_size`` rows go into one request, ``_max_workers`` requests are under way at a time; both may be set
    before the first write. The SDK retries nothing itself. Extensions of ours: ``high_water_ts``, ``lookup_arrow``,
    ``scan``, ``read_changes``, and for what is larger than memory ``scan_batches`` and ``read_changes_batches``.

    ``ts`` and keys are integers, NumPy's included, within int64; ``version`` is a str. Nothing else is converted: it is
    refused with the code of ``fakes.errors`` that the service would use, a write's refusals in the next flush.
    """

    def __init__(self, transport: Transport, spec: ViewSpec) -> None:
        self._transport = transport
        self._spec = spec
        self.name = spec.name
        self.pk_field = spec.pk
        self.sk_field = spec.sk
        self.embedding_field = spec.value
        self.embedding_field_type = next(key for key, value in FIELD_TYPES.items() if value == spec.value_type)
        self.ttl = spec.ttl_s
        self.shard_count = spec.shard_count
        self.replication_count = spec.replication_count
        self._batch_size = 1000
        self._max_workers = 4
        self._lock = threading.Lock()
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: list[tuple[int, concurrent.futures.Future[None]]] = []
        self._closed = False

    def _submit(self, rows: int, write: Any, payload: Any, version: Any, ts: Any) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"view {self.name}: write after close")
            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(
                    max_workers=self._max_workers, thread_name_prefix="feature_store_py"
                )
            self._pending.append((rows, self._executor.submit(self._write, write, payload, version, ts)))

    def _write(self, write: Any, payload: Any, version: Any, ts: Any) -> None:
        with _refusals():
            version, ts = inputs.version(version), inputs.ts(ts)
            if isinstance(payload, FakeError):
                raise payload
        write(self._spec, payload, version, ts)

    def write_features(
        self,
        data: Sequence[dict[str, Any]],
        version: str | None = None,
        write_mode: str = "MERGE",
        ts: SupportsIndex | None = None,
    ) -> None:
        """Queue rows ``{pk_field: str, sk_field: int, embedding_field: numbers}`` for the JSON route.

        Raises ValueError for another write mode or an impossible ``_batch_size``, TypeError for what is no list of rows
        and for values JSON has no form for, RuntimeError after close.
        """
        self._check_mode(write_mode)
        rows = inputs.rows(data)
        parts = [rows[part] for part in self._parts(len(rows))]
        for part, body in [(part, inputs.encoded(part)) for part in parts]:
            self._submit(len(part), self._transport.write_rows, body, version, ts)

    def write_features_arrow(
        self,
        batch: pa.RecordBatch | pa.Table,
        version: str | None = None,
        write_mode: str = "MERGE",
        ts: SupportsIndex | None = None,
    ) -> None:
        """Queue a batch whose columns bear the view's field names; split at ``_batch_size`` rows.

        Raises ValueError for another write mode, other columns or an impossible ``_batch_size``, TypeError for what is
        no batch, RuntimeError after close.
        """
        self._check_mode(write_mode)
        if not isinstance(batch, pa.RecordBatch | pa.Table):
            raise TypeError(f"batch is a {type(batch).__name__}; want a pyarrow RecordBatch or Table")
        names = [self.pk_field, self.sk_field, self.embedding_field]
        if sorted(batch.schema.names) != sorted(names):
            raise ValueError(f"view {self.name}: columns {batch.schema.names}, want {names}")
        # Several, where a table holds more than one batch can.
        wholes = batch.combine_chunks().to_batches() if isinstance(batch, pa.Table) else [batch]
        for wire in (whole.select(names).rename_columns(["pk", "sk", "embedding"]) for whole in wholes):
            for part in self._parts(wire.num_rows):
                self._submit(part.stop - part.start, self._transport.write_arrow, wire[part], version, ts)

    def _parts(self, rows: int) -> list[slice]:
        """Of at most ``_batch_size`` rows. Raises ValueError for a size with which rows would be left out."""
        if self._batch_size < 1:
            raise ValueError(f"view {self.name}: _batch_size {self._batch_size}, want 1 or more")
        return [slice(start, min(start + self._batch_size, rows)) for start in range(0, rows, self._batch_size)]

    def _check_mode(self, write_mode: str) -> None:
        if write_mode != "MERGE":
            raise ValueError(f"view {self.name}: write_mode {shown(write_mode)}, this fake knows MERGE only")

    def write_flush(self) -> dict[str, Any]:
        """Wait for every queued request (each is bounded by its timeouts) and sum up since the last flush.

        Returns total_batches, failed_batches, total_records, success_records, failed_records and errors, a list of
        WriteError. Rows of a request whose fate is unknown count as failed.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        try:
            errors = [error for rows, future in pending if (error := self._outcome(rows, future)) is not None]
        except BaseException:  # Ctrl-C: the next flush must account for these
            with self._lock:
                self._pending = pending + self._pending
            raise
        total = sum(rows for rows, _ in pending)
        failed_records = sum(error.rows for error in errors)
        return {
            "total_batches": len(pending),
            "failed_batches": len(errors),
            "total_records": total,
            "success_records": total - failed_records,
            "failed_records": failed_records,
            "errors": errors,
        }

    @staticmethod
    def _outcome(rows: int, future: concurrent.futures.Future[None]) -> WriteError | None:
        try:
            future.result()
        except concurrent.futures.CancelledError:
            return WriteError.of(TransportError("NotSent", "dropped by close(wait=False)"), rows)
        except TransportError as error:
            return WriteError.of(error, rows if error.rows_failed is None else min(error.rows_failed, rows))
        except Exception as error:  # a bug in this library must show as a failed batch, not pass as a success
            return WriteError.of(TransportError("ClientBug", f"{type(error).__name__}: {error}"), rows)
        return None

    def get_online_features(
        self, feature_name: str, keys: Iterable[SupportsIndex], version: str | None = None
    ) -> list[dict[str, Any]]:
        """Rows found for ``keys`` of table ``feature_name``: dicts with pk_field, "sk" (int) and embedding_field.

        Raises TransportError: InvalidVersion, SchemaMismatch for keys that are no int64, BodyTooLarge for too many.
        """
        with _refusals():
            wanted, (name,) = inputs.keys(keys), inputs.names([feature_name])
        table = self.lookup_arrow(version, pa.repeat(name, len(wanted)), wanted)
        columns = (table.column(name).to_pylist() for name in ("pk", "sk", "embedding"))
        return [
            {self.pk_field: pk, "sk": sk, self.embedding_field: embedding}
            for pk, sk, embedding in zip(*columns, strict=True)
        ]

    def lookup_arrow(self, version: str | None, pk: Any, sk: Any) -> pa.Table:
        """Ours: rows found of ``zip(pk, sk)`` in request order, columns pk, sk, embedding, ts."""
        with _refusals():
            version, request = inputs.version(version), inputs.lookup(pk, sk)
        return self._transport.lookup(self._spec, version, request)

    def scan_batches(self, version: str) -> Batches:
        """Ours: a snapshot of every row of the version, columns pk, sk, embedding, ts, in batches as they arrive."""
        with _refusals():
            version = inputs.version(version)
        return self._transport.scan(self._spec, version)

    def scan(self, version: str) -> pa.Table:
        """Ours: the same as one table."""
        return self.scan_batches(version).read_all()

    def read_changes_batches(self, version: str, ts: SupportsIndex) -> Batches:
        """Ours: rows whose ts is above ``ts`` (0: all), in batches as they arrive; its ``next_ts`` is for next time."""
        with _refusals():
            version, cursor = inputs.version(version), inputs.cursor(ts)
        return self._transport.changes(self._spec, version, cursor)

    def read_changes(self, version: str, ts: SupportsIndex) -> tuple[pa.Table, int]:
        """Ours: (rows whose ts is above ``ts``, the ts to ask with next time)."""
        found = self.read_changes_batches(version, ts)
        assert found.next_ts is not None
        return found.read_all(), found.next_ts

    def data_plane(self) -> tuple[str, dict[str, str]]:
        """URL of this view's routes on the data plane, and the headers that every request to them has: for clients in
        other languages. LookupError for a view in process, which has none."""
        if not isinstance(self._transport, HttpTransport):
            raise LookupError(f"view {self.name} lies in this process: it has no address")
        return self._transport.table(self._spec)

    def high_water_ts(self, version: str) -> int:
        """Ours: the greatest ts the version holds, 0 when empty."""
        with _refusals():
            version = inputs.version(version)
        return self._transport.high_water_ts(self._spec, version)

    def close(self, wait: bool = True) -> None:
        """No more writes. ``wait``: queued requests end first; else those not yet begun are dropped."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=not wait)


class Project:
    """A project; made by ``FeatureStoreClient.get_project``."""

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self.name = name
        self.project_name = name

    def get_entity(self, name: str) -> Entity | None:
        spec = self._transport.entity(self.name, name) if inputs.is_name(name) else None
        return Entity(spec) if spec else None

    def create_entity(self, name: str, join_id: str, parent_feature_entity_name: str | None = None) -> Entity:
        """Raises TransportError (AlreadyExists, EntityNotFound for the parent, InvalidParameter)."""
        parent = parent_feature_entity_name or ""
        with _refusals():
            spec = EntitySpec(self.name, inputs.name("entity", name), inputs.name("join id", join_id), parent)
            if parent and not inputs.is_name(parent):
                raise EntityNotFound(f"no entity {shown(parent)} in project {self.name!r}")
        self._transport.create_entity(spec)
        return Entity(spec)

    def get_dynamic_embedding_feature_view(self, name: str) -> DynamicEmbeddingFeatureView | None:
        spec = self._transport.view(self.name, name) if inputs.is_name(name) else None
        return DynamicEmbeddingFeatureView(self._transport, spec) if spec else None

    def create_dynamic_embedding_feature_view(
        self,
        name: str,
        entity: str | Entity,
        pk_field_name: str = "embedding_name",
        sk_field_name: str = "key_id",
        embedding_field_name: str = "embedding",
        pk_field_type: Any = "STRING",
        sk_field_type: Any = "INT64",
        ttl: SupportsIndex = 1_296_000,
        shard_count: SupportsIndex = 20,
        replication_count: SupportsIndex = 1,
        embedding_field_type: Any = "ARRAY<FLOAT>",
    ) -> DynamicEmbeddingFeatureView:
        """Create the view and open it. Raises ValueError for other field types, TransportError (AlreadyExists, …)."""
        wanted = ((pk_field_type, ("STRING",)), (sk_field_type, ("INT64",)), (embedding_field_type, tuple(FIELD_TYPES)))
        for kind, known in wanted:
            if _type_name(kind) not in known:
                raise ValueError(f"view {shown(name)}: field type {_type_name(kind)!r}, want {' or '.join(known)}")
        with _refusals():
            spec = ViewSpec(
                self.name,
                inputs.name("view", name),
                inputs.name("entity", entity.name if isinstance(entity, Entity) else entity),
                inputs.name("field", pk_field_name),
                inputs.name("field", sk_field_name),
                inputs.name("field", embedding_field_name),
                FIELD_TYPES[_type_name(embedding_field_type)],  # type: ignore[arg-type]
                inputs.setting("ttl", ttl),
                inputs.setting("shard_count", shard_count),
                inputs.setting("replication_count", replication_count),
            )
            spec.check()
        self._transport.create_view(spec)
        return DynamicEmbeddingFeatureView(self._transport, spec)


def _type_name(kind: Any) -> str:
    value = getattr(kind, "value", kind)
    return value if isinstance(value, str) else shown(value)


class FeatureStoreClient:
    """The SDK's entry. ``endpoint`` "127.0.0.1:PORT" reaches the fake; the data plane is found as real clients do.

    The datasource's token is read now, and so is the credential: without ``access_key_id`` and ``access_key_secret``
    (ours) a fresh one is fetched from the default chain of ``alibabacloud_credentials``. When either has expired or was
    revoked, calls fail with InvalidToken or a code of the gateway, a write surely not applied: another client, or
    ``refresh`` (ours), fetches both anew.

    ``read_timeout_s`` (ours) bounds the wait for each reply; ``ca_file`` (ours) is a PEM file of
    certificates to trust. Raises ValueError for arguments that are missing or cannot be, TransportError.
    """

    def __init__(
        self,
        access_key_id: str | None = None,
        access_key_secret: str | None = None,
        region: str | None = None,
        endpoint: str | None = None,
        security_token: str | None = None,
        featuredb_username: str | None = None,
        featuredb_password: str | None = None,
        *,
        read_timeout_s: float = READ_TIMEOUT_S,
        ca_file: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        if transport is None:
            from_chain = access_key_id is access_key_secret is security_token is None
            if not from_chain and not (access_key_id and access_key_secret):
                raise ValueError("access_key_id and access_key_secret are needed, or neither and no security_token")
            if not featuredb_username or not featuredb_password:
                raise ValueError("featuredb_username and featuredb_password are needed")
            if not endpoint and not region:
                raise ValueError("endpoint or region is needed")
            inputs.login(featuredb_username, featuredb_password)
            given = Credential(access_key_id or "", access_key_secret or "", security_token or None)
            transport = HttpTransport(
                credential=default_credential if from_chain else lambda: given,
                region=region or "cn-deltaproof",
                endpoint=endpoint or f"paifeaturestore.{region}.aliyuncs.com",
                username=featuredb_username,
                password=featuredb_password,
                read_timeout_s=read_timeout_s,
                ca_file=ca_file,
            )
        self._transport = transport

    def get_project(self, name: str) -> Project | None:
        found = inputs.is_name(name) and self._transport.has_project(name)
        return Project(self._transport, name) if found else None

    def refresh(self) -> None:
        """Ours: a fresh credential, if they come from the default chain, and the datasource's current token. Views of
        this client go on with them. Raises TransportError, and then nothing has changed.
        """
        self._transport.refresh()

    def close(self) -> None:
        """Ours: release pooled connections."""
        self._transport.close()


def in_process_client(store: Store, username: str, faults: FaultPlan | None = None) -> FeatureStoreClient:
    """A client that calls ``store`` directly as ``username``; ``faults`` strike as they would on the server."""
    inputs.login(username, "")
    return FeatureStoreClient(transport=StoreTransport(store, username, faults))

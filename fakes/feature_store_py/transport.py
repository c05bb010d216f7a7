"""How the facade reaches a store: over HTTP, or straight into a Store object. Both raise TransportError only.

What a caller handed in has been through ``inputs.py`` before it gets here.
"""

from __future__ import annotations

import _thread
import base64
import contextlib
import itertools
import json
import logging
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote

import msgspec
import pyarrow as pa

from ..errors import (
    ERRORS,
    Applied,
    BodyTooLarge,
    FakeError,
    InvalidToken,
    ProjectNotFound,
    code_for_status,
    disk_failure,
    shown,
)
from ..server import windows
from ..server.faults import (
    DuplicateFault,
    FaultPlan,
    ReorderFault,
    SchemaChangedFault,
    SlowBodyFault,
    StaleReadFault,
    Strike,
    TokenRevokedFault,
    Turns,
    ViewDeletedFault,
)
from ..server.state import CLIENT_HEADER, is_loopback
from ..server.wire import arrow_chunks, read_arrow, rows_to_batch
from ..store import EntitySpec, Snapshot, Store, ViewSpec, other_type

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
BODY_BYTES_MAX: Final = 64 * 2**20  # of a request in process: as the server's own limit
WINDOW_BYTES: Final = 4 * 2**20  # a body over this is sent in pieces
REFUSAL_BYTES_MAX: Final = 2**16  # of an error reply, read
POOL_SIZE: Final = 16  # idle connections kept; more are made when more workers need them
_ENDPOINT: Final = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<address>(?P<host>[\w.-]+|\[[\w:.%]+\])(?::(?P<port>[0-9]{1,5}))?)/?", re.A | re.I
)
VIEW_TYPE: Final = "DynamicEmbedding"  # ours: not in the public documentation


class TransportError(Exception):
    """A call failed. ``code`` is a row of ``fakes.errors.ERRORS``; ``applied`` says whether a write happened.

    ``rows_failed`` is set for partial failures: the number of rows at the end of the batch that were not applied.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        rows_failed: int | None = None,
    ) -> None:
        super().__init__(shown(f"{code}: {message}"))
        spec = ERRORS.get(code) or ERRORS[code_for_status(status or 500)]
        self.code = code
        self.status = status if status is not None else spec.status
        self.applied: Applied = spec.applied
        self.retriable = spec.retriable
        self.retry_after_s = retry_after_s
        self.rows_failed = rows_failed


class Batches:
    """Rows as they arrive: an iterator of record batches, each of about 4 MiB at most. Only one is held at a time.

    ``schema`` is known from the start; ``next_ts`` (of changes) is the cursor for the next call, good once every batch
    has been read. Whoever stops early calls ``close``, or uses it as a context manager. Reading raises TransportError.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        close: Callable[[], object] = lambda: None,
        next_ts: int | None = None,
    ) -> None:
        self.schema = schema
        self.next_ts = next_ts
        self._batches = iter(batches)
        self._close = close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._batches)

    def read_all(self) -> pa.Table:
        """What is left, as one table."""
        with self:
            return pa.Table.from_batches(self, schema=self.schema)

    def close(self) -> None:
        """Read no more. Safe to call twice."""
        self._batches = iter(())
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Credential(NamedTuple):
    """An access key, with its security token when it is a temporary one."""

    access_key_id: str
    access_key_secret: str
    security_token: str | None = None

    def __repr__(self) -> str:
        return "Credential(…)"


def default_credential() -> Credential:
    """A fresh credential from the default chain of ``alibabacloud_credentials``. Raises TransportError.

    Fresh: a chain remembers a token until shortly before it expires, so a new one is made. (The package reads its
    variables when it is imported.) What it raises and logs may quote a live token: none of that is repeated.
    """
    from alibabacloud_credentials.client import Client

    try:
        with _quiet(logging.getLogger("credentials")):
            found = Client().get_credential()
    except Exception as error:
        kind = type(error).__name__
    else:
        if found.access_key_id and found.access_key_secret:
            return Credential(found.access_key_id, found.access_key_secret, found.security_token or None)
        kind = "an empty one"
    raise TransportError(
        "NoCredential",
        f"no source of alibabacloud_credentials' default chain has a credential ({kind}): environment, OIDC, profile "
        "files, ECS metadata, ALIBABA_CLOUD_CREDENTIALS_URI",
    )


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Drop what this thread logs there meanwhile."""
    ours = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != ours

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class Transport(Protocol):
    """What the facade needs of a store. Batches have the columns of ``store.write_schema``.

    ``refresh`` fetches a fresh credential and the datasource's current token.
    """

    def has_project(self, project: str) -> bool: ...
    def entity(self, project: str, name: str) -> EntitySpec | None: ...
    def create_entity(self, spec: EntitySpec) -> None: ...
    def view(self, project: str, name: str) -> ViewSpec | None: ...
    def create_view(self, spec: ViewSpec) -> None: ...
    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None: ...
    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None: ...
    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table: ...
    def scan(self, view: ViewSpec, version: str) -> Batches: ...
    def changes(self, view: ViewSpec, version: str, ts: int) -> Batches: ...
    def high_water_ts(self, view: ViewSpec, version: str) -> int: ...
    def refresh(self) -> None: ...
    def close(self) -> None: ...


def to_ipc(batch: pa.RecordBatch) -> pa.Buffer:
    """One Arrow IPC stream holding the batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def to_ipc_windows(batch: pa.RecordBatch, window_bytes: int = WINDOW_BYTES) -> tuple[int, Iterator[bytes]]:
    """An Arrow IPC stream holding the batch in pieces of about ``window_bytes``: its length, and its chunks of bytes.

    Only one chunk exists at a time. The length is known first, so that a store can refuse a body before it is sent.
    """
    rows = max(1, batch.num_rows * window_bytes // max(1, batch.nbytes))
    starts = range(0, batch.num_rows, rows)
    counter = pa.MockOutputStream()
    with pa.ipc.new_stream(counter, batch.schema) as writer:
        for start in starts:
            writer.write_batch(batch.slice(start, rows))
    return counter.size(), arrow_chunks(batch.schema, (batch.slice(start, rows) for start in starts))


def _ipc_body(batch: pa.RecordBatch) -> tuple[Any, dict[str, str]]:
    """A batch as the body of a request, in pieces when it is large, and the headers that go with it."""
    if batch.nbytes <= WINDOW_BYTES:
        return memoryview(to_ipc(batch)), {}
    length, chunks = to_ipc_windows(batch, WINDOW_BYTES)
    return chunks, {"Content-Length": str(length)}


def _pieces(data: bytes) -> Iterator[memoryview]:
    return (memoryview(data)[start : start + WINDOW_BYTES] for start in range(0, len(data), WINDOW_BYTES))


class _Begun(NamedTuple):
    """A snapshot that is being read: it goes on even if its view is dropped now."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    nbytes: int
    ts: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Begun:
        return cls(snapshot.schema, windows.batches(snapshot), snapshot.nbytes, snapshot.ts)


# How often the datasource's token was replaced, by a fault of the plan that in-process clients share.
_TOKENS: Final[weakref.WeakKeyDictionary[FaultPlan, int]] = weakref.WeakKeyDictionary()


class StoreTransport:
    """Calls a Store directly, as user ``username``; faults of ``plan`` strike as they would on the server.

    Batches are copied through Arrow IPC first: on the wire, too, later changes of the caller's memory cannot reach
    the store.
    """

    def __init__(self, store: Store, username: str, plan: FaultPlan | None = None) -> None:
        self._store = store
        self._username = username
        self._plan = plan or FaultPlan()
        self._turns = Turns()
        self.refresh()

    def refresh(self) -> None:
        """Learn the current token."""
        self._token = _TOKENS.get(self._plan, 0)

    def _call(
        self, route: str, group: str, effect: Callable[[Strike, Store], Any], view: ViewSpec | None = None
    ) -> Any:
        """Run ``effect(strike, store)`` among the faults that are due; ``view`` is the one a request names."""
        if view is not None:
            self._check_request(view)
        strike = self._plan.strike(route, group, self._username)
        self._suffer(strike, "before-commit")
        self._hold(strike)
        try:
            result = effect(strike, self._prepare(strike, view))
            self._turns.passed(route, group, self._username, _thread.get_ident())
        except FakeError as error:
            raise TransportError(error.code, str(error)) from None
        except OSError as error:  # of a store in a folder: over HTTP the server says no more
            raise TransportError("InternalError", disk_failure(error, route)) from None
        if isinstance(strike.main, DuplicateFault):
            # Here, not later: in process there is nobody to deliver it once this call has returned.
            time.sleep(strike.main.delay_ms / 1000)
            # Whatever becomes of it: the client is told of the first delivery.
            with contextlib.suppress(FakeError, OSError):
                effect(strike, self._store)
        self._suffer(strike, "after-commit")
        self._befall(strike, result)
        return result

    def _check_request(self, view: ViewSpec) -> None:
        """What the server looks at before the fault plan: a request refused for its own sake strikes no fault."""
        try:
            if self._token != _TOKENS.get(self._plan, 0):
                raise InvalidToken("the token is not the datasource's current one")
            if view.project not in self._store.projects():
                raise ProjectNotFound(f"no project {view.project!r}")
            self._store.view(view.project, view.name)
        except FakeError as error:
            raise TransportError(error.code, str(error)) from None

    def _prepare(self, strike: Strike, view: ViewSpec | None) -> Store:
        """The store that the effect sees, after what a fault does to it."""
        main = strike.main
        if isinstance(main, TokenRevokedFault):
            _TOKENS[self._plan] = _TOKENS.get(self._plan, 0) + 1
            raise InvalidToken(f"planned fault {main.id}")
        if view is not None and isinstance(main, ViewDeletedFault | SchemaChangedFault):
            current = self._store.view(view.project, view.name)
            self._store.drop_view(view.project, view.name)
            if isinstance(main, SchemaChangedFault):
                self._store.create_view(other_type(current))
        if view is not None and isinstance(main, StaleReadFault):
            return self._store.as_of(view.project, view.name, writes=main.writes, age_ms=main.age_ms)
        return self._store

    def _hold(self, strike: Strike) -> None:
        if not isinstance(strike.main, ReorderFault):
            return
        passed: list[bool] = []
        waited_ms = 0.0
        with self._turns.waiting(strike.main, self._username, _thread.get_ident(), lambda: passed.append(True)):
            while not passed and waited_ms < strike.main.hold_ms_max:
                time.sleep(0.001)  # asked again each ms: a simulator's clock knows sleep, not conditions
                waited_ms += 1

    @staticmethod
    def _suffer(strike: Strike, when: Any) -> None:
        if delay_s := strike.delay_s(when):
            time.sleep(delay_s)
        if fault := strike.refusal(when):
            raise TransportError(
                code_for_status(fault.code or 503),
                f"planned fault {fault.id}",
                status=fault.code,
                retry_after_s=fault.retry_after_s,
            )
        if strike.breaks(when):
            raise TransportError("ConnectionLost", f"planned fault {strike.ids[-1]}")

    @staticmethod
    def _befall(strike: Strike, result: Any) -> None:
        fault = strike.reply_fault
        if isinstance(fault, SlowBodyFault):
            time.sleep(max(64, getattr(result, "nbytes", 0)) / fault.bytes_per_s)  # 64: a small JSON reply
        elif fault is not None:
            raise TransportError("ReplyTruncated", f"planned fault {fault.id}", status=200)

    def has_project(self, project: str) -> bool:
        return bool(self._call("list_projects", "control", lambda *_: project in self._store.projects()))

    def entity(self, project: str, name: str) -> EntitySpec | None:
        def effect(_: Strike, store: Store) -> EntitySpec | None:
            return next((spec for spec in store.entities(project) if spec.name == name), None)

        found: EntitySpec | None = self._call("list_entities", "control", effect)
        return found

    def create_entity(self, spec: EntitySpec) -> None:
        self._call("create_entity", "control", lambda _, store: store.create_entity(spec))

    def view(self, project: str, name: str) -> ViewSpec | None:
        def effect(_: Strike, store: Store) -> ViewSpec | None:
            return next((spec for spec in store.views(project) if spec.name == name), None)

        found: ViewSpec | None = self._call("list_views", "control", effect)
        return found

    def create_view(self, spec: ViewSpec) -> None:
        def effect(_: Strike, store: Store) -> None:
            store.entity(spec.project, spec.entity)  # the control plane creates no entity on the way
            store.create_view(spec)

        self._call("create_view", "control", effect)

    def _write(self, route: str, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None:
        where = {"version": version, "ts": self._store.now_ms() if ts is None else ts}

        def effect(strike: Strike, store: Store) -> int:
            failed = min(strike.rows_failed, batch.num_rows)
            store.check_write(view.project, view.name, batch, **where)  # type: ignore[arg-type]
            if failed < batch.num_rows or not failed:
                kept = batch.slice(0, batch.num_rows - failed)
                store.write(view.project, view.name, kept, client=self._username, **where)  # type: ignore[arg-type]
            return failed

        failed = self._call(route, "write", effect, view)
        if failed:
            message = f"the last {failed} of {batch.num_rows} rows were not applied"
            raise TransportError("PartialFailure", message, rows_failed=failed)

    def _received(self, view: ViewSpec, body: Any, decode: Callable[[Any], pa.RecordBatch]) -> pa.RecordBatch:
        """What the server makes of a body."""
        self._check_request(view)
        try:
            if len(body) > BODY_BYTES_MAX:
                raise BodyTooLarge(f"a body of {len(body)} bytes is over {BODY_BYTES_MAX}")
            return decode(body)
        except FakeError as error:
            raise TransportError(error.code, str(error)) from None

    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None:
        self._write("write_arrow", view, self._received(view, to_ipc(batch), read_arrow), version, ts)

    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None:
        batch = self._received(view, rows, lambda body: rows_to_batch(body, view))
        self._write("write_json", view, batch, version, ts)

    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table:
        def effect(_: Strike, store: Store) -> pa.Table:
            return store.lookup(view.project, view.name, version, request["pk"], request["sk"])

        return self._call("lookup_arrow", "lookup", effect, view)

    def scan(self, view: ViewSpec, version: str) -> Batches:
        def effect(_: Strike, store: Store) -> Snapshot:
            return store.snapshot(view.project, view.name, version)

        snapshot: Snapshot = self._call("create_snapshot", "scan", effect, view)
        begun: _Begun = self._call("scan_snapshot", "scan", lambda *_: _Begun.of(snapshot), view)
        return Batches(snapshot.schema, begun.batches)

    def changes(self, view: ViewSpec, version: str, ts: int) -> Batches:
        def effect(_: Strike, store: Store) -> _Begun:
            return _Begun.of(store.snapshot(view.project, view.name, version, after_ts=ts))

        begun: _Begun = self._call("iterate_changes", "changes", effect, view)
        return Batches(begun.schema, begun.batches, next_ts=max(ts, begun.ts))

    def high_water_ts(self, view: ViewSpec, version: str) -> int:
        def effect(_: Strike, store: Store) -> int:
            return store.high_water_ts(view.project, view.name, version)

        return int(self._call("high_water_ts", "changes", effect, view))

    def close(self) -> None:
        """Nothing to release."""


class _Body:
    """A reply's body as a file for Arrow to read from, with our errors. A context manager: afterwards the connection
    is free for the next request or, if this reply was not read to its end, broken off.
    """

    closed = False

    def __init__(self, response: Any, what: str) -> None:
        self._response, self._what = response, what

    def read(self, size: int = -1) -> bytes:
        from urllib3.exceptions import HTTPError

        try:
            data: bytes = self._response.read(None if size < 0 else size)
        except (HTTPError, OSError) as error:
            code = "ReplyTruncated" if self._response.status < 300 else code_for_status(self._response.status)
            what = f"{self._what}: {type(error).__name__}"
            raise TransportError(code, what, status=self._response.status) from None
        return data

    def close(self) -> None:
        """Safe to call twice."""
        self._response.close()  # at the end of the reply the connection had gone back already
        self._response.release_conn()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpTransport:
    """Control plane through Alibaba's published OpenAPI client, data plane over pooled HTTP connections.

    ``credential`` is asked for one now and at each ``refresh``. The published client is imported when a transport is
    made: it takes most of a second.
    """

    def __init__(
        self,
        *,
        credential: Callable[[], Credential],
        region: str,
        endpoint: str,
        username: str,
        password: str,
        read_timeout_s: float = READ_TIMEOUT_S,
        ca_file: str | None = None,
    ) -> None:
        import urllib3
        from alibabacloud_paifeaturestore20230621 import models

        self._models = models
        self._read_timeout_s = read_timeout_s
        self._credential = credential
        address, protocol, is_local = _split_endpoint(endpoint)
        self._config: dict[str, Any] = {
            "region_id": region,
            "endpoint": address,
            "protocol": protocol,
            # The published client sends even loopback requests to HTTP_PROXY. Only another proxy overrides that, so
            # the fake is named as its own: it understands the absolute form of such requests.
            "http_proxy": f"http://{address}" if is_local and protocol == "HTTP" else None,
            "ca": ca_file,
            "connect_timeout": int(CONNECT_TIMEOUT_S * 1000),
            "read_timeout": int(read_timeout_s * 1000),
        }
        self._names = {CLIENT_HEADER: quote(username, safe="")}
        self._pool = urllib3.PoolManager(
            num_pools=4,
            maxsize=POOL_SIZE,
            retries=False,
            ca_certs=ca_file,
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_timeout_s),
        )
        self._login = base64.b64encode(f"{username}:{password}".encode()).decode()
        self.refresh()

    def refresh(self) -> None:
        """A fresh credential, and with it the instance, and the data plane's address and current token."""
        from alibabacloud_paifeaturestore20230621.client import Client
        from alibabacloud_tea_openapi.utils_models import Config, GlobalParameters

        parameters = GlobalParameters(headers=dict(self._names))
        control = Client(Config(**self._credential()._asdict(), **self._config, global_parameters=parameters))
        request = self._models.ListInstancesRequest(status="Running")
        instances = _ask(control, "list_instances", request).instances or []
        if not instances:
            raise TransportError("InstanceNotFound", "the account has no running Feature Store instance")
        instance: str = instances[0].instance_id
        self._featuredb = self._find_featuredb(control, instance)
        self._control, self._instance = control, instance
        self._project_ids: dict[str, str] = {}

    def _find_featuredb(self, control: Any, instance: str) -> tuple[str, str]:
        """The data plane's address and token."""
        request = self._models.ListDatasourcesRequest(type="FeatureDB")
        for row in _ask(control, "list_datasources", instance, request).datasources or []:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                config = json.loads(row.config)
                return config["fdb_public_address"].rstrip("/"), str(config["token"])
        raise TransportError("DatasourceNotFound", "the instance has no FeatureDB datasource with address and token")

    def _ask(self, action: str, *arguments: Any) -> Any:
        return _ask(self._control, action, *arguments)

    def has_project(self, project: str) -> bool:
        request = self._models.ListProjectsRequest(name=project, page_size=100)
        for row in self._ask("list_projects", self._instance, request).projects or []:
            if row.name == project:
                self._project_ids[project] = row.project_id
                return True
        return False

    def _project_id(self, project: str) -> str:
        if project not in self._project_ids and not self.has_project(project):
            raise TransportError("ProjectNotFound", f"no project {project!r}")
        return self._project_ids[project]

    def _find_entity(self, project: str, name: str) -> Any:
        request = self._models.ListFeatureEntitiesRequest(
            project_id=self._project_id(project), name=name, page_size=100
        )
        rows = self._ask("list_feature_entities", self._instance, request).feature_entities or []
        return next((row for row in rows if row.name == name), None)

    def entity(self, project: str, name: str) -> EntitySpec | None:
        row = self._find_entity(project, name)
        return row and EntitySpec(project, row.name, row.join_id, row.parent_feature_entity_name or "")

    def create_entity(self, spec: EntitySpec) -> None:
        parent = self._find_entity(spec.project, spec.parent) if spec.parent else None
        if spec.parent and parent is None:
            raise TransportError("EntityNotFound", f"no entity {spec.parent!r} in project {spec.project!r}")
        request = self._models.CreateFeatureEntityRequest(
            name=spec.name,
            join_id=spec.join_id,
            project_id=self._project_id(spec.project),
            parent_feature_entity_id=parent.feature_entity_id if parent else None,
        )
        self._ask("create_feature_entity", self._instance, request)

    def view(self, project: str, name: str) -> ViewSpec | None:
        request = self._models.ListFeatureViewsRequest(
            project_id=self._project_id(project), name=name, type=VIEW_TYPE, page_size=100
        )
        rows = self._ask("list_feature_views", self._instance, request).feature_views or []
        found = next((row for row in rows if row.name == name), None)
        if found is None:
            return None
        row = self._ask("get_feature_view", self._instance, found.feature_view_id)
        config = json.loads(row.config)
        fields = {next(iter(field.attributes or []), "value"): field for field in row.fields}
        return ViewSpec(
            project,
            row.name,
            row.feature_entity_name,
            fields["PrimaryKey"].name,
            fields["SecondaryKey"].name,
            fields["value"].name,
            "uint8" if fields["value"].type == "ARRAY<UINT8>" else "float32",
            row.ttl,
            config["shard_count"],
            config["replication_count"],
        )

    def create_view(self, spec: ViewSpec) -> None:
        entity = self._find_entity(spec.project, spec.entity)
        if entity is None:
            raise TransportError("EntityNotFound", f"no entity {spec.entity!r} in project {spec.project!r}")
        field = self._models.CreateFeatureViewRequestFields
        config = {"ttl": spec.ttl_s, "shard_count": spec.shard_count, "replication_count": spec.replication_count}
        request = self._models.CreateFeatureViewRequest(
            name=spec.name,
            type=VIEW_TYPE,
            project_id=self._project_id(spec.project),
            feature_entity_id=entity.feature_entity_id,
            ttl=spec.ttl_s,
            config=json.dumps(config),
            write_to_feature_db=True,
            sync_online_table=True,
            fields=[
                field(name=spec.pk, type="STRING", attributes=["PrimaryKey"]),
                field(name=spec.sk, type="INT64", attributes=["SecondaryKey"]),
                field(
                    name=spec.value,
                    type="ARRAY<UINT8>" if spec.value_type == "uint8" else "ARRAY<FLOAT>",
                    attributes=[],
                ),
            ],
        )
        self._ask("create_feature_view", self._instance, request)

    def table(self, view: ViewSpec) -> tuple[str, dict[str, str]]:
        """URL of a view's routes on the data plane, and the headers that every request to them has."""
        address, token = self._featuredb
        parts = "/".join(quote(part, safe="") for part in (self._instance, view.project, view.name))
        return f"{address}/api/v1/tables/{parts}", {"Authorization": token, "Auth": self._login}

    def _open(
        self, method: str, view: ViewSpec, path: str, query: dict[str, Any], body: Any = None, extra: Any = None
    ) -> tuple[Any, _Body]:
        """One data-plane call: the headers and the body, not yet read, of a 200. Raises TransportError."""
        from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

        text = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in query.items() if value is not None)
        table, login = self.table(view)
        url, headers = f"{table}/{path}?{text}", {**login, **(extra or {})}
        what = f"{method} {path}"
        try:
            response = self._pool.request(method, url, body=body, headers=headers, preload_content=False)
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise TransportError("ConnectFailed", f"{what}: {type(error).__name__}") from None
        except ReadTimeoutError:
            raise TransportError("ReadTimeout", f"{what}: no reply within {self._read_timeout_s:g} s") from None
        except HTTPError as error:
            raise TransportError("ConnectionLost", f"{what}: {type(error).__name__}") from None
        reply = _Body(response, what)
        if response.status == 200:
            return response.headers, reply
        with reply:
            raise _refusal(what, response.status, response.headers, reply.read(REFUSAL_BYTES_MAX))

    def _json(self, *arguments: Any) -> Any:
        """One data-plane call: the value of "data" in its reply, None without one."""
        _, reply = self._open(*arguments)
        with reply:
            return _in_our_terms(lambda: json.loads(reply.read()).get("data"))

    def _batches(self, *arguments: Any) -> Batches:
        """One data-plane call: its reply, an Arrow stream, batch by batch."""
        headers, reply = self._open(*arguments)
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(reply)
            reader = _in_our_terms(lambda: pa.ipc.open_stream(pa.PythonFile(reply, mode="r")))
            on_failure.pop_all()

        def read() -> Iterator[pa.RecordBatch]:
            with reply:
                while (batch := _in_our_terms(lambda: next(reader, None))) is not None:
                    yield batch
                reply.read(1)  # a reply that breaks off behind its last batch is none

        cursor = headers.get("Next-Ts")
        return Batches(reader.schema, read(), reply.close, None if cursor is None else int(cursor))

    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None:
        query = {"version": version, "write_mode": "MERGE", "ts": ts}
        self._json("POST", view, "write_arrow", query, *_ipc_body(batch))

    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None:
        request = {"write_mode": "MERGE", "version": version, **({} if ts is None else {"ts": ts})}
        head, tail = msgspec.json.encode(request)[:-1] + b',"content":', b"}"
        length = len(head) + len(rows) + len(tail)
        if length <= WINDOW_BYTES:
            self._json("POST", view, "write", {}, b"".join((head, rows, tail)))
        else:
            pieces = itertools.chain((head,), _pieces(rows), (tail,))
            self._json("POST", view, "write", {}, pieces, {"Content-Length": str(length)})

    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table:
        return self._batches("POST", view, "lookup_arrow", {"version": version}, *_ipc_body(request)).read_all()

    def scan(self, view: ViewSpec, version: str) -> Batches:
        snapshot = self._json("POST", view, "snapshots", {"version": version})
        return self._batches("GET", view, f"snapshots/{snapshot['snapshot_id']}/scan", {})

    def changes(self, view: ViewSpec, version: str, ts: int) -> Batches:
        found = self._batches("GET", view, "iterate_get_kv", {"version": version, "ts": ts})
        if found.next_ts is None:
            found.close()
            raise TransportError("ReplyTruncated", "the reply has no Next-Ts", status=200)
        return found

    def high_water_ts(self, view: ViewSpec, version: str) -> int:
        return int(self._json("GET", view, "high_water_ts", {"version": version})["ts"])

    def close(self) -> None:
        self._pool.clear()


def _split_endpoint(endpoint: object) -> tuple[str, str, bool]:
    """("host:port", "HTTP" or "HTTPS", whether on loopback): plain host:port means HTTP there, as for every fake.

    Raises ValueError, which does not repeat it: people paste logins into it.
    """
    found = _ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if found is None or int(found["port"] or 0) > 65535:
        raise ValueError("endpoint is not host, host:port or http(s)://host:port, without a login or a path")
    is_local = is_loopback(found["host"].strip("[]"))
    return found["address"], (found["scheme"] or ("http" if is_local else "https")).upper(), is_local


T = TypeVar("T")


def _in_our_terms(read: Callable[[], T]) -> T:
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError, AttributeError) as error:
        what = f"the reply is not, or not all of, what this route sends ({type(error).__name__})"
        raise TransportError("ReplyTruncated", what, status=200) from None


def _ask(control: Any, action: str, *arguments: Any) -> Any:
    """One control-plane call: the reply's body."""
    from Tea.exceptions import TeaException  # the base of all that the published client raises

    try:
        return getattr(control, action)(*arguments).body
    except TeaException as error:
        raise _from_openapi(error) from None


def _refusal(what: str, status: int, headers: Any, data: bytes) -> TransportError:
    try:
        reply = json.loads(data)
        code, message = str(reply["Code"]), str(reply["Message"])
    except (ValueError, KeyError, TypeError):
        reply, code, message = {}, code_for_status(status), "the reply holds no Code and Message"
    try:
        wait_s = float(headers.get("Retry-After", "nan"))
    except ValueError:  # a date: not what this service sends
        wait_s = math.nan
    return TransportError(
        code,
        f"{what}: {message} (request {reply.get('RequestId', 'unknown')})",
        status=status,
        retry_after_s=wait_s if 0 <= wait_s < math.inf else None,
        rows_failed=reply.get("RowsFailed"),
    )


def _from_openapi(error: Any) -> TransportError:
    """What the published client raised, in our terms. It wraps what happened below HTTP into its message only."""
    inner = getattr(error, "inner_exception", None) or error
    status, text = getattr(inner, "status_code", None), str(getattr(inner, "message", inner))
    if status is None:
        if any(name in text for name in ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError")):
            # The address asked for, then that of the proxy, if any: the published client takes it from HTTPS_PROXY or
            # HTTP_PROXY, whatever NO_PROXY says.
            places = [":".join(place) for place in re.findall(r"host='([^']*)', port=(\d+)", text)] or ["the store"]
            proxy = f" by way of the proxy {places[-1]}" if places[-1] != places[0] else ""
            reason = re.search(r"\[Errno -?\d+\] [\w ]+", text)
            why = f" ({reason[0]})" if reason else ""
            return TransportError("ConnectFailed", f"control plane: no connection to {places[0]}{proxy}{why}")
        code = "ReadTimeout" if "Read timed out" in text else "ConnectionLost"
        return TransportError(code, f"control plane: {text[:300]}")
    code = str(getattr(inner, "code", ""))
    code = code if code in ERRORS else code_for_status(status)
    return TransportError(code, f"control plane: {text[:300]}", status=status)

"""How the facade reaches a store: over HTTP, or straight into a Store object. Both raise TransportError only."""

from __future__ import annotations

import _thread
import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import quote

import msgspec
import pyarrow as pa

from ..errors import ERRORS, Applied, FakeError, InvalidToken, code_for_status
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
from ..server.state import CLIENT_HEADER
from ..server.wire import arrow_chunks, rows_to_batch
from ..store import EntitySpec, Snapshot, Store, ViewSpec, other_type

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
WINDOW_BYTES: Final = 4 * 2**20  # a batch over this is sent in pieces
POOL_SIZE: Final = 16  # idle connections kept; more are made when more workers need them
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
        super().__init__(f"{code}: {message}")
        spec = ERRORS.get(code) or ERRORS[code_for_status(status or 500)]
        self.code = code
        self.status = status if status is not None else spec.status
        self.applied: Applied = spec.applied
        self.retriable = spec.retriable
        self.retry_after_s = retry_after_s
        self.rows_failed = rows_failed


class Transport(Protocol):
    """What the facade needs of a store. Batches have the columns of ``store.write_schema``."""

    def has_project(self, project: str) -> bool: ...
    def entity(self, project: str, name: str) -> EntitySpec | None: ...
    def create_entity(self, spec: EntitySpec) -> None: ...
    def view(self, project: str, name: str) -> ViewSpec | None: ...
    def create_view(self, spec: ViewSpec) -> None: ...
    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None: ...
    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None: ...
    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table: ...
    def scan(self, view: ViewSpec, version: str) -> pa.Table: ...
    def changes(self, view: ViewSpec, version: str, ts: int) -> tuple[pa.Table, int]: ...
    def high_water_ts(self, view: ViewSpec, version: str) -> int: ...
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

    def _call(
        self, route: str, group: str, effect: Callable[[Strike, Store], Any], view: ViewSpec | None = None
    ) -> Any:
        """Run ``effect(strike, store)`` among the faults that are due; ``view`` is the one a request names."""
        strike = self._plan.strike(route, group, self._username)
        self._suffer(strike, "before-commit")
        self._hold(strike)
        try:
            result = effect(strike, self._prepare(strike, view))
            self._turns.passed(route, group, self._username, _thread.get_ident())
        except FakeError as error:
            raise TransportError(error.code, str(error)) from None
        if isinstance(strike.main, DuplicateFault):
            # Here, not later: in process there is nobody to deliver it once this call has returned.
            time.sleep(strike.main.delay_ms / 1000)
            effect(strike, self._store)
        self._suffer(strike, "after-commit")
        self._befall(strike, result)
        return result

    def _prepare(self, strike: Strike, view: ViewSpec | None) -> Store:
        """The store that the effect sees, after what a fault does to it."""
        main = strike.main
        if isinstance(main, TokenRevokedFault):
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

    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None:
        self._write("write_arrow", view, pa.ipc.open_stream(to_ipc(batch)).read_next_batch(), version, ts)

    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None:
        try:
            batch = rows_to_batch(rows, view)
        except FakeError as error:
            raise TransportError(error.code, str(error)) from None
        self._write("write_json", view, batch, version, ts)

    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table:
        def effect(_: Strike, store: Store) -> pa.Table:
            return store.lookup(view.project, view.name, version, request["pk"], request["sk"])

        return self._call("lookup_arrow", "lookup", effect, view)

    def scan(self, view: ViewSpec, version: str) -> pa.Table:
        def effect(_: Strike, store: Store) -> Snapshot:
            return store.snapshot(view.project, view.name, version)

        snapshot: Snapshot = self._call("create_snapshot", "scan", effect, view)
        return self._call("scan_snapshot", "scan", lambda *_: snapshot.table(), view)

    def changes(self, view: ViewSpec, version: str, ts: int) -> tuple[pa.Table, int]:
        def effect(_: Strike, store: Store) -> tuple[pa.Table, int]:
            return store.changes(view.project, view.name, version, ts)

        found: tuple[pa.Table, int] = self._call("iterate_changes", "changes", effect, view)
        return found

    def high_water_ts(self, view: ViewSpec, version: str) -> int:
        def effect(_: Strike, store: Store) -> int:
            return store.high_water_ts(view.project, view.name, version)

        return int(self._call("high_water_ts", "changes", effect, view))

    def close(self) -> None:
        """Nothing to release."""


class HttpTransport:
    """Control plane through Alibaba's published OpenAPI client, data plane over pooled HTTP connections.

    The published client is imported when a transport is made: it takes most of a second.
    """

    def __init__(
        self,
        *,
        access_key_id: str,
        access_key_secret: str,
        region: str,
        endpoint: str,
        security_token: str | None,
        username: str,
        password: str,
        read_timeout_s: float = READ_TIMEOUT_S,
        ca_file: str | None = None,
    ) -> None:
        import urllib3
        from alibabacloud_paifeaturestore20230621 import models
        from alibabacloud_paifeaturestore20230621.client import Client
        from alibabacloud_tea_openapi.utils_models import Config, GlobalParameters

        self._models = models
        self._read_timeout_s = read_timeout_s
        address, protocol = _split_endpoint(endpoint)
        self._control = Client(
            Config(
                access_key_id=access_key_id,
                access_key_secret=access_key_secret,
                security_token=security_token,
                region_id=region,
                endpoint=address,
                protocol=protocol,
                # The published client sends even loopback requests to HTTP_PROXY. Only another proxy overrides that,
                # so the fake is named as its own: it understands the absolute form of such requests.
                http_proxy=f"http://{address}" if _is_loopback(address) and protocol == "HTTP" else None,
                ca=ca_file,
                connect_timeout=int(CONNECT_TIMEOUT_S * 1000),
                read_timeout=int(read_timeout_s * 1000),
                global_parameters=GlobalParameters(
                    headers={CLIENT_HEADER: quote(username, safe="")} if username else {}
                ),
            )
        )
        self._pool = urllib3.PoolManager(
            num_pools=4,
            maxsize=POOL_SIZE,
            retries=False,
            ca_certs=ca_file,
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_timeout_s),
        )
        self._login = base64.b64encode(f"{username}:{password}".encode()).decode()
        instances = self._ask("list_instances", models.ListInstancesRequest(status="Running")).instances or []
        if not instances:
            raise TransportError("InstanceNotFound", "the account has no running Feature Store instance")
        self._instance: str = instances[0].instance_id
        self._project_ids: dict[str, str] = {}
        self._address, self._token = self._find_featuredb()

    def _find_featuredb(self) -> tuple[str, str]:
        request = self._models.ListDatasourcesRequest(type="FeatureDB")
        for row in self._ask("list_datasources", self._instance, request).datasources or []:
            config = json.loads(row.config)
            return config["fdb_public_address"].rstrip("/"), config["token"]
        raise TransportError("DatasourceNotFound", "the instance has no FeatureDB datasource")

    def _ask(self, action: str, *arguments: Any) -> Any:
        """One control-plane call: the reply's body."""
        from Tea.exceptions import TeaException  # the base of all that the published client raises

        try:
            return getattr(self._control, action)(*arguments).body
        except TeaException as error:
            raise _from_openapi(error) from None

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

    def _data(
        self, method: str, view: ViewSpec, path: str, query: dict[str, Any], body: Any = None, extra: Any = None
    ) -> Any:
        """One data-plane call: the urllib3 response of a 200. Raises TransportError."""
        import urllib3
        from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

        parts = "/".join(quote(part, safe="") for part in (self._instance, view.project, view.name))
        text = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in query.items() if value is not None)
        url = f"{self._address}/api/v1/tables/{parts}/{path}?{text}"
        headers = {"Authorization": self._token, "Auth": self._login, **(extra or {})}
        try:
            response = self._pool.request(method, url, body=body, headers=headers, preload_content=False)
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise TransportError("ConnectFailed", f"{method} {path}: {type(error).__name__}") from None
        except ReadTimeoutError:
            raise TransportError(
                "ReadTimeout", f"{method} {path}: no reply within {self._read_timeout_s:g} s"
            ) from None
        except HTTPError as error:
            raise TransportError("ConnectionLost", f"{method} {path}: {type(error).__name__}") from None
        try:
            data = response.read()
        except (HTTPError, urllib3.exceptions.IncompleteRead, OSError) as error:
            code = "ReplyTruncated" if response.status < 300 else code_for_status(response.status)
            raise TransportError(code, f"{method} {path}: {type(error).__name__}", status=response.status) from None
        finally:
            response.release_conn()
        if response.status != 200:
            _raise_reply(method, path, response.status, response.headers, data)
        return response.headers, data

    def write_arrow(self, view: ViewSpec, batch: pa.RecordBatch, version: str, ts: int | None) -> None:
        query = {"version": version, "write_mode": "MERGE", "ts": ts}
        if batch.nbytes <= WINDOW_BYTES:
            self._data("POST", view, "write_arrow", query, memoryview(to_ipc(batch)))
        else:
            length, chunks = to_ipc_windows(batch)
            self._data("POST", view, "write_arrow", query, chunks, {"Content-Length": str(length)})

    def write_rows(self, view: ViewSpec, rows: bytes, version: str, ts: int | None) -> None:
        request: dict[str, Any] = {"content": msgspec.Raw(rows), "write_mode": "MERGE", "version": version}
        if ts is not None:
            request["ts"] = ts
        self._data("POST", view, "write", {}, msgspec.json.encode(request))

    def lookup(self, view: ViewSpec, version: str, request: pa.RecordBatch) -> pa.Table:
        _, data = self._data("POST", view, "lookup_arrow", {"version": version}, memoryview(to_ipc(request)))
        return _table(data)

    def scan(self, view: ViewSpec, version: str) -> pa.Table:
        _, data = self._data("POST", view, "snapshots", {"version": version})
        snapshot_id = json.loads(data)["data"]["snapshot_id"]
        _, data = self._data("GET", view, f"snapshots/{snapshot_id}/scan", {})
        return _table(data)

    def changes(self, view: ViewSpec, version: str, ts: int) -> tuple[pa.Table, int]:
        headers, data = self._data("GET", view, "iterate_get_kv", {"version": version, "ts": ts})
        return _table(data), int(headers["Next-Ts"])

    def high_water_ts(self, view: ViewSpec, version: str) -> int:
        _, data = self._data("GET", view, "high_water_ts", {"version": version})
        return int(json.loads(data)["data"]["ts"])

    def close(self) -> None:
        self._pool.clear()


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    """("host:port", "HTTP" or "HTTPS"): plain host:port on loopback means HTTP, as for every fake."""
    scheme, found, rest = endpoint.partition("://")
    if found:
        return rest.rstrip("/"), scheme.upper()
    return endpoint, "HTTP" if _is_loopback(endpoint) else "HTTPS"


def _is_loopback(address: str) -> bool:
    return address.rsplit(":", 1)[0].strip("[]") in ("127.0.0.1", "localhost", "::1")


def _table(data: bytes) -> pa.Table:
    try:
        return pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise TransportError(
            "ReplyTruncated", f"the reply is no complete Arrow stream ({type(error).__name__})"
        ) from None


def _raise_reply(method: str, path: str, status: int, headers: Any, data: bytes) -> NoReturn:
    try:
        reply = json.loads(data)
        code, message = str(reply["Code"]), str(reply["Message"])
    except (ValueError, KeyError, TypeError):
        reply, code, message = {}, code_for_status(status), "the reply holds no Code and Message"
    try:
        retry_after_s = float(headers["Retry-After"]) if "Retry-After" in headers else None
    except ValueError:
        retry_after_s = None
    raise TransportError(
        code,
        f"{method} {path}: {message} (request {reply.get('RequestId', 'unknown')})",
        status=status,
        retry_after_s=retry_after_s,
        rows_failed=reply.get("RowsFailed"),
    )


def _from_openapi(error: Any) -> TransportError:
    """What the published client raised, in our terms. It wraps what happened below HTTP into its message only."""
    inner = getattr(error, "inner_exception", None) or error
    status, text = getattr(inner, "status_code", None), str(getattr(inner, "message", inner))[:300]
    if status is None:
        code = "ReadTimeout" if "Read timed out" in text else "ConnectionLost"
        never_sent = any(name in text for name in ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError"))
        return TransportError("ConnectFailed" if never_sent else code, f"control plane: {text}")
    code = str(getattr(inner, "code", ""))
    return TransportError(code if code in ERRORS else code_for_status(status), f"control plane: {text}", status=status)

"""What each route does. A handler gets a Call, checks it, and puts its effect inside ``call.commit``: faults act there,
so a request that is refused for its own sake strikes no fault. Replies are sent by routes.py.

Public wire facts (docs/feature-store.md): the control plane's paths and field names, ``write``, ``batch_get_kkv``,
``batch_get_kv2``, ``snapshots``, ``scan`` and ``iterate_get_kv``. Ours: ``write_arrow``, ``lookup_arrow``, ``/_admin``,
and the query parameters ``version`` and ``ts`` wherever they appear.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
from aiohttp import web

from ..errors import (
    BodyTooLarge,
    FakeError,
    Injected,
    InvalidParameter,
    InvalidTimestamp,
    InvalidToken,
    InvalidVersion,
    ProjectNotFound,
)
from ..store import EntitySpec, ViewSpec, check_version, other_type
from . import flat, windows, wire
from .faults import (
    AnyFault,
    DuplicateFault,
    ReorderFault,
    ResetFault,
    SchemaChangedFault,
    SlowBodyFault,
    StaleReadFault,
    Strike,
    TokenRevokedFault,
    TruncateFault,
    ViewDeletedFault,
)
from .state import (
    FEATUREDB,
    INSTANCE_ID,
    MAXCOMPUTE,
    OWNER,
    REGION_ID,
    WORKSPACE_ID,
    RequestEntry,
    ServerState,
    parse_int,
)

T = TypeVar("T")

RUNNER: Final = web.AppKey("runner", web.AppRunner)

VIEW_TYPE: Final = "DynamicEmbedding"  # ours: the public documentation names no Type for dynamic embeddings
VALUE_TYPES: Final = {"ARRAY<FLOAT>": "float32", "ARRAY<UINT8>": "uint8"}
FIELD_TYPES: Final = {value: key for key, value in VALUE_TYPES.items()}
PAGE_SIZE_DEFAULT: Final = 10
PAGE_SIZE_MAX: Final = 1000
TS_MAX: Final = 2**63 - 1
ONLINE_ROWS_MAX: Final = 1000
ONLINE_BYTES_MAX: Final = 4 * 2**20  # of all these rows as Arrow columns; as JSON they take six times as much


class Reply(NamedTuple):
    """What to send: ``body`` is a JSON-able object, bytes, or an iterator of byte chunks to stream."""

    body: Any
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


class Broken(Exception):
    """A reset fault struck: break the connection, send nothing."""


class Call:
    """One request under way."""

    def __init__(self, state: ServerState, request: web.Request, entry: RequestEntry, group: str) -> None:
        self.state = state
        self.request = request
        self.entry = entry
        self.group = group
        self.generation = state.generation
        self.body: Any = b""  # a pa.Buffer once it is there
        self.rows_failed = 0
        self.reply_fault: ResetFault | TruncateFault | SlowBodyFault | None = None

    def path(self, name: str) -> str:
        return self.request.match_info[name]

    def query(self, name: str) -> str | None:
        values = self.request.query.getall(name, [])
        if len(values) > 1:
            raise InvalidParameter(f"parameter {name} is given {len(values)} times")
        return values[0] if values else None

    def query_int(self, name: str, default: int, low: int, high: int) -> int:
        text = self.query(name)
        return default if text is None or text == "" else parse_int(name, text, low, high)

    def query_ts(self, default: int, low: int) -> int:
        """The query's ``ts``, in ms. Raises InvalidTimestamp."""
        try:
            return self.query_int("ts", default, low, TS_MAX)
        except InvalidParameter as error:
            raise InvalidTimestamp(str(error)) from None

    def datasource(self, datasource_id: str) -> dict[str, Any]:
        """Raises DatasourceNotFound."""
        return self.state.datasource(datasource_id, self.request.headers["Host"])  # there and signed: see signature.py

    def json(self) -> dict[str, Any]:
        """The body as a JSON object ({} when empty). Raises MalformedBody."""
        return wire.json_object(self.body)

    async def commit(self, effect: Callable[[], T]) -> T:
        """Run ``effect`` between the faults that are due before and after it."""
        with self.state.lock:
            self._check_generation()
            strike = self.state.faults.strike(self.entry.route, self.group, self.entry.client)
        self.entry.fault_ids, self.entry.fault = strike.ids, strike.at
        self.rows_failed = strike.rows_failed
        await self._suffer(strike, "before-commit")
        if isinstance(strike.main, ReorderFault):
            await self._hold(strike.main)
        with self.state.lock:
            self._check_generation()
            result = self._act(strike, effect)
            self.state.turns.passed(self.entry.route, self.group, self.entry.client, self.request.protocol)
        if isinstance(strike.main, DuplicateFault):
            self._deliver_again(strike.main, effect)
        await self._suffer(strike, "after-commit")
        self.reply_fault = strike.reply_fault
        return result

    def _act(self, strike: Strike, effect: Callable[[], T]) -> T:
        """The effect, after what a fault does to the view or the token, or on the past that a stale read sees."""
        main, state = strike.main, self.state
        if isinstance(main, TokenRevokedFault):
            state.token = uuid.uuid4().hex
            raise InvalidToken("the Authorization header is not the datasource's current token: it was replaced")
        if isinstance(main, ViewDeletedFault | SchemaChangedFault):
            spec = state.store.view(self.path("schema"), self.path("table"))
            state.store.drop_view(spec.project, spec.name)
            if isinstance(main, SchemaChangedFault):
                state.store.create_view(other_type(spec))
        if not isinstance(main, StaleReadFault):
            return effect()
        if self.entry.route == "online_features":
            spec = state.view(self.path("view"))
        else:
            spec = state.store.view(self.path("schema"), self.path("table"))
        # Handlers read through call.state, whatever they read: for the time of the effect it shows the past.
        self.state = copy.copy(state)
        self.state.store = state.store.as_of(spec.project, spec.name, writes=main.writes, age_ms=main.age_ms)
        try:
            return effect()
        finally:
            self.state = state

    async def _hold(self, fault: ReorderFault) -> None:
        passed = asyncio.Event()
        waiting = self.state.turns.waiting(fault, self.entry.client, self.request.protocol, passed.set)
        with waiting, contextlib.suppress(TimeoutError):
            await asyncio.wait_for(passed.wait(), fault.hold_ms_max / 1000)

    def _deliver_again(self, fault: DuplicateFault, effect: Callable[[], object]) -> None:
        first = self.entry

        def deliver() -> None:
            with self.state.lock:
                if self.generation != self.state.generation:
                    return
                again = self.state.open_entry(first.route)
                for name in ("request_id", "client", "rows", "version", "ts", "fault", "fault_ids"):
                    setattr(again, name, getattr(first, name))
                again.delivery, again.fate = 2, "no"
                self.entry = again  # the effect notes its fate here
                try:
                    effect()
                except (FakeError, OSError) as error:  # the view was dropped meanwhile, or the store's folder failed
                    again.code = error.code if isinstance(error, FakeError) else "InternalError"
                finally:
                    self.entry = first
                self.state.close_entry(again, self.generation)

        if fault.delay_ms:
            asyncio.get_running_loop().call_later(fault.delay_ms / 1000, deliver)
        else:
            deliver()

    def _check_generation(self) -> None:
        if self.generation != self.state.generation:
            raise Broken  # the server was reset meanwhile: an old request must not reach the new store

    async def _suffer(self, strike: Strike, when: Any) -> None:
        if delay_s := strike.delay_s(when):
            await asyncio.sleep(delay_s)
        if fault := strike.refusal(when):
            raise Injected(fault.code or 503, f"planned fault {fault.id}", fault.retry_after_s)
        if strike.breaks(when):
            raise Broken


# Control plane


def _time(ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(ms / 1000))


def _field(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise InvalidParameter(f"{name}: want a string, got {type(value).__name__}")
    return value


def _matches(call: Call, rows: list[dict[str, Any]], filters: tuple[str, ...]) -> list[dict[str, Any]]:
    for name in filters:
        if want := call.query(name):
            rows = [row for row in rows if row[name] == want]
    return rows


def _id_filter(call: Call, name: str, key: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = call.query(name)
    if not text:
        return rows
    wanted = text.split(",")  # the published client joins with commas (style "simple")
    return [row for row in rows if row[key] in wanted]


def _page(call: Call, key: str, rows: list[dict[str, Any]], sort_keys: tuple[str, ...]) -> dict[str, Any]:
    """One page of a list: PageNumber (from 1), PageSize, SortBy, Order (ASC or DESC), TotalCount."""
    number = call.query_int("PageNumber", 1, 1, 2**31)
    size = call.query_int("PageSize", PAGE_SIZE_DEFAULT, 1, PAGE_SIZE_MAX)
    order = (call.query("Order") or "ASC").upper()
    if order not in ("ASC", "DESC"):
        raise InvalidParameter(f"Order {order[:20]!r}: want ASC or DESC")
    if sort_by := call.query("SortBy"):
        if sort_by not in sort_keys:
            raise InvalidParameter(f"SortBy {sort_by[:40]!r}: want one of {', '.join(sort_keys)}")
        rows = sorted(rows, key=lambda row: str(row[sort_by]))
    if order == "DESC":
        rows = rows[::-1]
    return {key: rows[(number - 1) * size : number * size], "TotalCount": len(rows)}


async def list_instances(call: Call) -> Reply:
    """The one instance of this server."""

    def effect() -> dict[str, Any]:
        instance = {
            "InstanceId": INSTANCE_ID,
            "RegionId": REGION_ID,
            "Status": "Running",
            "Type": "Basic",
            "GmtCreateTime": "2023-06-21T00:00:00+08:00",
            "GmtModifiedTime": "2023-06-21T00:00:00+08:00",
            "FeatureDBInfo": {"Status": "Running"},
            "FeatureDBInstanceInfo": {"Status": "Running"},
        }
        return _page(call, "Instances", _matches(call, [instance], ("Status",)), ("GmtCreateTime", "GmtModifiedTime"))

    return Reply(await call.commit(effect))


def _project_row(state: ServerState, name: str) -> dict[str, Any]:
    created = _time(state.store.created_ms("project", name))
    return {
        "ProjectId": state.id_of("project", name),
        "Name": name,
        "Description": "",
        "FeatureEntityCount": len(state.store.entities(name)),
        "FeatureViewCount": len(state.store.views(name)),
        "ModelCount": 0,
        "OnlineDatasourceId": "1",
        "OnlineDatasourceName": FEATUREDB.lower(),
        "OnlineDatasourceType": FEATUREDB,
        "OfflineDatasourceId": "2",
        "OfflineDatasourceName": MAXCOMPUTE.lower(),
        "OfflineDatasourceType": MAXCOMPUTE,
        "OfflineLifecycle": 0,
        "Owner": OWNER,
        "WorkspaceId": WORKSPACE_ID,
        "GmtCreateTime": created,
        "GmtModifiedTime": created,
    }


async def list_projects(call: Call) -> Reply:
    """Projects by Name, Owner, WorkspaceId or ProjectIds."""

    def effect() -> dict[str, Any]:
        rows = [_project_row(call.state, name) for name in call.state.store.projects()]
        rows = _matches(call, rows, ("Name", "Owner", "WorkspaceId"))
        rows = _id_filter(call, "ProjectIds", "ProjectId", rows)
        return _page(call, "Projects", rows, ("Name", "GmtCreateTime", "GmtModifiedTime"))

    return Reply(await call.commit(effect))


async def create_project(call: Call) -> Reply:
    """A new project on the FeatureDB datasource."""
    body = call.json()
    name = _field(body, "Name")
    online = call.datasource(_field(body, "OnlineDatasourceId", "1"))
    call.datasource(_field(body, "OfflineDatasourceId", "2"))
    if online["Type"] != FEATUREDB:
        raise InvalidParameter(f"OnlineDatasourceId {online['DatasourceId']}: want a FeatureDB datasource")

    def effect() -> dict[str, Any]:
        call.state.store.create_project(name)
        return {"ProjectId": call.state.id_of("project", name)}

    return Reply(await call.commit(effect))


async def get_project(call: Call) -> Reply:
    """One project by id."""
    return Reply(await call.commit(lambda: _project_row(call.state, call.state.project(call.path("project")))))


def _entity_row(state: ServerState, spec: EntitySpec) -> dict[str, Any]:
    parent = state.store.entity(spec.project, spec.parent) if spec.parent else None
    return {
        "FeatureEntityId": state.id_of("entity", spec.project, spec.name),
        "Name": spec.name,
        "JoinId": spec.join_id,
        "ProjectId": state.id_of("project", spec.project),
        "ProjectName": spec.project,
        "ParentFeatureEntityId": state.id_of("entity", spec.project, parent.name) if parent else "",
        "ParentFeatureEntityName": parent.name if parent else "",
        "ParentJoinId": parent.join_id if parent else "",
        "Owner": OWNER,
        "WorkspaceId": WORKSPACE_ID,
        "GmtCreateTime": _time(state.store.created_ms("entity", spec.project, spec.name)),
    }


async def list_entities(call: Call) -> Reply:
    """Entities by ProjectId, Name, Owner, ParentFeatureEntityId or FeatureEntityIds."""

    def effect() -> dict[str, Any]:
        rows = [_entity_row(call.state, spec) for spec in call.state.store.entities()]
        rows = _matches(call, rows, ("ProjectId", "Name", "Owner", "ParentFeatureEntityId"))
        rows = _id_filter(call, "FeatureEntityIds", "FeatureEntityId", rows)
        return _page(call, "FeatureEntities", rows, ("Name", "GmtCreateTime"))

    return Reply(await call.commit(effect))


async def create_entity(call: Call) -> Reply:
    """A new entity of a project."""
    body = call.json()
    project = call.state.project(_field(body, "ProjectId"))
    parent_id = _field(body, "ParentFeatureEntityId", "")
    parent = call.state.entity(parent_id) if parent_id else None
    if parent and parent.project != project:
        raise InvalidParameter(f"ParentFeatureEntityId {parent_id} belongs to another project")
    spec = EntitySpec(project, _field(body, "Name"), _field(body, "JoinId"), parent.name if parent else "")

    def effect() -> dict[str, Any]:
        call.state.store.create_entity(spec)
        return {"FeatureEntityId": call.state.id_of("entity", project, spec.name)}

    return Reply(await call.commit(effect))


async def get_entity(call: Call) -> Reply:
    """One entity by id."""
    return Reply(await call.commit(lambda: _entity_row(call.state, call.state.entity(call.path("entity")))))


async def get_project_entity(call: Call) -> Reply:
    """One entity of a project by name."""

    def effect() -> dict[str, Any]:
        project = call.state.project(call.path("project"))
        return _entity_row(call.state, call.state.store.entity(project, call.path("entity")))

    return Reply(await call.commit(effect))


async def delete_entity(call: Call) -> Reply:
    """Drop an entity that no view uses."""

    def effect() -> dict[str, Any]:
        spec = call.state.entity(call.path("entity"))
        call.state.store.drop_entity(spec.project, spec.name)
        return {}

    return Reply(await call.commit(effect))


def _view_row(state: ServerState, spec: ViewSpec) -> dict[str, Any]:
    entity = state.store.entity(spec.project, spec.entity)
    created = _time(state.store.created_ms("view", spec.project, spec.name))
    config = {"ttl": spec.ttl_s, "shard_count": spec.shard_count, "replication_count": spec.replication_count}
    return {
        "FeatureViewId": state.id_of("view", spec.project, spec.name),
        "Name": spec.name,
        "Type": VIEW_TYPE,
        "ProjectId": state.id_of("project", spec.project),
        "ProjectName": spec.project,
        "FeatureEntityId": state.id_of("entity", spec.project, spec.entity),
        "FeatureEntityName": spec.entity,
        "JoinId": entity.join_id,
        "TTL": spec.ttl_s,
        "Config": json.dumps(config),
        "Fields": [
            {"Name": spec.pk, "Type": "STRING", "Attributes": ["PrimaryKey"]},
            {"Name": spec.sk, "Type": "INT64", "Attributes": ["SecondaryKey"]},
            {"Name": spec.value, "Type": FIELD_TYPES[spec.value_type], "Attributes": []},
        ],
        "Tags": [],
        "Owner": OWNER,
        "WriteMethod": "",
        "WriteToFeatureDB": True,
        "SyncOnlineTable": True,
        "RegisterTable": "",
        "RegisterDatasourceId": "",
        "RegisterDatasourceName": "",
        "LastSyncConfig": "",
        "GmtCreateTime": created,
        "GmtModifiedTime": created,
        "GmtSyncTime": created,
    }


async def list_views(call: Call) -> Reply:
    """Views by ProjectId, Name, Owner, Type, FeatureName, Tag or FeatureViewIds."""

    def effect() -> dict[str, Any]:
        rows = [_view_row(call.state, spec) for spec in call.state.store.views()]
        rows = _matches(call, rows, ("ProjectId", "Name", "Owner", "Type"))
        if feature := call.query("FeatureName"):
            rows = [row for row in rows if any(field["Name"] == feature for field in row["Fields"])]
        if tag := call.query("Tag"):
            rows = [row for row in rows if tag in row["Tags"]]
        rows = _id_filter(call, "FeatureViewIds", "FeatureViewId", rows)
        return _page(call, "FeatureViews", rows, ("Name", "GmtCreateTime", "GmtModifiedTime"))

    return Reply(await call.commit(effect))


def _parse_fields(fields: Any) -> tuple[str, str, str, Any]:
    """(pk, sk, value, value type) of a view's Fields. Raises InvalidParameter."""
    if not isinstance(fields, list) or not all(isinstance(field, dict) for field in fields):
        raise InvalidParameter("Fields: want a list of objects with Name, Type and Attributes")
    found: dict[str, dict[str, Any]] = {}
    for field in fields:
        attributes = field.get("Attributes") or []
        if not isinstance(attributes, list):
            raise InvalidParameter("Fields: Attributes must be a list")
        role = next((role for role in ("PrimaryKey", "SecondaryKey") if role in attributes), "value")
        if role in found:
            raise InvalidParameter(f"Fields: two fields for {role}")
        found[role] = field
    for role in ("PrimaryKey", "SecondaryKey", "value"):
        if role not in found:
            raise InvalidParameter(f"Fields: no field for {role}; want three: PrimaryKey, SecondaryKey and a value")
    for role, want in (("PrimaryKey", ("STRING",)), ("SecondaryKey", ("INT64",)), ("value", tuple(VALUE_TYPES))):
        if found[role].get("Type") not in want:
            raise InvalidParameter(f"Fields: {role} must be of type {' or '.join(want)}")
    names = [_field(found[role], "Name") for role in ("PrimaryKey", "SecondaryKey", "value")]
    return names[0], names[1], names[2], VALUE_TYPES[found["value"]["Type"]]


async def create_view(call: Call) -> Reply:
    """A new DynamicEmbedding view; TTL, shard_count and replication_count may stand in Config."""
    body = call.json()
    project = call.state.project(_field(body, "ProjectId"))
    entity = call.state.entity(_field(body, "FeatureEntityId"))
    if entity.project != project:
        raise InvalidParameter(f"FeatureEntityId {body['FeatureEntityId']} belongs to another project")
    if body.get("Type") != VIEW_TYPE:
        raise InvalidParameter(f"Type {str(body.get('Type'))[:40]!r}: this fake keeps {VIEW_TYPE} views only")
    config = wire.json_object(_field(body, "Config", "").encode(), "Config")
    pk, sk, value, value_type = _parse_fields(body.get("Fields"))
    default = ViewSpec(project, "default", entity.name)
    spec = ViewSpec(
        project,
        _field(body, "Name"),
        entity.name,
        pk,
        sk,
        value,
        value_type,
        ttl_s=body["TTL"] if body.get("TTL") is not None else config.get("ttl", default.ttl_s),
        shard_count=config.get("shard_count", default.shard_count),
        replication_count=config.get("replication_count", default.replication_count),
    )

    def effect() -> dict[str, Any]:
        call.state.store.create_view(spec)
        return {"FeatureViewId": call.state.id_of("view", project, spec.name)}

    return Reply(await call.commit(effect))


async def get_view(call: Call) -> Reply:
    """One view by id."""
    return Reply(await call.commit(lambda: _view_row(call.state, call.state.view(call.path("view")))))


async def update_view(call: Call) -> Reply:
    """PUT: only a repetition of the fields a view has is accepted; the schema of a dynamic embedding is fixed."""
    body = call.json()

    def effect() -> dict[str, Any]:
        spec = call.state.view(call.path("view"))
        if _parse_fields(body.get("Fields")) != (spec.pk, spec.sk, spec.value, spec.value_type):
            raise InvalidParameter(f"the fields of view {spec.name} cannot change: create another view")
        return {"requestId": call.entry.request_id}  # spelt so in the published client

    return Reply(await call.commit(effect))


async def delete_view(call: Call) -> Reply:
    """Drop a view with its rows."""

    def effect() -> dict[str, Any]:
        spec = call.state.view(call.path("view"))
        call.state.store.drop_view(spec.project, spec.name)
        return {}

    return Reply(await call.commit(effect))


async def online_features(call: Call) -> Reply:
    """Rows of the tables named in JoinIds, as JSON texts; ours: the version stands in Config, {"version": …}."""
    join_ids = wire.json_value((call.query("JoinIds") or "").encode(), list[str], "JoinIds", InvalidParameter)
    config = wire.json_object((call.query("Config") or "").encode(), "Config")
    version = call.entry.version = _check_version(config.get("version"))

    def effect() -> dict[str, Any]:
        spec = call.state.view(call.path("view"))
        snapshot = call.state.store.snapshot(spec.project, spec.name, version, tables=join_ids)
        if snapshot.rows > ONLINE_ROWS_MAX or snapshot.nbytes > ONLINE_BYTES_MAX:
            raise BodyTooLarge(
                f"{snapshot.rows} rows of {snapshot.nbytes} bytes, over {ONLINE_ROWS_MAX} or {ONLINE_BYTES_MAX}: "
                "use the data plane"
            )
        texts = [
            json.dumps({spec.pk: row["pk"], spec.sk: row["sk"], spec.value: row["embedding"]})
            for row in snapshot.table().to_pylist()
        ]
        return {"OnlineFeatures": texts}

    return Reply(await call.commit(effect))


async def write_table(call: Call) -> Reply:
    """Offline tables feed batch views only: refused for dynamic embeddings, the only views there are."""

    def effect() -> dict[str, Any]:
        spec = call.state.view(call.path("view"))
        raise InvalidParameter(f"view {spec.name} is a {VIEW_TYPE}: it is written through FeatureDB, not from a table")

    return Reply(await call.commit(effect))


async def list_datasources(call: Call) -> Reply:
    """Datasources by Type, WorkspaceId or Name."""

    def effect() -> dict[str, Any]:
        rows = [call.datasource(number) for number in ("1", "2")]
        rows = _matches(call, rows, ("Type", "WorkspaceId", "Name"))
        return _page(call, "Datasources", rows, ("Name", "GmtCreateTime", "GmtModifiedTime"))

    return Reply(await call.commit(effect))


async def get_datasource(call: Call) -> Reply:
    """One datasource by id; FeatureDB's Config holds its address and token."""
    return Reply(await call.commit(lambda: call.datasource(call.path("datasource"))))


# Data plane. {db} is the instance id, {schema} the project, {table} the view.


def _table(call: Call) -> ViewSpec:
    call.state.check_instance(call.path("db"))
    if call.path("schema") not in call.state.store.projects():
        raise ProjectNotFound(f"no project {call.path('schema')[:80]!r}")
    return call.state.store.view(call.path("schema"), call.path("table"))


def _check_version(version: Any) -> str:
    if not isinstance(version, str | None):
        raise InvalidVersion(f"version: want a string, got {type(version).__name__}")
    return check_version(version)


def _version(call: Call) -> str:
    call.entry.version = check_version(call.query("version"))
    return call.entry.version


def _write_mode(mode: Any) -> None:
    if mode not in (None, "", "MERGE"):
        raise InvalidParameter(f"write_mode {str(mode)[:40]!r}: this fake knows MERGE only")


async def _write(call: Call, spec: ViewSpec, batch: pa.RecordBatch, version: str, ts: int) -> Reply:
    store = call.state.store
    if not batch.num_rows:
        raise InvalidParameter("a write without rows")
    call.entry.rows, call.entry.version, call.entry.ts, call.entry.fate = batch.num_rows, version, ts, "no"

    def effect() -> int:
        entry = call.entry  # that of the delivery under way
        failed = min(call.rows_failed, batch.num_rows)
        kept = batch.slice(0, batch.num_rows - failed)
        if failed:
            # The whole batch must be valid: a partial failure is the store's, not the client's.
            store.check_write(spec.project, spec.name, batch, version=version, ts=ts)
        if kept.num_rows or not failed:
            store.write(
                spec.project, spec.name, kept, version=version, ts=ts, client=entry.client, request_id=entry.request_id
            )
        entry.rows_applied = kept.num_rows
        entry.fate = "yes" if not failed else "partly" if kept.num_rows else "no"
        return failed

    failed = await call.commit(effect)
    if failed:
        entry = call.entry
        entry.code = "PartialFailure"
        message = f"the last {failed} of {batch.num_rows} rows were not applied"
        body = {"Code": entry.code, "Message": message, "RowsWritten": entry.rows_applied, "RowsFailed": failed}
        return Reply(body, status=207)
    return Reply({"RowsWritten": batch.num_rows, "RowsFailed": 0})


async def write_arrow(call: Call) -> Reply:
    """Ours: a write as an Arrow IPC stream; version, write_mode and ts in the query."""
    spec = _table(call)
    version = _version(call)
    ts = call.query_ts(call.state.store.now_ms(), 1)
    _write_mode(call.query("write_mode"))
    return await _write(call, spec, wire.read_arrow(call.body), version, ts)


_Ts: Final = Annotated[int, msgspec.Meta(ge=1, le=TS_MAX)]


class _WriteBody(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()
    version: msgspec.Raw = msgspec.Raw()
    ts: msgspec.Raw = msgspec.Raw()
    write_mode: msgspec.Raw = msgspec.Raw(b"null")


async def write_json(call: Call) -> Reply:
    """A write as JSON rows under "content", with write_mode, version and ts beside them."""
    spec = _table(call)
    body = wire.json_value(call.body, _WriteBody) if len(call.body) else _WriteBody()
    ts = call.query_ts(call.state.store.now_ms(), 1)
    if len(body.ts):
        ts = wire.json_value(body.ts, _Ts, "ts", InvalidTimestamp)
    version = call.query("version")
    if len(body.version):
        version = wire.json_value(body.version, str, "version", InvalidVersion)
    _write_mode(wire.json_value(body.write_mode, str | None, "write_mode", InvalidParameter))
    version = check_version(version)
    return await _write(call, spec, wire.rows_to_batch(body.content, spec), version, ts)


async def lookup_arrow(call: Call) -> Reply:
    """Ours: rows by (pk, sk) as an Arrow IPC stream, in request order, missing ones left out."""
    spec = _table(call)
    version = _version(call)
    pk, sk = wire.key_columns(wire.read_arrow(call.body))
    call.entry.rows = len(sk)
    table = await call.commit(lambda: call.state.store.lookup(spec.project, spec.name, version, pk, sk))
    if table.get_total_buffer_size() <= windows.WINDOW_BYTES:  # nbytes takes as long as the lookup
        return Reply(wire.arrow_bytes(table), wire.ARROW_STREAM)
    return Reply(wire.arrow_chunks(table.schema, iter(windows.table_batches(table))), wire.ARROW_STREAM)


def _read_version(call: Call, spec: ViewSpec) -> str:
    """Ours: published clients name no version, so one that is not named is the only one there is."""
    versions = call.state.store.versions(spec.project, spec.name)
    if call.query("version") is None and len(versions) == 1:
        call.entry.version = versions[0]
        return versions[0]
    return _version(call)


class _PksBody(msgspec.Struct):
    pks: list[str]
    length: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    with_value: bool = True


class _KeysBody(msgspec.Struct):
    keys: list[str]


def _check_count(name: str, texts: list[str]) -> None:
    if len(texts) > flat.KEYS_MAX:
        raise InvalidParameter(f"{name}: {len(texts)} are over {flat.KEYS_MAX}: ask for fewer")


async def batch_get_kkv(call: Call) -> Reply:
    """The newest rows of each pk: ``{"pks": [...], "length": n, "with_value": bool}``; FlatBuffers blocks (flat.py)."""
    spec = _table(call)
    version = _read_version(call, spec)
    body = wire.json_value(call.body, _PksBody, refusal=InvalidParameter)
    _check_count("pks", body.pks)
    pks = list(dict.fromkeys(body.pks))
    snapshot = await call.commit(
        lambda: call.state.store.snapshot(spec.project, spec.name, version, tables=pks),
    )
    call.entry.rows = len(pks)
    return Reply(flat.kkv_blocks(snapshot, pks, body.length, body.with_value), flat.OCTET_STREAM)


async def batch_get_kv2(call: Call) -> Reply:
    """One value per key: ``{"keys": [...]}``, at most ``batch_size`` in a block; FlatBuffers blocks (flat.py)."""
    spec = _table(call)
    version = _read_version(call, spec)
    keys = wire.json_value(call.body, _KeysBody, refusal=InvalidParameter).keys
    _check_count("keys", keys)
    batch_size = call.query_int("batch_size", max(1, len(keys)), 1, flat.KEYS_MAX)
    if call.query("encoder"):
        raise InvalidParameter("encoder: only the empty one is known")
    pks, sks = flat.split_keys(keys)
    call.entry.rows = len(keys)
    pk, sk = pa.array(pks, pa.string()), pa.array(sks, pa.int64())
    table = await call.commit(lambda: call.state.store.lookup(spec.project, spec.name, version, pk, sk))
    names, numbers = table.column("pk").to_pylist(), table.column("sk").to_pylist()
    found, row = [], 0
    for key in zip(pks, sks, strict=True):  # the table holds what was found, in this order
        found.append(row < len(names) and (names[row], numbers[row]) == key)
        row += found[-1]
    return Reply(flat.kv_blocks(table, found, batch_size), flat.OCTET_STREAM)


async def create_snapshot(call: Call) -> Reply:
    """Keep an image of a version: {"data": {"snapshot_id", "ts"}}."""
    spec = _table(call)
    version = _version(call)

    def effect() -> dict[str, Any]:
        snapshot = call.state.store.snapshot(spec.project, spec.name, version)
        snapshot_id = call.state.keep_snapshot(spec.project, spec.name, snapshot)
        return {"data": {"snapshot_id": snapshot_id, "ts": snapshot.ts}}

    return Reply(await call.commit(effect))


async def scan_snapshot(call: Call) -> Reply:
    """Stream a kept image as Arrow IPC."""
    spec = _table(call)
    snapshot = await call.commit(lambda: call.state.snapshot(spec.project, spec.name, call.path("snapshot")))
    call.entry.rows = snapshot.rows
    return Reply(wire.arrow_chunks(snapshot.schema, windows.batches(snapshot)), wire.ARROW_STREAM)


async def iterate_changes(call: Call) -> Reply:
    """Rows with a ts above the query's, as Arrow IPC; header Next-Ts holds the next cursor."""
    spec = _table(call)
    version = _version(call)
    cursor = call.query_ts(0, 0)
    snapshot = await call.commit(
        lambda: call.state.store.snapshot(spec.project, spec.name, version, after_ts=cursor),
    )
    call.entry.rows = snapshot.rows
    chunks = wire.arrow_chunks(snapshot.schema, windows.batches(snapshot))
    return Reply(chunks, wire.ARROW_STREAM, headers={"Next-Ts": str(max(cursor, snapshot.ts))})


async def high_water_ts(call: Call) -> Reply:
    """Ours: {"data": {"ts"}}, the greatest ts of a version, 0 when it is empty."""
    spec = _table(call)
    version = _version(call)
    return Reply(
        await call.commit(
            lambda: {"data": {"ts": call.state.store.high_water_ts(spec.project, spec.name, version)}},
        )
    )


async def health(call: Call) -> Reply:
    """200 when up."""
    return Reply(await call.commit(lambda: {"status": "ok"}))


# Admin (ours; loopback only)


async def status_page(call: Call) -> Reply:
    """The page for people: see status.py."""
    from . import status

    return Reply(memoryview(status.page(call.state)), "text/html; charset=utf-8", headers=status.HEADERS)


async def admin_reset(call: Call) -> Reply:
    """Pristine state; body {"projects": [names]} says which projects exist (default: those at start)."""
    projects = call.json().get("projects")
    if projects is not None and not isinstance(projects, list):
        raise InvalidParameter("projects: want a list of names")
    call.state.reset(projects)
    hang_up(call.request.app, spare=call.request.protocol)
    return Reply({})


def hang_up(app: web.Application, spare: web.RequestHandler | None = None) -> None:
    """Break every connection but one: what a killed client left in its socket must not reach a reset store."""
    server = app[RUNNER].server
    for connection in server.connections if server is not None else ():
        if connection is not spare and connection.transport is not None:
            connection.transport.abort()


async def admin_set_faults(call: Call) -> Reply:
    """Replace the fault plan by the JSON list in the body."""
    try:
        faults = msgspec.json.decode(call.body, type=list[AnyFault])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParameter(f"faults: {error}") from None
    with call.state.lock:
        call.state.faults.set(faults)
    return Reply({"Count": len(faults)})


async def admin_get_faults(call: Call) -> Reply:
    """The fault plan with the counts of seen requests and firings."""
    with call.state.lock:
        return Reply({"Faults": call.state.faults.fired()})


async def admin_requests(call: Call) -> Reply:
    """The request log from sequence number ``since`` on."""
    since = call.query_int("since", 0, 0, TS_MAX)
    with call.state.lock:
        rows = [entry for entry in call.state.requests if entry.seq >= since]
    return Reply({"Requests": rows})


async def admin_log(call: Call) -> Reply:
    """Every row ever written to a view, as Arrow IPC (store.log_schema)."""
    project, view = call.query("project"), call.query("view")
    if not project or not view:
        raise InvalidParameter("log: want the parameters project and view")
    table = call.state.store.log(project, view)
    return Reply(wire.arrow_chunks(table.schema, iter(table.to_batches())), wire.ARROW_STREAM)

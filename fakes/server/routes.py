"""Which path runs which handler, and what surrounds every handler: limits, login, log entry, errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import pyarrow as pa
from aiohttp import hdrs, web

from ..durable import DataDirError
from ..errors import (
    BodyTooLarge,
    FakeError,
    Injected,
    InvalidParameter,
    MalformedBody,
    MethodNotAllowed,
    RequestTimeout,
    RouteNotFound,
    disk_failure,
)
from ..served import break_off
from . import handlers, wire
from .faults import ResetFault, SlowBodyFault, TruncateFault
from .handlers import Broken, Call, Reply
from .signature import check_content
from .state import RequestEntry, ServerState, check_loopback, check_same_origin

log = logging.getLogger(__name__)

STATE: Final = web.AppKey("state", ServerState)

BODY_BYTES_MAX: Final = 64 * 2**20  # writes and Arrow lookups
JSON_BYTES_MAX: Final = 4 * 2**20  # every other body outside the control plane: Python objects take ten times as much
CONTROL_BYTES_MAX: Final = 2**20
BODIES_BYTES_MAX: Final = 2**30  # of all requests under way together
BODY_TIMEOUT_S: Final = 30.0
_COPY_BYTES_MAX: Final = 2**18  # below, a copy costs less than what aiohttp does for anything but bytes

_LARGE_BODIES: Final = ("write_json", "write_arrow", "lookup_arrow")

Handler = Callable[[Call], Awaitable[Reply]]

_I: Final = "/api/v1/instances"
_T: Final = "/api/v1/tables/{db}/{schema}/{table}"

# (method, path, route name, handler). The group of a route is the block it stands in; faults match name or group.
CONTROL: Final = (
    ("GET", _I, "list_instances", handlers.list_instances),
    ("GET", _I + "/{instance}/projects", "list_projects", handlers.list_projects),
    ("POST", _I + "/{instance}/projects", "create_project", handlers.create_project),
    ("GET", _I + "/{instance}/projects/{project}", "get_project", handlers.get_project),
    (
        "GET",
        _I + "/{instance}/projects/{project}/featureentities/{entity}",
        "get_project_entity",
        handlers.get_project_entity,
    ),
    ("GET", _I + "/{instance}/featureentities", "list_entities", handlers.list_entities),
    ("POST", _I + "/{instance}/featureentities", "create_entity", handlers.create_entity),
    ("GET", _I + "/{instance}/featureentities/{entity}", "get_entity", handlers.get_entity),
    ("DELETE", _I + "/{instance}/featureentities/{entity}", "delete_entity", handlers.delete_entity),
    ("GET", _I + "/{instance}/featureviews", "list_views", handlers.list_views),
    ("POST", _I + "/{instance}/featureviews", "create_view", handlers.create_view),
    ("GET", _I + "/{instance}/featureviews/{view}", "get_view", handlers.get_view),
    ("PUT", _I + "/{instance}/featureviews/{view}", "update_view", handlers.update_view),
    ("DELETE", _I + "/{instance}/featureviews/{view}", "delete_view", handlers.delete_view),
    ("GET", _I + "/{instance}/featureviews/{view}/onlinefeatures", "online_features", handlers.online_features),
    ("POST", _I + "/{instance}/featureviews/{view}/action/writetable", "write_table", handlers.write_table),
    ("GET", _I + "/{instance}/datasources", "list_datasources", handlers.list_datasources),
    ("GET", _I + "/{instance}/datasources/{datasource}", "get_datasource", handlers.get_datasource),
)
WRITE: Final = (
    ("POST", _T + "/write", "write_json", handlers.write_json),
    ("POST", _T + "/write_arrow", "write_arrow", handlers.write_arrow),
)
LOOKUP: Final = (
    ("POST", _T + "/lookup_arrow", "lookup_arrow", handlers.lookup_arrow),
    ("POST", _T + "/batch_get_kkv", "batch_get_kkv", handlers.batch_get_kkv),
    ("POST", _T + "/batch_get_kv2", "batch_get_kv2", handlers.batch_get_kv2),
)
SCAN: Final = (
    ("POST", _T + "/snapshots", "create_snapshot", handlers.create_snapshot),
    ("GET", _T + "/snapshots/{snapshot}/scan", "scan_snapshot", handlers.scan_snapshot),
)
CHANGES: Final = (
    ("GET", _T + "/iterate_get_kv", "iterate_changes", handlers.iterate_changes),
    ("GET", _T + "/high_water_ts", "high_water_ts", handlers.high_water_ts),
)
HEALTH: Final = (("GET", "/health", "health", handlers.health),)
ADMIN: Final = (
    ("GET", "/", "status_page", handlers.status_page),
    ("POST", "/_admin/reset", "admin_reset", handlers.admin_reset),
    ("PUT", "/_admin/faults", "admin_set_faults", handlers.admin_set_faults),
    ("GET", "/_admin/faults", "admin_get_faults", handlers.admin_get_faults),
    ("GET", "/_admin/requests", "admin_requests", handlers.admin_requests),
    ("GET", "/_admin/log", "admin_log", handlers.admin_log),
)
GROUPS: Final = {
    "control": CONTROL,
    "write": WRITE,
    "lookup": LOOKUP,
    "scan": SCAN,
    "changes": CHANGES,
    "health": HEALTH,
    "admin": ADMIN,
}


def make_app(
    state: ServerState, *, body_bytes_max: int = BODY_BYTES_MAX, body_timeout_s: float = BODY_TIMEOUT_S
) -> web.Application:
    """The application; ``state`` is shared with whoever embeds the server."""
    app = web.Application(client_max_size=body_bytes_max, middlewares=[_errors_as_json])
    app[STATE] = state
    room = _Room(BODIES_BYTES_MAX)
    for group, routes in GROUPS.items():
        for method, path, name, handler in routes:
            own = CONTROL_BYTES_MAX if group == "control" else JSON_BYTES_MAX
            bytes_max = body_bytes_max if name in _LARGE_BODIES else min(own, body_bytes_max)
            endpoint = _endpoint(handler, name, group, room, bytes_max, body_timeout_s)
            app.router.add_route(method, path, endpoint, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> None:
    """Answer ``Expect: 100-continue``; other expectations get 417 in the service's error shape."""
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        error = {"Code": "BadRequest", "Message": "unknown expectation", "RequestId": uuid.uuid4().hex}
        raise web.HTTPExpectationFailed(text=wire.to_json(error).decode(), content_type="application/json")
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def identify(state: ServerState, request: web.Request, group: str) -> str:
    """Who asks: the FeatureDB user of the data plane, the access key of the control plane. Raises Refused errors."""
    if group in ("health", "admin"):
        if group == "admin":
            check_loopback(request.remote)
            check_same_origin(request.headers)
        return ""
    if group == "control":
        return state.check_signature(request.method, request.raw_path, request.headers)
    return state.login(request.headers.get("Authorization"), request.headers.get("Auth"))


class _Room:
    """For the bodies of all requests under way."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Inside the block ``take(bytes)`` takes room, or raises Throttling; afterwards it is given back."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._left:
                raise Injected(429, "too many large bodies at once: try again in a second", retry_after_s=1.0)
            self._left -= size
            taken += size

        try:
            yield take
        finally:
            self._left += taken


async def _read_body(request: web.Request, take: Callable[[int], None], bytes_max: int, timeout_s: float) -> pa.Buffer:
    """The body, in Arrow's memory, which batches decoded from it go on using: Python holds one network chunk of it."""
    length = request.content_length
    if length is not None and length > bytes_max:
        raise BodyTooLarge(f"a body of {length} bytes is over this route's {bytes_max}")
    if length is not None and request.content.is_eof() and hdrs.CONTENT_ENCODING not in request.headers:
        take(length)
        return pa.py_buffer(request.content.read_nowait())  # a small one, which came with its head
    if not length or hdrs.CONTENT_ENCODING in request.headers:
        sink: Any = pa.BufferOutputStream()
        whole = None
    else:
        whole = pa.allocate_buffer(length)
        sink = pa.FixedSizeBufferWriter(whole)
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > bytes_max:
                    raise BodyTooLarge(f"the body is over this route's {bytes_max} bytes")
                take(len(chunk))
                sink.write(chunk)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    except (web.RequestPayloadError, ValueError) as error:
        raise MalformedBody(f"the body cannot be read ({type(error).__name__})") from None
    return sink.getvalue() if whole is None else whole.slice(0, size)


def _endpoint(
    handler: Handler, name: str, group: str, room: _Room, bytes_max: int, body_timeout_s: float
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def endpoint(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        entry = state.open_entry(name)
        call = Call(state, request, entry, group)
        try:
            _check_target(request.raw_path)
            entry.client = identify(state, request, group)
            if group == "control" and "instance" in request.match_info:
                state.check_instance(request.match_info["instance"])
            with room.share() as take:
                call.body = await _read_body(request, take, bytes_max, body_timeout_s)
                if group == "control":
                    check_content(request.headers, call.body)
                reply = await handler(call)
            entry.status = reply.status
            if call.reply_fault is not None:
                return await _send_struck(request, entry, reply, call.reply_fault)
            return await _send(request, entry, reply)
        except (Broken, ConnectionError):  # planned, or the client left while its body was read or its reply sent
            entry.status = None
            break_off(request.transport)
            return web.Response()  # never sent: the transport is gone
        except FakeError as error:
            return refuse(entry, error)
        except web.HTTPException:
            raise
        except MemoryError:
            if entry.rows_applied:  # a refusal would say that nothing was
                entry.status = None
                break_off(request.transport)
                return web.Response()
            log.warning("route %s: out of memory; the request is refused", name)
            return _refuse_late(
                request, entry, BodyTooLarge("there is no memory for this request: ask for less at a time")
            )
        except DataDirError as error:
            log.error("route %s: %s", name, error.strerror)
            return _refuse_late(request, entry, Injected(500, disk_failure(error, name)))
        except Exception as error:
            log.exception("route %s failed", name)
            return _refuse_late(request, entry, Injected(500, f"{type(error).__name__} in route {name}"))
        finally:
            if group != "admin":
                state.close_entry(entry, call.generation)

    return endpoint


def _check_target(target: str) -> None:
    """Raise InvalidParameter for what different readers of a target take for different things."""
    if "#" in target:
        raise InvalidParameter("a request's target has no fragment: percent-encode '#'")
    try:
        if "%" in target or not target.isascii():
            unquote_to_bytes(target.encode(errors="surrogateescape")).decode()
    except UnicodeDecodeError:
        raise InvalidParameter("the path or query is not UTF-8") from None


def _refuse_late(request: web.Request, entry: RequestEntry, error: FakeError) -> web.Response:
    """As ``refuse``; where part of a reply is sent already the connection is broken."""
    if request.writer.output_size > 0:
        break_off(request.transport)
    return refuse(entry, error)


async def _send(request: web.Request, entry: RequestEntry, reply: Reply) -> web.StreamResponse:
    headers = {"x-acs-request-id": entry.request_id, **reply.headers}
    if isinstance(reply.body, dict):
        body = wire.to_json({"RequestId": entry.request_id, **reply.body})
        return web.Response(body=body, status=reply.status, content_type=reply.content_type, headers=headers)
    if isinstance(reply.body, memoryview):
        small = len(reply.body) < _COPY_BYTES_MAX
        return web.Response(
            body=bytes(reply.body) if small else reply.body,
            status=reply.status,
            headers={hdrs.CONTENT_TYPE: reply.content_type, **headers},
        )
    response = web.StreamResponse(status=reply.status, headers={hdrs.CONTENT_TYPE: reply.content_type, **headers})
    await response.prepare(request)
    for chunk in reply.body:
        await response.write(chunk)
    await response.write_eof()
    return response


async def _send_struck(
    request: web.Request, entry: RequestEntry, reply: Reply, fault: ResetFault | TruncateFault | SlowBodyFault
) -> web.StreamResponse:
    """Send a reply, built whole, the way a fault wants it: cut off, or slowly."""
    headers = {"x-acs-request-id": entry.request_id, hdrs.CONTENT_TYPE: reply.content_type, **reply.headers}
    if isinstance(reply.body, dict):
        body = wire.to_json({"RequestId": entry.request_id, **reply.body})
    else:
        body = bytes(reply.body) if isinstance(reply.body, memoryview | bytes) else b"".join(reply.body)
    response = web.StreamResponse(status=reply.status, headers=headers)
    response.content_length = len(body)
    response.force_close()
    await response.prepare(request)
    if isinstance(fault, SlowBodyFault):
        # Ten times a second, or byte by byte: a client with a read timeout must see neither silence nor haste.
        size = max(1, int(fault.bytes_per_s / 10))
        for start in range(0, len(body), size):
            part = body[start : start + size]
            await asyncio.sleep(len(part) / fault.bytes_per_s)
            await response.write(part)
        await response.write_eof()
        return response
    kept = len(body) // 2 if isinstance(fault, ResetFault) else min(fault.bytes_kept, len(body) - 1)
    if kept > 0:
        await response.write(body[:kept])
    entry.code = "ReplyTruncated"
    if isinstance(fault, ResetFault):
        break_off(request.transport)
    elif request.transport is not None:
        request.transport.close()  # orderly: what was written is sent first
    return response


def refuse(entry: RequestEntry, error: FakeError) -> web.Response:
    """The reply to a request that failed, in the service's error shape; noted in ``entry``."""
    status = error.status if isinstance(error, Injected) else error.spec.status or 500
    entry.status, entry.code = status, error.code
    headers = {"x-acs-request-id": entry.request_id}
    if isinstance(error, Injected) and error.retry_after_s is not None:
        headers["Retry-After"] = f"{error.retry_after_s:g}"
    body = wire.to_json({"Code": error.code, "Message": str(error), "RequestId": entry.request_id})
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give aiohttp's own refusals (unknown route, wrong method) the service's error shape."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        state = request.app[STATE]
        entry, generation = state.open_entry("unknown"), state.generation
        refused: FakeError = {
            404: RouteNotFound("no such route"),
            405: MethodNotAllowed(f"{request.method} is not for this route"),
            413: BodyTooLarge("the body is too large"),
        }.get(error.status) or Injected(error.status, error.reason)
        response = refuse(entry, refused)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        state.close_entry(entry, generation)
        return response

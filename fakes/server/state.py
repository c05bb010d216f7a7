"""What the server holds besides the store: ids of the control plane, snapshots, faults and the request log."""

from __future__ import annotations

import base64
import binascii
import collections
import ipaddress
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from ..errors import (
    AccessDenied,
    DatasourceNotFound,
    EntityNotFound,
    FakeError,
    InstanceNotFound,
    InvalidParameter,
    InvalidToken,
    MissingAuthorization,
    ProjectNotFound,
    SnapshotNotFound,
    ViewNotFound,
)
from ..store import EntitySpec, Snapshot, Store, ViewSpec
from .faults import FaultPlan, Turns
from .signature import Verifier

SNAPSHOTS_MAX: Final = 64
SNAPSHOTS_BYTES_MAX: Final = 2**30  # in memory for the older of them, and not for the newest
REQUESTS_MAX: Final = 200_000
INSTANCE_ID: Final = "featurestore-cn-deltaproof"
WORKSPACE_ID: Final = "1"
REGION_ID: Final = "cn-deltaproof"
OWNER: Final = "deltaproof"
DEFAULT_TOKEN: Final = "deltaproof-featuredb-token"
FEATUREDB: Final = "FeatureDB"
MAXCOMPUTE: Final = "MaxCompute"
DATASOURCES: Final = {"1": FEATUREDB, "2": MAXCOMPUTE}
# Ours: names the rank on control-plane requests, percent-encoded; its prefix is that of the headers which are signed.
CLIENT_HEADER: Final = "x-acs-deltaproof-client"
NAME_LENGTH_MAX: Final = 256  # of a user
_NOT_FOUND: Final[dict[str, type[FakeError]]] = {
    "project": ProjectNotFound,
    "entity": EntityNotFound,
    "view": ViewNotFound,
}


class RequestEntry(msgspec.Struct):
    """One request and its fate. ``t_ms``/``end_ms``: monotonic host clock. ``rows``: sent; ``rows_applied``: kept.

    ``fate``: was a write applied: "yes", "partly" or "no"; None for reads. ``status`` None: no reply was sent.
    ``delivery``: 2 for the second delivery of a write that a duplicate fault delivered twice.
    ``fault``: index (at that time) of the fault that decided the outcome, else of the first delay, else None;
    ``fault_ids``: all that struck.
    """

    seq: int
    request_id: str
    t_ms: float
    route: str
    client: str = ""
    rows: int = 0
    rows_applied: int = 0
    version: str = ""
    ts: int = 0
    status: int | None = None
    code: str = ""
    fate: str | None = None
    fault: int | None = None
    fault_ids: list[str] = []
    delivery: int = 1
    end_ms: float = 0.0


class _Kept:
    """Snapshots by id. The oldest is dropped while there are more than ``SNAPSHOTS_MAX``, or while the older ones keep
    more than ``SNAPSHOTS_BYTES_MAX`` in memory that the newest does not. The newest stays, whatever its size.

    Snapshots between which old rows were not written share their columns: shared memory counts once.
    """

    def __init__(self) -> None:
        self._all: collections.OrderedDict[str, tuple[tuple[str, str], Snapshot]] = collections.OrderedDict()
        self._uses: collections.Counter[int] = collections.Counter()  # of each array, by its identity
        self._bytes = 0

    def add(self, table: tuple[str, str], snapshot: Snapshot) -> str:
        snapshot_id = uuid.uuid4().hex
        self._all[snapshot_id] = table, snapshot
        newest = snapshot.arrays()
        self._bytes += sum(size for array, size in newest.items() if not self._uses[array])
        self._uses.update(newest.keys())
        bytes_max = SNAPSHOTS_BYTES_MAX + sum(newest.values())
        while len(self._all) > SNAPSHOTS_MAX or self._bytes > bytes_max:
            oldest = self._all.popitem(last=False)[1][1].arrays()
            self._uses.subtract(oldest.keys())
            for array, size in oldest.items():
                if not self._uses[array]:
                    del self._uses[array]
                    self._bytes -= size
        return snapshot_id

    def get(self, table: tuple[str, str], snapshot_id: str) -> Snapshot | None:
        owner, snapshot = self._all.get(snapshot_id, (None, None))
        return snapshot if owner == table else None


class ServerState:
    """One server's state; ``reset()`` makes it pristine. Ids are given on first sight, so views made directly on the
    store appear in the control plane too. ``lock`` guards the fault plan and the log against other threads.
    """

    def __init__(self, store: Store, token: str = DEFAULT_TOKEN, verifier: Verifier | None = None) -> None:
        self.store = store
        self.token = self._first_token = token
        self.verifier = verifier or Verifier()
        self.scheme = "http"  # or "https": how the server is reached
        self.address = ""  # http://host:port of a data plane elsewhere
        self.begun_ms = time.monotonic() * 1000
        self.lock = threading.RLock()
        self.generation = 0  # counts resets: a request that began before one must not write after it
        self.fault_clock_ms: Callable[[], float] = lambda: time.monotonic() * 1000  # of the faults' time windows
        self.faults = FaultPlan(lambda: self.fault_clock_ms())
        self._forget()

    def reset(self, projects: Sequence[str] | None = None) -> None:
        """Empty store (with ``projects`` if given), no faults, empty log. Raises InvalidParameter."""
        with self.lock:
            self.store.reset(projects)
            self._forget()

    def _forget(self) -> None:
        """Everything but the store back to its beginnings: a store may come with content, kept over a restart."""
        with self.lock:
            self.generation += 1
            self.token = self._first_token
            self.faults.set([])
            self.turns = Turns()
            self.requests: collections.deque[RequestEntry] = collections.deque(maxlen=REQUESTS_MAX)
            self._seq = itertools.count()
            self._ids: dict[tuple[str, ...], str] = {}
            self._objects: dict[tuple[str, str], tuple[str, ...]] = {}
            self._snapshots = _Kept()

    def open_entry(self, route: str) -> RequestEntry:
        return RequestEntry(next(self._seq), uuid.uuid4().hex, time.monotonic() * 1000, route)

    def close_entry(self, entry: RequestEntry, generation: int) -> None:
        """Log a finished request, unless the server was reset since it began."""
        entry.end_ms = time.monotonic() * 1000
        with self.lock:
            if generation == self.generation:
                self.requests.append(entry)

    # Accounts. Any username with a non-empty password may log in; the datasource token must match.

    def login(self, authorization: str | None, auth: str | None) -> str:
        """The username of a data-plane request. Raises MissingAuthorization, InvalidToken, AccessDenied."""
        if not authorization or not auth:
            raise MissingAuthorization(
                "the data plane wants Authorization: <datasource token> and Auth: base64(user:password)"
            )
        if authorization != self.token:
            raise InvalidToken("the Authorization header is not the datasource's current token")
        try:
            username, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise MissingAuthorization("the Auth header is not base64 of username:password") from None
        if not colon or not username or not password:
            raise AccessDenied("the Auth header holds no username and password")
        if not _is_name(username):
            raise AccessDenied(f"the username in the Auth header: want at most {NAME_LENGTH_MAX} printable characters")
        return username

    def check_signature(self, method: str, target: str, headers: Mapping[str, str]) -> str:
        """Who signed a control-plane request: the name in ``CLIENT_HEADER``, else the access key id.

        Raises what ``signature.Verifier.check`` raises, InvalidParameter for a name that is none.
        """
        key = self.verifier.check(method, target, headers)
        if CLIENT_HEADER not in headers:
            return key
        try:
            name = unquote(headers[CLIENT_HEADER], errors="strict")
        except UnicodeDecodeError:
            name = ""
        if not _is_name(name):
            raise InvalidParameter(
                f"{CLIENT_HEADER}: want at most {NAME_LENGTH_MAX} printable characters, percent-encoded UTF-8"
            )
        return name

    # Ids of the control plane

    def id_of(self, *key: str) -> str:
        """The id of ("project", name), ("entity", project, name) or ("view", project, name)."""
        with self.lock:
            if key not in self._ids:
                number = str(self.store.number_of(*key))
                self._ids[key] = number
                self._objects[key[0], number] = key
            return self._ids[key]

    def _key(self, kind: str, number: str) -> tuple[str, ...]:
        if (kind, number) not in self._objects:  # made directly on the store: such get their ids here
            for project in self.store.projects():
                self.id_of("project", project)
            for entity in self.store.entities():
                self.id_of("entity", entity.project, entity.name)
            for view in self.store.views():
                self.id_of("view", view.project, view.name)
        try:
            return self._objects[kind, number]
        except KeyError:
            raise _NOT_FOUND[kind](f"no {kind} with id {number[:80]!r}") from None

    def project(self, project_id: str) -> str:
        name = self._key("project", project_id)[1]
        if name not in self.store.projects():
            raise ProjectNotFound(f"no project with id {project_id}")
        return name

    def entity(self, entity_id: str) -> EntitySpec:
        return self.store.entity(*self._key("entity", entity_id)[1:])

    def view(self, view_id: str) -> ViewSpec:
        return self.store.view(*self._key("view", view_id)[1:])

    def check_instance(self, instance_id: str) -> None:
        if instance_id != INSTANCE_ID:
            raise InstanceNotFound(f"no instance {instance_id[:80]!r}")

    def datasource(self, datasource_id: str, host: str) -> dict[str, Any]:
        """One datasource as the control plane shows it to whoever reached this server as ``host`` (with the port): a
        server that listens on every address, or behind a forwarded port, knows no other. Raises DatasourceNotFound.
        """
        kind = DATASOURCES.get(datasource_id)
        if kind is None:
            raise DatasourceNotFound(f"no datasource with id {datasource_id[:80]!r}")
        address = self.address or f"{self.scheme}://{host}"
        config = {
            "fdb_public_address": address,
            "fdb_vpc_address": address,
            "fdb_vpc_plk_address": address,
            "token": self.token,
        }
        return {
            "DatasourceId": datasource_id,
            "Name": kind.lower(),
            "Type": kind,
            "Uri": kind.lower(),
            "Config": json.dumps(config) if kind == FEATUREDB else "",
            "WorkspaceId": WORKSPACE_ID,
            "GmtCreateTime": "2023-06-21T00:00:00+08:00",
            "GmtModifiedTime": "2023-06-21T00:00:00+08:00",
        }

    # Snapshots

    def keep_snapshot(self, project: str, view: str, snapshot: Snapshot) -> str:
        """Remember a snapshot and return its id; older ones may have to go (``SNAPSHOTS_MAX``, ``_BYTES_MAX``)."""
        return self._snapshots.add((project, view), snapshot)

    def snapshot(self, project: str, view: str, snapshot_id: str) -> Snapshot:
        snapshot = self._snapshots.get((project, view), snapshot_id)
        if snapshot is None:
            raise SnapshotNotFound(f"no snapshot {snapshot_id[:80]!r} of view {project}/{view}")
        return snapshot


def _is_name(text: str) -> bool:
    return 0 < len(text) <= NAME_LENGTH_MAX and text.isprintable()


def is_loopback(host: str) -> bool:
    """Whether a name or address (IPv6: without brackets) is this machine's own."""
    return host.lower() == "localhost" or _is_loopback_address(host)


def _is_loopback_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def endpoint(scheme: str, host: str, port: int) -> str:
    """What SDK clients call this server: they take http for granted on loopback alone."""
    plain = scheme == "http" and is_loopback(host.strip("[]"))
    return f"{host}:{port}" if plain else f"{scheme}://{host}:{port}"


def check_loopback(remote: str | None) -> None:
    """Raise AccessDenied unless the peer address is this machine."""
    if remote is None or not _is_loopback_address(remote.partition("%")[0]):
        raise AccessDenied("admin routes answer on loopback only")


def check_same_origin(headers: Mapping[str, str]) -> None:
    """Raise AccessDenied when a web page of another origin makes the browser of this machine ask.

    Such a request comes from loopback, too, and a page could wipe the store. Browsers name the page in ``Origin`` and
    ``Sec-Fetch-Site``; a name that resolves to this machine (DNS rebinding) shows in ``Host``.
    """
    host = headers.get("Host", "").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    origin = headers.get("Origin")
    foreign = origin is not None and origin.partition("://")[2].lower() != host
    if (
        not is_loopback(name.strip("[]"))
        or foreign
        or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    ):
        raise AccessDenied("admin routes answer this machine's own programs, not web pages of other origins")


def parse_int(name: str, text: str, low: int, high: int) -> int:
    """An integer parameter, or InvalidParameter naming it and its range."""
    if re.fullmatch(r"-?[0-9]{1,19}", text) and low <= int(text) <= high:
        return int(text)
    raise InvalidParameter(f"{name} {text[:40]!r}: want an integer from {low} to {high}")

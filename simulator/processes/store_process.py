"""The fake Feature Store in a process of its own, driven over its admin routes."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import urllib3

from ...fakes.feature_store_py import FeatureStoreClient
from ..errors import KitError
from ..history import FINAL_SCHEMA, WRITES_SCHEMA, Event
from ..scenario import Scenario
from ..store_faults import planned
from ..target import PROJECT, VERSION, VIEW
from .launchers import end_processes
from .supervisor import start_processes

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


#: Seconds for the ranks of a supervisor that was killed to be gone, so that they write no more.
SWEEP_S = 20.0


def serve(pipe: Connection, folder: Path, sockets: Path) -> None:
    """Entry point of the store's process. Serves until ``pipe`` has something or is closed; where the other end was
    closed without a word the supervisor was killed, and what it can no longer remove is removed here.

    ``sockets``: multiprocessing's folder in the supervisor, with the forkserver's socket, if there is one.
    """
    from ...fakes.server import process_main

    process_main(pipe)
    if not pipe.poll():
        return  # SIGTERM ended it
    try:
        pipe.recv()
    except (EOFError, ConnectionError):
        limit = time.monotonic() + SWEEP_S
        while folder.exists() and time.monotonic() < limit:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)
        for socket in sockets.glob("listener-*"):
            socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            sockets.rmdir()


class StoreProcess:
    """The fake Feature Store in a process of its own, driven over its admin routes; every call has a time-out.

    ``folder``: the engine's, which the process removes should this one be killed.
    """

    def __init__(self, context: BaseContext, folder: Path) -> None:
        self._pipe, child = context.Pipe()
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(child, folder, Path(get_temp_dir())), name="deltaproof-store", daemon=True
        )
        start_processes([self._process], folder / "torch")
        child.close()
        if not self._pipe.poll(120):
            self.close()
            raise KitError("the fake store did not start within 120 s")
        try:
            self.port: int = self._pipe.recv()
        except EOFError:
            self.close()
            raise KitError(f"the fake store ended while starting (exit code {self._process.exitcode})") from None
        self.endpoint = f"127.0.0.1:{self.port}"
        self._http = urllib3.PoolManager(timeout=urllib3.Timeout(total=60), retries=False)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it ended before
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(5)
        end_processes([self._process])

    def _request(self, method: str, path: str, body: Any = None) -> urllib3.BaseHTTPResponse:
        try:
            return self._http.request(method, f"http://{self.endpoint}/_admin/{path}", json=body)
        except urllib3.exceptions.HTTPError as error:
            raise KitError(f"the fake store does not answer {method} /_admin/{path}: {error}") from error

    def _admin(self, method: str, path: str, body: Any = None) -> bytes:
        reply = self._request(method, path, body)
        if reply.status != 200:
            raise KitError(f"the fake store answers {method} /_admin/{path} with {reply.status}: {reply.data[:500]!r}")
        return reply.data

    def reset(self, scenario: Scenario) -> None:
        """Empty the store and plan the scenario's store faults; a fault's id is its index in the scenario."""
        self._admin("POST", "reset", {"projects": [PROJECT]})
        self._admin("PUT", "faults", msgspec.to_builtins(planned(scenario)))

    def observed(self, kinds: Sequence[str]) -> tuple[pa.Table, pa.Table, list[Event], list[int]]:
        """(final content, accepted writes, request events, firings by fault index). ``kinds``: one per fault."""
        fired = [0] * len(kinds)
        for entry in msgspec.json.decode(self._admin("GET", "faults"))["Faults"]:
            fired[int(entry["fault"]["id"])] = entry["fired"]
        self._admin("PUT", "faults", [])  # what strikes any client would strike the reader
        # The content is read before the log: whatever a dead rank's last request still adds is in the log then, too.
        final = self._content()
        writes = self._log()
        events = []
        for request in msgspec.json.decode(self._admin("GET", "requests"))["Requests"]:
            if request["route"].startswith("admin"):
                continue
            client = str(request["client"])
            rank = int(client[4:]) if client.startswith("rank") and client[4:].isdigit() else None
            data = {k: v for k, v in request.items() if k in _REQUEST_FIELDS and v not in (None, "", [], 0)}
            events.append(Event(t_ms=request["t_ms"], who="store", kind="request", rank=rank, data=data))
            for index in map(int, request["fault_ids"]):
                struck = {"index": index, "kind": kinds[index], "client": client}
                events.append(Event(t_ms=request["t_ms"], who="store", kind="fault", rank=rank, data=struck))
        return final, writes, events, fired

    def _content(self) -> pa.Table:
        """What a reader sees, by the read path that serving uses. Empty when no view was ever made."""
        try:
            client = FeatureStoreClient(
                access_key_id="deltaproof",
                access_key_secret="deltaproof",
                region="local",
                endpoint=self.endpoint,
                featuredb_username="reader",
                featuredb_password="deltaproof",
            )
            project = client.get_project(PROJECT)
            view = None if project is None else project.get_dynamic_embedding_feature_view(VIEW)
            return FINAL_SCHEMA.empty_table() if view is None else view.scan(VERSION).select(FINAL_SCHEMA.names)
        except Exception as error:
            raise KitError(f"cannot read the fake store back: {type(error).__name__}: {error}") from error

    def _log(self) -> pa.Table:
        reply = self._request("GET", f"log?project={PROJECT}&view={VIEW}")
        if reply.status == 404:
            return WRITES_SCHEMA.empty_table()
        if reply.status != 200:
            raise KitError(f"the fake store's log cannot be read: {reply.status} {reply.data[:500]!r}")
        with pa.ipc.open_stream(reply.data) as reader:
            return reader.read_all().select(WRITES_SCHEMA.names)


#: What of the store's request log goes into the history.
_REQUEST_FIELDS = {"route", "client", "rows", "rows_applied", "version", "ts", "status", "code", "fate"}

"""What the fakes' tests share: batches, one view, and clients that speak the wire."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import urllib3
from urllib3.util import parse_url

from deltaproof.fakes.feature_store_py import DynamicEmbeddingFeatureView, FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import FaultPlan
from deltaproof.fakes.server.signature import DEFAULT_ACCOUNTS, sign
from deltaproof.fakes.store import EntitySpec, Store, ViewSpec

PROJECT, VIEW, VERSION = "deltaproof", "view", "v1"


def rows(
    pk: list[str], sk: list[int], embedding: list[list[float]], value: pa.DataType | None = None
) -> pa.RecordBatch:
    """A write in the store's own column names."""
    columns = [
        pa.array(pk, pa.string()),
        pa.array(sk, pa.int64()),
        pa.array(embedding, pa.list_(value or pa.float32())),
    ]
    return pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"])


def sdk_rows(pk: list[str], sk: list[int], embedding: list[list[float]]) -> pa.RecordBatch:
    """The same in the SDK's column names."""
    return rows(pk, sk, embedding).rename_columns(["embedding_name", "key_id", "embedding"])


def make_view(store: Store, **settings: Any) -> ViewSpec:
    """The tests' view, made directly on the store."""
    spec = ViewSpec(PROJECT, VIEW, "entity", **settings)
    store.create_entity(EntitySpec(PROJECT, "entity", "entity_id"))
    store.create_view(spec)
    return spec


class Backend:
    """A store with the SDK in front of it: ``kind`` "http" or "in-process"."""

    def __init__(self, kind: str, store: Store, client: Callable[[str], FeatureStoreClient], faults: Any) -> None:
        self.kind, self.store, self.client, self._faults = kind, store, client, faults

    def add_fault(self, fault: Any) -> None:
        self._faults.add(fault) if isinstance(self._faults, FaultPlan) else self._faults.add_fault(fault)

    def fired(self) -> dict[str, int]:
        found = self._faults.fired() if isinstance(self._faults, FaultPlan) else self._faults.faults()
        return {entry.fault.id: entry.fired for entry in found}

    def view(self, username: str = "rank0") -> DynamicEmbeddingFeatureView:
        project = self.client(username).get_project(PROJECT)
        assert project is not None
        view = project.get_dynamic_embedding_feature_view(VIEW)
        assert view is not None
        return view


class Raw:
    """Plain HTTP to the server, as a client that knows the wire but not the SDK. Deadlines on every wait."""

    def __init__(self, server: FeatureStoreServer) -> None:
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(connect=5, read=20), maxsize=8)
        self.base = f"http://{server.endpoint}"
        self.table = f"/api/v1/tables/featurestore-cn-deltaproof/{PROJECT}/{VIEW}"
        self.login = {"Authorization": server.state.token, "Auth": "cmFuazA6cGFzc3dvcmQ="}  # rank0:password

    def __call__(self, method: str, path: str, **arguments: Any) -> urllib3.BaseHTTPResponse:
        return self._http.request(method, self.base + path, **arguments)

    def data(self, method: str, path: str, body: Any = None, **headers: str) -> urllib3.BaseHTTPResponse:
        """A data-plane call on the tests' view, logged in."""
        return self(method, self.table + path, body=body, headers={**self.login, **headers})

    def control(self, method: str, path: str, body: Any = None, **headers: str) -> urllib3.BaseHTTPResponse:
        """A control-plane call, signed."""
        path = "/api/v1/instances" + path
        return self(method, path, body=body, headers=self.signed(method, path, body, **headers))

    def signed(self, method: str, path: str, body: Any = None, /, **headers: str) -> dict[str, str]:
        """``headers`` with those of a signature by ``DEFAULT_ACCOUNTS``; ``headers`` may override single ones of it."""
        content = body.encode() if isinstance(body, str) else body or b""
        url = parse_url(self.base + path)
        wanted = {
            "host": url.netloc or "",
            "x-acs-action": "Any",
            "x-acs-content-sha256": hashlib.sha256(content).hexdigest(),
            "x-acs-date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "x-acs-signature-nonce": uuid.uuid4().hex,
            "x-acs-version": "2023-06-21",
            **headers,
        }
        names = ";".join(sorted(name for name in wanted if name == "host" or name.startswith("x-acs-")))
        ((key, secret),) = DEFAULT_ACCOUNTS.items()
        signature = sign(method, url.request_uri, wanted, names, secret)
        return {
            "Authorization": f"ACS3-HMAC-SHA256 Credential={key},SignedHeaders={names},Signature={signature}",
            **wanted,
        }

    def close(self) -> None:
        self._http.clear()


def ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()

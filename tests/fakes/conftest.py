"""Fixtures of the fakes' tests: a server per test, clients of it, and one view over HTTP or in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltaproof.fakes.feature_store_py import FeatureStoreClient, in_process_client
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import FaultPlan
from deltaproof.fakes.server.serve import wall_store

from .kit import Backend, Raw, make_view


@pytest.fixture
def server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer() as running:
        yield running


@pytest.fixture
def connect(server: FeatureStoreServer) -> Iterator[Callable[..., FeatureStoreClient]]:
    """connect(username="rank0", **arguments): a client of the server over HTTP."""
    clients = []

    def make(username: str = "rank0", **arguments: Any) -> FeatureStoreClient:
        wanted = {
            "endpoint": server.endpoint,
            "access_key_id": "deltaproof",
            "access_key_secret": "deltaproof",
            "featuredb_password": "password",
            **arguments,
        }
        client = FeatureStoreClient(featuredb_username=username, **wanted)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture(params=["http", "in-process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both ways to reach a store, each with an empty view."""
    if request.param == "http":
        server = request.getfixturevalue("server")
        made = Backend("http", server.store, request.getfixturevalue("connect"), server)
    else:
        store, plan = wall_store(), FaultPlan()
        made = Backend("in-process", store, lambda name: in_process_client(store, name, plan), plan)
    make_view(made.store)
    return made


@pytest.fixture
def raw(server: FeatureStoreServer) -> Iterator[Raw]:
    client = Raw(server)
    yield client
    client.close()

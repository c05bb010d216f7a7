"""pytest fixtures of the fake Feature Store, registered by the installed package: nothing to import in a conftest.

    def test_publishing(feature_store, feature_store_client):
        project = feature_store_client.get_project("deltaproof")

Each test has a server of its own, on a free port of loopback, so tests may run side by side (pytest-xdist). Importing
this module costs next to nothing: the server is imported when a fixture is first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .feature_store_py import FeatureStoreClient
    from .server import FeatureStoreServer


@pytest.fixture
def feature_store() -> Iterator[FeatureStoreServer]:
    """A running, empty fake Feature Store: ``.endpoint``, ``.store``, ``.add_fault(…)``, ``.requests()``."""
    from .server import FeatureStoreServer

    with FeatureStoreServer() as server:
        yield server


@pytest.fixture
def feature_store_client(feature_store: FeatureStoreServer) -> Iterator[FeatureStoreClient]:
    """An SDK client of ``feature_store``, logged in to FeatureDB as "pytest"."""
    from .feature_store_py import FeatureStoreClient

    client = FeatureStoreClient(
        "deltaproof",
        "deltaproof",
        "local",
        feature_store.endpoint,
        featuredb_username="pytest",
        featuredb_password="pytest",
    )
    yield client
    client.close()

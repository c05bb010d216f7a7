"""The interface of Alibaba's Python SDK ``feature_store_py`` (docs/feature-store.md), over HTTP or in process.

``install()`` makes ``import feature_store_py`` find this package, so that code written against the SDK runs unchanged.
"""

from __future__ import annotations

import importlib
import sys

from .client import (
    DynamicEmbeddingFeatureView,
    Entity,
    FeatureStoreClient,
    Project,
    WriteError,
    in_process_client,
)
from .transport import Batches, TransportError

__all__ = [
    "Batches",
    "DynamicEmbeddingFeatureView",
    "Entity",
    "FeatureStoreClient",
    "Project",
    "TransportError",
    "WriteError",
    "in_process_client",
    "install",
    "preload",
]


def preload() -> None:
    """Import what clients import on first use (Alibaba's OpenAPI client: most of a second), e.g. before a fork."""
    importlib.import_module("alibabacloud_paifeaturestore20230621.client")
    importlib.import_module("urllib3")


def install() -> None:
    """Register this package as ``feature_store_py``. Raises RuntimeError if another one is imported already."""
    this = sys.modules[__name__]
    if sys.modules.setdefault("feature_store_py", this) is not this:
        raise RuntimeError("another feature_store_py is imported already; install() must come before it")

"""A local Feature Store server: control plane, FeatureDB data plane, planned faults, request log.

The names below import aiohttp on first use only, so that ``server.faults`` stays cheap for those without sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .serve import FeatureStoreServer, PortInUse, process_main, run_forever

__all__ = ["FeatureStoreServer", "PortInUse", "process_main", "run_forever"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import serve

        return getattr(serve, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

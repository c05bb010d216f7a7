"""deltaproof proves that no embedding row is lost between a training job and the store that serves it.

`reference` is a correct publisher for TorchRec models, `fakes` a feature store that runs on a laptop, `simulator` runs
ranks against the fakes and injects faults, `conformance` holds the properties and the known bugs they must catch.

The names below are loaded when they are first used. Importing this package imports no part of it, and never torch:
`pip install deltaproof` without the `torch` extra is enough for the fakes and for checking an uploader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fakes.server import FeatureStoreServer
    from .reference.publisher import Publisher
    from .reference.settings import Settings
    from .simulator.scenario import Scenario

__version__ = "0.1.0"

__all__ = ["FeatureStoreServer", "Publisher", "Scenario", "Settings", "__version__"]

_HOMES = {
    "FeatureStoreServer": ".fakes.server",
    "Publisher": ".reference.publisher",
    "Scenario": ".simulator.scenario",
    "Settings": ".reference.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)

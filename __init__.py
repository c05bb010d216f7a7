"""deltaproof proves that no embedding row is lost between a training job and the store that serves it.

`reference` is a correct publisher for TorchRec models, `fakes` a feature store that runs on a laptop, `simulator` runs
ranks against the fakes and injects faults, `conformance` holds the properties and the known bugs they must catch.

Importing this package imports none of them, and never torch: `pip install deltaproof` without the `torch` extra is
enough for the fakes and for checking an uploader.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]

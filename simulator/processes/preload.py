"""Imported once by the forkserver, so that each rank starts with torch and torchrec in memory.

Nothing here may touch CUDA: a forked child could not use it any more.
"""
# ruff: noqa: E402 - what the imports read must be set before them

import gc
import importlib
import os
import signal

# Ranks inherit it: Ctrl-C is the supervisor's to handle, also while a rank has only begun to start.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from ...fakes import feature_store_py
from ...fakes.server import serve  # noqa: F401
from ...reference import publisher, tracker  # noqa: F401
from . import model, rank  # noqa: F401

# What a rank would import only on its way, each at a cost of 0.1 s or more.
for _name in ("torch.distributed.optim", "numpy.ma"):
    importlib.import_module(_name)
feature_store_py.preload()

# One thread per rank: ranks share the cores, and a thread pool made before the fork would not survive it.
torch.set_num_threads(1)

# What is in memory now stays: no collection in a rank looks through it again, or copies its pages by doing so.
gc.collect()
gc.freeze()

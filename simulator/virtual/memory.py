"""How much memory a target holds: all ranks share a process here, so it is counted object by object.

What an object holds counts, not what this Python takes for it: that depends on what ran before.
"""

from __future__ import annotations

import contextlib
import gc
import io
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import greenlet
import numpy as np
import pyarrow as pa

#: What a target's objects lead to, and is not its own.
_OTHERS = ("deltaproof.simulator.", "deltaproof.fakes.", "logging", "_thread", "_frozen_importlib", "importlib")
_ENDS = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, greenlet.greenlet)
#: Of any object, and of each thing in one of these.
OBJECT_BYTES = 32
_WIDTHS: dict[type, int] = {bytes: 1, bytearray: 1, str: 1, list: 8, tuple: 8, deque: 8, set: 32, dict: 64}


def held_bytes(roots: Iterable[object]) -> int:
    """Bytes of everything that can be reached from these objects, each once: Arrow's and NumPy's memory in full.

    Not followed: modules and classes, what functions find as globals, and objects of the simulator and the fakes.
    """
    buffers: dict[int, int] = {}  # by address: arrays and slices share them
    seen: set[int] = set()
    waiting, total = list(roots), 0
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen or isinstance(each, _ENDS) or type(each).__module__.startswith(_OTHERS):
            continue
        seen.add(id(each))
        if isinstance(each, io.IOBase):  # the streams of the process, which every thread knows, and other files
            total += len(each.getbuffer()) if isinstance(each, io.BytesIO) else 0
        elif isinstance(each, np.ndarray):
            waiting.append(each.base)
            if each.base is None:
                buffers[each.__array_interface__["data"][0]] = each.nbytes
        elif isinstance(each, pa.Table | pa.RecordBatch | pa.ChunkedArray | pa.Array | pa.Buffer):
            buffers |= {buffer.address: buffer.size for buffer in _buffers(each)}
        elif isinstance(each, types.FunctionType):
            waiting += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            width = next((width for kind, width in _WIDTHS.items() if isinstance(each, kind)), 0)
            total += OBJECT_BYTES + (width and width * len(each))
            with contextlib.suppress(AttributeError):
                object.__getattribute__(each, "__dict__")  # is made when somebody asks for it, and seen below only then
            waiting += gc.get_referents(each)
    return total + sum(buffers.values())


def _buffers(data: Any) -> list[pa.Buffer]:
    if isinstance(data, pa.Buffer):
        return [data]
    if isinstance(data, pa.Array):
        return [buffer for buffer in data.buffers() if buffer is not None]
    parts = data.chunks if isinstance(data, pa.ChunkedArray) else data.columns
    return [buffer for part in parts for buffer in _buffers(part)]

"""Rows of one byte a number, as the contract has them (docs/tables.md): read and made by code that no target shares.

A row is its numbers as uint8, then scale and offset as fp16, little-endian; number * scale + offset is what serving
uses. Targets may round in their own ways. So a stored row stands for a model's row when it is the one that FBGEMM makes
of it, bit for bit, or else when no number of it is further off than such rounding explains (`tolerance`).
"""

from __future__ import annotations

import numpy as np

TRAILER_BYTES = 4


def decode(rows: np.ndarray) -> np.ndarray:
    """float32 (n, dim) of uint8 (n, dim + 4)."""
    trailer = np.ascontiguousarray(rows[:, -TRAILER_BYTES:]).view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers: np.ndarray = rows[:, :-TRAILER_BYTES] * trailer[:, :1] + trailer[:, 1:]
    return numbers


def encode(rows: np.ndarray) -> np.ndarray:
    """uint8 (n, dim + 4) of float32 (n, dim), as FBGEMM's FloatToFusedNBitRowwiseQuantizedSBHalf makes them."""
    if not len(rows):
        return np.empty((0, rows.shape[1] + TRAILER_BYTES), np.uint8)
    with np.errstate(all="ignore"):
        offset = rows.min(axis=1).astype("<f2")
        low = offset.astype(np.float32)
        scale = ((rows.max(axis=1) - low) / np.float32(255)).astype("<f2")
        inverse = np.float32(1) / scale.astype(np.float32)
        scale[np.isinf(inverse)], inverse[np.isinf(inverse)] = 1, 1
        numbers = np.clip(np.rint((rows - low[:, None]) * inverse[:, None]), 0, 255).astype(np.uint8)
    return np.concatenate([numbers, np.stack([scale, offset], axis=1).view(np.uint8)], axis=1)


def tolerance(rows: np.ndarray) -> np.ndarray:
    """float32 (n, 1): how far a number of each row (n, dim) may be off in int8.

    Half of a 255th of the spread by the rounding of the number, an eighth more by that of the scale, fp16's rounding of
    the offset, twice, and 255 times that of a scale so small that fp16 has no digits for it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        spread = np.ptp(rows, axis=1, keepdims=True)
        found: np.ndarray = spread * np.float32(0.63 / 255) + np.abs(rows).max(axis=1, keepdims=True) * 2**-10 + 2**-16
    return found

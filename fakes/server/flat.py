"""FlatBuffers replies of ``batch_get_kkv`` and ``batch_get_kv2``, as the published Go and Java clients parse them.

A reply is a series of blocks, each a 4-byte little-endian length and that many bytes of one FlatBuffers table. Field
numbers (public: the clients' generated readers):

    KKVRecordBlock   0 values [KKVData]
    KKVData          0 pk string, 1 sk string, 2 event_timestamp int64, 3 play_time double, 4 value [ubyte]
    RecordBlock      0 index uint32, 1 values [UInt8ValueColumn]
    UInt8ValueColumn 0 value [ubyte]; fewer than two bytes: no such key

A value is a record of fields, little endian (public): ``F``, ``1``, then for each field a null flag (1: null, nothing
follows) and its content; for an array a uint32 number of elements and the elements. Ours, since the published clients
read no dynamic embeddings: a record holds one field, the embedding; sk is the key in decimal digits; event_timestamp
is the ts (ms); a key of ``batch_get_kv2`` is pk and sk joined by U+001D, as those clients join the parts of a pk;
``index`` counts the blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import flatbuffers
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import InvalidParameter
from ..store import Snapshot
from .windows import rows_within

OCTET_STREAM: Final = "application/octet-stream"
SEPARATOR: Final = "\x1d"
BLOCK_ROWS: Final = 500
KEYS_MAX: Final = 10_000
_RECORD: Final = b"F1\x00"


def _record(values: npt.NDArray[Any]) -> bytes:
    return _RECORD + struct.pack("<I", len(values)) + values.astype(values.dtype.newbyteorder("<")).tobytes()


def _vector(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _frame(builder: flatbuffers.Builder, table: int) -> bytes:
    builder.Finish(table)
    body = builder.Output()
    return struct.pack("<I", len(body)) + bytes(body)


def _kkv_block(pk: str, keys: Any, ts: Any, values: Any | None) -> bytes:
    builder = flatbuffers.Builder(64 * len(keys))
    pk_at = builder.CreateString(pk)
    rows = []
    for number, (key, stamp) in enumerate(zip(keys.tolist(), ts.tolist(), strict=True)):
        sk_at = builder.CreateString(str(key))
        value_at = None if values is None else builder.CreateByteVector(_record(values[number]))
        builder.StartObject(5)
        builder.PrependUOffsetTRelativeSlot(0, pk_at, 0)
        builder.PrependUOffsetTRelativeSlot(1, sk_at, 0)
        builder.PrependInt64Slot(2, stamp, 0)
        if value_at is not None:
            builder.PrependUOffsetTRelativeSlot(4, value_at, 0)
        rows.append(builder.EndObject())
    rows_at = _vector(builder, rows)
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, rows_at, 0)
    return _frame(builder, builder.EndObject())


def kkv_blocks(snapshot: Snapshot, pks: Sequence[str], length: int, with_value: bool) -> Iterator[bytes]:
    """Blocks of at most ``BLOCK_ROWS`` rows and about ``windows.WINDOW_BYTES``, one at a time.

    For each of ``pks`` the ``length`` rows written last, newest ts first. Equal ts: smaller key first. ``length`` 0:
    all rows.
    """
    images = dict(snapshot.parts)
    for pk in pks:
        if pk not in images:
            continue
        image = images[pk]
        newest = np.argsort(-image.ts[image.order], kind="stable")[: length or None]
        rows = rows_within(image.value_bytes, BLOCK_ROWS)
        for start in range(0, len(newest), rows):
            keys, ts, values = image.take(newest[start : start + rows])
            yield _kkv_block(pk, keys, ts, values if with_value else None)


def kv_blocks(table: pa.Table, found: Sequence[bool], batch_size: int) -> Iterator[bytes]:
    """Blocks of ``batch_size`` values, one value per requested key in request order; absent keys have none.

    ``table``: the rows found, in request order; ``found``: for each requested key whether ``table`` has its row.
    """
    rows = (np.asarray(value.values) for value in table.column("embedding"))
    for index, start in enumerate(range(0, len(found), batch_size)):
        builder = flatbuffers.Builder(1024)
        columns = []
        for here in found[start : start + batch_size]:
            value_at = builder.CreateByteVector(_record(next(rows))) if here else None
            builder.StartObject(1)
            if value_at is not None:
                builder.PrependUOffsetTRelativeSlot(0, value_at, 0)
            columns.append(builder.EndObject())
        columns_at = _vector(builder, columns)
        builder.StartObject(2)
        builder.PrependUint32Slot(0, index, 0)
        builder.PrependUOffsetTRelativeSlot(1, columns_at, 0)
        yield _frame(builder, builder.EndObject())


def split_keys(keys: Sequence[str]) -> tuple[list[str], list[int]]:
    """pk and sk of ``batch_get_kv2`` keys. Raises InvalidParameter for one that is not ``pk U+001D sk``."""
    pks, sks = [], []
    for number, text in enumerate(keys):
        pk, found, sk = text.rpartition(SEPARATOR)
        digits = sk.removeprefix("-")
        if not found or not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
            raise InvalidParameter(f"keys, number {number}: want pk, U+001D and sk in decimal digits")
        if not -(2**63) <= int(sk) < 2**63:
            raise InvalidParameter(f"keys, number {number}: sk is no int64")
        pks.append(pk)
        sks.append(int(sk))
    return pks, sks

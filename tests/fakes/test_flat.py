"""The public FlatBuffers reads, decoded with flatbuffers' generic table reader by the published field numbers."""

from __future__ import annotations

import json
import struct
from typing import Any

import flatbuffers
import numpy as np
import pyarrow as pa
import pytest
from flatbuffers import number_types
from flatbuffers.table import Table

from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.flat import BLOCK_ROWS, KEYS_MAX

from .kit import PROJECT, VERSION, VIEW, Raw, make_view, rows


def blocks(data: bytes) -> list[Table]:
    """The root tables of a reply: 4-byte little-endian lengths, nothing between or after."""
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        body = data[at + 4 : at + 4 + size]
        assert len(body) == size
        found.append(Table(body, flatbuffers.encode.Get(number_types.UOffsetTFlags.packer_type, body, 0)))
        at += 4 + size
    return found


def at(table: Table, number: int) -> int:
    """Where a field lies, 0 when absent."""
    offset = table.Offset(4 + 2 * number)
    return table.Pos + offset if offset else 0


def tables(table: Table, number: int) -> list[Table]:
    here = at(table, number)
    if not here:
        return []
    offset = here - table.Pos
    start = table.Vector(offset)
    return [Table(table.Bytes, table.Indirect(start + 4 * n)) for n in range(table.VectorLen(offset))]


def octets(table: Table, number: int) -> bytes:
    here = at(table, number)
    if not here:
        return b""
    offset = here - table.Pos
    start = table.Vector(offset)
    return bytes(table.Bytes[start : start + table.VectorLen(offset)])


def kkv(data: bytes) -> list[tuple[str, str, int, bytes]]:
    found = []
    for block in blocks(data):
        for row in tables(block, 0):
            assert not at(row, 3)  # play_time: default
            stamp = row.Get(number_types.Int64Flags, at(row, 2)) if at(row, 2) else 0
            found.append((octets(row, 0).decode(), octets(row, 1).decode(), stamp, octets(row, 4)))
    return found


def embedding(record: bytes, kind: Any = np.float32) -> list[float]:
    assert record[:3] == b"F1\x00"
    (size,) = struct.unpack_from("<I", record, 3)
    values = np.frombuffer(record, np.dtype(kind).newbyteorder("<"), offset=7)
    assert len(values) == size
    return list(values.tolist())


@pytest.fixture
def filled(server: FeatureStoreServer) -> FeatureStoreServer:
    make_view(server.store)
    for ts, (pk, sk, value) in enumerate(
        [("t", 1, [1.0, 2.0]), ("t", 2**60, [3.0, 4.0]), ("t", -5, [5.0, 6.0]), ("ü", 7, [0.5])], start=10
    ):
        server.store.write(PROJECT, VIEW, rows([pk], [sk], [value]), version=VERSION, ts=ts)
    return server


def ask(raw: Raw, path: str, body: Any, status: int = 200) -> bytes:
    reply = raw.data("POST", path, json.dumps(body))
    assert reply.status == status, reply.data
    return reply.data


def test_kkv_yields_the_newest_rows_first(filled: FeatureStoreServer, raw: Raw) -> None:
    found = kkv(ask(raw, "/batch_get_kkv", {"pks": ["ü", "nobody", "t"], "length": 2, "with_value": True}))
    assert [row[:3] for row in found] == [("ü", "7", 13), ("t", "-5", 12), ("t", str(2**60), 11)]
    assert [embedding(row[3]) for row in found] == [[0.5], [5.0, 6.0], [3.0, 4.0]]


def test_kkv_without_values_or_limit(filled: FeatureStoreServer, raw: Raw) -> None:
    found = kkv(ask(raw, "/batch_get_kkv", {"pks": ["t", "t"], "with_value": False}))
    assert found == [("t", "-5", 12, b""), ("t", str(2**60), 11, b""), ("t", "1", 10, b"")]
    assert ask(raw, "/batch_get_kkv", {"pks": ["nobody"]}) == b""


def test_kv2_answers_every_key_in_order(filled: FeatureStoreServer, raw: Raw) -> None:
    keys = ["t\x1d1", "t\x1d99", f"t\x1d{2**60}", "ü\x1d7", "t\x1d1"]
    found = blocks(ask(raw, "/batch_get_kv2?batch_size=2&encoder=", {"keys": keys}))
    assert [block.Get(number_types.Uint32Flags, at(block, 0)) if at(block, 0) else 0 for block in found] == [0, 1, 2]
    values = [[octets(column, 0) for column in tables(block, 1)] for block in found]
    assert [len(part) for part in values] == [2, 2, 1]
    flat = [value for part in values for value in part]
    assert flat[1] == b""
    assert [embedding(flat[n]) for n in (0, 2, 3, 4)] == [[1.0, 2.0], [3.0, 4.0], [0.5], [1.0, 2.0]]


def test_uint8_records_and_many_blocks(server: FeatureStoreServer, raw: Raw) -> None:
    make_view(server.store, value_type="uint8")
    count = 2 * BLOCK_ROWS + 1
    batch = rows(["t"] * count, list(range(count)), [[n % 256, 255] for n in range(count)], pa.uint8())
    server.store.write(PROJECT, VIEW, batch, version=VERSION, ts=5)
    data = ask(raw, "/batch_get_kkv", {"pks": ["t"]})
    assert len(blocks(data)) == 3
    found = kkv(data)
    assert [int(row[1]) for row in found] == list(range(count))  # equal ts: smaller key first
    assert embedding(found[300][3], np.uint8) == [300 % 256, 255]


def test_a_version_is_asked_for_when_there_are_several(filled: FeatureStoreServer, raw: Raw) -> None:
    filled.store.write(PROJECT, VIEW, rows(["t"], [1], [[9.0]]), version="v2", ts=99)
    assert b"InvalidVersion" in ask(raw, "/batch_get_kkv", {"pks": ["t"]}, 400)
    (row,) = kkv(ask(raw, "/batch_get_kkv?version=v2", {"pks": ["t"]}))
    assert embedding(row[3]) == [9.0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/batch_get_kkv", {}),
        ("/batch_get_kkv", {"pks": "t"}),
        ("/batch_get_kkv", {"pks": [1]}),
        ("/batch_get_kkv", {"pks": ["t"], "length": -1}),
        ("/batch_get_kkv", {"pks": ["t"], "length": True}),
        ("/batch_get_kkv", {"pks": ["t"], "with_value": 1}),
        ("/batch_get_kkv", {"pks": ["t"] * (KEYS_MAX + 1)}),
        ("/batch_get_kv2", {"keys": ["t"]}),
        ("/batch_get_kv2", {"keys": ["t\x1d"]}),
        ("/batch_get_kv2", {"keys": ["t\x1d--1"]}),
        ("/batch_get_kv2", {"keys": ["t\x1d1.0"]}),
        ("/batch_get_kv2", {"keys": ["t\x1d٣"]}),
        ("/batch_get_kv2", {"keys": [f"t\x1d{2**63}"]}),
        ("/batch_get_kv2?batch_size=0", {"keys": ["t\x1d1"]}),
        ("/batch_get_kv2?encoder=zstd", {"keys": ["t\x1d1"]}),
    ],
)
def test_wrong_requests_are_refused(filled: FeatureStoreServer, raw: Raw, path: str, body: Any) -> None:
    assert b"InvalidParameter" in ask(raw, path, body, 400)

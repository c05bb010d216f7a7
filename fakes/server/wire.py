"""Bodies in and out: Arrow IPC streams and JSON, checked against hostile input before anything is allocated for it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ..errors import InvalidParameter, MalformedBody, SchemaMismatch
from ..store import ViewSpec, write_schema

ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
_RECORD_BATCH: Final = 3  # MessageHeader union (Arrow format, Message.fbs)


def json_value(body: bytes, what: str = "body") -> Any:
    """Decode strict JSON (no NaN, integers exact). Raises MalformedBody."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"{what}: not JSON ({error})") from None


def json_object(body: bytes, what: str = "body") -> dict[str, Any]:
    """A JSON object; an empty text counts as {}. Raises MalformedBody."""
    value = json_value(body, what) if body else {}
    if not isinstance(value, dict):
        raise MalformedBody(f"{what}: want a JSON object, got {type(value).__name__}")
    return value


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where field ``number`` of the FlatBuffers table at ``table`` lies, or None when it is absent."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else None


def _is_compressed(metadata: bytes) -> bool:
    """Whether an Arrow message is a record batch with compressed buffers (Message.fbs of the Arrow format).

    Message: header_type is field 1, header field 2; RecordBatch: compression is field 3.
    """
    message = int(struct.unpack_from("<I", metadata, 0)[0])
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if kind is None or header is None or metadata[kind] != _RECORD_BATCH:
        return False
    batch = header + int(struct.unpack_from("<I", metadata, header)[0])
    return _field(metadata, batch, 3) is not None


def read_arrow(body: bytes | pa.Buffer) -> pa.RecordBatch:
    """One record batch from an Arrow IPC stream (several batches are joined), fully validated. Refers to ``body``.

    Compressed bodies are refused: a few bytes could declare gigabytes. Raises MalformedBody.
    """
    try:
        messages = list(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))
        for message in messages:
            if message.type not in ("schema", "record batch"):
                # No legal column needs a dictionary, and a compressed one would be inflated before it is looked at.
                raise MalformedBody(f"Arrow: a {message.type} message is refused; send plain columns")
            if _is_compressed(message.metadata.to_pybytes()):
                raise MalformedBody("Arrow: compressed buffers are refused; send the stream uncompressed")
        # The usual case apart, for speed: a stream of one batch need not be opened a second time.
        if [message.type for message in messages] == ["schema", "record batch"]:
            schema = pa.ipc.read_schema(messages[0])
            batches = [pa.ipc.read_record_batch(messages[1], schema)]
        else:
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                batches = list(reader)
                schema = reader.schema
        _ = schema.names  # decoded here, so that one that is no UTF-8 (ValueError) is found here
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, ValueError, struct.error, IndexError, TypeError) as error:
        raise MalformedBody(f"Arrow: not a valid IPC stream ({str(error)[:200]})") from None
    if len(batches) == 1:
        return batches[0]
    try:
        merged = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches()
    except (pa.ArrowException, ValueError) as error:
        raise MalformedBody(f"Arrow: batches cannot be joined ({str(error)[:200]})") from None
    return merged[0] if merged else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


class _Sink:
    """A file object that keeps what the Arrow writer wrote since the last ``take``."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None: ...

    def writable(self) -> bool:
        return True

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data


def arrow_bytes(table: pa.Table) -> memoryview:
    """A table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def arrow_chunks(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """An Arrow IPC stream, one chunk of bytes per batch, so that a reply holds one batch at a time."""
    sink = _Sink()
    writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema)
    for batch in batches:
        writer.write_batch(batch)
        yield sink.take()
    writer.close()
    yield sink.take()


def rows_to_batch(rows: Any, spec: ViewSpec) -> pa.RecordBatch:
    """JSON rows ``{pk: str, sk: int, value: [numbers]}`` under the view's field names, as a write batch.

    Integers are exact (keys above 2^53 survive). Raises InvalidParameter, SchemaMismatch, ReservedKey.
    """
    if not isinstance(rows, list):
        raise InvalidParameter("content: want a list of rows")
    names = {spec.pk, spec.sk, spec.value}
    schema = write_schema(spec.value_type)
    columns: list[list[Any]] = [[], [], []]
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != names:
            raise SchemaMismatch(f"content, row {number}: want an object with exactly {', '.join(sorted(names))}")
        pk, sk, value = row[spec.pk], row[spec.sk], row[spec.value]
        if not isinstance(pk, str) or type(sk) is not int or not -(2**63) <= sk < 2**63:
            raise SchemaMismatch(f"content, row {number}: want {spec.pk} a string and {spec.sk} an int64")
        if not isinstance(value, list) or not all(type(x) in (int, float) for x in value):
            raise SchemaMismatch(f"content, row {number}: want {spec.value} a list of numbers")
        if spec.value_type == "uint8" and not all(type(x) is int and 0 <= x <= 255 for x in value):
            raise SchemaMismatch(f"content, row {number}: want {spec.value} a list of integers from 0 to 255")
        for column, item in zip(columns, (pk, sk, value), strict=True):
            column.append(item)
    lengths = [len(value) for value in columns[2]]
    try:
        with np.errstate(over="ignore"):  # 1e39 becomes infinity, which the store refuses by name
            flat = np.array([x for value in columns[2] for x in value], dtype=spec.value_type)
    except OverflowError:
        raise SchemaMismatch(f"content: {spec.value} holds an integer beyond any float") from None
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    embedding = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
    try:
        keys = pa.array(columns[0], pa.string())
    except (UnicodeEncodeError, pa.ArrowException):
        raise SchemaMismatch(f"content: {spec.pk} is not valid Unicode") from None
    return pa.RecordBatch.from_arrays([keys, pa.array(columns[1], pa.int64()), embedding], schema=schema)


def to_json(value: Any) -> bytes:
    """JSON bytes of plain data."""
    return msgspec.json.encode(value)

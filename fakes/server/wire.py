"""Bodies in and out: Arrow IPC streams and JSON, checked against hostile input before anything is allocated for it.

The rows of a JSON write are decoded ``JSON_WINDOW_BYTES`` at a time: as Python objects a body would take ten times its
size and more.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import FakeError, InvalidParameter, MalformedBody, SchemaMismatch
from ..store import ViewSpec, one_batch, write_schema

ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
_RECORD_BATCH: Final = 3  # MessageHeader union (Arrow format, Message.fbs)
SCHEMA_BYTES_MAX: Final = 2**16  # three columns take some hundred bytes
BATCHES_MAX: Final = 10_000  # of an Arrow stream: each costs some KiB, whatever it holds
FIELDS_MAX: Final = 16  # of each of several batches, as each field costs about as much; three columns have four
JSON_WINDOW_BYTES: Final = 2**20
_NUMBERS_MAX: Final = 2**16  # at a time as Python objects
_STRING_OR_BRACE: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}]', re.DOTALL)
_COMMA: Final = re.compile(b",")
_BETWEEN: Final = b" \t\r\n,["  # rows, or numbers
_HALF_PAIR: Final = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])")
_ROW_PLACE: Final = re.compile(r"(.*) - at `\$\[(\d+)\]\.?(.*)`")

T = TypeVar("T")


def json_value(body: Any, kind: Any, what: str = "body", refusal: type[FakeError] = MalformedBody) -> Any:
    """Decode ``body`` (bytes or a buffer), strict JSON (no NaN, integers exact), as the type ``kind``.

    Raises MalformedBody for what is no JSON, ``refusal`` for JSON of another kind.
    """
    return _decoded(msgspec.json.Decoder(kind), body, what, refusal)


def json_object(body: Any, what: str = "body") -> dict[str, Any]:
    """A JSON object; an empty text counts as {}. Raises MalformedBody."""
    return dict(json_value(body, dict[str, Any], what)) if len(body) else {}


def _decoded(decoder: msgspec.json.Decoder[T], text: Any, what: str, refusal: type[FakeError]) -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise refusal(f"{what}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "half of a surrogate pair" if _HALF_PAIR.search(text) else str(error)
        raise MalformedBody(f"{what}: not JSON ({reason})") from None


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


def _fields(kind: pa.DataType) -> int:
    """How many arrays a column of that type is made of."""
    return 1 + sum(_fields(kind.field(number).type) for number in range(kind.num_fields))


def read_arrow(body: bytes | pa.Buffer) -> pa.RecordBatch:
    """One record batch from an Arrow IPC stream (several batches are joined), fully validated. Refers to ``body``.

    Compressed bodies are refused: a few bytes could declare gigabytes. Raises MalformedBody.
    """
    try:
        messages: list[Any] = []
        types: list[str] = []
        for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
            if not messages and message.metadata.size > SCHEMA_BYTES_MAX:
                raise MalformedBody(f"Arrow: a schema of over {SCHEMA_BYTES_MAX} bytes; send the columns alone")
            if len(messages) > BATCHES_MAX:
                raise MalformedBody(f"Arrow: over {BATCHES_MAX} batches in one stream; send fewer, larger ones")
            messages.append(message)
            types.append(message.type)
            if types[-1] not in ("schema", "record batch"):
                # No legal column needs a dictionary, and a compressed one would be inflated before it is looked at.
                raise MalformedBody(f"Arrow: a {types[-1]} message is refused; send plain columns")
            if types[-1] != "schema" and _is_compressed(message.metadata.to_pybytes()):
                raise MalformedBody("Arrow: compressed buffers are refused; send the stream uncompressed")
        # The usual case apart, for speed: a stream of one batch need not be opened a second time.
        if types == ["schema", "record batch"]:
            schema = pa.ipc.read_schema(messages[0])
            batches = [pa.ipc.read_record_batch(messages[1], schema)]
        else:
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                schema = reader.schema
                if sum(map(_fields, schema.types)) > FIELDS_MAX:
                    raise MalformedBody(f"Arrow: over {FIELDS_MAX} fields in each of many batches; send three columns")
                batches = list(reader)
        _ = schema.names  # decoded here, so that one that is no UTF-8 (ValueError) is found here
        for batch in batches:
            batch.validate(full=True)
        if len(batches) == 1:
            return batches[0]
        return one_batch(pa.Table.from_batches(batches, schema=schema))
    except (pa.ArrowException, OSError, ValueError, struct.error, IndexError, TypeError) as error:
        raise MalformedBody(f"Arrow: not a valid IPC stream ({str(error)[:200]})") from None


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
    # Message by message: a stream writer costs as much again as what it writes here.
    messages = (part.serialize() for part in (table.schema, *table.to_batches()))
    return memoryview(b"".join((*messages, _END_OF_STREAM)))


def arrow_chunks(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """An Arrow IPC stream, one chunk of bytes per batch, so that a reply holds one batch at a time."""
    sink = _Sink()
    writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema)
    for batch in batches:
        writer.write_batch(batch)
        yield sink.take()
    writer.close()
    yield sink.take()


def key_columns(batch: pa.RecordBatch) -> tuple[pa.StringArray, pa.Int64Array]:
    """pk and sk of a lookup. Raises SchemaMismatch for other columns, other types and nulls."""
    names = batch.schema.names
    if sorted(names) != ["pk", "sk"]:
        raise SchemaMismatch(f"lookup: columns {names}, want pk and sk")
    pk, sk = (batch.column(names.index(name)) for name in ("pk", "sk"))
    for name, column, want in (("pk", pk, pa.string()), ("sk", sk, pa.int64())):
        if column.type != want:
            raise SchemaMismatch(f"lookup: column {name} is {column.type}, want {want}")
        if column.null_count:
            raise SchemaMismatch(f"lookup: column {name} is null in row {pc.index(column.is_null(), True)}")
    return pk, sk


def rows_to_batch(content: Any, spec: ViewSpec) -> pa.RecordBatch:
    """JSON rows ``[{pk: str, sk: int, value: [numbers]}, …]`` (text) under the view's field names, as a write batch.

    Integers are exact (keys above 2^53 survive). Raises InvalidParameter, MalformedBody, SchemaMismatch.
    """
    text = memoryview(content)
    if bytes(text[:1]) != b"[":
        raise InvalidParameter("content: want a list of rows")
    windows = [_window_to_batch(window, before, spec) for before, window in _row_windows(text)]
    return windows[0] if len(windows) == 1 else one_batch(pa.Table.from_batches(windows))


def _row_windows(rows: memoryview) -> Iterator[tuple[int, Any]]:
    """A well-formed JSON array in windows of about ``JSON_WINDOW_BYTES``, each an array of whole objects too, with the
    number of objects before it. (If it is no array of objects, some window is none either.)
    """
    depth = count = before = start = 0
    for token in _STRING_OR_BRACE.finditer(rows) if len(rows) > JSON_WINDOW_BYTES else ():
        if token[0] == b"{":
            depth += 1
        elif token[0] == b"}":
            depth -= 1
            count += not depth
            if not depth and token.end() - start >= JSON_WINDOW_BYTES:
                yield before, b"[" + bytes(rows[start : token.end()]).lstrip(_BETWEEN) + b"]"
                start, before = token.end(), count
    yield before, b"[" + bytes(rows[start:]).lstrip(_BETWEEN)


def _number_windows(numbers: memoryview) -> Iterator[Any]:
    """The same for a well-formed JSON array of numbers."""
    start = 0
    while len(numbers) - start > JSON_WINDOW_BYTES and (comma := _COMMA.search(numbers, start + JSON_WINDOW_BYTES)):
        yield b"[" + bytes(numbers[start : comma.start()]).lstrip(_BETWEEN) + b"]"
        start = comma.end()
    yield b"[" + bytes(numbers[start:]).lstrip(_BETWEEN) if start else numbers


@functools.lru_cache(maxsize=16)
def _rows_decoder(pk: str, sk: str, value: str) -> msgspec.json.Decoder[list[Any]]:
    fields = [("pk", str), ("sk", int), ("value", msgspec.Raw)]
    names = {"pk": pk, "sk": sk, "value": value}
    row = msgspec.defstruct("Row", fields, rename=names, forbid_unknown_fields=True)
    return msgspec.json.Decoder(list[row])  # type: ignore[valid-type]


_NUMBERS: Final[dict[str, msgspec.json.Decoder[list[Any]]]] = {
    "float32": msgspec.json.Decoder(list[float]),
    "uint8": msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=255)]]),
}


def _window_to_batch(window: Any, before: int, spec: ViewSpec) -> pa.RecordBatch:
    schema = write_schema(spec.value_type)
    try:
        rows = _decoded(_rows_decoder(spec.pk, spec.sk, spec.value), window, "content", SchemaMismatch)
    except SchemaMismatch as error:
        found = _ROW_PLACE.fullmatch(str(error))
        where = f"{found[1]} (row {before + int(found[2])} {found[3]}".rstrip() + ")" if found else str(error)
        raise SchemaMismatch(f"{where}; want objects with exactly {spec.pk}, {spec.sk} and {spec.value}") from None
    parts, numbers = [], []
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    with np.errstate(over="ignore"):  # 1e39 becomes infinity, which the store refuses by name
        for at, row in enumerate(rows):
            where = f"content, row {before + at}"
            if not -(2**63) <= row.sk < 2**63:
                raise SchemaMismatch(f"{where}: {spec.sk} is no int64")
            offsets[at + 1] = offsets[at]
            for text in _number_windows(memoryview(row.value)):
                decoded = _decoded(_NUMBERS[spec.value_type], text, f"{where}: {spec.value}", SchemaMismatch)
                offsets[at + 1] += len(decoded)
                numbers += decoded
                if len(numbers) >= _NUMBERS_MAX:
                    parts.append(np.array(numbers, dtype=spec.value_type))
                    numbers.clear()
        parts.append(np.array(numbers, dtype=spec.value_type))
    embedding = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(parts)))
    columns = [
        pa.array([row.pk for row in rows], pa.string()),
        pa.array([row.sk for row in rows], pa.int64()),
        embedding,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def to_json(value: Any) -> bytes:
    """JSON bytes of plain data."""
    return msgspec.json.encode(value)

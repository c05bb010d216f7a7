"""The store: an append-only columnar log of writes, and the current rows beside it.

A write appends one validated, immutable Arrow batch with its ts and arrival number. Per version and embedding_name
the current rows are also kept in columns (key, ts, arrival, value) under a hash table, so that a write costs O(rows
written), a lookup O(rows asked for), whatever is stored, and nothing is done row by row in Python.

Semantics (docs/feature-store.md, "Views and rows"): MERGE only; the greatest ts of a (version, pk, sk) wins; with equal
ts the later arrival, and inside one batch the later row; versions are isolated; a row is hidden once ``ttl_s`` have
passed on the store's clock since it was written (a hidden row still outranks a write with a smaller ts: expiry never
revives an older value).

No sockets, no threads; clocks are injected. A plain lock makes it safe to share with a server thread.
"""

from __future__ import annotations

import _thread
import bisect
import contextlib
import functools
import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import (
    AlreadyExists,
    BodyTooLarge,
    DimensionMismatch,
    EntityNotFound,
    InUse,
    InvalidParameter,
    InvalidTimestamp,
    InvalidVersion,
    NonFiniteValue,
    ProjectNotFound,
    ReservedKey,
    SchemaMismatch,
    SnapshotNotFound,
    ViewNotFound,
)

P = ParamSpec("P")
R = TypeVar("R")

Int64Array = npt.NDArray[np.int64]
_RowNumbers = slice | npt.NDArray[np.intp]
ValueType = Literal["float32", "uint8"]

DEFAULT_PROJECT: Final = "deltaproof"
RESERVED_KEY: Final = -1
SCAN_ROWS_MAX: Final = 65_536  # rows per batch of a scan
SCAN_BYTES_MAX: Final = 2**24  # likewise; a batch of one row may be larger
DIM_MAX: Final = 65_536  # of an embedding
TABLES_MAX: Final = 4_096  # named by one write
REPLY_BYTES_MAX: Final = 2**26  # of a lookup's reply, as Arrow columns
PENDING_ROWS_MAX: Final = 16_384  # of one table
_PENDING_BYTES_MAX: Final = 2**23
_OFFSET_MAX: Final = 2**31 - 1  # of Arrow's strings and lists
_CELLS_MIN: Final = 16  # of a hash table; always a power of two
_LOAD_MAX: Final = 0.5
_STEPS_MAX: Final = 64  # of a search in it; at that load one in 2^64 searches would take more
_FEW: Final = 16  # searches that are gone on with one by one
_WINDOW: Final = 2**20  # elements that are indexed one by one at a time
_HALF: Final = np.uint64(32)
_NEVER: Final = np.iinfo(np.int64).min  # a ts below any
NAME_LENGTH_MAX: Final = 256
PK_LENGTH_MAX: Final = 1024  # of an embedding name
SHOWN_CHARS_MAX: Final = 80  # of a value that an error quotes
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ARROW_TYPES: Final[dict[str, pa.DataType]] = {"float32": pa.float32(), "uint8": pa.uint8()}
_WRITE_SCHEMAS: Final = {
    name: pa.schema([("pk", pa.string()), ("sk", pa.int64()), ("embedding", pa.list_(kind))])
    for name, kind in _ARROW_TYPES.items()
}
_READ_SCHEMAS: Final = {name: schema.append(pa.field("ts", pa.int64())) for name, schema in _WRITE_SCHEMAS.items()}


def shown(value: object) -> str:
    """A value as an error names it: its beginning, and its type where that says more."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or somebody's own __repr__
        return f"a {type(value).__name__}"
    return text[:SHOWN_CHARS_MAX]


def check_name(what: str, name: object) -> str:
    """Return ``name`` if it is a plain identifier (letters, digits, ``_ . -``), else raise InvalidParameter."""
    if not isinstance(name, str) or len(name) > NAME_LENGTH_MAX or not _NAME.fullmatch(name):
        raise InvalidParameter(f"{what} {shown(name)}: want 1 to {NAME_LENGTH_MAX} letters, digits, '_', '.' or '-'")
    return name


def check_version(version: object) -> str:
    """Return ``version`` if it is a printable, non-empty string of at most 256 characters, else InvalidVersion."""
    if not isinstance(version, str) or not version.strip():
        raise InvalidVersion("version is absent or empty: name the version to write to or read from")
    if len(version) > NAME_LENGTH_MAX or not version.isprintable():
        raise InvalidVersion(f"version {version[:80]!r}: want at most {NAME_LENGTH_MAX} printable characters")
    return version


class EntitySpec(msgspec.Struct, frozen=True):
    """A feature entity of a project: the thing that ``join_id`` identifies."""

    project: str
    name: str
    join_id: str
    parent: str = ""

    def check(self) -> None:
        check_name("project", self.project)
        check_name("entity", self.name)
        check_name("join id", self.join_id)


class ViewSpec(msgspec.Struct, frozen=True):
    """A DynamicEmbedding view. ``pk``, ``sk`` and ``value`` name its fields; ``ttl_s`` 0 means rows never expire."""

    project: str
    name: str
    entity: str
    pk: str = "embedding_name"
    sk: str = "key_id"
    value: str = "embedding"
    value_type: ValueType = "float32"
    ttl_s: int = 1_296_000
    shard_count: int = 20
    replication_count: int = 1

    def check(self) -> None:
        """Raise InvalidParameter if a setting is outside what docs/feature-store.md allows."""
        check_name("project", self.project)
        check_name("view", self.name)
        check_name("entity", self.entity)
        for field in (self.pk, self.sk, self.value):
            check_name("field", field)
        if len({self.pk, self.sk, self.value}) != 3:
            raise InvalidParameter(f"view {self.name}: pk, sk and value need three different field names")
        if self.value_type not in tuple(_ARROW_TYPES):  # which asks for no hash
            raise InvalidParameter(f"view {self.name}: value type {shown(self.value_type)}, want float32 or uint8")
        for what, number, low, high in (
            ("ttl_s", self.ttl_s, 0, 2**40),
            ("shard_count", self.shard_count, 1, 20),
            ("replication_count", self.replication_count, 1, 3),
        ):
            if type(number) is not int or not low <= number <= high:
                raise InvalidParameter(f"view {self.name}: {what} {shown(number)}, want {low} to {high}")


def other_type(spec: ViewSpec) -> ViewSpec:
    """The view with the other value type: what a client meets when somebody has made it again differently."""
    return msgspec.structs.replace(spec, value_type="uint8" if spec.value_type == "float32" else "float32")


class WriteResult(NamedTuple):
    """``rows`` appended and the ``arrival`` number of the write, unique and increasing over the whole store."""

    rows: int
    arrival: int


class _Image(NamedTuple):
    """Rows of one (version, pk) at one time, in order of their keys: row i stands in place ``order[i]`` of the columns.

    Nobody changes the columns any more, or only behind the places that ``order`` names.
    """

    keys: Int64Array
    ts: Int64Array
    values: npt.NDArray[Any]  # (rows, dim)
    order: npt.NDArray[np.intp]

    @property
    def value_bytes(self) -> int:
        return self.values.shape[1] * self.values.itemsize

    def take(self, rows: slice | npt.NDArray[np.intp]) -> tuple[Int64Array, Int64Array, npt.NDArray[Any]]:
        """(keys, ts, values) of some rows, numbered in order of their keys."""
        places = self.order[rows]
        return self.keys[places], self.ts[places], self.values.take(places, axis=0)


class _Write(NamedTuple):
    """One write's rows of one (version, pk), as they came."""

    keys: Int64Array
    ts: int
    arrival: int
    values: npt.NDArray[Any]


class _Entry(NamedTuple):
    """One write as logged."""

    arrival: int
    t_ms: float
    version: str
    ts: int
    batch: pa.RecordBatch
    client: str
    request_id: str


class _Rows:
    """All rows of one (version, pk), each key once: columns in order of the keys' first write, found by hash.

    ``_cells`` is an open-addressing hash table of places in the columns (-1: free) with triangular probing; key by key
    the same steps as in any other, but each step is taken for many rows at once: writes wait until there are
    ``PENDING_ROWS_MAX`` rows of them, or somebody reads. Then they change the rows in place, so their cost does not
    grow with the rows stored. An image shares the columns until old rows are next changed, which copies them first.

    No key lies more than ``_STEPS_MAX`` steps from where its search begins. The hash is drawn anew for every table and
    whenever that would not hold, so nobody can choose keys whose searches are long.
    """

    def __init__(self, dim: int, dtype: npt.DTypeLike) -> None:
        self.dim = dim
        self._count = 0
        self._shared = False
        self._keys = np.empty(0, dtype=np.int64)
        self._ts = np.empty(0, dtype=np.int64)
        self._arrival = np.empty(0, dtype=np.int64)
        self._values = np.empty((0, dim), dtype=dtype)
        self.value_bytes = dim * self._values.itemsize
        self._hash = _Hash.draw()
        self._cells = np.full(_CELLS_MIN, -1, dtype=np.int32)
        self._torn = False
        self._pending: list[_Write] = []
        self._pending_rows = 0

    def put(self, write: _Write) -> None:
        """Merge one write, sooner or later: of each key the row of the greatest ts stays, with equal ts the later."""
        self._pending.append(write)
        self._pending_rows += len(write.keys)

    @property
    def is_due(self) -> bool:
        """Whether enough writes wait."""
        return self._pending_rows >= PENDING_ROWS_MAX or self._pending_rows * self.value_bytes >= _PENDING_BYTES_MAX

    def settle(self) -> None:
        """Merge what waits. What runs out of memory on its way can be done once more."""
        if not self._pending:
            return
        if self._torn:
            self._rehash(len(self._cells), self._count)
        writes = sorted(self._pending, key=lambda write: write.ts)  # stable: equal ts stay in order of arrival
        ends = list(itertools.accumulate(len(write.keys) for write in writes))
        parts = [slice(end - len(write.keys), end) for write, end in zip(writes, ends, strict=True)]
        keys, ts, arrival = (np.empty(ends[-1], dtype=np.int64) for _ in range(3))
        for write, part in zip(writes, parts, strict=True):
            keys[part], ts[part], arrival[part] = write.keys, write.ts, write.arrival
        places = self._probe(keys)
        new = np.flatnonzero(places < 0)
        if len(new) < len(keys) and self._shared:
            self._copy(len(self._keys))
        if len(new):
            places[new] = self._insert(keys[new])
        # A row as one item: NumPy then moves it as such, three times as fast.
        item = f"V{self.value_bytes}"
        rows = self._values.view(item)[:, 0]
        newer = self._ts[places] <= ts
        if newer.all():
            for write, part in zip(writes, parts, strict=True):
                rows[places[part]] = write.values.view(item)[:, 0]
        else:
            places, ts, arrival = places[newer], ts[newer], arrival[newer]
            rows[places] = np.concatenate([write.values for write in writes])[newer].view(item)[:, 0]
        # Where a place comes twice NumPy leaves the later: that of the greater ts, or of the later arrival.
        self._ts[places], self._arrival[places] = ts, arrival
        self._pending, self._pending_rows = [], 0

    def _probe(self, keys: Int64Array) -> npt.NDArray[np.intp]:
        """The place of each key, or -1."""
        mask = len(self._cells) - 1
        cells = self._hash.cells(keys, mask)
        places = self._cells[cells].astype(np.intp)  # NumPy would convert it again at every use
        if not self._count:
            return places
        # A free cell's -1 picks some key, which is not looked at.
        open_ = ((places >= 0) & (self._keys[places] != keys)).nonzero()[0]  # np.flatnonzero is three calls
        step = 1
        while len(open_) > _FEW and step <= _STEPS_MAX:
            at = (cells[open_] + step) & mask
            found = self._cells[at]
            cells[open_], places[open_] = at, found
            open_ = open_[(found >= 0) & (self._keys[found] != keys[open_])]
            step += 1
        for row in open_.tolist():
            places[row] = self._walk(keys.item(row), cells.item(row), step)
        return places

    def _walk(self, key: int, cell: int, step: int) -> int:
        """``_probe`` of one key from ``step`` on: for a few, plain Python takes less time than NumPy."""
        mask = len(self._cells) - 1
        while step <= _STEPS_MAX:
            cell = (cell + step) & mask
            place = self._cells.item(cell)
            if place < 0 or self._keys.item(place) == key:
                return place
            step += 1
        return -1  # no key lies farther off

    def _insert(self, keys: Int64Array) -> npt.NDArray[np.intp]:
        """Append keys that are not there, with a ts below any; a key may come twice. The place of each."""
        keys, which = np.unique(keys, return_inverse=True)
        first, count = self._count, self._count + len(keys)
        if count > len(self._keys):
            self._copy(max(count, 2 * first))
        self._keys[first:count], self._ts[first:count] = keys, _NEVER
        size = len(self._cells)
        while count > _LOAD_MAX * size:
            size *= 2
        places = np.arange(first, count)
        self._torn = True
        if size > len(self._cells) or not _claim(self._cells, self._hash.cells(keys, size - 1), places):
            self._rehash(size, count)
        self._count, self._torn = count, False
        return places[which]

    def _rehash(self, size: int, count: int) -> None:
        """Another hash table of ``size`` cells or more, of the first ``count`` rows, under another hash."""
        while True:
            hash_, cells = _Hash.draw(), np.full(size, -1, dtype=np.int32)
            parts = (slice(start, min(start + SCAN_ROWS_MAX, count)) for start in range(0, count, SCAN_ROWS_MAX))
            if all(
                _claim(cells, hash_.cells(self._keys[part], size - 1), np.arange(part.start, part.stop))
                for part in parts
            ):
                self._hash, self._cells, self._torn = hash_, cells, False
                return
            size *= 2

    def _copy(self, capacity: int) -> None:
        """Other columns of the same content, which no image shares."""
        grown = {}
        for name in ("_keys", "_ts", "_arrival", "_values"):
            old = getattr(self, name)
            # Not zeroed: the system gives memory to what is written to, so spare room takes none.
            grown[name] = np.empty((capacity, *old.shape[1:]), dtype=old.dtype)
            grown[name][: self._count] = old[: self._count]
        vars(self).update(grown, _shared=False)

    def trim(self) -> None:
        """Merge what waits, and give spare room back."""
        self.settle()
        if len(self._keys) > self._count:
            self._copy(self._count)

    def find(self, keys: Int64Array, expired_before: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """(which of ``keys`` exist, their places until the next write)."""
        self.settle()
        places = self._probe(keys)
        found = places >= 0
        if expired_before:
            found &= self._arrival[places] >= expired_before
        rows = found.nonzero()[0]
        return rows, places if len(rows) == len(places) else places[rows]

    def take(self, places: npt.NDArray[np.intp]) -> tuple[Int64Array, npt.NDArray[Any]]:
        """(ts, values (rows, dim)) of the rows there."""
        return self._ts[places], self._values.take(places, axis=0)

    def _visible(self, expired_before: int, after_ts: int) -> npt.NDArray[np.bool_] | None:
        """Which rows are of arrivals from ``expired_before`` on and above ``after_ts``; None: all."""
        if not expired_before and not after_ts:
            return None
        return (self._arrival[: self._count] >= expired_before) & (self._ts[: self._count] > after_ts)

    def count(self, expired_before: int) -> int:
        self.settle()
        visible = self._visible(expired_before, 0)
        return self._count if visible is None else int(np.count_nonzero(visible))

    def image(self, expired_before: int, after_ts: int) -> _Image:
        """The visible rows as they are now, whatever is written later."""
        self.settle()
        count, visible = self._count, self._visible(expired_before, after_ts)
        if visible is None or visible.all():
            order = np.argsort(self._keys[:count])
        else:
            places = np.flatnonzero(visible)
            order = places[np.argsort(self._keys[places])]
        if 2 * len(order) < count:  # to copy these costs less than to let the next write copy all
            some = (self._keys[order], self._ts[order], self._values.take(order, axis=0))
            return _Image(*some, np.arange(len(order)))
        self._shared = True
        return _Image(self._keys[:count], self._ts[:count], self._values[:count], order)


class _Hash(NamedTuple):
    """Two odd factors, secret, with a shift between them: from outside nobody can tell which keys collide."""

    first: np.uint64
    second: np.uint64

    @classmethod
    def draw(cls) -> _Hash:
        return cls(*(np.uint64(secrets.randbits(64) | 1) for _ in range(2)))

    def cells(self, keys: Int64Array, mask: int) -> npt.NDArray[np.intp]:
        """A cell of ``mask + 1`` (a power of two) for each key: the top bits of the mixed key."""
        mixed = keys.view(np.uint64) * self.first
        mixed ^= mixed >> _HALF
        mixed *= self.second
        mixed >>= np.uint64(64 - mask.bit_length())
        return mixed.view(np.int64)


def _claim(cells: npt.NDArray[np.int32], at: npt.NDArray[np.intp], places: npt.NDArray[np.intp]) -> bool:
    """Enter different, absent keys, whose searches begin ``at``. False, and half done, if a search grew too long."""
    mask = len(cells) - 1
    for step in range(1, _STEPS_MAX + 2):
        free = cells[at] < 0
        cells[at[free]] = places[free]  # of several that want the same cell, one gets it
        others = (cells[at] != places).nonzero()[0]
        if not len(others):
            return True
        at, places = (at[others] + step) & mask, places[others]
    return False


class _Life:
    """Of a view, from its creation until it is dropped; shared with whatever must not outlive it."""

    ended = False


class _View:
    def __init__(self, spec: ViewSpec) -> None:
        self.spec = spec
        self.life = _Life()
        self.entries: list[_Entry] = []
        self.versions: dict[str, dict[str, _Rows]] = {}
        self.high_water: dict[str, int] = {}


class Snapshot(NamedTuple):
    """A consistent image of one version. ``ts`` is its high-water mark; ``batches()`` yields READ schema batches.

    It can be read until its view is dropped, also if another view of that name is made then.
    """

    ts: int
    rows: int
    schema: pa.Schema
    parts: tuple[tuple[str, _Image], ...]
    life: _Life

    @property
    def nbytes(self) -> int:
        """Of the whole snapshot as Arrow columns."""
        return sum(len(image.order) * _row_bytes(pk, image.value_bytes) for pk, image in self.parts)

    def arrays(self) -> dict[int, int]:
        """What it keeps in memory: the identity of each array and its bytes, room for rows to come included."""
        parts = (part if part.base is None else part.base for _, image in self.parts for part in image)
        return {id(part): part.nbytes for part in parts}

    def batches(self, rows_max: int = SCAN_ROWS_MAX) -> Iterator[pa.RecordBatch]:
        """Batches of at most ``rows_max`` rows and about ``SCAN_BYTES_MAX`` bytes, ordered by pk then sk.

        Raises SnapshotNotFound at once if the view is gone; what has begun goes on.
        """
        if self.life.ended:
            raise SnapshotNotFound("the snapshot went with its view, which was dropped: take a new one")
        return self._batches(rows_max)

    def _batches(self, rows_max: int) -> Iterator[pa.RecordBatch]:
        for pk, image in self.parts:
            rows = max(1, min(rows_max, SCAN_BYTES_MAX // _row_bytes(pk, image.value_bytes)))
            for start in range(0, len(image.order), rows):
                keys, ts, values = image.take(slice(start, start + rows))
                yield _read_batch(self.schema, pa.repeat(pk, len(keys)), _from_numpy(keys, pa.int64()), values, ts)

    def table(self) -> pa.Table:
        """The whole snapshot as one table. Raises SnapshotNotFound."""
        return pa.Table.from_batches(self.batches(), schema=self.schema)


def write_schema(value_type: ValueType) -> pa.Schema:
    """Columns of a write: ``pk string, sk int64, embedding list<value_type>``."""
    return _WRITE_SCHEMAS[value_type]


def read_schema(value_type: ValueType) -> pa.Schema:
    """Columns of every read: ``pk string, sk int64, embedding list<value_type>, ts int64``."""
    return _READ_SCHEMAS[value_type]


def log_schema(value_type: ValueType) -> pa.Schema:
    """Columns of ``Store.log``."""
    value = pa.list_(_ARROW_TYPES[value_type])
    return pa.schema(
        [
            ("arrival", pa.int64()),
            ("t_ms", pa.float64()),
            ("version", pa.string()),
            ("pk", pa.string()),
            ("sk", pa.int64()),
            ("ts", pa.int64()),
            ("embedding", value),
            ("client", pa.string()),
            ("request_id", pa.string()),
        ]
    )


def _from_numpy(array: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """``array``, contiguous, as the Arrow array of the same memory; ``pa.array`` does that too, in thrice the time."""
    return pa.Array.from_buffers(kind, array.size, [None, pa.py_buffer(array)])


def _list_array(values: npt.NDArray[Any], offsets: npt.NDArray[np.int32], kind: pa.ListType) -> pa.ListArray:
    children = [_from_numpy(values, kind.value_type)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=children)


def _read_batch(
    schema: pa.Schema, pk: pa.StringArray, sk: pa.Int64Array, values: npt.NDArray[Any], ts: Int64Array
) -> pa.RecordBatch:
    rows, dim = values.shape
    offsets = np.arange(0, rows * dim + 1, dim, dtype=np.int32)
    embedding = _list_array(values, offsets, schema.field("embedding").type)
    return pa.RecordBatch.from_arrays([pk, sk, embedding, _from_numpy(ts, pa.int64())], schema=schema)


def _row_bytes(pk: str, value_bytes: int) -> int:
    """Of one row as Arrow: two offsets, key and ts beside the name and the embedding."""
    return len(pk.encode()) + 4 + 8 + 4 + value_bytes + 8


def _first_row(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


class _Batch(NamedTuple):
    """A checked write, grouped by pk: ``groups`` are (pk, row numbers, dim). ``body_bytes`` stay in memory for it."""

    batch: pa.RecordBatch
    keys: Int64Array
    flat: npt.NDArray[Any]
    offsets: npt.NDArray[np.int32]
    groups: list[tuple[str, _RowNumbers, int]]
    body_bytes: int

    def values(self, rows: _RowNumbers, dim: int) -> npt.NDArray[Any]:
        """The (rows, dim) matrix of some rows, all of length dim; a view when they stand together."""
        if isinstance(rows, slice):
            return self.flat[self.offsets[rows.start] : self.offsets[rows.stop]].reshape(-1, dim)
        values = np.empty((len(rows), dim), dtype=self.flat.dtype)
        for part in _windows(len(rows), dim):
            values[part] = self.flat[self.offsets[rows[part]][:, None] + np.arange(dim)]
        return values


def _windows(rows: int, dim: int) -> Iterator[slice]:
    """Cut ``rows`` so that an index of each element, which takes more memory than the element, stays small."""
    step = max(1, _WINDOW // dim)
    return (slice(start, start + step) for start in range(0, rows, step))


def _body_bytes(buffer: pa.Buffer | None) -> int:
    """Of the memory that a buffer, perhaps a sliver of it, keeps from being given back."""
    while buffer is not None and buffer.parent is not None:
        buffer = buffer.parent
    return buffer.size if buffer is not None else 0


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows of a table together. Raises BodyTooLarge for more than Arrow can count in one batch."""
    merged = table.combine_chunks().to_batches()
    if len(merged) > 1:
        raise BodyTooLarge(f"{table.num_rows} rows hold more than one Arrow batch can: send fewer at a time")
    if not merged:
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)
    return merged[0]


def check_batch(spec: ViewSpec, batch: pa.RecordBatch | pa.Table) -> _Batch:
    """Check a write against the view: columns, types, nulls, reserved key, finite values, one length per pk.

    Raises SchemaMismatch, ReservedKey, NonFiniteValue, DimensionMismatch naming the view, table and key; BodyTooLarge.
    """
    where = f"view {spec.project}/{spec.name}"
    if isinstance(batch, pa.Table):
        batch = one_batch(batch)
    want, schema = write_schema(spec.value_type), batch.schema
    names = schema.names
    if sorted(names) != sorted(want.names):
        raise SchemaMismatch(f"{where}: columns {names}, want {want.names}")
    if names != want.names:
        batch = batch.select(want.names)
        schema = batch.schema
    if not (as_wanted := schema.equals(want, check_metadata=True)):
        for field, found in zip(want, schema.types, strict=True):
            both_lists = pa.types.is_list(found) and pa.types.is_list(field.type)
            if found.value_type != field.type.value_type if both_lists else found != field.type:
                raise SchemaMismatch(f"{where}: column {field.name} is {found}, want {field.type}")
    pk, sk, embedding = (
        _without_nulls(column, name, where) for name, column in zip(want.names, batch.columns, strict=True)
    )
    elements = embedding.values
    if elements.null_count:
        elements = embedding.flatten()  # without what is not this slice's
        if elements.null_count:
            raise SchemaMismatch(f"{where}: column embedding holds null elements")
        embedding = pa.ListArray.from_arrays(_from_zero(embedding.offsets.to_numpy()), elements)
    keys, offsets, flat = sk.to_numpy(), embedding.offsets.to_numpy(), elements.to_numpy()
    if (keys == RESERVED_KEY).any():
        row = _first_row(keys == RESERVED_KEY)
        raise ReservedKey(f"{where}, table {pk[row]}: key {RESERVED_KEY} is reserved (row {row} of the batch)")
    flat, offsets = flat[offsets[0] : offsets[-1]], _from_zero(offsets)
    if spec.value_type == "float32":
        finite = np.isfinite(flat)
        if not finite.all():
            row = int(np.searchsorted(offsets, _first_row(~finite), side="right")) - 1
            raise NonFiniteValue(f"{where}, table {pk[row]}, key {keys[row]}: the embedding holds NaN or infinity")
    if not as_wanted:
        # Rebuilt, so that every logged batch has one schema, whatever the sender called its list items.
        embedding = pa.ListArray.from_arrays(embedding.offsets, elements, type=want.field("embedding").type)
        batch = pa.RecordBatch.from_arrays([pk, sk, embedding], schema=want)
    return _Batch(batch, keys, flat, offsets, _group(where, pk, keys, offsets), _body_bytes(elements.buffers()[1]))


def _without_nulls(column: pa.Array, name: str, where: str) -> Any:
    if column.null_count:
        row = _first_row(np.asarray(column.is_null()))
        raise SchemaMismatch(f"{where}: column {name} is null in row {row} (and {column.null_count - 1} others)")
    return column


def _from_zero(offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return offsets - offsets[0] if offsets[0] else offsets


def _group(
    where: str, pk: pa.StringArray, keys: Int64Array, offsets: npt.NDArray[np.int32]
) -> list[tuple[str, _RowNumbers, int]]:
    groups: list[tuple[str, _RowNumbers, int]] = []
    same = _step(offsets)
    for name, rows in _rows_by_name(pk):
        if len(groups) == TABLES_MAX:
            raise InvalidParameter(f"{where}: over {TABLES_MAX} different embedding names in one write: send fewer")
        if not 0 < len(name) <= PK_LENGTH_MAX:
            raise SchemaMismatch(f"{where}: embedding name {name[:80]!r}: want 1 to {PK_LENGTH_MAX} characters")
        dim = same
        if dim is None:
            lengths = (offsets[1:] - offsets[:-1])[rows]
            dim = int(lengths[0])
            if (lengths != dim).any():
                row = _first_row(lengths != dim)
                raise DimensionMismatch(
                    f"{where}, table {name}, key {keys[rows][row]}: embedding of length {lengths[row]}, want {dim} "
                    "as in the batch's first row of that table"
                )
        if not 1 <= dim <= DIM_MAX:
            raise DimensionMismatch(
                f"{where}, table {name}, key {keys[rows][0]}: embedding of length {dim}, want 1 to {DIM_MAX}"
            )
        groups.append((name, rows, dim))
    return groups


def _rows_by_name(names: pa.StringArray, among: Mapping[str, Any] | None = None) -> list[tuple[str, _RowNumbers]]:
    """Each different name (``among`` these) with the rows that bear it, in order; a slice when they stand together."""
    count = len(names)
    if not count:
        return []
    if _is_one_name(names):
        name = names[0].as_py()
        return [(name, slice(0, count))] if among is None or name in among else []
    encoded = names.dictionary_encode()
    different, codes = encoded.dictionary, encoded.indices.to_numpy()
    if among is None:
        wanted = list(enumerate(different.to_pylist()))
    else:  # a request may name millions that nobody wrote
        numbers = pc.index_in(pa.array(list(among), pa.string()), value_set=different).to_pylist()
        wanted = sorted((code, name) for code, name in zip(numbers, among, strict=True) if code is not None)
    if (codes[1:] >= codes[:-1]).all():  # codes count from 0 in order of appearance
        bounds = np.searchsorted(codes, np.arange(len(different) + 1))
        return [(name, slice(*bounds[code : code + 2].tolist())) for code, name in wanted]
    order = np.argsort(codes, kind="stable")  # stable: the later row of a key stays the later one
    bounds = np.searchsorted(codes[order], np.arange(len(different) + 1))
    return [(name, order[slice(*bounds[code : code + 2].tolist())]) for code, name in wanted]


def _step(offsets: npt.NDArray[np.int32]) -> int | None:
    """The difference between neighbours, if it is the same everywhere."""
    if len(offsets) < 2:
        return None
    first, last = int(offsets[0]), int(offsets[-1])
    step = int(offsets[1]) - first
    if step <= 0 or last - first != step * (len(offsets) - 1):
        return 0 if (offsets == first).all() else None
    even = np.arange(first, last + 1, step, dtype=np.int32)
    return step if pa.py_buffer(offsets).equals(pa.py_buffer(even)) else None


def _is_one_name(names: pa.StringArray) -> bool:
    """Whether all are equal, seen from their bytes: many times faster than encoding them, and nearly always so."""
    _, offsets_buffer, data = names.buffers()
    # With a count: a sender's buffer may be a few bytes longer than its numbers.
    offsets = np.frombuffer(offsets_buffer, np.int32, names.offset + len(names) + 1)[names.offset :]
    length = _step(offsets)
    if not length:
        return length == 0
    # Each like the next, all at once.
    first, size = int(offsets[0]), length * (len(names) - 1)
    return bool(data.slice(first, size).equals(data.slice(first + length, size)))


def _bounded(read: Callable[P, R]) -> Callable[P, R]:
    """What memory cannot hold is refused like any other reply that is too large."""

    @functools.wraps(read)
    def bounded(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return read(*arguments, **keywords)
        except MemoryError:
            raise BodyTooLarge(
                f"{read.__name__}: more than memory holds; ask for less, or end what else uses it"
            ) from None

    return bounded


class Store:
    """The whole store: projects, entities, views and their rows.

    ``now_ms`` is the store's wall clock in ms (TTL, default ts); ``monotonic_ms`` stamps the log (default: now_ms, so
    that a virtual clock is the only clock). ``projects`` exist from the start. ``history=False`` keeps no log, so that
    memory follows the live rows; the properties need the log. ``reply_bytes_max`` bounds what one lookup returns.
    """

    reply_bytes_max: int = REPLY_BYTES_MAX

    def __init__(
        self,
        now_ms: Callable[[], int],
        *,
        monotonic_ms: Callable[[], float] | None = None,
        projects: Sequence[str] = (DEFAULT_PROJECT,),
        history: bool = True,
    ) -> None:
        self.now_ms = now_ms
        self._monotonic_ms = monotonic_ms or now_ms
        self._first_projects = tuple(projects)
        self._history = history
        self._views: dict[tuple[str, str], _View] = {}
        self._lock = _thread.RLock()  # not threading.RLock: a simulator replaces that one with a scheduling point
        self.reset()

    def reset(self, projects: Sequence[str] | None = None) -> None:
        """Back to the state right after construction, with other ``projects`` if given. Raises InvalidParameter."""
        projects = self._first_projects if projects is None else tuple(projects)
        for name in projects:
            check_name("project", name)
        with self._lock:
            now_ms = self.now_ms()
            self._record("reset", {"projects": list(projects), "now_ms": now_ms})
            for view in self._views.values():
                view.life.ended = True
            self._created_ms: dict[tuple[str, ...], int] = {}
            self._entities: dict[tuple[str, str], EntitySpec] = {}
            self._views = {}
            self._arrivals = 0
            self._written_ms: list[int] = []  # by arrival; never falls, so that one bisect answers TTL
            self._numbers: dict[str, dict[tuple[str, ...], int]] = {"project": {}, "entity": {}, "view": {}}
            for name in dict.fromkeys(projects):
                self._created(now_ms, "project", name)

    def _record(self, kind: str, fields: dict[str, Any], batch: pa.RecordBatch | None = None) -> None:
        """Called under the lock with every change that has passed its checks, before it is made. Here: nothing; a
        durable store writes it down, and by raising keeps it from being made.
        """

    def _created(self, now_ms: int, *key: str) -> None:
        self._created_ms[key] = now_ms
        numbers = self._numbers[key[0]]
        numbers.setdefault(key, 1 + len(numbers))

    def number_of(self, *key: str) -> int:
        """How manieth of its kind an object was made, from 1: ("project", name), ("entity", project, name) or ("view",
        project, name). One that was dropped and made again keeps its number.
        """
        return self._numbers[key[0]][key]

    # Catalogue

    def create_project(self, name: str) -> None:
        """Raises InvalidParameter, AlreadyExists."""
        check_name("project", name)
        with self._lock:
            if ("project", name) in self._created_ms:
                raise AlreadyExists(f"project {name} exists")
            now_ms = self.now_ms()
            self._record("create-project", {"name": name, "now_ms": now_ms})
            self._created(now_ms, "project", name)

    def projects(self) -> list[str]:
        with self._lock:
            return [key[1] for key in self._created_ms if key[0] == "project"]

    def _need_project(self, name: str) -> None:
        if ("project", name) not in self._created_ms:
            raise ProjectNotFound(f"no project {name!r}")

    def create_entity(self, spec: EntitySpec) -> None:
        """Raises InvalidParameter, ProjectNotFound, EntityNotFound (unknown parent), AlreadyExists."""
        spec.check()
        with self._lock:
            self._need_project(spec.project)
            if spec.parent:
                self.entity(spec.project, spec.parent)
            if (spec.project, spec.name) in self._entities:
                raise AlreadyExists(f"entity {spec.name} exists in project {spec.project}")
            now_ms = self.now_ms()
            self._record("create-entity", {**msgspec.to_builtins(spec), "now_ms": now_ms})
            self._entities[spec.project, spec.name] = spec
            self._created(now_ms, "entity", spec.project, spec.name)

    def entity(self, project: str, name: str) -> EntitySpec:
        """Raises EntityNotFound."""
        with self._lock:
            try:
                return self._entities[project, name]
            except KeyError:
                raise EntityNotFound(f"no entity {name!r} in project {project!r}") from None

    def entities(self, project: str | None = None) -> list[EntitySpec]:
        with self._lock:
            return [spec for spec in self._entities.values() if project in (None, spec.project)]

    def drop_entity(self, project: str, name: str) -> None:
        """Raises EntityNotFound, InUse."""
        with self._lock:
            self.entity(project, name)
            users = [f"view {spec.name}" for spec in self.views(project) if spec.entity == name]
            users += [f"entity {spec.name}" for spec in self.entities(project) if spec.parent == name]
            if users:
                raise InUse(f"entity {name} of project {project} is used by {users[0]}")
            self._record("drop-entity", {"project": project, "name": name})
            del self._entities[project, name]
            del self._created_ms["entity", project, name]

    def create_view(self, spec: ViewSpec) -> None:
        """Create the view, and its project and entity when they are missing. Raises InvalidParameter, AlreadyExists."""
        spec.check()
        with self._lock:
            if ("project", spec.project) not in self._created_ms:
                self.create_project(spec.project)
            if (spec.project, spec.entity) not in self._entities:
                self.create_entity(EntitySpec(spec.project, spec.entity, f"{spec.entity}_id"))
            if (spec.project, spec.name) in self._views:
                raise AlreadyExists(f"view {spec.name} exists in project {spec.project}")
            now_ms = self.now_ms()
            self._record("create-view", {**msgspec.to_builtins(spec), "now_ms": now_ms})
            self._views[spec.project, spec.name] = _View(spec)
            self._created(now_ms, "view", spec.project, spec.name)

    def view(self, project: str, name: str) -> ViewSpec:
        """Raises ViewNotFound."""
        with self._lock:
            return self._view(project, name).spec

    def views(self, project: str | None = None) -> list[ViewSpec]:
        with self._lock:
            return [view.spec for view in self._views.values() if project in (None, view.spec.project)]

    def drop_view(self, project: str, name: str) -> None:
        """Raises ViewNotFound. The rows, the log and the snapshots of the view go with it."""
        with self._lock:
            dropped = self._view(project, name)
            self._record("drop-view", {"project": project, "name": name})
            dropped.life.ended = True
            del self._views[project, name]
            del self._created_ms["view", project, name]

    def created_ms(self, *key: str) -> int:
        """When ("project", name), ("entity", project, name) or ("view", project, name) was created."""
        return self._created_ms[key]

    def _view(self, project: str, name: str) -> _View:
        try:
            return self._views[project, name]
        except KeyError:
            raise ViewNotFound(f"no view {name!r} in project {project!r}") from None

    # Writing

    def write(
        self,
        project: str,
        view: str,
        batch: pa.RecordBatch | pa.Table,
        *,
        version: str,
        ts: int,
        client: str = "",
        request_id: str = "",
    ) -> WriteResult:
        """Append a batch (columns of ``write_schema``), all rows under one ``ts`` (ms). All or nothing.

        Raises ViewNotFound, InvalidVersion, InvalidTimestamp, SchemaMismatch, ReservedKey, NonFiniteValue,
        DimensionMismatch, InvalidParameter (too many tables), BodyTooLarge (out of memory, or of what Arrow can count).
        The store keeps references to the batch's buffers: hand it memory that nobody changes.
        """
        with self._lock:
            target = self._view(project, view)
            arrival, t_ms = self._arrivals, self._monotonic_ms()
            written_ms = max(self.now_ms(), self._written_ms[-1] if self._written_ms else 0)
            # One field per setting of a write: DurableStore reads them back.
            fields = {"project": project, "view": view, "version": version, "ts": ts, "client": client}
            fields |= {"request_id": request_id, "written_ms": written_ms, "t_ms": t_ms}
            try:
                checked = self._check_write(target, batch, version, ts)
                parts = self._split(checked, ts, arrival)
                self._record("write", fields, checked.batch)
            except MemoryError:
                raise BodyTooLarge("write: more than memory holds; send less, or end what else uses it") from None
            self._arrivals += 1
            self._written_ms.append(written_ms)
            if parts:
                self._append(target, parts, _Entry(arrival, t_ms, version, ts, checked.batch, client, request_id))
            return WriteResult(checked.batch.num_rows, arrival)

    def _split(self, checked: _Batch, ts: int, arrival: int) -> list[tuple[str, _Write]]:
        """A write's rows by table, without copying but for a sliver that would keep a large body in memory."""
        parts = []
        for pk, rows, dim in checked.groups:
            keys, values = checked.keys[rows], checked.values(rows, dim)
            if not self._history and 4 * values.nbytes < checked.body_bytes:
                keys, values = np.array(keys), np.array(values)
            parts.append((pk, _Write(keys, ts, arrival, values)))
        return parts

    def _append(self, target: _View, parts: list[tuple[str, _Write]], entry: _Entry) -> None:
        tables = target.versions.setdefault(entry.version, {})
        for pk, write in parts:
            if pk not in tables:
                tables[pk] = _Rows(write.values.shape[1], write.values.dtype)
            tables[pk].put(write)
        target.high_water[entry.version] = max(entry.ts, target.high_water.get(entry.version, 0))
        if self._history:
            target.entries.append(entry)
        for pk, _ in parts:
            if tables[pk].is_due:
                with contextlib.suppress(MemoryError):  # the rows are there, and whoever reads them tries again
                    tables[pk].settle()

    def check_write(self, project: str, view: str, batch: pa.RecordBatch | pa.Table, *, version: str, ts: int) -> None:
        """Raise what ``write`` would raise, and change nothing."""
        with self._lock:
            self._check_write(self._view(project, view), batch, version, ts)

    def _check_write(self, target: _View, batch: pa.RecordBatch | pa.Table, version: str, ts: int) -> _Batch:
        check_version(version)
        if type(ts) is not int or not 0 < ts < 2**63:
            raise InvalidTimestamp(f"ts {shown(ts)}: want a positive int64 number of milliseconds")
        checked = check_batch(target.spec, batch)
        tables = target.versions.get(version, {})
        for pk, rows, dim in checked.groups:
            if pk in tables and tables[pk].dim != dim:
                raise DimensionMismatch(
                    f"view {target.spec.project}/{target.spec.name}, version {version}, table {pk}, "
                    f"key {checked.keys[rows][0]}: embedding of length {dim}, want {tables[pk].dim} as first written"
                )
        return checked

    # Reading

    def _expired_before(self, spec: ViewSpec) -> int:
        """Rows of arrivals below this number are past the view's TTL now."""
        if not spec.ttl_s:
            return 0
        return bisect.bisect_right(self._written_ms, self.now_ms() - 1000 * spec.ttl_s)

    def check_reply(self, nbytes: int) -> None:
        """Raise BodyTooLarge for a reply of more bytes than ``reply_bytes_max``, or than Arrow's offsets can count."""
        if nbytes > (limit := min(self.reply_bytes_max, _OFFSET_MAX)):
            raise BodyTooLarge(f"the reply would take {nbytes} bytes, over {limit}: ask for fewer rows at a time")

    @_bounded
    def lookup(
        self, project: str, view: str, version: str, pk: pa.StringArray | Sequence[str], sk: Int64Array | pa.Int64Array
    ) -> pa.Table:
        """Rows of ``zip(pk, sk)`` that exist, in request order, as a ``read_schema`` table.

        Raises ViewNotFound, InvalidVersion, SchemaMismatch (wrong types, nulls or unequal lengths), BodyTooLarge.
        """
        check_version(version)
        with self._lock:
            target = self._view(project, view)
            names, numbers = _lookup_request(pk, sk)
            keys = numbers.to_numpy()
            schema = read_schema(target.spec.value_type)
            expired_before = self._expired_before(target.spec)
            tables = target.versions.get(version, {})
            found = []
            for name, rows in _rows_by_name(names, tables):
                which, places = tables[name].find(keys[rows], expired_before)
                if len(which):
                    found.append((name, which + rows.start if isinstance(rows, slice) else rows[which], places))
            self.check_reply(sum(len(at) * _row_bytes(name, tables[name].value_bytes) for name, _, at in found))
            hits = [tables[name].take(places) for name, _, places in found]
        if not hits:
            return schema.empty_table()
        if len(hits) == 1:
            (name, rows, _), (ts, values) = found[0], hits[0]
            if len(rows) < len(names):
                names, numbers = pa.repeat(name, len(rows)), _from_numpy(keys[rows], pa.int64())
            return pa.Table.from_batches([_read_batch(schema, names, numbers, values, ts)])
        where = np.concatenate([rows for _, rows, _ in found])
        order = np.argsort(where)
        flat, offsets = _interleave([values for _, values in hits], order)
        rows = where[order]
        columns = [
            names.take(pa.array(rows)),
            pa.array(keys[rows]),
            _list_array(flat, offsets, schema.field("embedding").type),
            pa.array(np.concatenate([ts for ts, _ in hits])[order]),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    @_bounded
    def snapshot(
        self, project: str, view: str, version: str, *, after_ts: int = 0, tables: Sequence[str] | None = None
    ) -> Snapshot:
        """A consistent image of a version, unaffected by later writes: rows with ts above ``after_ts``, of ``tables``
        (values of pk; default: all). Raises ViewNotFound, InvalidVersion, BodyTooLarge (out of memory).
        """
        check_version(version)
        wanted = None if tables is None else set(tables)  # of thousands, perhaps, among as many
        with self._lock:
            target = self._view(project, view)
            expired_before = self._expired_before(target.spec)
            parts = []
            for pk, rows in sorted(target.versions.get(version, {}).items()):
                if wanted is not None and pk not in wanted:
                    continue
                image = rows.image(expired_before, after_ts)
                if len(image.order):
                    parts.append((pk, image))
            high_water = target.high_water.get(version, 0)
        rows_total = sum(len(image.order) for _, image in parts)
        return Snapshot(high_water, rows_total, read_schema(target.spec.value_type), tuple(parts), target.life)

    def scan(self, project: str, view: str, version: str) -> Iterator[pa.RecordBatch]:
        """All rows of a version now, as ``read_schema`` batches ordered by pk then sk."""
        return self.snapshot(project, view, version).batches()

    @_bounded
    def changes(self, project: str, view: str, version: str, cursor_ts: int) -> tuple[pa.Table, int]:
        """(rows whose current ts is above ``cursor_ts``, the cursor for the next call). A cursor never falls."""
        snapshot = self.snapshot(project, view, version, after_ts=cursor_ts)
        return snapshot.table(), max(cursor_ts, snapshot.ts)

    def high_water_ts(self, project: str, view: str, version: str) -> int:
        """The greatest ts ever written to the version; 0 when it is empty."""
        check_version(version)
        with self._lock:
            return self._view(project, view).high_water.get(version, 0)

    @_bounded
    def rows(self, project: str, view: str, version: str) -> int:
        """How many rows a scan of the version would yield."""
        check_version(version)
        with self._lock:
            target = self._view(project, view)
            expired_before = self._expired_before(target.spec)
            return sum(rows.count(expired_before) for rows in target.versions.get(version, {}).values())

    def versions(self, project: str, view: str) -> list[str]:
        """Versions that hold rows, in order of their first write."""
        with self._lock:
            return list(self._view(project, view).versions)

    def as_of(self, project: str, view: str, *, writes: int = 0, age_ms: float = 0) -> Store:
        """A store apart whose only view holds what this one held ``writes`` writes and ``age_ms`` ms ago: what a stale
        reader sees. Costs a replay of the view's log. Raises ViewNotFound, InvalidParameter (a store without history).
        """
        with self._lock:
            target = self._view(project, view)
            if not self._history:
                raise InvalidParameter("this store keeps no history, so the past cannot be read")
            past = Store(self.now_ms, monotonic_ms=self._monotonic_ms, projects=[project])
            past._numbers = self._numbers  # shared: an object has one number
            for entity in self.entities(project):
                past.create_entity(entity)
            past.create_view(target.spec)
            past._view(project, view).life = target.life  # what is read of it goes with the view, too
            past.reply_bytes_max = self.reply_bytes_max
            past._created_ms = dict(self._created_ms)
            past._written_ms = list(self._written_ms)
            cut_ms = self.now_ms() - age_ms
            for entry in target.entries[: len(target.entries) - writes] if writes < len(target.entries) else ():
                if self._written_ms[entry.arrival] <= cut_ms:
                    parts = past._split(check_batch(target.spec, entry.batch), entry.ts, entry.arrival)
                    past._append(past._view(project, view), parts, entry)
            return past

    def log(self, project: str, view: str) -> pa.Table:
        """Every row ever written to the view, superseded ones too, in arrival order (``log_schema``)."""
        with self._lock:
            target = self._view(project, view)
            entries = list(target.entries)
        schema = log_schema(target.spec.value_type)
        if not entries:
            return schema.empty_table()
        counts = np.array([entry.batch.num_rows for entry in entries])
        which = np.repeat(np.arange(len(entries), dtype=np.int32), counts)

        def spread(name: str) -> pa.Array:
            return pa.array([getattr(entry, name) for entry in entries], schema.field(name).type).take(pa.array(which))

        rows = pa.Table.from_batches([entry.batch for entry in entries])
        columns = [rows[name] if name in ("pk", "sk", "embedding") else spread(name) for name in schema.names]
        return pa.Table.from_arrays(columns, schema=schema)

    def compact(self) -> None:
        """Give back the room kept for rows to come. Superseded rows take memory in the log only, at any time."""
        with self._lock:
            for view in self._views.values():
                for tables in view.versions.values():
                    for rows in tables.values():
                        rows.trim()


def as_array(values: Any, want: pa.DataType) -> pa.Array:
    """``values`` as one Arrow array: arrays as they are, chunks joined, anything else converted to ``want``."""
    if isinstance(values, pa.ChunkedArray):
        return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    return values if isinstance(values, pa.Array) else pa.array(values, want)


def _lookup_request(
    pk: pa.StringArray | Sequence[str], sk: Int64Array | pa.Int64Array
) -> tuple[pa.StringArray, pa.Int64Array]:
    try:
        pk, sk = as_array(pk, pa.string()), as_array(sk, pa.int64())
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaMismatch(f"lookup: pk and sk must be strings and int64 ({str(error)[:200]})") from None
    if pk.type != pa.string() or sk.type != pa.int64() or len(pk) != len(sk) or pk.null_count or sk.null_count:
        raise SchemaMismatch(
            f"lookup: want equally long pk string and sk int64 without nulls, got {pk.type}[{len(pk)}] and "
            f"{sk.type}[{len(sk)}]"
        )
    return pk, sk


def _interleave(
    matrices: list[npt.NDArray[Any]], order: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Rows of several matrices of different widths, put in ``order``: their flat values and list offsets."""
    lengths = np.concatenate([np.full(len(matrix), matrix.shape[1], dtype=np.int32) for matrix in matrices])
    target = np.empty(len(order), dtype=np.intp)
    target[order] = np.arange(len(order))
    offsets = np.zeros(len(order) + 1, dtype=np.int32)
    np.cumsum(lengths[order], out=offsets[1:])
    flat = np.empty(offsets[-1], dtype=matrices[0].dtype)
    start = 0
    for matrix in matrices:
        rows, dim = matrix.shape
        at = offsets[target[start : start + rows]]
        for part in _windows(rows, dim):
            flat[at[part][:, None] + np.arange(dim)] = matrix[part]
        start += rows
    return flat, offsets

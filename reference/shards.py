"""Copies of what was published (retained) or could not be (spilled): Parquet shards, each vouched for by a manifest.

A manifest is written after its shard is there to stay, and never before. So where there is a manifest, the store
acknowledged exactly these rows with these ts ("acknowledged"), or was not known to have them ("spilled", "resent").
A shard without a manifest is a write that did not end, and is never read.

Layout: `ROOT/VIEW/VERSION/step-STEP/rank-RANK-of-RANKS.GENERATION-SEQ.parquet` and, beside it, `.json`. Neither the
generation (one start of one rank) nor the submission's number within it ever comes again, so nothing is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from .errors import redact
from .settings import Settings, wrong_place

FORMAT = 1
GROUP_ROWS, GROUP_BYTES = 64_000, 1 << 25  # of one row group, about; a batch of the store is never divided
FOLDER_NAME_MAX = 120
BLOCK_BYTES, READERS = 1 << 23, 16
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what mounted object stores answer
State = Literal["acknowledged", "spilled", "resent"]


class ShardError(ValueError):
    """A place for shards that cannot be used. The message says what to do."""


class Damaged(Exception):
    """A shard or manifest is not what was written: torn, changed, or gone."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one shard. `check` covers every other field, so a changed manifest gives itself away."""

    format: int
    generation: str
    seq: int
    project: str
    view: str
    version: str
    step: int
    rank: int
    world_size: int
    state: State
    shard: str  # name of the file beside this one
    rows: int
    shard_bytes: int
    sha256: str  # of the shard's file
    ts_first: int  # ms; both 0 without rows
    ts_last: int
    check: str = ""

    def encode(self) -> bytes:
        """JSON, with its checksum."""
        return msgspec.json.format(msgspec.json.encode(self._checked()))

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Raises Damaged unless this is, field by field, what was encoded."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"not a manifest: {error}") from None
        if found.format != FORMAT:
            raise Damaged(f"a manifest of format {found.format}; this deltaproof reads {FORMAT}")
        if found != found._checked():
            raise Damaged("the manifest was changed: its own checksum differs")
        return found

    def _checked(self) -> Manifest:
        bare = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(bare, check=hashlib.sha256(msgspec.json.encode(bare)).hexdigest())


class Entry(NamedTuple):
    """A manifest and its path below the root."""

    path: str
    manifest: Manifest

    @property
    def shard(self) -> str:
        """Path of the shard below the root."""
        return self.path[: self.path.rfind("/") + 1] + self.manifest.shard


class Found(NamedTuple):
    """What lies in a folder. `damaged`: what is wrong, by path. `unverified`: shards without a manifest."""

    entries: list[Entry]
    damaged: dict[str, str]
    unverified: list[str]


class Files:
    """A place for shards: a folder, or a URI that Arrow's file systems know (`s3://BUCKET/PREFIX`).

    Args:
        filesystem: when the URI does not tell it; `where` is then a path in it.

    Raises:
        ShardError: the place cannot be named so.
    """

    def __init__(self, where: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        if wrong := wrong_place(where):
            raise ShardError(f"the place for shards {wrong}")
        try:
            if filesystem is None:
                uri = where if "://" in where else os.path.abspath(where)
                filesystem, where = pyarrow.fs.FileSystem.from_uri(uri)
        except (OSError, ValueError, NotImplementedError) as error:  # pa.ArrowException derives from these
            place, _, query = where.partition("?")  # whatever the query holds is not repeated
            what = redact(str(error).replace(query, "…") if query else error)
            raise ShardError(f"{place!r} is no place for shards: {what}") from None
        self._where, self._is_local = where, isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._system = pyarrow.fs.SubTreeFileSystem(where, filesystem)

    def prepare(self) -> None:
        """Make the folder and see that files can be made in it, before there is one to keep. An object store is not
        asked: who may write there need not be allowed to look.

        Raises:
            ShardError: they cannot.
        """
        if not self._is_local:
            return
        try:
            make_folder(self._where)
            tempfile.TemporaryFile(dir=self._where).close()
        except OSError as error:
            raise ShardError(f"{self._where!r} cannot be used as a place for shards: {redact(error)}") from None

    def exists(self) -> bool:
        """Whether there is such a folder. Raises OSError when nobody can say."""
        return bool(self._system.get_file_info("").type != pyarrow.fs.FileType.NotFound)

    def names(self, folder: str = "") -> list[str]:
        """Paths of all files in and below a folder, sorted; none when there is no such folder."""
        below = pyarrow.fs.FileSelector(folder, allow_not_found=True, recursive=True)
        return sorted(info.path for info in self._system.get_file_info(below) if info.is_file)

    def open(self, path: str) -> pa.NativeFile:
        """A file, for reading at any place. Raises FileNotFoundError, OSError."""
        return self._system.open_input_file(path)

    def read(self, path: str) -> bytes:
        """Content of a small file. Raises FileNotFoundError, OSError."""
        with self.open(path) as file:
            return file.readall()

    def write(self, path: str, data: Any) -> None:
        """Make a file appear whole and to stay, in place of any other. Raises OSError: it may be there or not."""
        if self._is_local:
            self._write_file(f"{self._where}/{path}", data)
            return
        # At once: to close a stream of an object store publishes what it got so far, also after an error.
        with self._system.open_output_stream(path) as stream:
            stream.write(data)
        if (size := self._system.get_file_info(path).size) != len(data):
            raise OSError(f"wrote {len(data)} bytes to {path!r}, and the object store says it has {size}")

    def _write_file(self, path: str, data: Any) -> None:
        """Flushed to the disk under another name, then renamed, then the rename flushed too."""
        folder, temporary = os.path.dirname(path), self._temporary(path)
        make_folder(folder)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # gives its room back: the disk may be full
            raise
        sync_folder(folder)

    def _temporary(self, path: str) -> str:
        return path + ".tmp"


def make_folder(folder: str) -> None:
    """Make a folder and those above it, so that a loss of power does not take it back."""
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(parent)  # also when it was there: whoever made it may not have come to this yet


def sync_folder(folder: str) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


class ShardWriter:
    """The uploader's hook `retain` (state "acknowledged") or `spill` (state "spilled") for one generation of a rank.

    A shard is built in memory, so keeping a delta takes as much room again as the delta, for that time.

    Args:
        generation: names one start of one rank's publisher, and no other.
        names: published name per table FQN; without it the FQN is the name.
    """

    def __init__(
        self,
        files: Files,
        settings: Settings,
        rank: int,
        world_size: int,
        generation: str,
        *,
        names: Mapping[str, str] | None = None,
        state: State = "acknowledged",
    ) -> None:
        self._files, self._settings, self._names, self._state = files, settings, names, state
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._folder = f"{folder_name(settings.view)}/{folder_name(settings.version)}"

    def __call__(self, step: int, seq: int, table: pa.Table, stamps: npt.NDArray[np.int64]) -> None:
        """Keep a delta (DELTA_SCHEMA) whose rows have these ts (ms), int64 (rows,). To repeat it does no harm.

        Raises:
            OSError: it is not known to be kept.
        """
        path, shard = self._path(step, seq), self._shard(table, stamps)
        manifest = Manifest(
            format=FORMAT,
            generation=self._generation,
            seq=seq,
            project=self._settings.project,
            view=self._settings.view,
            version=self._settings.version,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            state=self._state,
            shard=path[path.rfind("/") + 1 :] + ".parquet",
            rows=table.num_rows,
            shard_bytes=shard.size,
            sha256=hashlib.sha256(shard).hexdigest(),
            ts_first=int(stamps.min()) if len(stamps) else 0,
            ts_last=int(stamps.max()) if len(stamps) else 0,
        )
        self._publish(shard, Entry(path + ".json", manifest))

    def ts_floor(self) -> int:
        """Greatest ts (ms) that a shard of this view and version has in this place, 0 without any.

        A start must rule all of them out (`Uploader.catch_up`): the store never saw those of spilled rows, and a clock
        that is behind would give smaller ones to newer rows, which a resend would then take for older.
        """
        return max((entry.manifest.ts_last for entry in self._entries()), default=0)

    def keys_after(self, ts: int) -> Iterator[pa.Table]:
        """Columns table_fqn and key_id of every whole shard of this view, version and state with a ts (ms) above `ts`.

        A restart publishes these rows again, so that no later resend finds its own values older than the spilled ones.
        """
        for entry in self._entries():
            if entry.manifest.ts_last > ts and entry.manifest.state == self._state:
                with contextlib.suppress(Damaged):  # nothing resends it either
                    verify(self._files, entry)
                    yield pq.read_table(self._files.open(entry.shard), columns=["table_fqn", "key_id"])

    def _entries(self) -> list[Entry]:
        try:
            return find(self._files, self._folder).entries
        except OSError as error:
            raise ShardError(f"the shards of earlier starts cannot be read: {redact(error)}") from None

    def _path(self, step: int, seq: int) -> str:
        """Path of one submission's files, without their endings."""
        kind = "" if self._state == "acknowledged" else f"-{self._state}"
        name = f"rank-{self._rank:05d}-of-{self._world_size:05d}.{self._generation}-{seq:06d}{kind}"
        return f"{self._folder}/step-{step:012d}/{name}"

    def _publish(self, shard: pa.Buffer, entry: Entry) -> None:
        """The shard first: who finds the manifest must find what it vouches for."""
        self._files.write(entry.shard, shard)
        self._files.write(entry.path, entry.manifest.encode())

    def _shard(self, table: pa.Table, stamps: npt.NDArray[np.int64]) -> pa.Buffer:
        """The shard's file. A row group ends where a batch of the store ends, so no ts is in two of them."""
        schema, sink = shard_schema(table.schema.field("embedding").type), pa.BufferOutputStream()
        few = [name for name in schema.names if name not in ("key_id", "embedding")]
        if schema.field("embedding").type == pa.list_(pa.uint8()):
            few.append("embedding.list.element")  # Parquet has no smaller number than int32, but a dictionary has
        with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=few, write_statistics=False) as file:
            for start, end in pairwise(_group_ends(table, stamps)):
                rows = table.slice(start, end - start)
                rows = rows.append_column("embedding_name", self._published(rows["table_fqn"]))
                rows = rows.append_column("ts", pa.array(stamps[start:end]))
                file.write_table(rows.select(schema.names).cast(schema), row_group_size=end - start)
        return sink.getvalue()

    def _published(self, fqns: pa.ChunkedArray) -> pa.ChunkedArray:
        """Published name of each row."""
        if self._names is None:
            return fqns
        which = pc.index_in(fqns, value_set=pa.array(list(self._names), pa.string()))
        return pa.chunked_array([pa.array(list(self._names.values()), pa.string())]).take(which)


def _group_ends(table: pa.Table, stamps: npt.NDArray[np.int64]) -> list[int]:
    """Row numbers at which row groups begin and end: each holds whole batches."""
    size = max(1, min(GROUP_ROWS, GROUP_BYTES * len(stamps) // max(1, table.nbytes)))
    ends = np.append(np.flatnonzero(np.diff(stamps)) + 1, len(stamps))
    return sorted({0, *ends[np.diff(ends // size, append=-1) != 0].tolist()})


def shard_schema(value_type: pa.DataType) -> pa.Schema:
    """Columns of a shard; `value_type` is that of the delta's embeddings."""
    columns = {
        "embedding_name": pa.string(),
        "key_id": pa.int64(),
        "embedding": value_type,
        "ts": pa.int64(),
        "table_fqn": pa.string(),
        "global_step": pa.int64(),
        "rank": pa.int32(),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def folder_name(text: str) -> str:
    """Name of a view's or version's folder: readable, and legal whatever the text."""
    name = quote(text, safe="").replace(".", "%2E")
    if len(name) > FOLDER_NAME_MAX:
        name = f"{name[:FOLDER_NAME_MAX]}+{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name


def find(files: Files, folder: str = "") -> Found:
    """Read every manifest in and below a folder. Raises OSError when the place cannot be read."""
    found, names = Found([], {}, []), files.names(folder)
    manifests = [name for name in names if fnmatch(name, "*rank-*-of-*.json")]
    with ThreadPoolExecutor(READERS) as pool:  # an object store takes its time for each
        for path, text in zip(manifests, pool.map(files.read, manifests), strict=True):
            try:
                found.entries.append(Entry(path, Manifest.decode(text)))
            except Damaged as error:
                found.damaged[path] = str(error)
    vouched = {path.removesuffix(".json") for path in manifests}
    shards = (name for name in names if name.endswith(".parquet"))
    found.unverified.extend(name for name in shards if name.removesuffix(".parquet") not in vouched)
    return found


def verify(files: Files, entry: Entry) -> None:
    """Read a shard's file, a block at a time. Raises Damaged unless every bit of it is as it was written."""
    manifest = entry.manifest
    try:
        with files.open(entry.shard) as file:
            size, digest = file.size(), hashlib.file_digest(io.BufferedReader(file, BLOCK_BYTES), "sha256").hexdigest()
    except FileNotFoundError:
        raise Damaged("its shard is missing") from None
    if (size, digest) != (manifest.shard_bytes, manifest.sha256):
        raise Damaged(f"its shard has {size} bytes, which are not the {manifest.shard_bytes} that were written")

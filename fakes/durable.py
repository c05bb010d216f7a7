"""A store that keeps its content in a folder: a write-ahead log of checksummed records in segments.

Every change that has passed its checks is appended to the newest segment before it is made in memory, and so before it
is acknowledged. What survives what:

- *kill -9* of the process: every acknowledged write, with either policy, for the record is with the operating system.
- *loss of power or a crash of the kernel*: with ``fsync="always"`` every acknowledged write (each append is flushed to
  the disk before it is acknowledged); with ``fsync="os"``, the default and much faster, all but the last seconds.

A record that was cut off at the end of the newest segment was never acknowledged: it is dropped at the next start. A
damaged record with whole ones behind it, or in an older segment, is no torn tail: opening fails and says where.

Kept: projects, entities, views, every write with its version, ts, arrival number and time (for TTL). Not kept: the
server's snapshots, planned faults and request log. Segments are never merged: the folder grows with every write until
``reset``, which empties it.

Segment file ``segment-00000001.wal``: ``DPWAL001``, then records: ``DPRC``, length of the payload (uint64), sequence
number of the record (uint64), CRC-32 of length, sequence number and payload (uint32); little endian. Payload: length
of a JSON text (uint32), the text ({"kind", "t", …fields}), then for a write one Arrow IPC stream.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import pyarrow as pa

from .errors import FakeError
from .store import DEFAULT_PROJECT, EntitySpec, Store, ViewSpec

Fsync = Literal["os", "always"]

SEGMENT_BYTES_MAX: Final = 64 * 2**20
_MAGIC: Final = b"DPWAL001"
_MARK: Final = b"DPRC"
RESET: Final = "reset"  # the kind of record that begins anew: always the first of its segment
_FIRST_BYTES: Final = 2**20  # of a segment, to see whether it begins with a reset: a list of project names
_HEAD: Final = struct.Struct("<4sQQI")
_META: Final = struct.Struct("<I")


class DataDirError(OSError):
    """The data folder cannot be used. Causes: another server has it, it is not writable, it holds damaged records."""


class DataDirInUse(DataDirError):
    """Another server has the folder open. Cure: end that one, or name another folder."""


class JournalCorrupt(DataDirError):
    """A record is damaged that cannot be a torn tail. Cure: restore the folder from a copy, or start an empty one."""


class _Record(NamedTuple):
    meta: dict[str, Any]
    body: memoryview


def _checksum(length: int, sequence: int, parts: Sequence[Any]) -> int:
    crc = zlib.crc32(struct.pack("<QQ", length, sequence))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def _frame(sequence: int, meta: dict[str, Any], body: Any) -> list[Any]:
    """A record as the pieces to write one after the other."""
    text = msgspec.json.encode(meta)
    parts = [_META.pack(len(text)), text, body]
    length = sum(len(part) for part in parts)
    return [_HEAD.pack(_MARK, length, sequence, _checksum(length, sequence, parts)), *parts]


def _read_frame(data: memoryview, at: int) -> tuple[int, _Record, int] | None:
    """(sequence, record, where the next begins) of the record at ``at``; None if there is no whole one."""
    if len(data) - at < _HEAD.size:
        return None
    mark, length, sequence, crc = _HEAD.unpack_from(data, at)
    begin, end = at + _HEAD.size, at + _HEAD.size + length
    if mark != _MARK or length < _META.size or end > len(data):
        return None
    if _checksum(length, sequence, [data[begin:end]]) != crc:
        return None
    text_end = begin + _META.size + _META.unpack_from(data, begin)[0]
    if text_end > end:
        return None
    try:
        meta = msgspec.json.decode(data[begin + _META.size : text_end], type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return sequence, _Record(meta, data[text_end:end]), end


def _whole_record_after(data: memoryview, at: int) -> int | None:
    """Where, behind ``at``, a whole record begins."""
    raw = bytes(data[at + 1 :])
    found = raw.find(_MARK)
    while found >= 0:
        if _read_frame(data, at + 1 + found) is not None:
            return at + 1 + found
        found = raw.find(_MARK, found + 1)
    return None


class Journal:
    """The segments of one folder, open for one process. ``replay`` first, then ``append``.

    Raises DataDirInUse, DataDirError.
    """

    def __init__(self, folder: Path, *, fsync: Fsync = "os", segment_bytes_max: int = SEGMENT_BYTES_MAX) -> None:
        self.folder = folder
        self._always = fsync == "always"
        self._segment_bytes_max = segment_bytes_max
        self._fd = -1
        self._size = 0
        self._number = 0
        self.sequence = 0
        self._broken: str | None = None
        self.dropped_bytes = 0  # of a torn tail, at the last replay
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirError(error.errno, f"data folder {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock_fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            raise DataDirInUse(
                errno.EWOULDBLOCK, f"data folder {folder} is in use by another server (process {owner})"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:08d}.wal"

    def _segments(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.folder.glob("segment-*.wal"))

    def replay(self) -> Iterator[_Record]:
        """Every record since the last reset, in order; a torn tail is cut off. Afterwards the journal takes appends.

        Raises JournalCorrupt.
        """
        numbers = self._segments()
        begin = next((number for number in reversed(numbers) if self._begins_anew(number)), None)
        if begin is None and any(_whole_record_after(self._read(number), 0) is not None for number in numbers):
            raise JournalCorrupt(
                errno.EIO, f"{self._path(numbers[0])}: its first record, or a segment before it, is missing or damaged"
            )
        for number in [number for number in numbers if begin is not None and number < begin]:
            self._path(number).unlink()  # a reset was cut short while it deleted these
            numbers.remove(number)
        for number in numbers:
            yield from self._replay_segment(number, is_last=number == numbers[-1])
        if numbers:
            self._open(numbers[-1])
        else:
            self._start_segment()

    def _read(self, number: int) -> memoryview:
        return memoryview(self._path(number).read_bytes())

    def _begins_anew(self, number: int) -> bool:
        with self._path(number).open("rb") as file:
            data = memoryview(file.read(_FIRST_BYTES))
        found = _read_frame(data, len(_MAGIC))
        return found is not None and found[1].meta.get("kind") == RESET

    def _replay_segment(self, number: int, *, is_last: bool) -> Iterator[_Record]:
        path, data = self._path(number), self._read(number)
        at = len(_MAGIC)
        if bytes(data[:at]) != _MAGIC:
            if not is_last or not _MAGIC.startswith(bytes(data)):
                raise JournalCorrupt(errno.EIO, f"{path} does not begin like a segment of this version")
            path.write_bytes(_MAGIC)  # torn while it was made: nothing was acknowledged in it
            self.dropped_bytes = len(data)
            return
        while found := _read_frame(data, at):
            sequence, record, end = found
            if self.sequence and sequence != self.sequence + 1:
                raise JournalCorrupt(
                    errno.EIO, f"{path}, byte {at}: record {sequence} follows record {self.sequence}: some are missing"
                )
            self.sequence = sequence
            yield record
            at = end
        if at == len(data):
            return
        later = _whole_record_after(data, at)
        if not is_last or later is not None:
            behind = f"a whole one at byte {later}" if later is not None else "later segments"
            raise JournalCorrupt(errno.EIO, f"{path}, byte {at}: a damaged record, with {behind} behind it")
        self.dropped_bytes = len(data) - at
        with path.open("r+b") as file:
            file.truncate(at)
            os.fsync(file.fileno())

    def _open(self, number: int) -> None:
        fd = os.open(self._path(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
        self._fd, self._number, self._size = fd, number, os.fstat(fd).st_size

    def _start_segment(self) -> None:
        self._open(self._number + 1)
        self._write([_MAGIC])
        os.fsync(self._fd)
        self._sync_folder()

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write(self, parts: list[Any]) -> None:
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            done = os.writev(self._fd, left)
            self._size += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def append(self, meta: dict[str, Any], body: Any = b"") -> None:
        """Write one record down. Raises OSError (disk full, I/O error): then it is not written, or nothing more is."""
        if self._fd < 0:
            raise DataDirError(errno.EBADF, f"data folder {self.folder} is closed")
        if self._broken:
            raise DataDirError(errno.EIO, f"data folder {self.folder} takes no writes since: {self._broken}")
        if self._size >= self._segment_bytes_max:
            self._start_segment()
        size = self._size
        try:
            self._write(_frame(self.sequence + 1, meta, body))
        except OSError as error:
            # Nothing may follow a half-written record: cut it off, or write no more.
            try:
                os.ftruncate(self._fd, size)
                self._size = size
            except OSError:
                self._broken = str(error.strerror)
            raise
        if self._always:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._broken = str(error.strerror)  # after a failed flush nobody knows what reached the disk
                raise
        self.sequence += 1

    def restart(self, meta: dict[str, Any]) -> None:
        """Begin anew with one record in a segment of its own, and delete what came before."""
        old = self._segments()
        self._start_segment()
        self.append(meta)
        os.fsync(self._fd)
        for number in old:
            self._path(number).unlink()
        self._sync_folder()

    def close(self) -> None:
        """Flush and release the folder. Safe to call twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class DurableStore(Store):
    """A Store whose content is in ``folder`` and comes back when the folder is opened again.

    Clocks as for ``Store``; what is in the folder keeps the times at which it was written. ``fsync``: see the module's
    docstring. Raises DataDirInUse, JournalCorrupt, DataDirError. ``close()`` (or ``with``) releases the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        *,
        monotonic_ms: Callable[[], float] | None = None,
        projects: Sequence[str] = (DEFAULT_PROJECT,),
        fsync: Fsync = "os",
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
    ) -> None:
        self.folder = Path(folder)
        self._journal: Journal | None = None
        self._past: dict[str, Any] | None = None  # of the record that is replayed now
        wall_ms, host_ms = now_ms, monotonic_ms or now_ms
        super().__init__(
            lambda: wall_ms() if self._past is None else self._past["now_ms"],
            monotonic_ms=lambda: host_ms() if self._past is None else self._past["t_ms"],
            projects=projects,
        )
        journal = Journal(self.folder, fsync=fsync, segment_bytes_max=segment_bytes_max)
        try:
            count = 0
            for record in journal.replay():
                self._replay(journal, record)
                count += 1
            self._journal = journal
            if not count:
                self.reset()
        except BaseException:
            journal.close()
            raise
        self.dropped_bytes = journal.dropped_bytes

    def _meta(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "now_ms": self.now_ms(), "t_ms": self._monotonic_ms(), **fields}

    def _record(self, kind: str, fields: dict[str, Any], batch: pa.RecordBatch | None = None) -> None:
        if self._journal is None:
            return  # the beginnings, and what is replayed
        meta = self._meta(kind, fields)
        if kind == RESET:
            self._journal.restart(meta)
        elif batch is None:
            self._journal.append(meta)
        else:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            self._journal.append(meta, memoryview(sink.getvalue()))

    def _replay(self, journal: Journal, record: _Record) -> None:
        fields = dict(record.meta)
        try:
            kind = fields.pop("kind")
            self._past = {name: fields.pop(name) for name in ("now_ms", "t_ms")}
            if kind == RESET:
                self.reset(fields["projects"])
            elif kind == "create-project":
                self.create_project(fields["name"])
            elif kind == "create-entity":
                self.create_entity(msgspec.convert(fields, EntitySpec))
            elif kind == "create-view":
                self.create_view(msgspec.convert(fields, ViewSpec))
            elif kind == "drop-entity":
                self.drop_entity(fields["project"], fields["name"])
            elif kind == "drop-view":
                self.drop_view(fields["project"], fields["name"])
            elif kind == "write":
                self._past["now_ms"] = fields.pop("written_ms")
                # A copy: of known alignment, and it does not keep the whole segment in memory.
                with pa.ipc.open_stream(pa.py_buffer(bytes(record.body))) as reader:
                    batch = reader.read_all()
                self.write(fields.pop("project"), fields.pop("view"), batch, **fields)
            else:
                raise JournalCorrupt(errno.EIO, f"a record of unknown kind {kind!r}: written by a newer version?")
        except (FakeError, KeyError, TypeError, msgspec.ValidationError, pa.ArrowException) as error:
            raise JournalCorrupt(
                errno.EIO, f"data folder {journal.folder}: record {journal.sequence} cannot be replayed ({error})"
            ) from None
        finally:
            self._past = None

    def close(self) -> None:
        """Flush and release the folder; later changes are refused. Safe to call twice."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> DurableStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A store that keeps its content in a folder: a write-ahead log of checksummed records in segments.

Every change that has passed its checks is appended to the newest segment before it is made in memory, and so before it
is acknowledged; then the file ``acknowledged`` gets the record's sequence number. What survives what:

- *kill -9* of the process: every acknowledged write, with either policy, for both files are with the operating system.
- *loss of power or a crash of the kernel*: with ``fsync="always"`` every acknowledged write (segment, then mark, are
  flushed to the disk before it is acknowledged); with ``fsync="os"``, the default and much faster, all but the last
  seconds.

What the folder says when it is opened again. Sequence numbers have no gaps, and ``acknowledged`` says how far they must
reach, so what may be gone is told from what may not:

- Behind the last acknowledged record there may be a whole one, whose reply was perhaps never sent: it is kept. Or there
  is a part of one, a *torn tail*: nobody was told that it is written, and it is dropped.
- A damaged, cut-off or missing record, segment or mark that was acknowledged is never taken for a torn tail: opening
  raises JournalCorrupt, names the file and the records, and changes nothing. After a loss of power under "os" this is
  how the last seconds are reported, unless the mark was lost with them, which nothing can tell from a torn tail.
- ``accept_loss=True`` goes on with the records before the damage, for whoever has no copy. The rest is set aside.

Kept: projects, entities, views, every write with its version, ts, arrival number and time (for TTL). Not kept: the
server's snapshots, planned faults and request log. Segments are never merged: the folder grows with every write until
``reset``, which empties it. One process has the folder: its lock is on the folder itself, so no file guards it.

Segment ``segment-00000001.wal``: ``DPWAL002``, then records: ``DPRC``, length of the payload (uint64), sequence number
of the record (uint64), CRC-32 of length, sequence number and payload (uint32); little endian. Payload: length of a JSON
text (uint32), the text ({"kind", "t", …fields}), then for a write one Arrow IPC stream. Mark ``acknowledged``:
``DPACK001`` and, at bytes 512 and 1024, the last two sequence numbers acknowledged (uint64), each with its CRC-32:
one is whole while the other is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import pyarrow as pa

from .errors import FakeError
from .store import DEFAULT_PROJECT, EntitySpec, Store, ViewSpec

Fsync = Literal["os", "always"]

SEGMENT_BYTES_MAX: Final = 64 * 2**20
_MAGIC: Final = b"DPWAL002"
_MARK: Final = b"DPRC"
RESET: Final = "reset"  # the kind of record that begins anew: always the first of its segment
_HEAD: Final = struct.Struct("<4sQQI")
_META: Final = struct.Struct("<I")
_RESET_TEXT: Final = b'{"kind":"reset"'  # how the JSON text of such a record begins, and where in its segment
_RESET_AT: Final = len(_MAGIC) + _HEAD.size + _META.size
_SEGMENT: Final = re.compile(r"segment-([0-9]{8,})\.wal")
_ACKNOWLEDGED: Final = "acknowledged"
_ACKNOWLEDGED_MAGIC: Final = b"DPACK001"
_SLOT: Final = struct.Struct("<QI")
_SECTOR: Final = 512  # what a disk writes as one, or not at all
_OWNER: Final = "owner"  # names the process in messages; no lock
_WAY_OUT: Final = (
    "Restore the folder from a copy; or start once with --accept-loss (DurableStore(accept_loss=True)), which goes on "
    "with what was written before and sets the rest aside"
)


class DataDirError(OSError):
    """The data folder cannot be used. Causes: another server has it, it is not writable, it holds foreign files."""


class DataDirInUse(DataDirError):
    """Another server has the folder open. Cure: end that one, or name another folder."""


class JournalCorrupt(DataDirError):
    """Acknowledged records are damaged or gone. Cure: restore the folder from a copy, or accept the loss."""


class _Record(NamedTuple):
    meta: dict[str, Any]
    body: memoryview


class _Stop(NamedTuple):
    """Where the whole records of a segment end; ``why`` they do, "" for the end of the file.

    ``surely_lost``: whatever the mark says. A record is begun only once the one before it has been acknowledged.
    """

    at: int
    why: str = ""
    surely_lost: bool = False


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


def _whole_record_after(data: memoryview, at: int) -> bool:
    """Whether, behind ``at``, a whole record begins."""
    raw = bytes(data[at + 1 :])
    found = raw.find(_MARK)
    while found >= 0:
        if _read_frame(data, at + 1 + found) is not None:
            return True
        found = raw.find(_MARK, found + 1)
    return False


def _flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _slot(sequence: int) -> bytes:
    number = struct.pack("<Q", sequence)
    return number + struct.pack("<I", zlib.crc32(number))


def _slot_at(sequence: int) -> int:
    return _SECTOR * (1 + sequence % 2)


class Journal:
    """The segments of one folder, open for one process. ``replay`` first, then ``append``.

    Raises DataDirInUse, DataDirError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fsync: Fsync = "os",
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        accept_loss: bool = False,
    ) -> None:
        self.folder = folder
        self._always = fsync == "always"
        self._segment_bytes_max = segment_bytes_max
        self._accept_loss = accept_loss
        self._fd = self._acknowledged_fd = -1
        self._size = 0
        self._number = 0
        self._older: list[int] = []  # segments before the one that takes the appends
        self.sequence = 0
        self._broken: str | None = None
        self.dropped_bytes = 0  # of a torn tail, at the last replay
        self.set_aside: Path | None = None  # where an accepted loss is kept
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in missing:
                _flush_folder(path.parent)  # else a loss of power may take the new folder, whatever is flushed in it
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DataDirError(error.errno, f"data folder {folder}: {error.strerror}") from None
        try:
            self._lock()
        except BaseException:
            os.close(self._folder_fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = "unknown"
            with contextlib.suppress(OSError):
                owner = (self.folder / _OWNER).read_text(errors="replace")[:20].strip() or owner
            raise DataDirInUse(
                errno.EWOULDBLOCK, f"data folder {self.folder} is in use by another server (process {owner})"
            ) from None
        except OSError as error:
            raise DataDirError(error.errno, f"data folder {self.folder} cannot be locked: {error.strerror}") from None
        for path in (self.folder / _OWNER, self.folder / _ACKNOWLEDGED):
            if path.exists() and not path.is_file():
                raise DataDirError(errno.EINVAL, f"{path} is no plain file: move it elsewhere, or name another folder")
        try:
            fd = self._create(_OWNER)
            os.write(fd, f"{os.getpid()}\n".encode())
            os.close(fd)
        except OSError as error:
            raise DataDirError(error.errno, f"{self.folder / _OWNER}: {error.strerror}") from None

    # Files, found through the folder's descriptor: a folder that was moved is still this one

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder_fd)

    def _delete(self, number: int) -> None:
        os.unlink(self._name(number), dir_fd=self._folder_fd)

    @staticmethod
    def _name(number: int) -> str:
        return f"segment-{number:08d}.wal"

    def _path(self, number: int) -> Path:
        return self.folder / self._name(number)

    def _segments(self) -> list[int]:
        """The numbers of the segments in order. Raises DataDirError for a file that only looks like one."""
        numbers = []
        for name in os.listdir(self._folder_fd):
            if not (name.startswith("segment-") and name.endswith(".wal")):
                continue
            found = _SEGMENT.fullmatch(name)
            if not found or self._name(int(found[1])) != name or not (self.folder / name).is_file():
                raise self._foreign(name)
            numbers.append(int(found[1]))
        return sorted(numbers)

    def _foreign(self, name: str) -> DataDirError:
        what = f"data folder {self.folder}: {name!r} is no segment that this server wrote"
        return DataDirError(errno.EINVAL, f"{what}: move it elsewhere, or name another folder")

    def _read(self, number: int) -> memoryview:
        return memoryview(self._path(number).read_bytes())

    # The mark

    def _acknowledged(self) -> int | None:
        """The last sequence number that was acknowledged; None without a file. Raises JournalCorrupt."""
        path = self.folder / _ACKNOWLEDGED
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        found = []
        if data.startswith(_ACKNOWLEDGED_MAGIC) and len(data) == 3 * _SECTOR:
            for at in (_SECTOR, 2 * _SECTOR):
                sequence, _ = _SLOT.unpack_from(data, at)
                if data[at : at + _SLOT.size] == _slot(sequence) and at == _slot_at(sequence):
                    found.append(sequence)
        if found:
            return max(found)
        if self._accept_loss:
            return 0
        raise JournalCorrupt(
            errno.EIO, f"{path} is damaged: nobody knows how many records were acknowledged. {_WAY_OUT}"
        )

    def _make_acknowledged(self) -> None:
        """The mark anew, whole at any time, at ``self.sequence``."""
        data = bytearray(_ACKNOWLEDGED_MAGIC.ljust(3 * _SECTOR, b"\0"))
        at = _slot_at(self.sequence)
        data[at : at + _SLOT.size] = _slot(self.sequence)
        fd = self._create(f"{_ACKNOWLEDGED}.new")
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        names = f"{_ACKNOWLEDGED}.new", _ACKNOWLEDGED
        os.replace(*names, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        os.fsync(self._folder_fd)
        self._acknowledged_fd = os.open(_ACKNOWLEDGED, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._folder_fd)

    # Opening

    def replay(self) -> Iterator[_Record]:
        """Every record since the last reset, in order; a torn tail is cut off. Afterwards the journal takes appends.

        Raises JournalCorrupt, DataDirError; then nothing in the folder has changed.
        """
        acknowledged, all_numbers = self._acknowledged(), self._segments()
        begin = next((number for number in reversed(all_numbers) if self._begins_anew(number)), None)
        numbers = [number for number in all_numbers if begin is not None and number >= begin]
        self._check_beginning(acknowledged, all_numbers, numbers)
        stop = _Stop(0)
        for number, following in itertools.zip_longest(numbers, numbers[1:]):
            stop = yield from self._replay_segment(number)
            missing = following is not None and following != number + 1
            short = following is None and self.sequence < (acknowledged or 0)
            if not stop.why and not missing and not short:
                continue
            if missing or short or stop.surely_lost or following is not None:
                self._lose(number, stop, acknowledged or 0, self._name(number + 1) if missing else "")
                numbers = numbers[: numbers.index(number) + 1]
                break
        self._settle(all_numbers, numbers, stop)

    def _check_beginning(self, acknowledged: int | None, all_numbers: list[int], numbers: list[int]) -> None:
        where = f"data folder {self.folder}"
        if acknowledged is None and all_numbers and not self._accept_loss:
            raise JournalCorrupt(
                errno.EIO,
                f"{where}: {_ACKNOWLEDGED} is missing beside {self._name(all_numbers[0])}, which this version did not "
                f"write or somebody took apart. {_WAY_OUT}",
            )
        for number in all_numbers:
            if numbers and number < numbers[0] and not self._begins_like_one(self._read(number)):
                raise self._foreign(self._name(number))  # and not a remainder of a reset, to be deleted
        if numbers or (not acknowledged and not any(map(self._holds_something, all_numbers))):
            return
        what = f"{where}: {_ACKNOWLEDGED} tells of {acknowledged} records, and every segment is missing"
        if all_numbers:
            what = f"{self._path(all_numbers[0])}: its first record, or a segment before it, is missing or damaged"
        raise JournalCorrupt(
            errno.EIO, f"{what}, so nothing can be read. Restore the folder from a copy, or name another one"
        )

    def _holds_something(self, number: int) -> bool:
        """Whether it is more than a segment whose first record was torn."""
        data = self._read(number)
        return not self._begins_like_one(data) or _whole_record_after(data, 0)

    @staticmethod
    def _begins_like_one(data: memoryview) -> bool:
        """Also when it was cut off while it was made; a loss of power may leave zeros there."""
        return _MAGIC.startswith(bytes(data[: len(_MAGIC)]).rstrip(b"\0"))

    def _begins_anew(self, number: int) -> bool:
        with self._path(number).open("rb") as file:
            data = file.read(_RESET_AT + len(_RESET_TEXT))
            if not data.startswith(_MAGIC) or data[_RESET_AT:] != _RESET_TEXT:
                return False  # usually known from these few bytes
            data += file.read(_HEAD.unpack_from(data, len(_MAGIC))[1])
        return _read_frame(memoryview(data), len(_MAGIC)) is not None

    def _replay_segment(self, number: int) -> Generator[_Record, None, _Stop]:
        data, at = self._read(number), len(_MAGIC)
        if bytes(data[:at]) != _MAGIC:
            if self._begins_like_one(data):
                return _Stop(0, "the segment ends in its first bytes")
            return _Stop(0, "it does not begin like a segment of this version", surely_lost=True)
        while found := _read_frame(data, at):
            sequence, record, end = found
            if self.sequence and sequence != self.sequence + 1:
                why = f"record {sequence} follows record {self.sequence}: some are missing"
                return _Stop(at, why, surely_lost=True)
            self.sequence = sequence
            yield record
            at = end
        if at == len(data):
            return _Stop(at)
        if _whole_record_after(data, at):
            return _Stop(at, "a damaged record, with a whole one behind it", surely_lost=True)
        return _Stop(at, "a damaged record")

    def _lose(self, number: int, stop: _Stop, acknowledged: int, missing: str) -> None:
        """Acknowledged records are gone from here on: refuse, unless that is accepted."""
        if self._accept_loss:
            return
        what = f"{self._path(number)}, byte {stop.at}: {stop.why or 'the segment ends'}"
        if missing and not stop.why:
            what = f"data folder {self.folder}: {missing} is missing"
        if self.sequence < acknowledged:
            what += f"; records {self.sequence + 1} to {acknowledged} were acknowledged"
        raise JournalCorrupt(errno.EIO, f"{what}. {_WAY_OUT}")

    def _settle(self, all_numbers: list[int], numbers: list[int], stop: _Stop) -> None:
        """Make the folder what was read: cut the tail off, take up the newest segment, move the mark, delete the old.

        In this order: whoever dies on the way finds nothing worse at the next start.
        """
        if not numbers:  # nothing but a first start that was cut short
            self._make_acknowledged()
            self._number, self._older = max(all_numbers, default=0), all_numbers
            self._start_segment()
            return
        *self._older, last = numbers
        if self._accept_loss:
            self._put_aside(last, [number for number in all_numbers if number > last], stop)
        self._take_up(last, stop.at)
        self._make_acknowledged()
        for number in all_numbers:
            if number < numbers[0]:  # a reset was cut short while it deleted these
                self._delete(number)

    def _put_aside(self, number: int, later: list[int], stop: _Stop) -> None:
        """Keep, in a folder of its own, what an accepted loss drops: later segments, and a copy of the damaged one."""
        path = self._path(number)
        if not later and stop.at == path.stat().st_size:
            return
        self.set_aside = next(
            aside for aside in (self.folder / f"set-aside-{n}" for n in itertools.count(1)) if not aside.exists()
        )
        self.set_aside.mkdir()
        with (self.set_aside / path.name).open("xb") as copy:
            copy.write(self._read(number))
            copy.flush()
            os.fsync(copy.fileno())  # before the original is cut
        for other in later:
            self._path(other).rename(self.set_aside / self._name(other))

    def _take_up(self, number: int, at: int) -> None:
        fd = os.open(self._name(number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=self._folder_fd)
        self._fd, self._number = fd, number
        size = os.fstat(fd).st_size
        self.dropped_bytes = size - at
        if size > at:
            os.ftruncate(fd, at)
        self._size = at
        if not at:
            self._write([_MAGIC])
        os.fsync(fd)  # also what was whole, but not acknowledged: it can be read from now on

    def _start_segment(self) -> None:
        """A further segment takes the appends. When the disk refuses it, all is as it was."""
        if self._fd >= 0:
            self._flush(os.fsync, self._fd)
        name = self._name(self._number + 1)
        fd = self._create(name)
        try:
            os.write(fd, _MAGIC)
            os.fsync(fd)
            os.fsync(self._folder_fd)
            if os.fstat(fd).st_size != len(_MAGIC):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._delete(self._number + 1)
            raise
        if self._fd >= 0:
            os.close(self._fd)
            self._older.append(self._number)
        self._fd, self._number, self._size = fd, self._number + 1, len(_MAGIC)

    # Appending

    def _write(self, parts: list[Any]) -> None:
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            done = os.writev(self._fd, left)
            self._size += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def _flush(self, flush: Callable[[int], None], fd: int) -> None:
        try:
            flush(fd)
        except OSError as error:
            self._broken = str(error.strerror)  # after a failed flush nobody knows what reached the disk
            raise

    def append(self, meta: dict[str, Any], body: Any = b"") -> None:
        """Write one record down. Raises OSError (disk full, I/O error): then it is not written, or nothing more is."""
        if self._fd < 0:
            raise DataDirError(errno.EBADF, f"data folder {self.folder} is closed")
        if self._broken:
            raise DataDirError(errno.EIO, f"data folder {self.folder} takes no writes since: {self._broken}")
        if not os.fstat(self._fd).st_nlink:
            self._broken = f"{self._name(self._number)} was deleted under this server"
            raise DataDirError(errno.EIO, f"data folder {self.folder} takes no writes: {self._broken}")
        if self._size >= self._segment_bytes_max:
            self._start_segment()
        size, sequence = self._size, self.sequence + 1
        try:
            self._write(_frame(sequence, meta, body))
        except OSError as error:
            # Nothing may follow a half-written record: cut it off, or write no more.
            try:
                os.ftruncate(self._fd, size)
                self._size = size
            except OSError:
                self._broken = str(error.strerror)
            raise
        if self._always:
            self._flush(os.fdatasync, self._fd)
        self._flush(lambda fd: self._acknowledge(fd, sequence), self._acknowledged_fd)
        self.sequence = sequence

    def _acknowledge(self, fd: int, sequence: int) -> None:
        if os.pwrite(fd, _slot(sequence), _slot_at(sequence)) != _SLOT.size:
            raise OSError(errno.EIO, f"{_ACKNOWLEDGED} could not be written")
        if self._always:
            os.fdatasync(fd)

    def restart(self, meta: dict[str, Any]) -> None:
        """Begin anew with one record in a segment of its own, and delete what came before."""
        self._start_segment()
        self.append(meta)
        # It is done. What cannot be deleted now is deleted at the next start.
        with contextlib.suppress(OSError):
            self._flush(os.fsync, self._fd)
            self._flush(os.fsync, self._acknowledged_fd)
            while self._older:
                self._delete(self._older.pop(0))
            os.fsync(self._folder_fd)

    def close(self) -> None:
        """Flush and release the folder. Safe to call twice."""
        for name in ("_fd", "_acknowledged_fd", "_folder_fd"):  # the last one holds the lock
            fd = getattr(self, name)
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.fsync(fd)
                setattr(self, name, -1)
                os.close(fd)


class DurableStore(Store):
    """A Store whose content is in ``folder`` and comes back when the folder is opened again.

    Clocks as for ``Store``; what is in the folder keeps the times at which it was written. ``fsync``, ``accept_loss``:
    see the module's docstring; ``set_aside`` is the folder with what was lost, if anything was. Raises DataDirInUse,
    JournalCorrupt, DataDirError. ``close()`` (or ``with``) releases the folder.
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
        accept_loss: bool = False,
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
        journal = Journal(self.folder, fsync=fsync, segment_bytes_max=segment_bytes_max, accept_loss=accept_loss)
        try:
            count = 0
            for record in journal.replay():
                self._replay(journal, record)
                count += 1
            self._journal = journal
            if not count:
                self.reset()
        except BaseException as error:
            journal.close()
            if isinstance(error, OSError) and not isinstance(error, DataDirError):
                where = error.filename if isinstance(error.filename, str) else ""
                text = f"data folder {self.folder}: {where and where + ': '}{error.strerror}"
                raise DataDirError(error.errno, text) from None
            raise
        self.dropped_bytes, self.set_aside = journal.dropped_bytes, journal.set_aside

    def _meta(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "now_ms": self.now_ms(), "t_ms": self._monotonic_ms(), **fields}

    def _record(self, kind: str, fields: dict[str, Any], batch: pa.RecordBatch | None = None) -> None:
        if self._journal is None:
            return  # the beginnings, and what is replayed
        meta = self._meta(kind, fields)
        try:
            if kind == RESET:
                self._journal.restart(meta)
            elif batch is None:
                self._journal.append(meta)
            else:
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                self._journal.append(meta, memoryview(sink.getvalue()))
        except DataDirError:
            raise
        except OSError as error:
            raise DataDirError(error.errno, f"data folder {self.folder}: {error.strerror}") from None

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

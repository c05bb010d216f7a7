"""A disk in memory for the ranks of a run: nothing of it is on a real one, and power can fail.

All that lies below `ROOT` is on it, through `open`, `os`, `pathlib`, `shutil`, `tempfile` and the file systems of
`pyarrow.fs`. Every operation is a scheduling point. Whatever goes past Python, as Arrow's datasets and `OSFile` do,
meets a name that no disk can have.

When the machine of a rank goes down (`Disk.lose_power`), everything that the rank had not flushed is open: of a file's
content any first part may be there, in front of what was there at its last `fsync`; each new, changed or removed name
may be there or not, whatever became of others, until an `fsync` of its folder. A rename happens or does not. A process
that is killed loses nothing but what it had in buffers of its own: its machine lives on.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.dataset  # here, and not by whoever reads Parquet in the middle of a run
import pyarrow.fs

from ..disk import FaultyDisk
from .primitives import running
from .scheduler import Scheduler, SimulationError

#: Below a file that is no folder, so that not even root can make it on a real disk.
ROOT = "/dev/null/deltaproof-virtual-disk"
#: How long a flush to the disk takes, in seconds: uniform in this interval.
FLUSH_S = (0.0001, 0.005)
FIRST_DESCRIPTOR = 1 << 24  # greater than any that a kernel gives out


class _File:
    """Content as everybody sees it (``data``), and as it is on the disk for certain (``kept``)."""

    def __init__(self, number: int) -> None:
        self.number, self.data, self.kept = number, bytearray(), b""


class _Folder:
    """Names as everybody sees them (``entries``), and as they are on the disk for certain (``kept``)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: dict[str, _File | _Folder] = {}
        self.kept: dict[str, _File | _Folder] = {}


class _Change(NamedTuple):
    """What names of folders refer to from now on (None: nothing), all at once; made by ``rank``, not yet flushed."""

    rank: int | None
    names: tuple[tuple[_Folder, str, _File | _Folder | None], ...]


class Disk:
    """The disk of one run. All ranks see it; what each has not flushed is its own machine's.

    ``chance`` decides what a loss of power leaves. ``faulty``: by rank, the planned faults of its writes.
    """

    def __init__(self, scheduler: Scheduler, chance: random.Random) -> None:
        self._scheduler, self._chance = scheduler, chance
        self.faulty: dict[int, FaultyDisk] = {}
        self._numbers, self._descriptors = itertools.count(1), itertools.count(FIRST_DESCRIPTOR)
        self._root = _Folder(0)
        self._folders = [self._root]
        self._dirty: dict[_File, int | None] = {}  # by whom
        self._changes: list[_Change] = []
        self._open: dict[int, _Raw] = {}
        self._processes: dict[int | None, object] = {}

    # -- crashes -------------------------------------------------------------------------------------------------------

    def end_process(self, rank: int) -> None:
        """The process of a rank is gone: what its files hold in buffers reaches nobody."""
        self._processes.pop(rank, None)

    def lose_power(self, rank: int) -> None:
        """The machine of a rank goes down."""
        for file in [file for file, writer in self._dirty.items() if writer == rank]:
            part = self._chance.randint(0, len(file.data))
            file.data[part:] = file.kept[part:]
            self._flush_file(file)
        mine = [change for change in self._changes if change.rank == rank]
        self._changes = [change for change in self._changes if change.rank != rank]
        for change in mine:
            if self._chance.random() < 0.5:
                _apply(change, "kept")
        for folder in self._folders:
            folder.entries = dict(folder.kept)
        for change in self._changes:
            _apply(change, "entries")

    def contents(self) -> dict[str, bytes]:
        """Content of every file, by its path below `ROOT`."""
        return {path: bytes(file.data) for path, file in self._walk(self._root, "")}

    def _walk(self, folder: _Folder, prefix: str) -> Iterator[tuple[str, _File]]:
        for name, entry in sorted(folder.entries.items()):
            if isinstance(entry, _Folder):
                yield from self._walk(entry, f"{prefix}{name}/")
            else:
                yield prefix + name, entry

    # -- what the functions of `os` and `open` do ----------------------------------------------------------------------

    def open_or_fail(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`builtins.open`: planned faults of this rank's disk strike what is written."""
        faulty = self.faulty.get(self._rank)  # type: ignore[arg-type]
        return self.open(file, mode, *args, **kwargs) if faulty is None else faulty.open(file, mode, *args, **kwargs)

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[Any, int], int] | None = None,
    ) -> Any:
        kinds = [kind for kind in "rwax" if kind in mode]
        if len(kinds) != 1 or set(mode) - set("rwaxbt+") or len(set(mode)) < len(mode):
            raise ValueError(f"invalid mode: {mode!r}")
        flags = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}
        access = os.O_RDWR if "+" in mode else os.O_RDONLY if kinds == ["r"] else os.O_WRONLY
        if isinstance(file, int):
            raw = self._handle(file)
        elif opener is not None:
            raw = self._handle(opener(file, flags[kinds[0]] | access))
        else:
            raw = self._handle(self.os_open(file, flags[kinds[0]] | access))
        if isinstance(raw.node, _Folder):
            raw.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(file))
        if kinds == ["a"]:
            raw.seek(0, os.SEEK_END)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        kind = _Random if "+" in mode else _Reader if kinds == ["r"] else _Writer
        buffered: Any = kind(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name, node = self._find(path, dir_fd)
        if flags & os.O_TMPFILE == os.O_TMPFILE and isinstance(node, _Folder):
            node = _File(next(self._numbers))  # without a name
        elif node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            node = _File(next(self._numbers))
            self._change((folder, name, node))
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        elif isinstance(node, _Folder) and flags & os.O_ACCMODE:
            raise _error(errno.EISDIR, path)
        if flags & os.O_TRUNC and isinstance(node, _File):
            node.data.clear()
            self.wrote(node)
        descriptor = next(self._descriptors)
        self._open[descriptor] = _Raw(self, node, flags, descriptor, self._full(path, dir_fd))
        return descriptor

    def os_close(self, fd: int) -> None:
        self._point()
        self._handle(fd).close()

    def os_write(self, fd: int, data: Any) -> int:
        self._point()
        return self._handle(fd).write(data)

    def os_read(self, fd: int, size: int) -> bytes:
        self._point()
        return self._handle(fd).read(size) or b""

    def os_lseek(self, fd: int, position: int, how: int) -> int:
        return self._handle(fd).seek(position, how)

    def os_ftruncate(self, fd: int, length: int) -> None:
        self._point()
        self._handle(fd).truncate(length)

    def os_fstat(self, fd: int) -> os.stat_result:
        self._point()
        return self._stat(self._handle(fd).node)

    def os_fsync(self, fd: Any) -> None:
        """What makes a file's content stay or, of a folder, its names."""
        node = self._handle(fd).node
        if running() is not None:
            time.sleep(self._chance.uniform(*FLUSH_S))
        if isinstance(node, _File):
            self._flush_file(node)
            return
        for change in [c for c in self._changes if any(folder is node for folder, _, _ in c.names)]:
            self._changes.remove(change)
            _apply(change, "kept")

    os_fdatasync = os_fsync

    def os_stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(path, int):
            return self.os_fstat(path)
        return self._stat(self._there(path, dir_fd)[2])

    def os_lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self.os_stat(path, dir_fd=dir_fd)

    def os_access(self, path: Any, mode: int, **_: Any) -> bool:
        return self._find(path)[2] is not None

    def os_utime(self, path: Any, *_: Any, **__: Any) -> None:
        self._there(path)

    def os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        folder, name, node = self._find(path, dir_fd)
        if node is not None:
            raise _error(errno.EEXIST, path)
        made = _Folder(next(self._numbers))
        self._folders.append(made)
        self._change((folder, name, made))

    def os_rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        folder, name, node = self._there(path, dir_fd)
        if not isinstance(node, _Folder):
            raise _error(errno.ENOTDIR, path)
        if node.entries or node is self._root:
            raise _error(errno.ENOTEMPTY, path)
        self._change((folder, name, None))

    def os_unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        folder, name, node = self._there(path, dir_fd)
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        self._change((folder, name, None))

    os_remove = os_unlink

    def os_rename(self, src: Any, dst: Any, **_: Any) -> None:
        if not _is_mine(src) or not _is_mine(dst):
            raise _error(errno.EXDEV, dst)
        folder, name, node = self._find(src)
        new_folder, new_name, old = self._find(dst, point=False)
        if node is None:
            raise _error(errno.ENOENT, src)
        from_, to = f"{self._full(src)}/", f"{self._full(dst)}/"
        if to.startswith(from_) and to != from_:
            raise _error(errno.EINVAL, dst)
        if from_.startswith(to) and to != from_:
            raise _error(errno.ENOTEMPTY, dst)
        if isinstance(old, _File) and isinstance(node, _Folder):
            raise _error(errno.ENOTDIR, dst)
        if isinstance(old, _Folder) and isinstance(node, _File):
            raise _error(errno.EISDIR, dst)
        if old is node:
            return
        if isinstance(old, _Folder) and old.entries:
            raise _error(errno.ENOTEMPTY, dst)
        self._change((folder, name, None), (new_folder, new_name, node))

    os_replace = os_rename

    def os_listdir(self, path: Any = ".") -> list[str]:
        """Names in an order of their own, as disks have it."""
        node = self._handle(path).node if isinstance(path, int) else self._there(path)[2]
        if not isinstance(node, _Folder):
            raise _error(errno.ENOTDIR, path)
        return self._chance.sample(names := sorted(node.entries), len(names))

    def os_scandir(self, path: Any = ".") -> _Entries:
        where = self._handle(path).name if isinstance(path, int) else _text(path)
        return _Entries([_Entry(self, where, name, isinstance(path, int)) for name in self.os_listdir(path)])

    # -- within --------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int | None:
        task = self._scheduler.current
        return None if task is None else task.rank

    def _point(self) -> None:
        if (scheduler := running()) is not None:
            scheduler.point()

    def process(self) -> object:
        """Stands for the process of the running task as long as that lives."""
        return self._processes.setdefault(self._rank, object())

    def lives(self, rank: int | None, process: object) -> bool:
        return self._processes.get(rank) is process and not self._scheduler.reaping and _mounted is self

    def wrote(self, file: _File) -> None:
        self._dirty[file] = self._rank

    def closed(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _flush_file(self, file: _File) -> None:
        file.kept = bytes(file.data)
        self._dirty.pop(file, None)

    def _change(self, *names: tuple[_Folder, str, _File | _Folder | None]) -> None:
        self._changes.append(change := _Change(self._rank, names))
        _apply(change, "entries")

    def _handle(self, fd: Any) -> _Raw:
        number = fd if isinstance(fd, int) else fd.fileno()
        if number not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[number]

    def _full(self, path: Any, dir_fd: int | None = None) -> str:
        text = _text(path)
        return text if dir_fd is None or text.startswith("/") else f"{self._handle(dir_fd).name}/{text}"

    def _find(self, path: Any, dir_fd: int | None = None, point: bool = True) -> Any:
        """(folder, name in it, what lies there or None) of a path."""
        if point:
            self._point()
        parts = [part for part in self._full(path, dir_fd)[len(ROOT) :].split("/") if part not in ("", ".")]
        if ".." in parts:
            raise SimulationError(f"{path!r}: '..' is not simulated on the virtual disk; give paths without")
        if not parts:
            return self._root, "", self._root
        *above, name = parts
        folder = self._root
        for part in above:
            node = folder.entries.get(part)
            if not isinstance(node, _Folder):
                raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
            folder = node
        return folder, name, folder.entries.get(name)

    def _there(self, path: Any, dir_fd: int | None = None) -> Any:
        folder, name, node = self._find(path, dir_fd)
        if node is None:
            raise _error(errno.ENOENT, path)
        return folder, name, node

    def _stat(self, node: _File | _Folder) -> os.stat_result:
        is_file = isinstance(node, _File)
        kind = stat.S_IFREG | 0o644 if is_file else stat.S_IFDIR | 0o755
        size = len(node.data) if isinstance(node, _File) else 0
        return os.stat_result((kind, node.number, 0, 1, 0, 0, size, 0, 0, 0))


def _apply(change: _Change, to: str) -> None:
    for folder, name, node in change.names:
        names = getattr(folder, to)
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _error(code: int, path: Any) -> OSError:
    return OSError(code, os.strerror(code), path)


def _text(path: Any) -> str:
    return os.fsdecode(os.fspath(path)).rstrip("/")


class _Raw(io.RawIOBase):
    """An open file or folder. No scheduling point in here: the buffers around it hold locks of the real thread."""

    def __init__(self, disk: Disk, node: _File | _Folder, flags: int, descriptor: int, name: str) -> None:
        self.node, self.name, self._disk, self._descriptor = node, name, disk, descriptor
        self._rank, self._process = disk._rank, disk.process()
        self._access, self._appends, self._at = flags & os.O_ACCMODE, bool(flags & os.O_APPEND), 0

    def readable(self) -> bool:
        return self._access != os.O_WRONLY

    def writable(self) -> bool:
        return self._access != os.O_RDONLY

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def readinto(self, buffer: Any) -> int:
        part = self._content(self.readable())[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def write(self, data: Any) -> int:
        content, new = self._content(self.writable()), memoryview(data).cast("B")
        if not self._disk.lives(self._rank, self._process):
            return len(new)  # nobody's any more: what a dead process had in its buffers
        if self._appends:
            self._at = len(content)
        content.extend(bytes(max(0, self._at - len(content))))
        content[self._at : self._at + len(new)] = new
        self._at += len(new)
        self._disk.wrote(self.node)  # type: ignore[arg-type]
        return len(new)

    def truncate(self, size: int | None = None) -> int:
        content, length = self._content(self.writable()), self._at if size is None else size
        if self._disk.lives(self._rank, self._process):
            content.extend(bytes(max(0, length - len(content))))
            del content[length:]
            self._disk.wrote(self.node)  # type: ignore[arg-type]
        return length

    def seek(self, position: int, how: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content(True))}[how]
        if start + position < 0:
            raise _error(errno.EINVAL, self.name)
        self._at = start + position
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._disk.closed(self._descriptor)
        super().close()

    def _content(self, allowed: bool) -> bytearray:
        if isinstance(self.node, _Folder):
            raise _error(errno.EISDIR, self.name)
        if not allowed:
            raise io.UnsupportedOperation("the file is not open for that")
        return self.node.data


def _pointed(kind: Any) -> Any:
    """A buffered file whose calls are scheduling points; not those that a finaliser makes, which runs anywhere."""

    class Pointed(kind):
        def _point(self) -> None:
            if not self._finalizing and (scheduler := running()) is not None:
                scheduler.point()

        def _dealloc_warn(self, source: object) -> None:
            self._finalizing = True  # a text file around this one is being finalised

        def write(self, data: Any) -> int:
            self._point()
            return super().write(data)

        def read(self, size: int | None = -1) -> bytes:
            self._point()
            return super().read(size)

        def flush(self) -> None:
            self._point()
            super().flush()

    return Pointed


_Reader, _Writer, _Random = (_pointed(kind) for kind in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom))


class _Entry:
    """`os.DirEntry`."""

    def __init__(self, disk: Disk, folder: str, name: str, by_descriptor: bool) -> None:
        self._disk, self._path, self.name = disk, f"{folder}/{name}", name
        self.path = name if by_descriptor else self._path

    def __fspath__(self) -> str:
        return self.path

    def inode(self) -> int:
        return self.stat().st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._disk.os_stat(self._path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._disk._find(self._path, point=False)[2], _Folder)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._disk._find(self._path, point=False)[2], _File)

    def is_symlink(self) -> bool:
        return False


class _Entries:
    """What `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def close(self) -> None: ...


# -- Arrow's file systems ----------------------------------------------------------------------------------------------


class SameInstances(type):
    """`isinstance` and `issubclass` against the replaced class ask the real one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class _LocalFileSystem(pyarrow.fs.LocalFileSystem, metaclass=SameInstances):
    """Arrow's local file system, the virtual disk included; ``_prefix`` is what a subtree puts in front of paths."""

    _prefix = ""

    def get_file_info(self, asked: Any) -> Any:
        if isinstance(asked, str):
            return self._info(asked)
        if not isinstance(asked, pyarrow.fs.FileSelector):
            return [self._info(path) for path in asked]
        try:
            return self._below(asked.base_dir, asked.recursive)
        except FileNotFoundError:
            if asked.allow_not_found:
                return []
            raise

    def _below(self, folder: str, recursive: bool) -> list[pyarrow.fs.FileInfo]:
        found = []
        for name in os.listdir(self._prefix + folder):
            found.append(info := self._info(f"{folder}/{name}" if folder else name))
            if recursive and info.type == pyarrow.fs.FileType.Directory:
                found += self._below(info.path, recursive)
        return found

    def _info(self, path: str) -> pyarrow.fs.FileInfo:
        try:
            status = os.stat(self._prefix + path)
        except (FileNotFoundError, NotADirectoryError):
            return pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.NotFound)
        if stat.S_ISDIR(status.st_mode):
            return pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.Directory)
        return pyarrow.fs.FileInfo(path, pyarrow.fs.FileType.File, size=status.st_size)

    def open_input_file(self, path: str) -> pa.NativeFile:
        with open(self._prefix + path, "rb") as file:
            return pa.BufferReader(file.read())

    def open_input_stream(self, path: str, *_: Any, **__: Any) -> pa.NativeFile:
        return self.open_input_file(path)

    def open_output_stream(self, path: str, *_: Any, **__: Any) -> pa.NativeFile:
        return pa.PythonFile(open(self._prefix + path, "wb", buffering=0))  # no point below C++

    def create_dir(self, path: str, *, recursive: bool = True) -> None:
        (os.makedirs if recursive else os.mkdir)(self._prefix + path)

    def delete_file(self, path: str) -> None:
        os.unlink(self._prefix + path)

    def delete_dir(self, path: str) -> None:
        for info in self._below(path, recursive=False):
            (self.delete_file if info.is_file else self.delete_dir)(info.path)
        os.rmdir(self._prefix + path)

    def move(self, src: str, dest: str) -> None:
        os.replace(self._prefix + src, self._prefix + dest)


class _SubTree(pyarrow.fs.SubTreeFileSystem, metaclass=SameInstances):
    def __new__(cls, base_path: str, base_fs: Any) -> Any:
        if _mounted is None or not _is_mine(base_path):
            return _SubTree.__mro__[1](base_path, base_fs)
        system = _LocalFileSystem()
        system._prefix = f"{_text(base_path)}/"
        return system


class _AnyFileSystem(pyarrow.fs.FileSystem, metaclass=SameInstances):
    @staticmethod
    def from_uri(uri: Any) -> tuple[Any, str]:
        system, path = _AnyFileSystem.__mro__[1].from_uri(uri)
        return (_LocalFileSystem() if _is_mine(path) else system), path


# -- what is replaced --------------------------------------------------------------------------------------------------

_mounted: Disk | None = None


@contextlib.contextmanager
def mounted(disk: Disk) -> Iterator[None]:
    """While inside, `ROOT` is on this disk."""
    global _mounted
    _mounted = disk
    try:
        yield
    finally:
        _mounted = None


def _is_mine(file: Any) -> bool:
    """Whether a path, descriptor or file is one of the virtual disk."""
    if isinstance(file, int):
        return file >= FIRST_DESCRIPTOR
    if isinstance(file, str):
        return file.startswith(ROOT)
    if isinstance(file, bytes | os.PathLike):
        return _text(file).startswith(ROOT)
    return hasattr(file, "fileno") and _is_mine(file.fileno())


def _either(real: Callable[..., Any], ours: Callable[..., Any], places: int = 1) -> Callable[..., Any]:
    """A function that asks the mounted disk when one of its first arguments, or its ``dir_fd``, is the disk's."""

    def either(*args: Any, **kwargs: Any) -> Any:
        disk = _mounted
        if disk is not None and (
            any(map(_is_mine, args[:places])) or ("dir_fd" in kwargs and _is_mine(kwargs["dir_fd"] or 0))
        ):
            return ours(disk, *args, **kwargs)
        return real(*args, **kwargs)

    return either


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise SimulationError(
            f"os.{name} is not simulated on the virtual disk (in {args[1]!r}); use the process engine"
        )

    return refuse


#: (module, name, fake): see patches.py.
REPLACED: list[tuple[Any, str, Any]] = [
    (builtins, "open", _either(builtins.open, Disk.open_or_fail)),
    (io, "open", _either(io.open, Disk.open)),
    *(
        (
            os,
            name.removeprefix("os_"),
            _either(getattr(os, name.removeprefix("os_")), ours, 2 if ours is Disk.os_rename else 1),
        )
        for name, ours in vars(Disk).items()
        if name.startswith("os_")
    ),
    *(
        (os, name, _either(getattr(os, name), _refused(name), 2))
        for name in ("link", "symlink", "truncate", "chmod", "chown", "statvfs")
    ),
    (pyarrow.fs, "FileSystem", _AnyFileSystem),
    (pyarrow.fs, "LocalFileSystem", _LocalFileSystem),
    (pyarrow.fs, "SubTreeFileSystem", _SubTree),
]

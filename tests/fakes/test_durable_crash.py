"""The store in a folder when the process is killed or the power fails at any step, or a file is damaged: at random."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.fakes import durable
from deltaproof.fakes.durable import DataDirError, DurableStore, Fsync
from deltaproof.fakes.store import EntitySpec, Store, ViewSpec

from .kit import PROJECT, VERSION, VIEW, rows

SEGMENT_BYTES = 900  # two or three records
SECTOR = 512

# A change of the store, one record each: ("write", key), ("project", name), or one of ONCE.
Change = tuple[str, Any]
ONCE = [("entity", ""), ("view", ""), ("reset", "")]
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 9)),
        st.tuples(st.just("project"), st.sampled_from("abc")),
        st.sampled_from(ONCE),
    ),
    max_size=12,
).map(lambda drawn: [*ONCE[:2], *drawn])


def apply(store: Store, change: Change, number: int) -> None:
    kind, what = change
    if kind == "reset":
        store.reset()
    elif kind == "project":
        if what not in store.projects():
            store.create_project(what)
    elif kind == "entity":
        if not store.entities():
            store.create_entity(EntitySpec(PROJECT, "entity", "entity_id"))
    elif kind == "view":
        if store.entities() and not store.views():
            store.create_view(ViewSpec(PROJECT, VIEW, "entity"))
    elif store.views():
        store.write(PROJECT, VIEW, rows(["t"], [what], [[float(number)]]), version=VERSION, ts=number + 1)


def state_of(store: Store) -> Any:
    log = store.log(PROJECT, VIEW).drop_columns(["t_ms"]).to_pylist() if store.views() else None
    return store.projects(), store.entities(), log


def state_after(changes: Sequence[Change]) -> Any:
    store = Store(lambda: 1)
    for number, change in enumerate(changes):
        apply(store, change, number)
    return state_of(store)


Choose = Callable[[Sequence[Any], str], Any]


class Killed(BaseException):
    """Not an Exception: nobody may tidy up after it."""


class Disk:
    """What the journal takes for ``os``: dies at step ``dies_at``, having done a ``part`` of what it was to write.

    ``after_power_loss`` is the folder as a loss of power at that moment might leave it: what was not flushed is there,
    or is not, or is there in part, each file and each name for itself.
    """

    def __init__(self, folder: Path, dies_at: int = 0, part: float = 0.0) -> None:
        self.folder, self.part = folder, part
        self.steps, self.dies_at, self.dead = 0, dies_at, False
        self._held: dict[int, int] = {}  # a descriptor of each inode ever seen: so none is used again, all can be read
        self._opened: set[int] = set()  # by the process that lives here
        self._flushed: dict[int, bytes] = {}
        self._flushed_names: dict[str, int] = {}
        if folder.exists():
            self._flushed_names = self._names()
            self._flushed = {inode: self._content(inode) for inode in self._flushed_names.values()}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def revive(self, dies_at: int = 0, part: float = 0.0) -> None:
        """For another process; what was flushed is still known."""
        self.steps, self.dies_at, self.part, self.dead = 0, dies_at, part, False

    def _step(self) -> bool:
        if self.dead:
            return False
        self.steps += 1
        self.dead = self.steps == self.dies_at
        return self.dead

    def _names(self) -> dict[str, int]:
        found = {}
        for path in self.folder.iterdir():
            found[path.name] = path.stat().st_ino
            if found[path.name] not in self._held:
                self._held[found[path.name]] = os.open(path, os.O_RDONLY)
        return found

    def _content(self, inode: int) -> bytes:
        return os.pread(self._held[inode], 2**20, 0)

    def _written(self, data: bytes) -> bytes:
        """What reaches the file: all, or a part, and then the end."""
        return data[: round(len(data) * self.part)] if self._step() else data

    def writev(self, fd: int, parts: list[Any]) -> int:
        done = os.write(fd, self._written(b"".join(parts)))
        return self._or_die(done)

    def write(self, fd: int, data: bytes) -> int:
        return self._or_die(os.write(fd, self._written(bytes(data))))

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        return self._or_die(os.pwrite(fd, self._written(data), at))

    def _or_die(self, result: Any) -> Any:
        if self.dead:
            raise Killed
        return result

    def _whole(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        self._names()
        if self._step():
            raise Killed
        return getattr(os, name)(*arguments, **keywords)

    def open(self, path: Any, flags: int, *arguments: Any, **keywords: Any) -> Any:
        if flags & os.O_CREAT:
            fd = self._whole("open", path, flags, *arguments, **keywords)
            self._names()
            self._flushed.setdefault(os.fstat(fd).st_ino, b"")
        else:
            fd = os.open(path, flags, *arguments, **keywords)
        self._opened.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._opened.discard(fd)
        os.close(fd)

    def close_opened(self) -> None:
        """What the kernel does for a process that was killed."""
        while self._opened:
            os.close(self._opened.pop())

    def ftruncate(self, *arguments: Any) -> Any:
        return self._whole("ftruncate", *arguments)

    def unlink(self, *arguments: Any, **keywords: Any) -> Any:
        return self._whole("unlink", *arguments, **keywords)

    def replace(self, *arguments: Any, **keywords: Any) -> Any:
        return self._whole("replace", *arguments, **keywords)

    def fsync(self, fd: int) -> None:
        if self._step():
            raise Killed
        if self.dead:
            return
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._flushed_names = self._names()
        elif status.st_nlink:
            self._names()
            self._flushed[status.st_ino] = self._content(status.st_ino)

    fdatasync = fsync

    def after_power_loss(self, folder: Path, choose: Choose) -> None:
        """``choose(options, of what)``: the first option is what was flushed, and nothing more."""
        folder.mkdir()
        now = self._names()
        for name in sorted({*now, *self._flushed_names}):
            inodes = list(dict.fromkeys([self._flushed_names.get(name, 0), now.get(name, 0)]))
            if inode := choose(inodes, f"{name} is"):
                content = self._left_of(self._flushed.get(inode, b""), self._content(inode), name, choose)
                (folder / name).write_bytes(content)

    @staticmethod
    def _left_of(flushed: bytes, now: bytes, name: str, choose: Choose) -> bytes:
        if len(flushed) == len(now):
            sectors = [(flushed[at : at + SECTOR], now[at : at + SECTOR]) for at in range(0, len(now), SECTOR)]
            return b"".join(old if old == new else choose([old, new], name) for old, new in sectors)
        if len(now) < len(flushed):
            return choose([flushed, now], name)
        kept = choose(range(len(flushed), len(now) + 1), f"{name} has")
        return choose([now[:kept], now[:kept].ljust(len(now), b"\0")], name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_opened()
        while self._held:
            os.close(self._held.popitem()[1])


def live(
    folder: Path, disk: Disk, changes: Sequence[Change], before: list[Change], fsync: Fsync
) -> list[Change] | None:
    """One life of a server: open, change, close. Appends to ``before`` each change that was acknowledged; returns the
    one under way when it was killed, as a list of one; an empty one if it was opening or closing then; None: it lived.
    """
    under_way: list[Change] = []
    store = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "os", disk)
        try:
            store = DurableStore(folder, lambda: 1, fsync=fsync, segment_bytes_max=SEGMENT_BYTES)
            for change in changes:
                under_way = [change]
                apply(store, change, len(before))
                before.append(change)
            under_way = []
            store.close()
        except Killed:
            if store is not None and store._journal is not None:
                store._journal.close()
            disk.close_opened()
            return under_way
    return None


def check(folder: Path, acknowledged: list[Change], under_way: list[Change], where: str, disk: Disk) -> None:
    """Every acknowledged change is there; the one under way is there whole, or is not: then it is noted as done."""
    disk.revive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "os", disk)
        store = DurableStore(folder, lambda: 1)
        found = state_of(store)
        disk.dead = True  # so that closing flushes nothing
        store.close()
    wanted = [state_after(acknowledged), state_after([*acknowledged, *under_way])]
    assert found in wanted, (where, acknowledged, under_way)
    if found != wanted[0]:
        acknowledged += under_way


@pytest.fixture(scope="module")
def scratch() -> Iterator[Iterator[Path]]:
    """Fresh folders, in memory where there is such a place: thousands of flushes to a disk would take minutes."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="deltaproof-durable-", dir=place) as base:
        yield (Path(base) / str(number) for number in itertools.count())


LIVES = st.lists(st.tuples(CHANGES, st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=4)


@settings(max_examples=100)
@given(lives=LIVES, fsync=st.sampled_from(["os", "always"]))
def test_a_process_killed_at_any_step_loses_no_acknowledged_change(
    scratch: Iterator[Path], lives: list[tuple[list[Change], int, float]], fsync: Fsync
) -> None:
    folder, acknowledged = next(scratch), list[Change]()
    for number, (changes, dies_at, part) in enumerate(lives):
        with Disk(folder, dies_at, part) as disk:
            under_way = live(folder, disk, changes, acknowledged, fsync)
            check(folder, acknowledged, under_way or [], f"life {number}", disk)
    shutil.rmtree(folder)


@settings(max_examples=150)
@given(lives=LIVES, data=st.data())
def test_a_loss_of_power_at_any_step_loses_nothing_that_was_flushed(
    scratch: Iterator[Path], lives: list[tuple[list[Change], int, float]], data: st.DataObject
) -> None:
    """Some lives end by a kill alone: what they had not flushed is still to be lost at a later end."""
    folder, acknowledged = next(scratch), list[Change]()
    with ExitStack() as disks:
        disk = disks.enter_context(Disk(folder))
        for number, (changes, dies_at, part) in enumerate(lives):
            disk.revive(dies_at, part)
            under_way = live(folder, disk, changes, acknowledged, "always")
            if data.draw(st.booleans(), "power lost"):
                left = next(scratch)
                disk.after_power_loss(left, lambda options, what: data.draw(st.sampled_from(options), what))
                disks.close()
                shutil.rmtree(folder)
                folder, disk = left, disks.enter_context(Disk(left))
            check(folder, acknowledged, under_way or [], f"life {number}", disk)
    shutil.rmtree(folder)


@pytest.mark.parametrize("fsync", ["os", "always"])
def test_what_was_read_after_a_kill_survives_a_loss_of_power(scratch: Iterator[Path], fsync: Fsync) -> None:
    """A write that nobody acknowledged before the kill may be there afterwards; then it is there for good."""
    for dies_at in itertools.count(1):
        folder, left, acknowledged = next(scratch), next(scratch), list[Change]()
        with Disk(folder) as disk:
            assert live(folder, disk, ONCE[:2], acknowledged, fsync) is None
        with Disk(folder, dies_at, 1.0) as disk:
            under_way = live(folder, disk, [("write", 1)], acknowledged, fsync)
            check(folder, acknowledged, under_way or [], f"killed at step {dies_at}", disk)
            disk.after_power_loss(left, lambda options, what: options[0])
        with Disk(left) as disk:
            check(left, acknowledged, [], f"power lost after a kill at step {dies_at}", disk)
        if under_way is None:
            break
    assert dies_at > 10


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=200)
@given(changes=CHANGES, torn=st.booleans(), data=st.data())
def test_damage_is_refused_or_does_no_harm(
    scratch: Iterator[Path], changes: list[Change], torn: bool, data: st.DataObject
) -> None:
    """A byte flipped, a file removed or cut; with ``torn`` behind a last write that was cut off in the middle."""
    folder, acknowledged = next(scratch), list[Change]()
    with Disk(folder) as disk:
        assert live(folder, disk, changes, acknowledged, "os") is None
    if torn:
        with (
            Disk(folder, part=data.draw(st.floats(0, 1), "part")) as disk,
            pytest.MonkeyPatch.context() as patch,
            DurableStore(folder, segment_bytes_max=SEGMENT_BYTES) as store,
        ):
            patch.setattr(durable, "os", disk)
            disk.revive(1, disk.part)
            with pytest.raises(Killed):
                store.create_project("torn")
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())), "file")
    path = folder / name
    content = path.read_bytes()
    harm = data.draw(st.sampled_from(["flip", "remove", "cut"]), "harm")
    at = data.draw(st.integers(0, len(content) - 1), "at")
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[:at])
    else:
        path.write_bytes(
            content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255), "flip")]) + content[at + 1 :]
        )
    before, refusal = files_of(folder), ""
    try:
        with DurableStore(folder, lambda: 1) as store:
            found = state_of(store)
    except DataDirError as error:
        refusal = str(error)
    if refusal:
        assert "segment-" in refusal or "acknowledged" in refusal
        after = files_of(folder)
        del after["owner"]
        assert after == {name: content for name, content in before.items() if name != "owner"}, "looking changed it"
    else:
        wanted = [state_after(acknowledged)]
        if torn:
            wanted.append(state_after([*acknowledged, ("project", "torn")]))
        assert found in wanted, (name, harm, at)
        assert torn or not name.startswith("segment-"), "an acknowledged byte is damaged, and nobody says so"
    shutil.rmtree(folder)

"""The virtual disk answers as a real one does, and forgets what was not flushed when its machine goes down."""

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.reference.shards import Files, make_folder, sync_folder
from deltaproof.simulator.virtual import patches
from deltaproof.simulator.virtual.files import ROOT, Disk, mounted
from deltaproof.simulator.virtual.scheduler import RandomPolicy, RankClock, Scheduler, SimulationError


def simulate(
    *mains: Callable[[Disk], Any], seed: int = 0, then: Callable[[Disk], Any] = lambda disk: None
) -> list[Any]:
    """Run each as a rank with a disk that all share; what they return by rank, and what ``then`` says of the disk."""
    scheduler = Scheduler(RandomPolicy(seed), [RankClock() for _ in mains])
    disk = Disk(scheduler, random.Random(seed))
    results: list[Any] = [None] * len(mains)

    def rank(number: int) -> Callable[[], None]:
        def run() -> None:
            results[number] = mains[number](disk)

        return run

    with mounted(disk), patches.installed(scheduler, seed):
        for number in range(len(mains)):
            scheduler.spawn(rank(number), f"rank{number}", number)
        scheduler.run()
        assert scheduler.stuck == ""
        return [*results, then(disk)]


def in_every_world(main: Callable[[Disk], Any], then: Callable[[Disk], Any]) -> set[Any]:
    """What comes of it with each of many chances."""
    return {simulate(main, seed=seed, then=then)[-1] for seed in range(60)}


# -- as a real disk ----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "a/x", "a/y", "b/x", "a/x/deep"])
CALLS = st.one_of(
    st.tuples(st.just("mkdir"), NAMES),
    st.tuples(st.sampled_from(["write", "append", "change", "exclusive"]), NAMES, st.binary(max_size=5)),
    st.tuples(st.sampled_from(["read", "unlink", "rmdir", "listdir", "stat", "rmtree", "fsync"]), NAMES),
    st.tuples(st.sampled_from(["replace", "rename", "copy"]), NAMES, NAMES),
)


def call(root: str, what: str, name: str, *args: Any) -> Any:
    """The outcome of one call below a folder, which is either's, real or virtual."""
    path = f"{root}/{name}"
    modes = {"write": "wb", "append": "ab", "change": "r+b", "exclusive": "xb"}
    if what in modes:
        with open(path, modes[what]) as file:
            return file.write(args[0]), file.tell()
    if what == "read":
        with Path(path).open("rb") as file:
            return file.read(2), file.read()
    if what == "stat":
        return os.path.isdir(path), os.path.isfile(path), os.stat(path).st_size if os.path.isfile(path) else 0
    if what == "fsync":
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        return os.close(descriptor)
    if what == "rmtree":
        return shutil.rmtree(path)
    if what == "listdir":
        assert sorted(os.listdir(path)) == sorted(entry.name for entry in os.scandir(path))
        return sorted(os.listdir(path))
    if what == "copy":
        return shutil.copyfile(path, f"{root}/{args[0]}") and None
    return getattr(os, what)(path, *(f"{root}/{other}" for other in args))


def outcomes(root: str, calls: list[Any]) -> list[Any]:
    found: list[Any] = []
    for each in calls:
        try:
            found.append((each, call(root, *each)))
        except OSError as error:
            found.append((each, type(error).__name__))
    tree = sorted((str(p.relative_to(root)), p.read_bytes() if p.is_file() else None) for p in Path(root).rglob("*"))
    return [*found, tree]


@settings(max_examples=60, deadline=None)
@given(st.lists(CALLS, max_size=12))
def test_it_answers_as_a_real_disk_does(calls: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = outcomes(folder, calls)
    assert simulate(lambda _: outcomes(ROOT, calls))[0] == expected


def test_text_temporary_files_and_descriptors_work() -> None:
    def main(_: Disk) -> Any:
        with open(f"{ROOT}/text", "w", encoding="utf-8") as file:
            print("é", 1, file=file)
        with tempfile.NamedTemporaryFile("w+", dir=ROOT, delete=False) as named:
            named.write("x")
            named.seek(0)
            held = named.read()
        os.replace(named.name, f"{ROOT}/placed")
        with os.fdopen(os.open(ROOT, os.O_TMPFILE | os.O_RDWR), "w+b") as nameless:
            assert nameless.write(b"xyz") == 3
            assert sorted(os.listdir(ROOT)) == ["placed", "text"]
        descriptor, path = tempfile.mkstemp(dir=ROOT)
        os.write(descriptor, b"12345")
        os.ftruncate(descriptor, 3)
        os.lseek(descriptor, 1, os.SEEK_SET)
        rest = os.read(descriptor, 10)
        os.close(descriptor)
        os.unlink(path)
        return Path(f"{ROOT}/text").read_text(encoding="utf-8"), held, rest, sorted(os.listdir(ROOT))

    assert simulate(main)[0] == ("é 1\n", "x", b"23", ["placed", "text"])


def test_arrows_file_systems_see_it_too() -> None:
    def main(_: Disk) -> Any:
        files = Files(f"{ROOT}/kept")
        assert not files.exists()
        assert files.names() == []
        files.write("a/b", pa.py_buffer(b"12345"))
        local = pyarrow.fs.LocalFileSystem()
        local.create_dir(f"{ROOT}/other/deep")
        with local.open_output_stream(f"{ROOT}/other/deep/c") as stream:
            stream.write(b"xyz")
        local.move(f"{ROOT}/other/deep/c", f"{ROOT}/kept/c")
        local.delete_dir(f"{ROOT}/other")
        pq.write_table(pa.table({"a": [1]}), f"{ROOT}/written")
        assert pq.ParquetFile(f"{ROOT}/written").read().num_rows == 1
        sizes = [info.size for info in local.get_file_info([f"{ROOT}/kept/c", f"{ROOT}/other"])]
        assert isinstance(local, pyarrow.fs.LocalFileSystem)
        with pytest.raises(FileNotFoundError):
            local.get_file_info(pyarrow.fs.FileSelector(f"{ROOT}/other"))
        return files.names(), files.read("a/b"), sizes

    assert simulate(main)[0] == (["a/b", "c"], b"12345", [3, None])


def test_nothing_of_it_is_on_a_real_disk_and_nothing_goes_past_it() -> None:
    def main(_: Disk) -> None:
        Path(ROOT, "here").write_bytes(b"x")
        with pytest.raises(OSError, match="Not a directory"):
            pa.OSFile(f"{ROOT}/past", "wb")
        with pytest.raises(SimulationError, match=r"os.link is not simulated"):
            os.link(f"{ROOT}/here", f"{ROOT}/there")

    simulate(main)
    assert not os.path.lexists(ROOT)


def test_every_operation_is_a_scheduling_point() -> None:
    def main(disk: Disk) -> None:
        scheduler = disk._scheduler
        file = open(f"{ROOT}/a", "wb")  # noqa: SIM115
        steps: list[Callable[[], Any]] = [
            lambda: file.write(b"x"),
            file.flush,
            lambda: os.fsync(file.fileno()),
            file.close,
            lambda: os.stat(f"{ROOT}/a"),
            lambda: os.path.exists(f"{ROOT}/b"),
            lambda: os.replace(f"{ROOT}/a", f"{ROOT}/b"),
            lambda: os.listdir(ROOT),
            lambda: os.mkdir(f"{ROOT}/c"),
            lambda: sync_folder(ROOT),
            lambda: pyarrow.fs.LocalFileSystem().get_file_info(f"{ROOT}/b"),
            lambda: pyarrow.fs.LocalFileSystem().open_input_file(f"{ROOT}/b"),
            lambda: os.unlink(f"{ROOT}/b"),
            lambda: os.rmdir(f"{ROOT}/c"),
        ]
        for number, step in enumerate(steps):
            before = scheduler.points
            step()
            assert scheduler.points > before, number

    simulate(main)


# -- crashes -----------------------------------------------------------------------------------------------------------


def left(disk: Disk) -> frozenset[Any]:
    return frozenset(disk.contents().items())


def store(path: str, *, flush: bool, place: bool) -> None:
    with open(path, "wb") as file:
        file.write(b"1234")
        file.flush()
        if flush:
            os.fsync(file.fileno())
    if place:
        sync_folder(os.path.dirname(path))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("place", [False, True])
def test_what_was_not_flushed_may_be_gone_or_cut(flush: bool, place: bool) -> None:
    def main(disk: Disk) -> None:
        store(f"{ROOT}/a", flush=flush, place=place)
        disk.lose_power(0)

    contents = {b"1234"} if flush else {b"1234"[:n] for n in range(5)}
    expected = {frozenset({("a", content)}) for content in contents}
    assert in_every_world(main, left) == (expected if place else {*expected, frozenset()})


def test_a_rename_happens_or_does_not() -> None:
    def main(disk: Disk) -> None:
        store(f"{ROOT}/old", flush=True, place=True)
        store(f"{ROOT}/new", flush=True, place=True)
        os.replace(f"{ROOT}/new", f"{ROOT}/old")
        Path(f"{ROOT}/old").write_bytes(b"later")
        disk.lose_power(0)

    worlds = {frozenset(name for name, _ in world) for world in in_every_world(main, left)}
    assert worlds == {frozenset({"old", "new"}), frozenset({"old"})}


def test_a_folder_goes_with_all_that_is_in_it() -> None:
    def main(disk: Disk) -> None:
        os.makedirs(f"{ROOT}/a/b")
        store(f"{ROOT}/a/b/c", flush=True, place=True)
        disk.lose_power(0)

    assert in_every_world(main, left) == {frozenset(), frozenset({("a/b/c", b"1234")})}


def test_the_references_way_of_writing_survives_any_crash() -> None:
    def main(disk: Disk) -> None:
        Files(f"{ROOT}/kept").write("step/shard", b"1234")
        disk.lose_power(0)

    assert in_every_world(main, left) == {frozenset({("kept/step/shard", b"1234")})}


def test_one_machine_goes_down_and_the_others_keep_what_they_wrote() -> None:
    def main(disk: Disk) -> None:
        Path(f"{ROOT}/mine").write_bytes(b"1")
        disk.lose_power(1)

    for seed in range(20):
        found = simulate(main, lambda _: Path(f"{ROOT}/theirs").write_bytes(b"2"), seed=seed, then=left)[-1]
        assert ("mine", b"1") in found


def test_a_killed_process_loses_its_own_buffers_only() -> None:
    def main(disk: Disk) -> None:
        with contextlib.ExitStack() as stack:
            for name, flushed in (("a", True), ("b", False)):
                file = stack.enter_context(open(f"{ROOT}/{name}", "wb"))
                file.write(b"1234")
                if flushed:
                    file.flush()
            disk.end_process(0)
            disk._scheduler.kill(0)

    assert in_every_world(main, left) == {frozenset({("a", b"1234"), ("b", b"")})}


def test_what_a_dead_process_had_in_a_buffer_reaches_nobody_later() -> None:
    def main(disk: Disk) -> None:
        with open(f"{ROOT}/a", "wb") as file:
            file.write(b"1234")
            disk.end_process(0)

    assert simulate(main, then=left)[-1] == frozenset({("a", b"")})


def test_make_folder_waits_for_what_another_has_just_made() -> None:
    """A peer's new folder that is not flushed yet goes with the peer's machine, unless whoever uses it flushes it."""

    def main(disk: Disk) -> None:
        make_folder(f"{ROOT}/a")
        store(f"{ROOT}/a/b", flush=True, place=True)

    def peer(disk: Disk) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{ROOT}/a")

    def then(disk: Disk) -> Any:
        disk.lose_power(1)
        return left(disk)

    for seed in range(40):
        assert simulate(main, peer, seed=seed, then=then)[-1] == frozenset({("a/b", b"1234")})

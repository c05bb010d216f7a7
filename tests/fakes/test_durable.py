"""The store in a folder: what was acknowledged is there again, whatever happened to the process or the file's end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaproof.fakes.durable import DataDirError, DataDirInUse, DurableStore, JournalCorrupt
from deltaproof.fakes.errors import FakeError
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.store import EntitySpec, Store, ViewSpec

from .kit import PROJECT, VERSION, VIEW, ipc, make_view, rows

WAIT_S = 60


class Clock:
    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        self.ms += 1
        return self.ms


def content(store: Store) -> Any:
    """Everything that a restart must bring back, in comparable form."""
    return {
        "projects": [(name, store.created_ms("project", name)) for name in store.projects()],
        "entities": [
            (
                spec,
                store.created_ms("entity", spec.project, spec.name),
                store.number_of("entity", spec.project, spec.name),
            )
            for spec in store.entities()
        ],
        "views": [
            (
                spec,
                store.created_ms("view", spec.project, spec.name),
                store.number_of("view", spec.project, spec.name),
                store.log(spec.project, spec.name).to_pylist(),
                [
                    (
                        version,
                        store.high_water_ts(spec.project, spec.name, version),
                        [batch.to_pylist() for batch in store.scan(spec.project, spec.name, version)],
                    )
                    for version in store.versions(spec.project, spec.name)
                ],
            )
            for spec in store.views()
        ],
        "written": list(store._written_ms),
    }


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.wal"))


def fill(store: Store, count: int = 6) -> None:
    make_view(store)
    store.create_view(ViewSpec("other", "bytes", "things", value_type="uint8", ttl_s=5))
    for number in range(count):
        batch = rows(["a", "b"], [number % 3, number], [[number / 2, -0.0], [float(number)]])
        store.write(
            PROJECT, VIEW, batch, version=f"v{number % 2}", ts=100 - number, client="rank0", request_id=f"r{number}"
        )
    store.write("other", "bytes", rows(["a"], [2**63 - 1], [[0.0, 255.0]], pa.uint8()), version="ü ", ts=2**63 - 1)
    store.write(PROJECT, VIEW, rows([], [], []), version="v0", ts=1)  # has an arrival number all the same


def test_everything_is_there_again(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "data", Clock(), monotonic_ms=lambda: 12.5) as store:
        fill(store)
        store.create_project("third")
        store.create_view(ViewSpec(PROJECT, "gone", "entity"))
        store.create_view(ViewSpec(PROJECT, "after", "entity"))
        store.drop_view(PROJECT, "gone")
        store.create_entity(EntitySpec(PROJECT, "leaf", "id", "entity"))
        store.drop_entity(PROJECT, "leaf")
        before = content(store)
    with DurableStore(tmp_path / "data", Clock(1), projects=["ignored"]) as again:
        assert content(again) == before
        assert again.number_of("view", PROJECT, "after") == 4
        written = again.write(PROJECT, VIEW, rows(["a"], [9], [[1.0, 1.0]]), version="v0", ts=1)
        assert written.arrival == 8
        before = content(again)
    with DurableStore(tmp_path / "data", Clock(1)) as third:
        assert content(third) == before


def test_an_object_made_again_keeps_its_number(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store:
        make_view(store)
        store.create_view(ViewSpec(PROJECT, "second", "entity"))
        store.drop_view(PROJECT, VIEW)
        store.create_view(ViewSpec(PROJECT, VIEW, "entity"))
        assert [store.number_of("view", PROJECT, name) for name in (VIEW, "second")] == [1, 2]


def test_rows_expire_by_the_time_of_their_write_and_not_of_the_restart(tmp_path: Path) -> None:
    clock = Clock()
    with DurableStore(tmp_path, clock) as store:
        make_view(store, ttl_s=10)
        store.write(PROJECT, VIEW, rows(["a"], [1], [[1.0]]), version=VERSION, ts=5)
        clock.ms += 9_000
    with DurableStore(tmp_path, clock) as store:
        assert store.rows(PROJECT, VIEW, VERSION) == 1
        clock.ms += 2_000
        assert store.rows(PROJECT, VIEW, VERSION) == 0


def test_a_refused_write_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store:
        make_view(store)
        size = segments(tmp_path)[-1].stat().st_size
        for batch, ts in ((rows(["a"], [-1], [[1.0]]), 5), (rows(["a"], [1], [[float("nan")]]), 5)):
            with pytest.raises(FakeError):
                store.write(PROJECT, VIEW, batch, version=VERSION, ts=ts)
        assert segments(tmp_path)[-1].stat().st_size == size


def test_a_reset_empties_the_folder(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store:
        fill(store)
        store.reset(["a", "b"])
        assert len(segments(tmp_path)) == 1
        assert segments(tmp_path)[0].stat().st_size < 500
        before = content(store)
    with DurableStore(tmp_path) as store:
        assert store.projects() == ["a", "b"]
        assert content(store) == before


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_reset_that_died_while_deleting_is_finished_at_the_next_start(tmp_path: Path, left: int) -> None:
    folder = tmp_path / "data"
    with DurableStore(folder, segment_bytes_max=600) as store:
        fill(store)
    old = [(path, path.read_bytes()) for path in segments(folder)]
    assert len(old) > 3
    with DurableStore(folder) as store:
        store.reset(["a"])
    for path, data in old[left:-1]:
        path.write_bytes(data)  # as if these had not been deleted yet
    with DurableStore(folder) as store:
        assert (store.projects(), store.views()) == (["a"], [])
    assert len(segments(folder)) == 1


def test_segments_rotate_and_replay_in_order(tmp_path: Path) -> None:
    with DurableStore(tmp_path, segment_bytes_max=1000) as store:
        fill(store, 40)
        before = content(store)
    assert len(segments(tmp_path)) > 5
    with DurableStore(tmp_path, segment_bytes_max=1000) as store:
        assert content(store) == before


# The end of the file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[Any]]:
    """A folder, the file's size after each write, and the content after each."""
    folder = tmp_path_factory.mktemp("written")
    sizes, contents = [], []
    with DurableStore(folder, Clock()) as store:
        make_view(store)
        for number in range(4):
            store.write(PROJECT, VIEW, rows(["a"], [number], [[1.0, 2.0]]), version=VERSION, ts=5)
            sizes.append(segments(folder)[-1].stat().st_size)
            contents.append(content(store))
    return folder, sizes, contents


def damaged(written: tuple[Path, list[int], list[Any]], folder: Path, change: Callable[[bytearray], bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written[0], folder)
    path = segments(folder)[-1]
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


def test_a_tail_torn_at_any_byte_loses_that_record_only(
    written: tuple[Path, list[int], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of them, and nobody pulls the plug
    _, sizes, contents = written

    def cut_at(data: bytearray) -> bytes:
        return bytes(data[:cut])

    for cut in range(sizes[2], sizes[3]):
        path = damaged(written, tmp_path / "torn", cut_at)
        with DurableStore(path.parent, Clock()) as store:
            assert content(store) == contents[2]
            assert store.dropped_bytes == cut - sizes[2]
            if cut % 16:
                continue
            store.write(PROJECT, VIEW, rows(["a"], [9], [[3.0, 4.0]]), version=VERSION, ts=6)
            after = content(store)
        with DurableStore(path.parent, Clock()) as store:  # what was written behind the cut is sound
            assert content(store) == after
            assert store.dropped_bytes == 0


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_tail_is_dropped_and_damage_before_it_is_reported(
    written: tuple[Path, list[int], list[Any]], tmp_path: Path, data: st.DataObject
) -> None:
    _, sizes, contents = written
    at = data.draw(st.integers(0, sizes[3] - 1), "at")
    flip = data.draw(st.integers(1, 255), "flip")
    garbage = data.draw(st.binary(max_size=60), "garbage")

    def change(raw: bytearray) -> bytes:
        raw[at] ^= flip
        return bytes(raw) + garbage

    path = damaged(written, tmp_path / "damaged", change)
    if at >= sizes[2]:
        with DurableStore(path.parent, Clock()) as store:
            assert content(store) == contents[2]
    else:
        with pytest.raises(JournalCorrupt, match="segment-0"):
            DurableStore(path.parent)
        # Nothing was thrown away by looking.
        assert path.read_bytes()[:at] == (written[0] / path.name).read_bytes()[:at]
        assert path.stat().st_size == sizes[3] + len(garbage)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_behind_the_last_record_is_dropped(
    written: tuple[Path, list[int], list[Any]], tmp_path: Path, garbage: bytes
) -> None:
    path = damaged(written, tmp_path / "garbage", lambda data: bytes(data) + garbage)
    with DurableStore(path.parent, Clock()) as store:
        assert content(store) == written[2][3]
        assert store.dropped_bytes == len(garbage)


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_a_segment_torn_while_it_was_made_is_made_again(tmp_path: Path, kept: int) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
        before = content(store)
    last = segments(tmp_path)[-1]
    number = int(last.stem.partition("-")[2])
    (tmp_path / f"segment-{number + 1:08d}.wal").write_bytes(b"DPWAL001"[:kept])
    for _ in range(2):
        with DurableStore(tmp_path, segment_bytes_max=600) as store:
            assert content(store) == before
            store.write(PROJECT, VIEW, rows(["a"], [9], [[3.0, 4.0]]), version="v0", ts=6)
            before = content(store)


def test_a_folder_whose_first_start_was_cut_short_is_an_empty_one(tmp_path: Path) -> None:
    DurableStore(tmp_path / "whole").close()
    (whole,) = segments(tmp_path / "whole")
    data = whole.read_bytes()
    for cut in (0, 5, 8, 9, 30, len(data) - 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / whole.name).write_bytes(data[:cut])
        for _ in range(2):
            with DurableStore(folder) as store:
                assert store.projects() == [PROJECT]


def test_a_file_that_is_no_segment_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "segment-00000001.wal"
    path.write_bytes(b"something else, of a length beyond that of a head")
    with pytest.raises(JournalCorrupt, match=path.name):
        DurableStore(tmp_path)
    assert path.read_bytes().startswith(b"something else")


@pytest.mark.parametrize("which", [0, 2])
def test_a_missing_segment_is_reported(tmp_path: Path, which: int) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
    segments(tmp_path)[which].unlink()
    with pytest.raises(JournalCorrupt, match="missing"):
        DurableStore(tmp_path)


def test_a_torn_older_segment_is_reported(tmp_path: Path) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
    path = segments(tmp_path)[1]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(JournalCorrupt, match="later segments behind it"):
        DurableStore(tmp_path)


# The disk


def test_a_write_that_the_disk_refuses_is_not_made_and_later_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev

    def full(fd: int, parts: list[Any]) -> int:
        if sum(map(len, parts)) > 100:
            return real(fd, [memoryview(parts[0])[:7]])  # some of it fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with DurableStore(tmp_path) as store:
        make_view(store)
        store.write(PROJECT, VIEW, rows(["a"], [1], [[1.0]]), version=VERSION, ts=5)
        before, calls = content(store), []

        def failing(fd: int, parts: list[Any]) -> int:
            calls.append(fd)
            if len(calls) == 1:
                return full(fd, parts)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "writev", failing)
        with pytest.raises(OSError, match="No space left"):
            store.write(PROJECT, VIEW, rows(["a"], [2], [[1.0]]), version=VERSION, ts=5)
        assert len(calls) == 2
        monkeypatch.undo()
        assert content(store) == before
        store.write(PROJECT, VIEW, rows(["a"], [3], [[1.0]]), version=VERSION, ts=5)
        before = content(store)
    with DurableStore(tmp_path) as store:
        assert content(store) == before


def test_always_flushes_before_each_acknowledgement_and_a_failed_flush_ends_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    with DurableStore(tmp_path, fsync="always") as store:
        make_view(store)
        count = len(flushed)
        store.write(PROJECT, VIEW, rows(["a"], [1], [[1.0]]), version=VERSION, ts=5)
        assert len(flushed) == count + 1

        def broken(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", broken)
        with pytest.raises(OSError, match="Input/output"):
            store.write(PROJECT, VIEW, rows(["a"], [2], [[1.0]]), version=VERSION, ts=5)
        monkeypatch.setattr(os, "fdatasync", flushed.append)
        with pytest.raises(DataDirError, match="takes no writes since: Input/output"):
            store.write(PROJECT, VIEW, rows(["a"], [3], [[1.0]]), version=VERSION, ts=5)
        assert store.rows(PROJECT, VIEW, VERSION) == 1
    flushed.clear()
    with DurableStore(tmp_path / "os", fsync="os") as store:
        make_view(store)
    assert flushed == []


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with DurableStore(tmp_path), pytest.raises(DataDirInUse, match=f"in use by another server .process {os.getpid()}"):
        DurableStore(tmp_path)
    store = DurableStore(tmp_path)
    store.close()
    store.close()
    with pytest.raises(DataDirError, match="is closed"):
        store.create_project("late")
    DurableStore(tmp_path).close()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirError, match="file"):
        DurableStore(tmp_path / "file")


# The server


def test_the_control_planes_ids_survive(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store, FeatureStoreServer(store=store) as server:
        fill(store)
        store.drop_view(PROJECT, VIEW)
        number = server.state.id_of("view", "other", "bytes")
    with DurableStore(tmp_path) as store, FeatureStoreServer(store=store) as server:
        assert server.state.view(number).name == "bytes"
        server.reset()
        assert server.store.views() == []
    with DurableStore(tmp_path) as store:
        assert store.views() == []


SERVE = """
import sys
from deltaproof.fakes.server import run_forever
run_forever("127.0.0.1", 0, data_dir=sys.argv[1], ready=lambda port: print(port, flush=True))
"""


def test_kill_9_amid_concurrent_writes_loses_no_acknowledged_write(tmp_path: Path) -> None:
    acknowledged: list[tuple[int, int]] = []
    sent: set[tuple[int, int]] = set()
    enough = threading.Event()

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}"

    def work(base: str, client: int) -> None:
        with urllib3.PoolManager(retries=False, timeout=10) as http:
            for number in range(100_000):
                sent.add((client, number))
                body = ipc(
                    rows([f"t{client}"] * 50, list(range(number * 50, number * 50 + 50)), [[float(number)] * 8] * 50)
                )
                url = f"{base}{TABLE}/write_arrow?version={VERSION}&ts={number + 1}"
                try:
                    reply = http.request("POST", url, body=body, headers=LOGIN)
                except urllib3.exceptions.HTTPError:
                    return
                assert reply.status == 200
                acknowledged.append((client, number))
                if len(acknowledged) > 200:
                    enough.set()

    with DurableStore(tmp_path / "data") as store:
        make_view(store)
    process, base = start()
    threads = [threading.Thread(target=work, args=(base, client)) for client in range(4)]
    try:
        for thread in threads:
            thread.start()
        assert enough.wait(WAIT_S)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        for thread in threads:
            thread.join(WAIT_S)
    process, base = start()
    try:
        reply = urllib3.request("GET", f"{base}/_admin/log?project={PROJECT}&view={VIEW}", timeout=WAIT_S)
        log = pa.ipc.open_stream(reply.data).read_all()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)
    kept: dict[tuple[int, int], int] = {}
    for pk, key, value in zip(*(log.column(name).to_pylist() for name in ("pk", "sk", "embedding")), strict=True):
        assert value == [key // 50] * 8
        write = (int(pk[1:]), key // 50)
        kept[write] = kept.get(write, 0) + 1
    assert set(acknowledged) <= set(kept) <= sent
    assert set(kept.values()) == {50}  # each whole, and once


TABLE = f"/api/v1/tables/featurestore-cn-deltaproof/{PROJECT}/{VIEW}"
LOGIN = {"Authorization": "deltaproof-featuredb-token", "Auth": "cmFuazA6cGFzc3dvcmQ="}


def test_an_interrupted_disk_is_an_error_of_unknown_fate_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, parts: list[Any]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with DurableStore(tmp_path) as store, FeatureStoreServer(store=store) as server:
        make_view(store)
        url = f"http://{server.endpoint}{TABLE}/write_arrow?version={VERSION}&ts=5"
        body = ipc(rows(["a"], [1], [[1.0]]))
        monkeypatch.setattr(os, "writev", full)
        reply = urllib3.request("POST", url, body=body, headers=LOGIN, timeout=10)
        assert (reply.status, json.loads(reply.data)["Code"]) == (500, "InternalError")
        assert str(tmp_path) not in reply.data.decode()
        monkeypatch.undo()
        assert urllib3.request("POST", url, body=body, headers=LOGIN, timeout=10).status == 200
        assert store.rows(PROJECT, VIEW, VERSION) == 1

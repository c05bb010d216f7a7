"""The store in a folder: what was acknowledged is there again, whatever happened to the process or the file's end."""

from __future__ import annotations

import errno
import json
import os
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


# Files that are not as they were left: more of it, drawn at random, in test_durable_crash.py


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_a_segment_torn_while_it_was_made_is_made_again(tmp_path: Path, kept: int) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
        before = content(store)
    last = segments(tmp_path)[-1]
    number = int(last.stem.partition("-")[2])
    (tmp_path / f"segment-{number + 1:08d}.wal").write_bytes(b"DPWAL002"[:kept])
    for _ in range(2):
        with DurableStore(tmp_path, segment_bytes_max=600) as store:
            assert content(store) == before
            store.write(PROJECT, VIEW, rows(["a"], [9], [[3.0, 4.0]]), version="v0", ts=6)
            before = content(store)


@pytest.mark.parametrize(
    "name", ["segment-00000001.wal", "segment-1.wal", "segment-000000001.wal", "segment-abc.wal", "segment-\udcff.wal"]
)
@pytest.mark.parametrize("beside", ["nothing", "a store"])
def test_a_file_that_is_no_segment_is_named_and_left_alone(tmp_path: Path, name: str, beside: str) -> None:
    if beside == "a store":
        DurableStore(tmp_path).close()
    path = tmp_path / name
    path.write_bytes(b"something else, of a length beyond that of a head")
    with pytest.raises(DataDirError) as caught:
        DurableStore(tmp_path)
    text = str(caught.value)
    assert name.encode("ascii", "backslashreplace").decode() in text
    assert any(cure in text for cure in ("move it elsewhere", "Restore the folder from a copy"))
    assert text.encode(), "it can be printed"
    assert path.read_bytes().startswith(b"something else")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["segment-00000007.wal", "acknowledged", "owner"])
def test_what_is_no_file_is_named(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(DataDirError, match=name):
        DurableStore(tmp_path)


def test_a_disk_that_is_full_at_the_start_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, parts: list[Any]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(DataDirError, match=f"{tmp_path}: No space left"):
        DurableStore(tmp_path)
    monkeypatch.undo()
    with DurableStore(tmp_path) as store:
        assert store.projects() == [PROJECT]


@pytest.mark.parametrize(
    ("which", "phrase"),
    [
        (0, "or a segment before it, is missing"),
        (2, "segment-00000004.wal is missing; records .* were acknowledged"),
        (-1, "the segment ends; records .* were acknowledged"),
    ],
)
def test_a_missing_segment_is_reported_and_the_way_out_told(tmp_path: Path, which: int, phrase: str) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
    segments(tmp_path)[which].unlink()
    with pytest.raises(JournalCorrupt, match=phrase) as caught:
        DurableStore(tmp_path)
    assert "Restore the folder from a copy" in str(caught.value)


def test_a_folder_without_any_segment_is_reported_and_an_empty_one_is_new(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store:
        fill(store)
    for path in segments(tmp_path):
        path.unlink()
    with pytest.raises(JournalCorrupt, match="every segment is missing"):
        DurableStore(tmp_path)
    (tmp_path / "acknowledged").unlink()
    with DurableStore(tmp_path) as store:
        assert store.views() == []


def test_an_accepted_loss_keeps_what_came_before_and_sets_the_rest_aside(tmp_path: Path) -> None:
    with DurableStore(tmp_path, segment_bytes_max=600) as store:
        fill(store)
        arrivals = store.log(PROJECT, VIEW).column("arrival").to_pylist()
    whole = {path.name: path.read_bytes() for path in segments(tmp_path)}
    damaged = segments(tmp_path)[-3]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(JournalCorrupt, match="--accept-loss"):
        DurableStore(tmp_path)
    with DurableStore(tmp_path, segment_bytes_max=600, accept_loss=True) as store:
        aside = store.set_aside
        kept = store.log(PROJECT, VIEW).column("arrival").to_pylist()
        assert 0 < len(kept) < len(arrivals)
        assert kept == arrivals[: len(kept)]
        store.write(PROJECT, VIEW, rows(["a"], [9], [[3.0, 4.0]]), version="v0", ts=6)
        after = content(store)
    assert aside is not None
    lost = {path.name: path.read_bytes() for path in aside.iterdir()}
    assert lost == {**dict(list(whole.items())[-2:]), damaged.name: whole[damaged.name][:-3]}
    with DurableStore(tmp_path) as store:
        assert (content(store), store.set_aside) == (after, None)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"x" * 1536)])
def test_without_the_mark_a_loss_must_be_accepted(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    with DurableStore(tmp_path) as store:
        fill(store)
        before = content(store)
    harm(tmp_path / "acknowledged")
    with pytest.raises(JournalCorrupt, match="acknowledged"):
        DurableStore(tmp_path)
    for accept_loss in (True, False):
        with DurableStore(tmp_path, accept_loss=accept_loss) as store:
            assert (content(store), store.set_aside) == (before, None)


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
        assert len(flushed) == count + 2, "the segment, then the mark"

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


def test_no_file_of_the_folder_guards_it(tmp_path: Path) -> None:
    with DurableStore(tmp_path):
        for path in tmp_path.iterdir():
            path.rename(tmp_path / f"moved-{path.name}")
        with pytest.raises(DataDirInUse, match="process unknown"):
            DurableStore(tmp_path)
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    with DurableStore(moved) as store:  # a folder that is moved takes its server along
        moved.rename(tmp_path)
        make_view(store)
        store.reset(["a"])
        assert not moved.exists()
        with pytest.raises(DataDirInUse):
            DurableStore(tmp_path)
    with DurableStore(tmp_path) as store:
        assert store.projects() == ["a"]


def test_a_segment_deleted_under_the_server_ends_writing(tmp_path: Path) -> None:
    with DurableStore(tmp_path) as store:
        make_view(store)
        segments(tmp_path)[-1].unlink()
        for _ in range(2):
            with pytest.raises(DataDirError, match=r"takes no writes.*was deleted under this server"):
                store.write(PROJECT, VIEW, rows(["a"], [1], [[1.0]]), version=VERSION, ts=5)
        assert store.rows(PROJECT, VIEW, VERSION) == 0


def test_a_full_disk_at_the_change_of_segments_leaves_a_sound_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(fd: int, data: bytes) -> int:
        return real(fd, data[:3])

    with DurableStore(tmp_path, segment_bytes_max=100) as store:
        make_view(store)
        before = content(store)
        monkeypatch.setattr(os, "write", full)
        for act in (lambda: store.create_project("x"), store.reset):
            with pytest.raises(OSError, match="No space left"):
                act()
        monkeypatch.undo()
        assert content(store) == before
        store.create_project("y")
        before = content(store)
    with DurableStore(tmp_path) as store:
        assert content(store) == before


def test_the_names_of_new_folders_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = [], os.fsync

    def noted(fd: int) -> None:
        flushed.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    DurableStore(tmp_path / "new" / "data").close()
    assert {tmp_path.stat().st_ino, (tmp_path / "new").stat().st_ino} <= set(flushed)


def test_a_mark_that_cannot_be_written_ends_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with DurableStore(tmp_path) as store:
        make_view(store)
        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(OSError, match="Input/output"):
            store.create_project("x")
        monkeypatch.undo()
        with pytest.raises(DataDirError, match="takes no writes since: Input/output"):
            store.create_project("y")
        assert store.projects() == [PROJECT]


def test_a_reset_to_very_many_projects_is_read_again(tmp_path: Path) -> None:
    names = [f"{number:0255d}" for number in range(5000)]
    with DurableStore(tmp_path) as store:
        store.reset(names)
    with DurableStore(tmp_path) as store:
        assert store.projects() == names


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        assert "No space left on device" in reply.data.decode()
        assert str(tmp_path) not in reply.data.decode()
        monkeypatch.undo()
        (logged,) = caplog.records  # one line for whoever runs the server, and no traceback
        assert logged.getMessage() == f"route write_arrow: data folder {tmp_path}: No space left on device"
        assert logged.exc_info is None
        assert urllib3.request("POST", url, body=body, headers=LOGIN, timeout=10).status == 200
        assert store.rows(PROJECT, VIEW, VERSION) == 1

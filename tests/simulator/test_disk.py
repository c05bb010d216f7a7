"""Faults of the disk strike the planned write half-way; what is read back is what is whole under its final name."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltaproof.simulator.disk import FaultyDisk, corrupt, read_shards
from deltaproof.simulator.faults import DiskCrash, DiskError

ROWS = pa.table(
    {
        "embedding_name": ["item", "item"],
        "key_id": [1, 2],
        "ts": [10, 11],
        "embedding": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())),
    }
)


class Died(BaseException):
    pass


@pytest.fixture
def disk(tmp_path: Path) -> Callable[..., FaultyDisk]:
    fired: list[int] = []

    def die() -> None:
        raise Died

    def make(*faults: Any) -> FaultyDisk:
        made = FaultyDisk(list(enumerate(faults)), [str(tmp_path / "retained")], fired.append, die)
        made.fired = fired  # type: ignore[attr-defined]
        return made

    (tmp_path / "retained").mkdir()
    return make


def test_only_the_planned_writes_to_the_folder_fail_and_half_of_them_is_there(disk: Any, tmp_path: Path) -> None:
    faulty = disk(DiskError(rank=0, nth=2, count=2, error="EIO"))
    outcomes = []
    for number in range(4):
        with faulty.open(tmp_path / "retained" / str(number), "wb") as file:
            try:
                outcomes.append(file.write(b"12345678"))
            except OSError as error:
                outcomes.append(error.strerror)
    with faulty.open(tmp_path / "elsewhere", "wb") as file:
        file.write(b"12345678")
    assert outcomes == [8, "Input/output error", "Input/output error", 8]
    assert faulty.fired == [0, 0]
    assert [(tmp_path / "retained" / str(n)).read_bytes() for n in range(3)] == [b"12345678", b"1234", b"1234"]


def test_a_crash_comes_in_the_middle_of_its_write(disk: Any, tmp_path: Path) -> None:
    faulty = disk(DiskCrash(rank=0, nth=1))
    file = faulty.open(tmp_path / "retained" / "shard", "wb")
    with pytest.raises(Died):
        file.write(pa.py_buffer(b"12345678"))
    assert (tmp_path / "retained" / "shard").read_bytes() == b"1234"


def test_reading_is_left_alone(disk: Any, tmp_path: Path) -> None:
    (tmp_path / "retained" / "a").write_bytes(b"x")
    assert isinstance(disk(DiskCrash(rank=0)).open(tmp_path / "retained" / "a", "rb"), io.BufferedReader)


def keep(folder: Path, name: str, **manifest: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(ROWS, folder / f"{name}.parquet")
    content = (folder / f"{name}.parquet").read_bytes()
    whole = {"state": "acknowledged", "rows": 2, "sha256": hashlib.sha256(content).hexdigest(), **manifest}
    (folder / f"{name}.json").write_text(json.dumps(whole))
    return folder / f"{name}.parquet"


def test_a_whole_shard_is_read_and_what_did_not_end_is_not_there(tmp_path: Path) -> None:
    keep(tmp_path / "step-1", "rank-0")
    (tmp_path / "step-1" / "rank-1.parquet.tmp").write_bytes(b"half")
    [shard] = read_shards(tmp_path)
    assert shard.path == "step-1/rank-0"
    assert shard.damage == ""
    assert shard.acknowledged == ROWS


@pytest.mark.parametrize("state", ["spilled", "resent", None])
def test_only_what_was_acknowledged_counts_as_that(tmp_path: Path, state: str | None) -> None:
    path = keep(tmp_path, "a", state=state)
    if state is None:
        path.with_suffix(".json").unlink()
    [shard] = read_shards(tmp_path)
    assert (shard.damage, shard.acknowledged) == ("", None)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def torn_without_manifest(path: Path) -> None:
    torn(path)
    path.with_suffix(".json").unlink()


def flipped(path: Path) -> None:
    assert corrupt(path.parent, -1) == path.name


def gone(path: Path) -> None:
    path.unlink()


def torn_manifest(path: Path) -> None:
    path.with_suffix(".json").write_text('{"rows')


def another_count(path: Path) -> None:
    keep(path.parent, path.stem, rows=3)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (torn, "not the one that its manifest vouches for; the shard is torn"),
        (torn_without_manifest, "the shard is torn: 50 bytes"),
        (flipped, "not the one that its manifest vouches for"),
        (gone, "there is a manifest and no shard"),
        (torn_manifest, "the manifest is torn"),
        (another_count, "the shard has 2 rows, its manifest says 3"),
    ],
)
def test_every_damage_is_told(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(keep(tmp_path, "a"))
    [shard] = read_shards(tmp_path)
    assert said in shard.damage
    assert shard.acknowledged is None


def test_there_is_nothing_to_corrupt_in_an_empty_folder(tmp_path: Path) -> None:
    assert corrupt(tmp_path / "absent", 1) is None
    keep(tmp_path, "a")
    assert corrupt(tmp_path, 2) is None

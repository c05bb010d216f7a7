"""Retained shards on a disk that fails and loses power, and on an object store that fails; and every flipped bit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltaproof.fakes.objects import ErrorFault, ObjectStore, ResetFault
from deltaproof.reference import shards
from deltaproof.reference.delta import SCHEMAS
from deltaproof.reference.shards import Damaged, Entry, Files, Manifest, ShardError, ShardWriter, find, verify

T = "m.ebc.embedding_bags.t"
EXTREMES = [-(2**63), 2**63 - 1, 2**53 + 1, 0, -2]
ATTEMPTS = 3


class PowerCut(BaseException):
    """The machine went off. Nothing that runs can do anything about it."""


class Disk:
    """Stands in for `os` and `open` of shards.py, over a real folder: keeps in mind what would survive a power cut.

    File content survives once its file was flushed, a name once its folder was. `cut_at`: the operation in which the
    power goes, half done. `errors`: operation -> errno. What a failed flush leaves behind is never flushed by another.
    """

    def __init__(self, chance: random.Random, cut_at: int | None = None, errors: dict[int, int] | None = None) -> None:
        self.chance, self.cut_at, self.errors = chance, cut_at, errors or {}
        self.operations, self.is_off = 0, False
        self.dirty: dict[str, bool] = {}  # path of a file with content that would be lost -> a flush of it can succeed
        self.undo: dict[str, list[Callable[[], object]]] = {}  # folder -> how to take back each change since its flush
        self.open_files: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _begin(self, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation; the power goes, or it fails. `half`: what it did by then, perhaps."""
        if self.is_off:
            raise PowerCut
        self.operations += 1
        if self.operations == self.cut_at:
            if self.chance.random() < 0.5:
                half()
            self._cut()
            raise PowerCut
        if number := self.errors.get(self.operations):
            raise OSError(number, os.strerror(number))

    def _cut(self) -> None:
        self.is_off = True
        for path in self.dirty:
            if os.path.exists(path):
                os.truncate(path, self.chance.randint(0, os.path.getsize(path)))
        for changes in self.undo.values():
            for take_back in reversed(changes[self.chance.randint(0, len(changes)) :]):
                take_back()

    def mkdir(self, path: str) -> None:
        def make() -> None:
            os.mkdir(path)
            self._changed(path, lambda: shutil.rmtree(path, ignore_errors=True))

        self._begin(lambda: None if os.path.exists(path) else make())
        make()

    def _changed(self, path: str, take_back: Callable[[], object]) -> None:
        self.undo.setdefault(os.path.dirname(path), []).append(take_back)

    def file(self, path: str, mode: str) -> Any:
        self._begin()
        if not os.path.exists(path):
            self._changed(path, lambda: Path(path).unlink(missing_ok=True))
        file, self.dirty[path] = open(path, mode, buffering=0), True  # noqa: SIM115
        disk = self

        class File:
            def __enter__(self) -> File:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: Any) -> None:
                disk._begin(lambda: file.write(memoryview(data)[: len(data) // 2]))
                file.write(data)

            def flush(self) -> None: ...

            def fileno(self) -> int:
                disk.open_files[file.fileno()] = path
                return file.fileno()

        return File()

    def open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags)
        self.open_files[descriptor] = path
        return descriptor

    def fsync(self, descriptor: int) -> None:
        path = self.open_files[descriptor]
        try:
            self._begin()
        except OSError:
            self.dirty = {other: can and other != path for other, can in self.dirty.items()}
            raise
        if self.dirty.get(path):
            del self.dirty[path]
        self.undo.pop(path, None)

    def replace(self, old: str, new: str) -> None:
        def move() -> None:
            before = Path(new).read_bytes() if os.path.exists(new) else None
            os.replace(old, new)
            if old in self.dirty:
                self.dirty[new] = self.dirty.pop(old)
            self._changed(new, lambda: Path(new).unlink() if before is None else Path(new).write_bytes(before))

        self._begin(move)
        move()

    def unlink(self, path: str) -> None:
        self._begin()
        os.unlink(path)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "os", self)
            patch.setattr(shards, "open", self.file, raising=False)
            yield


@st.composite
def lives(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Starts of a rank: the steps it submits (some twice), what goes wrong on the disk, and where the power goes."""
    failures = st.dictionaries(st.integers(1, 40), st.sampled_from([errno.ENOSPC, errno.EIO]), max_size=6)
    one = st.fixed_dictionaries(
        {
            "steps": st.lists(st.integers(1, 3), min_size=1, max_size=3).map(sorted),
            "errors": failures,
            "cut_at": st.none() | st.integers(1, 60),
            "seed": st.integers(0, 2**16),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=3))


def live(kit: Any, root: Path, plan: list[dict[str, Any]], writer: type[ShardWriter], files: type[Files]) -> list[str]:
    """Do it; then read. What a reader must not find, and what it misses: nothing."""
    submitted: dict[tuple[str, int], list[Any]] = {}
    kept: set[tuple[str, int]] = set()
    settings, ts = kit.settings(), 0
    for number, life in enumerate(plan):
        disk = Disk(random.Random(life["seed"]), life["cut_at"], life["errors"])
        keep = writer(files(str(root / "retained")), settings, 0, 1, f"generation{number}")
        with disk.mounted(), contextlib.suppress(PowerCut):
            for seq, step in enumerate(life["steps"]):
                table = kit.delta(step, EXTREMES[: 1 + seq], float(number))
                stamps = np.arange(ts, ts + table.num_rows)
                ts += table.num_rows
                submitted[f"generation{number}", seq] = [
                    (row["key_id"], row["embedding"], ts) for row, ts in zip(table.to_pylist(), stamps, strict=True)
                ]
                for _ in range(ATTEMPTS):  # as the uploader does
                    with contextlib.suppress(OSError):
                        keep(step, seq, table, stamps)
                        kept.add((f"generation{number}", seq))
                        break
    return complaints(Files(str(root / "retained")), submitted, kept)


def complaints(files: Files, submitted: dict[tuple[str, int], list[Any]], kept: set[tuple[str, int]]) -> list[str]:
    found = find(files)
    wrong = [f"{path}: {why}" for path, why in found.damaged.items()]
    seen = set()
    for entry in found.entries:
        who = entry.manifest.generation, entry.manifest.seq
        try:
            verify(files, entry)
        except Damaged as error:
            wrong.append(f"{who}: {error}")
            continue
        seen.add(who)
        rows = pq.read_table(files.open(entry.shard)).to_pylist()
        if [(row["key_id"], row["embedding"], row["ts"]) for row in rows] != submitted.get(who):
            wrong.append(f"{who} holds {rows}")
    return wrong + [f"{who} was kept and is gone" for who in kept - seen]


@hypothesis.given(plan=lives())
@hypothesis.settings(max_examples=120)
def test_whatever_the_disk_does_a_manifest_vouches_for_an_acknowledged_step_and_no_kept_step_is_lost(
    kit: Any, plan: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert live(kit, Path(folder), plan, ShardWriter, Files) == []


class InPlace(Files):
    def _temporary(self, path: str) -> str:
        return path


class ManifestFirst(ShardWriter):
    def _publish(self, shard: pa.Buffer, entry: Entry) -> None:
        self._files.write(entry.path, entry.manifest.encode())
        self._files.write(entry.shard, shard)


class ByStep(ShardWriter):
    def _path(self, step: int, seq: int) -> str:
        return f"{self._folder}/step-{step:012d}/rank-{self._rank:05d}-of-{self._world_size:05d}"


class NoSync(Files):
    def _write_file(self, path: str, data: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "sync_folder", lambda folder: None)
            super()._write_file(path, data)


@pytest.mark.parametrize(
    ("writer", "files"),
    [(ShardWriter, InPlace), (ManifestFirst, Files), (ByStep, Files), (ShardWriter, NoSync)],
    ids=["torn-shard", "manifest-first", "overwrite", "folder-not-flushed"],
)
def test_the_disk_shows_known_bugs(kit: Any, writer: type[ShardWriter], files: type[Files]) -> None:
    def breaks(life: dict[str, Any], writer: type[ShardWriter], files: type[Files]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            return bool(live(kit, Path(folder), [life], writer, files))

    cuts: list[dict[str, Any]] = [
        {"steps": [1, 1], "errors": {}, "cut_at": cut, "seed": seed} for cut in range(1, 50) for seed in (0, 1)
    ]
    found = next(life for life in cuts if breaks(life, writer, files))
    assert not breaks(found, ShardWriter, Files)


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


READS = ["HeadObject", "ListObjects", "HeadBucket"]
OPERATIONS = ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "HeadObject"]


@st.composite
def object_faults(draw: st.DrawFn) -> list[ErrorFault | ResetFault]:
    made: list[ErrorFault | ResetFault] = []
    for number in range(draw(st.integers(1, 4))):
        where: dict[str, Any] = {
            "id": str(number),
            "operation": draw(st.sampled_from(OPERATIONS)),
            "skip": draw(st.integers(0, 5)),
            "count": draw(st.integers(1, 3)),
            "when": draw(st.sampled_from(["before-commit", "after-commit"])),
        }
        if draw(st.booleans()):
            made.append(ResetFault(**where))
        elif where["when"] == "before-commit":
            code = draw(st.sampled_from(["SlowDown", "InternalError", "AccessDenied"]))
            made.append(ErrorFault(**where, code=code))
        else:
            in_reply = where["operation"] == "CompleteMultipartUpload" and draw(st.booleans())
            made.append(ErrorFault(**where, code="InternalError", in_reply=in_reply))
    return made


@hypothesis.given(faults=object_faults())
@hypothesis.settings(max_examples=15)
def test_an_object_store_that_fails_gets_every_shard_whole_or_the_writer_says_so(
    kit: Any, running: ObjectStore, faults: list[ErrorFault | ResetFault]
) -> None:
    running.filesystem().delete_dir_contents(running.bucket, missing_dir_ok=True)
    files = Files(running.path("retained"), running.filesystem(retry_attempts_max=1))
    keep = ShardWriter(files, kit.settings(), 0, 1, "g", names={T: "t"})
    submitted: dict[tuple[str, int], list[Any]] = {}
    kept = set()
    running.set_faults(faults)
    for seq in range(3):
        table, stamps = kit.delta(seq, EXTREMES, float(seq)), np.arange(5) + 10 * seq
        rows = zip(table.to_pylist(), stamps, strict=True)
        submitted["g", seq] = [(row["key_id"], row["embedding"], ts) for row, ts in rows]
        for _ in range(ATTEMPTS):
            with contextlib.suppress(OSError):
                keep(seq, seq, table, stamps)
                kept.add(("g", seq))
                break
    running.set_faults([])
    assert complaints(Files(running.path("retained"), running.filesystem()), submitted, kept) == []


def test_arrow_itself_waits_for_a_store_that_asks_for_it(kit: Any, running: ObjectStore) -> None:
    files = Files(running.path("patient"), running.filesystem())
    running.set_faults([ErrorFault(id="busy", operation="UploadPart", code="SlowDown")])
    ShardWriter(files, kit.settings(), 0, 1, "g")(1, 0, kit.delta(1, EXTREMES), np.arange(5))
    assert running.fired() == {"busy": 1}
    running.set_faults([])
    [entry] = find(files).entries
    verify(files, entry)


def test_a_shard_larger_than_one_part_is_not_published_when_a_part_is_refused(kit: Any, running: ObjectStore) -> None:
    files = Files(running.path("large"), running.filesystem(retry_attempts_max=1))
    running.set_faults([ErrorFault(id="part", operation="UploadPart", code="AccessDenied", skip=1)])
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        files.write("a.parquet", bytes(25 << 20))
    running.set_faults([])
    assert files.names() == []


def test_a_place_is_named_by_uri_and_credentials_come_from_the_environment(
    kit: Any, running: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in running.environment().items():
        monkeypatch.setenv(name, value)
    files = Files(running.uri("by/uri"))
    running.set_faults([ErrorFault(id=name, operation=name, code="AccessDenied", count=9) for name in READS])
    files.prepare()  # write-only logins are fine
    running.set_faults([])
    assert not files.exists()
    ShardWriter(files, kit.settings(), 3, 8, "g")(7, 0, kit.delta(7, [1]), np.array([5]))
    assert files.exists()
    assert [entry.shard for entry in find(files).entries] == [
        "v/v1/step-000000000007/rank-00003-of-00008.g-000000.parquet"
    ]


@pytest.mark.parametrize("where", ["", "s3://key:secret@bucket/prefix", "s3://bucket?nonsense=1", "gopher://place"])
def test_a_place_that_cannot_be_used_is_refused_and_no_secret_is_repeated(where: str) -> None:
    with pytest.raises(ShardError) as error:
        Files(where)
    assert "secret" not in str(error.value)


def test_a_place_may_be_relative_or_hold_characters_that_mean_something_in_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Files("a%20b ü#?").write("x.json", b"1")
    assert (tmp_path / "a%20b ü#?" / "x.json").read_bytes() == b"1"


@hypothesis.given(
    version=st.sampled_from(["..", ".", "a/../../b", "Ü" * 200, "a\\b:c", " x ", "%2E%2E", "+"])
    | st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=256).filter(str.strip),
    name=st.text(max_size=200),
)
@hypothesis.settings(max_examples=40)
def test_names_of_any_letters_and_length_come_back_and_stay_below_the_root(kit: Any, version: str, name: str) -> None:
    hypothesis.assume(version.strip().lower() != "default")
    with tempfile.TemporaryDirectory() as folder:
        files = Files(f"{folder}/root")
        keep = ShardWriter(files, kit.settings(version=version), 0, 1, "g", names={T: name, "other": "x"})
        keep(1, 0, kit.delta(1, EXTREMES), np.full(5, 9))
        assert os.listdir(folder) == ["root"]
        [entry] = find(files).entries
        assert (entry.manifest.view, entry.manifest.version) == ("v", version)
        assert entry.path.count("/") == 3
        rows = pq.read_table(files.open(entry.shard)).to_pydict()
        assert rows["embedding_name"] == [name] * 5
        assert rows["table_fqn"] == [T] * 5
        assert rows["key_id"] == EXTREMES
        assert keep.ts_floor() == 9


def test_versions_that_begin_alike_or_differ_in_what_is_escaped_get_folders_of_their_own() -> None:
    texts = ["a" * 256, "a" * 255, "a" * 255 + "b", "..", "%2E%2E", "%2e%2e", "", "A", "a", "ü", "%C3%BC", "+"]
    assert len({shards.folder_name(text) for text in texts}) == len(texts)


def test_rows_of_any_bits_come_back_bit_by_bit_and_int8_takes_one_byte(kit: Any, tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    files, rows, dim = Files(str(tmp_path)), 3000, 68
    floats = pa.array(chance.integers(0, 2**32, rows * dim, np.uint32).view(np.float32))
    numbers = pa.array(chance.integers(0, 256, rows * dim, np.uint8))
    kinds: list[tuple[Literal["float32", "int8"], pa.Array]] = [("float32", floats), ("int8", numbers)]
    for seq, (kind, values) in enumerate(kinds):
        table = kit.delta(1, np.arange(rows))
        lists = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * dim), values)
        table = table.set_column(table.schema.get_field_index("embedding"), SCHEMAS[kind].field("embedding"), lists)
        ShardWriter(files, kit.settings(), 0, 1, kind)(1, seq, table, np.arange(rows))
        [entry] = (entry for entry in find(files).entries if entry.manifest.generation == kind)
        read = pq.read_table(files.open(entry.shard))["embedding"].combine_chunks()
        assert read.type == lists.type
        assert read.values.to_numpy().tobytes() == values.to_numpy().tobytes()
        if kind == "int8":
            assert entry.manifest.shard_bytes < rows * (dim + 60)


@hypothesis.given(
    counts=st.lists(st.integers(1, 700), min_size=1, max_size=40), group_rows=st.integers(1, 2000), wide=st.booleans()
)
@hypothesis.settings(max_examples=50)
def test_a_row_group_ends_where_a_batch_ends_and_is_not_much_larger_than_wanted(
    kit: Any, counts: list[int], group_rows: int, wide: bool
) -> None:
    rows = sum(counts)
    table, stamps = kit.delta(1, np.arange(rows)), np.repeat(np.arange(len(counts)), counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "GROUP_ROWS", 10**9 if wide else group_rows)
        patch.setattr(shards, "GROUP_BYTES", group_rows * table.nbytes // rows if wide else 10**9)
        with tempfile.TemporaryDirectory() as folder:
            ShardWriter(Files(folder), kit.settings(), 0, 1, "g")(1, 0, table, stamps)
            [path] = Path(folder).rglob("*.parquet")
            file = pq.ParquetFile(path)
            groups = [file.read_row_group(group, ["ts"])["ts"].to_pylist() for group in range(file.num_row_groups)]
    assert [ts for group in groups for ts in group] == stamps.tolist()
    assert all(not set(one) & set(other) for one, other in itertools.pairwise(groups))
    assert all(len(group) <= group_rows + max(counts) for group in groups)
    assert len(groups) <= 2 * rows // group_rows + 1


def test_an_empty_delta_is_kept_too(kit: Any, tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    ShardWriter(files, kit.settings(), 0, 1, "g")(4, 2, SCHEMAS["float32"].empty_table(), np.empty(0, np.int64))
    [entry] = find(files).entries
    verify(files, entry)
    assert (entry.manifest.rows, entry.manifest.ts_first, entry.manifest.ts_last) == (0, 0, 0)


def kept_one(kit: Any, root: Path) -> Entry:
    ShardWriter(Files(str(root)), kit.settings(version="v-ü"), 0, 1, "g")(1, 0, kit.delta(1, EXTREMES), np.arange(5))
    return find(Files(str(root))).entries[0]


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_seen(kit: Any, tmp_path: Path) -> None:
    text = (tmp_path / kept_one(kit, tmp_path).path).read_bytes()
    assert Manifest.decode(text).version == "v-ü"
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            Manifest.decode(bytes(changed))
    for end in range(len(text)):
        with pytest.raises(Damaged):
            Manifest.decode(text[:end])


def test_every_flipped_bit_and_every_cut_of_a_shard_is_seen(kit: Any, tmp_path: Path) -> None:
    entry, files = kept_one(kit, tmp_path), Files(str(tmp_path))
    path = tmp_path / entry.shard
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 37):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged, match="not the"):
            verify(files, entry)
    for end in range(0, len(content), 101):
        path.write_bytes(content[:end])
        with pytest.raises(Damaged, match="not the"):
            verify(files, entry)
    path.write_bytes(content)
    verify(files, entry)
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        verify(files, entry)


def test_a_manifest_of_a_later_format_says_so(kit: Any, tmp_path: Path) -> None:
    import msgspec

    manifest = msgspec.structs.replace(kept_one(kit, tmp_path).manifest, format=2)
    with pytest.raises(Damaged, match="format 2; this deltaproof reads 1"):
        Manifest.decode(manifest.encode())


def test_a_full_disk_gets_its_room_back_and_the_error_names_the_cause(kit: Any, tmp_path: Path) -> None:
    disk = Disk(random.Random(0), errors=dict.fromkeys(range(1, 200), 0))
    keep = ShardWriter(Files(str(tmp_path)), kit.settings(), 0, 1, "g")
    with disk.mounted():
        keep(1, 0, kit.delta(1, EXTREMES), np.arange(5))
    writes = disk.operations // 2  # of the shard; the manifest's are as many
    for operation in range(1, 2 * writes):
        root = tmp_path / str(operation)
        disk = Disk(random.Random(0), errors={operation: errno.ENOSPC})
        keep = ShardWriter(Files(str(root)), kit.settings(), 0, 1, "g")
        with disk.mounted(), pytest.raises(OSError, match="No space left"):
            keep(1, 0, kit.delta(1, EXTREMES), np.arange(5))
        assert not list(root.rglob("*.tmp"))


def test_folders_that_cannot_be_flushed_are_taken_as_they_are(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def refuse(number: int) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(number, os.strerror(number))
            flush(descriptor)

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    kept_one(kit, tmp_path / "mounted-bucket")
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        kept_one(kit, tmp_path / "disk")


def test_a_step_that_was_retained_and_then_spilled_has_both(kit: Any, tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    for state, first in (("acknowledged", 10), ("spilled", 20)):
        keep = ShardWriter(files, kit.settings(), 0, 1, "g", state=state)  # type: ignore[arg-type]
        keep(1, 0, kit.delta(1, EXTREMES), np.arange(5) + first)
    found = find(files).entries
    assert [(e.manifest.state, e.manifest.ts_first, e.manifest.ts_last) for e in found] == [
        ("spilled", 20, 24),
        ("acknowledged", 10, 14),
    ]
    for entry in found:
        verify(files, entry)
    assert keep.ts_floor() == 24
    assert ShardWriter(files, kit.settings(version="v2"), 0, 1, "h").ts_floor() == 0


def test_shards_without_a_manifest_are_counted_and_other_files_left_alone(kit: Any, tmp_path: Path) -> None:
    entry = kept_one(kit, tmp_path)
    (tmp_path / entry.path).unlink()
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "rank-0-of-1.json.tmp").write_text("{")
    found = find(Files(str(tmp_path)))
    assert (found.entries, found.damaged, found.unverified) == ([], {}, [entry.shard])


def test_an_object_store_that_has_less_than_it_was_given_is_not_believed(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    told = types.SimpleNamespace(size=3)
    store = types.SimpleNamespace(
        open_output_stream=lambda path: pa.BufferOutputStream(), get_file_info=lambda path: told
    )
    files._is_local, files._system = False, store
    files.write("three", b"abc")
    with pytest.raises(OSError, match="wrote 4 bytes to 'four', and the object store says it has 3"):
        files.write("four", b"abcd")


def test_a_place_is_there_once_something_is_in_it(tmp_path: Path) -> None:
    files = Files(str(tmp_path / "new"))
    assert not files.exists()
    files.write("v/x.json", b"1")
    assert files.exists()


def test_a_refused_place_is_named_without_its_query() -> None:
    with pytest.raises(ShardError, match=r"^'s3://bucket' is no place for shards: ") as error:
        Files("s3://bucket?hush=secret")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "where", ["s3://bucket?region=%zz&hush=hunter2", "s3://buc ket?hush=hunter2", "gopher://place?hush=hunter2"]
)
def test_what_arrow_says_of_a_refused_place_repeats_no_query_either(where: str) -> None:
    with pytest.raises(ShardError, match=r"is no place for shards: .*(parse|Unrecognized)") as error:
        Files(where)
    assert "hunter2" not in str(error.value)


def test_a_place_where_no_file_can_be_made_is_refused_before_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ShardError, match=r"cannot be used as a place for shards: .*Not a directory"):
            Files(str(tmp_path / place)).prepare()
    Files(str(tmp_path / "new" / "folder")).prepare()
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_manifest_with_a_field_more_is_damaged_and_none_can_be_changed(kit: Any, tmp_path: Path) -> None:
    manifest = kept_one(kit, tmp_path).manifest
    text = manifest.encode()
    assert Manifest.decode(text) in {Manifest.decode(text)}  # can be hashed: nobody changes it
    with pytest.raises(Damaged, match="unknown field `more`"):
        Manifest.decode(text.replace(b"{", b'{"more": 1,', 1))
    with pytest.raises(AttributeError):
        manifest.step = 2  # type: ignore[misc]


def test_no_column_of_a_shard_may_have_nulls(kit: Any, tmp_path: Path) -> None:
    schema = pq.read_schema(tmp_path / kept_one(kit, tmp_path).shard)
    assert schema.names == ["embedding_name", "key_id", "embedding", "ts", "table_fqn", "global_step", "rank"]
    assert not any(field.nullable for field in schema)


def test_a_restart_gets_the_keys_of_its_own_state_above_a_ts_and_of_whole_shards_only(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    files = Files(str(tmp_path))
    for first, letters in enumerate(["acknowledged", "spilled"]):
        state: Any = "".join(list(letters))  # equal to what a manifest has, but another object
        keep = ShardWriter(files=files, settings=kit.settings(), rank=0, world_size=1, generation="g", state=state)
        for seq in range(3):
            keep(seq, seq, kit.delta(seq, [10 * first + seq]), np.array([5 + seq]))

    def after(ts: int) -> list[int]:
        return [key for table in keep.keys_after(ts) for key in table["key_id"].to_pylist()]

    assert after(4) == [10, 11, 12]
    assert after(5) == [11, 12]
    assert after(7) == []
    next(tmp_path.rglob("*-000001-spilled.parquet")).write_bytes(b"")
    assert after(5) == [12]
    for table in keep.keys_after(6):
        assert table.column_names == ["table_fqn", "key_id"]


def test_the_options_of_a_writer_are_given_by_name(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="positional"):
        ShardWriter(Files(str(tmp_path)), kit.settings(), 0, 1, "g", {T: "t"})  # type: ignore[call-arg]


def test_row_groups_are_as_large_as_documented() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "readback.md").read_text()
    assert f"about {shards.GROUP_ROWS:,} rows or {shards.GROUP_BYTES >> 20} MB" in docs

"""Readback and resend against a model: any shards, any store, any damage, any death of the process."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltaproof.fakes.feature_store_py import in_process_client
from deltaproof.fakes.server.faults import FaultPlan, PartialFault, StatusFault
from deltaproof.fakes.store import Store, ViewSpec
from deltaproof.reference import readback, shards
from deltaproof.reference.delta import SCHEMAS
from deltaproof.reference.readback import (
    BAD,
    VERDICTS,
    Newest,
    Readback,
    ReadbackError,
    Report,
    Resend,
    ResendReport,
    StoreReader,
    Survey,
    choose,
    same_bits,
)
from deltaproof.reference.shards import Files, ShardWriter, State, find, verify
from deltaproof.reference.uploader import AttemptError, Uploader, UploadError

NAMES = ["m.ebc.embedding_bags.t", "m.ec.embeddings.t", "ü" * 200]
KEYS = [-(2**63), 2**63 - 1, 2**53, 2**53 + 1, 0, -2]
VALUES = [0.0, -0.0, 1.0, 2.0]  # of a row: this number and how many it has
TOO_LATE = 2**62

Key = tuple[str, int]
Row = tuple[Key, int, float]  # key, ts, value


def embedding(key: Key, value: float) -> list[float]:
    """A table has one dimension."""
    return [value] * (1 + NAMES.index(key[0]))


class Place:
    """A store with one view, its SDK in process, and a folder for shards."""

    def __init__(self, kit: Any, folder: str, plan: FaultPlan | None = None, **spec: Any) -> None:
        self.now_ms = 10**6
        self.store = Store(lambda: self.now_ms)
        self.store.create_view(ViewSpec("p", "v", "e", **spec))
        self.plan = plan or FaultPlan()
        self.view = self.client().get_project("p").get_dynamic_embedding_feature_view("v")
        self.settings = kit.settings(batch_size=2, max_workers=2, retry_attempts_max=3)
        self.folder, self.files = folder, Files(folder)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.view.close(wait=False)  # its threads

    def client(self) -> Any:
        return in_process_client(self.store, "rank0", self.plan)

    def put(self, key: Key, ts: int, value: float) -> None:
        columns = {"pk": [key[0]], "sk": pa.array([key[1]], pa.int64())}
        batch = pa.record_batch(columns | {"embedding": pa.array([embedding(key, value)], pa.list_(pa.float32()))})
        self.store.write("p", "v", batch, version="v1", ts=ts)

    def rows(self) -> dict[Key, tuple[int, list[float]]]:
        rows = self.store.snapshot("p", "v", "v1").table().to_pylist()
        return {(row["pk"], row["sk"]): (row["ts"], row["embedding"]) for row in rows}

    def reader(self, kind: type[StoreReader] = StoreReader, **how: Any) -> StoreReader:
        return kind(self.view, self.settings, 0, 1, **how)

    def read_back(self, **how: Any) -> Report:
        return Readback(self.files, choose(find(self.files)), self.reader(), **how).run()

    def send_again(self, kind: type[StoreReader] = StoreReader, dry_run: bool = False) -> ResendReport:
        return Resend(self.files, choose(find(self.files)), self.reader(kind)).run(dry_run)


def delta(rows: Sequence[tuple[Key, float]], step: int = 1) -> pa.Table:
    count = len(rows)
    columns: dict[str, Any] = {
        "global_step": [step] * count,
        "rank": [0] * count,
        "world_size": [1] * count,
        "feature_name": ["f"] * count,
        "table_fqn": [name for (name, _), _ in rows],
        "key_id": [key for (_, key), _ in rows],
        "embedding": [embedding(key, value) for key, value in rows],
        "source": ["dump"] * count,
    }
    return pa.table(columns, schema=SCHEMAS["float32"])


keys = st.tuples(st.sampled_from(NAMES), st.sampled_from(KEYS))
stamps = st.integers(1, 6)
values = st.sampled_from(VALUES)


class Shard(NamedTuple):
    """One submission's shard, and what happened to it on the disk."""

    rank: int
    state: State
    rows: list[Row]
    damage: str | None
    bit: int


@st.composite
def some_shards(draw: st.DrawFn, states: Sequence[State] = ("acknowledged", "acknowledged", "spilled")) -> list[Shard]:
    """Of several ranks, which may have given a key the same ts (a replicated table); ts ascend in a shard."""
    rows = st.lists(st.tuples(keys, stamps, values), min_size=1, max_size=12).map(
        lambda rows: sorted(rows, key=lambda row: row[1])
    )
    damage = st.sampled_from([None, None, None, "shard-flip", "manifest-flip", "shard-gone", "manifest-gone"])
    shard = st.builds(Shard, st.integers(0, 2), st.sampled_from(states), rows, damage, st.integers(0, 2**20))
    return draw(st.lists(shard, min_size=1, max_size=6))


def write_shards(place: Place, drawn: list[Shard]) -> None:
    for seq, shard in enumerate(drawn):
        keep = ShardWriter(place.files, place.settings, shard.rank, 3, f"g{shard.rank}", state=shard.state)
        table = delta([(key, value) for key, _, value in shard.rows])
        keep(seq, seq, table, np.array([ts for _, ts, _ in shard.rows], np.int64))
        [path] = Path(place.folder).rglob(f"*.g{shard.rank}-{seq:06d}*.parquet")
        path = path if shard.damage and shard.damage.startswith("shard") else path.with_suffix(".json")
        if shard.damage and shard.damage.endswith("flip"):
            content = bytearray(path.read_bytes())
            content[shard.bit // 8 % len(content)] ^= 1 << shard.bit % 8
            path.write_bytes(content)
        elif shard.damage:
            path.unlink()


def newest_of(drawn: list[Shard], state: State) -> dict[Key, tuple[int, set[float | str]]]:
    """Greatest ts per key, and the values that may be the store's: of each shard the last row with that ts."""
    expected: dict[Key, tuple[int, set[float | str]]] = {}
    for shard in drawn:
        last = {(key, ts): value for key, ts, value in shard.rows}
        if shard.state == state and shard.damage is None:
            for (key, ts), value in last.items():
                if ts >= expected.get(key, (0,))[0]:
                    others = expected[key][1] if expected.get(key, (0,))[0] == ts else set()
                    expected[key] = ts, others | {repr(value)}
    return expected


def model_verdict(ts: int, values: set[float | str], stored: tuple[int, list[float]] | None) -> str:
    if stored is None:
        return "MISSING"
    if stored[0] > ts:
        return "SUPERSEDED"
    return "MATCH" if stored[0] == ts and repr(stored[1][0]) in values else "DIFFERENT"


@contextlib.contextmanager
def scene(kit: Any, lookup_rows: int = 3, group_rows: int = 4) -> Iterator[Place]:
    """A place of its own, and sizes at which a dozen rows are many."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, Place(kit, folder) as place:
        patch.setattr(readback, "LOOKUP_ROWS", lookup_rows)
        patch.setattr(shards, "GROUP_ROWS", group_rows)
        patch.setattr(shards, "READERS", 1)
        patch.setattr(os, "fsync", lambda descriptor: None)  # test_shards.py is about that
        yield place


sizes = st.fixed_dictionaries(
    {"lookup_rows": st.sampled_from([1, 3, 5000]), "group_rows": st.sampled_from([1, 4, 64000])}
)
store_rows = st.dictionaries(keys, st.tuples(stamps, values), max_size=18)


class Noting(Survey):
    """Keeps the verdict of each key, of a readback with room for few keys."""

    verdicts: dict[Key, str]

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        Noting.verdicts = {}

    def shares(self) -> Iterator[dict[str, Newest]]:
        for share in super().shares():
            assert sum(len(newest.keys) for newest in share.values()) <= self.keys_max
            yield share
            for name, newest in share.items():
                for key, code in zip(newest.keys.tolist(), newest.verdicts.tolist(), strict=True):
                    assert (name, key) not in Noting.verdicts, "a key is in two shares"
                    Noting.verdicts[name, key] = VERDICTS[code]


@hypothesis.given(drawn=some_shards(), stored=store_rows, sizes=sizes, keys_max=st.sampled_from([1, 2, 5, 100]))
@hypothesis.settings(max_examples=40)
def test_each_keys_verdict_is_the_models(
    kit: Any, drawn: list[Shard], stored: dict[Key, tuple[int, float]], sizes: dict[str, int], keys_max: int
) -> None:
    with scene(kit, **sizes) as place, pytest.MonkeyPatch.context() as patch:
        write_shards(place, drawn)
        for key, (ts, value) in stored.items():
            place.put(key, ts, value)
        patch.setattr(readback, "Survey", Noting)
        patch.setattr(Noting, "keys_max", keys_max)
        report = place.read_back()
        rows = place.rows()
    expected = newest_of(drawn, "acknowledged")
    verdicts = {key: model_verdict(*newest, rows.get(key)) for key, newest in expected.items()}
    assert Noting.verdicts == verdicts
    damaged = [shard for shard in drawn if shard.damage == "manifest-flip"]
    unsound = [s for s in drawn if s.state == "acknowledged" and s.damage in ("shard-flip", "shard-gone")]
    counts = dict.fromkeys(VERDICTS, 0) | {v: list(verdicts.values()).count(v) for v in verdicts.values()}
    counts["CORRUPT_LOCAL"] = sum(len(shard.rows) for shard in unsound)
    assert report.verdicts == counts
    assert report.compared == len(verdicts)
    assert len(report.damaged) == len(damaged) + len(unsound)
    assert len(report.unverified) == sum(shard.damage == "manifest-gone" for shard in drawn)
    assert report.agrees == (bool(verdicts) and not report.damaged and not set(verdicts.values()) & set(BAD))
    shown = {(e["table"], int(e["key"])): e for e in report.examples}
    assert all(verdicts[key] == example["verdict"] for key, example in shown.items())
    assert {verdicts[key] for key in shown} == set(verdicts.values()) & set(BAD)
    for key, example in shown.items():
        assert example["ts"] == expected[key][0]
        assert (example["store_ts"], example["stored"]) == rows.get(key, (None, None))


def test_bits_are_compared_not_numbers() -> None:
    def lists(*rows: list[Any], kind: pa.DataType | None = None) -> pa.ListArray:
        return pa.array(rows, pa.list_(kind or pa.float32()))

    nan, other_nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    rows = lists([0.0], [1.0, 2.0], [1.0], [], [nan], [nan])
    others = lists([-0.0], [1.0, 2.0], [1.0, 1.0], [], [nan], [other_nan])
    assert same_bits(rows, others).tolist() == [False, True, False, True, True, False]
    assert same_bits(rows[1:4], others[1:4]).tolist() == [True, False, True]
    shifted = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array([9, 1, 2, 3], pa.float32())[1:])
    assert same_bits(shifted, lists([1.0, 2.0], [3.0])).tolist() == [True, True]
    assert same_bits(rows, lists(*rows.to_pylist(), kind=pa.float64())).tolist() == [False] * 6
    assert same_bits(lists([1, 2], kind=pa.uint8()), lists([1, 2], kind=pa.uint8())).tolist() == [True]


def many_rows(place: Place, count: int, steps: int = 3) -> None:
    keep = ShardWriter(place.files, place.settings, 0, 1, "g")
    for step in range(steps):
        table = delta([((NAMES[key % 2], key), float(step)) for key in range(step * 10, count)], step)
        keep(step, step, table, np.full(table.num_rows, step + 1))


@hypothesis.given(sample=st.integers(1, 80), seed=st.integers(0, 5))
@hypothesis.settings(max_examples=20)
def test_a_sample_is_that_many_keys_the_same_for_the_same_seed(kit: Any, sample: int, seed: int) -> None:
    with scene(kit) as place:
        many_rows(place, 60)
        drawn = []
        for _ in range(2):
            survey = Survey(place.files, find(place.files), "acknowledged", sample=sample, seed=seed)
            survey.keys_max = 10
            [share] = survey.shares()
            drawn.append({name: newest.keys.tolist() for name, newest in share.items()})
            for name, newest in share.items():
                assert all(ts == min(3, 1 + key // 10) for key, ts in zip(newest.keys, newest.ts, strict=True)), name
        assert drawn[0] == drawn[1]
        assert sum(map(len, drawn[0].values())) == min(sample, 60)
        assert place.read_back(sample=sample, seed=seed).verdicts["MISSING"] == min(sample, 60)


def test_another_seed_draws_other_keys_and_every_key_is_drawn_by_some(kit: Any, tmp_path: Path) -> None:
    place = Place(kit, str(tmp_path))
    many_rows(place, 60)
    draws = set()
    for seed in range(60):
        survey = Survey(place.files, find(place.files), "acknowledged", sample=10, seed=seed)
        [share] = survey.shares()
        draws.add(frozenset((name, key) for name, newest in share.items() for key in newest.keys.tolist()))
    assert len(draws) == 60
    assert len(frozenset.union(*draws)) == 60


class Dies(StoreReader):
    """Ends like a killed process at the n-th of its look-ups and writes, after that write or before it."""

    left = 0

    def _die(self) -> None:
        Dies.left -= 1
        if Dies.left == 0:
            raise SystemExit("killed")

    def look_up(self, rows: Any) -> Any:
        self._die()
        return super().look_up(rows)

    def _write(self, rows: pa.RecordBatch, ts: int) -> None:
        self._die()
        super()._write(rows, ts)


@hypothesis.given(
    drawn=some_shards(states=("spilled", "spilled", "acknowledged")),
    stored=store_rows,
    sizes=sizes,
    deaths=st.lists(st.integers(1, 12), max_size=3),
    marks=st.none() | st.integers(0, 3),
)
@hypothesis.settings(max_examples=40)
def test_a_resend_ends_with_the_newest_of_store_and_spill_however_often_it_is_killed(
    kit: Any,
    drawn: list[Shard],
    stored: dict[Key, tuple[int, float]],
    sizes: dict[str, int],
    deaths: list[int],
    marks: int | None,
) -> None:
    with scene(kit, **sizes) as place:
        write_shards(place, drawn)
        for key, (ts, value) in stored.items():
            place.put(key, ts, value)
        before, expected = place.rows(), newest_of(drawn, "spilled")
        dry = place.send_again(dry_run=True)
        assert place.rows() == before
        for Dies.left in deaths:
            with contextlib.suppress(SystemExit, UploadError):
                place.send_again(Dies)
        if marks is not None:  # the disk fails while manifests are marked
            write, left = Files.write, itertools.count()

            def fails(files: Files, path: str, data: Any) -> None:
                if next(left) >= marks:
                    raise OSError("the disk is gone")
                write(files, path, data)

            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
                patch.setattr(Files, "write", fails)
                place.send_again()
        report = place.send_again()
        rows = place.rows()
        for key in {*before, *expected}:
            ts, values = expected.get(key, (0, set()))
            if before.get(key, (0,))[0] >= ts:
                assert rows[key] == before[key], "what the store had was as new, and was overwritten"
            else:
                assert repr(rows[key][1][0]) in values
                assert rows[key][0] > max([ts, *(row[0] for row in before.values())])
        due = {key for key, (ts, _) in expected.items() if before.get(key, (0,))[0] < ts}
        assert dry.sent == len(due)
        assert dry.sent + dry.superseded == dry.rows
        sound = [s for s in drawn if s.state == "spilled" and s.damage is None]
        states = [entry.manifest.state for entry in find(place.files).entries]
        assert states.count("resent") == len(sound)
        if not deaths and marks is None:
            assert report.sent == dry.sent
        again = place.send_again()
        assert (again.sent, again.rows) == (0, 0)
        assert place.rows() == rows
        assert len(again.damaged) == len(report.damaged)


@st.composite
def careers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Starts of a rank, one after the other: what it submits, how wrong its clock is, what strikes store and disk."""
    fault = st.one_of(
        st.builds(
            StatusFault, id=st.just("busy"), route=st.just("write"), skip=st.integers(0, 9), count=st.integers(1, 4)
        ),
        st.builds(
            StatusFault,
            id=st.just("late"),
            route=st.just("write"),
            when=st.just("after-commit"),
            skip=st.integers(0, 9),
            count=st.integers(1, 4),
        ),
        st.builds(StatusFault, id=st.just("no"), route=st.just("write"), code=st.just(403), skip=st.integers(0, 9)),
        st.builds(PartialFault, id=st.just("half"), rows_failed=st.just(1), skip=st.integers(0, 9)),
    )
    rows = st.dictionaries(keys, values, min_size=1, max_size=4).map(lambda rows: list(rows.items()))
    life = {
        "clock_ms": st.integers(1, 500),
        "submissions": st.lists(st.tuples(st.integers(1, 3), rows), min_size=1, max_size=4),
        "fault": st.none() | fault,
        "disk": st.none() | st.tuples(st.sampled_from(["fails", "dies"]), st.integers(0, 12)),
        "resend": st.sampled_from([None, None, "done", "killed"]),
        "drain": st.booleans(),
    }
    return draw(st.lists(st.fixed_dictionaries(life), min_size=1, max_size=4))


class Career:
    """Lives through them on one store and one folder, and knows what may be believed after each."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.order: list[tuple[str, list[tuple[Key, float]]]] = []  # fate and rows of each submission
        self.acknowledged = 0

    def live(self, number: int, life: dict[str, Any]) -> None:
        place = self.place
        place.plan.set([life["fault"]] if life["fault"] else [])
        clock = types.SimpleNamespace(time=lambda: life["clock_ms"] / 1000)
        writers = {
            state: ShardWriter(place.files, place.settings, 0, 1, f"g{number}", state=state)
            for state in ("acknowledged", "spilled")
        }
        uploader = Uploader(
            place.view, place.settings, 0, 1, clock, retain=writers["acknowledged"], spill=writers["spilled"]
        )
        with self._disk(life["disk"]):
            uploader.start()
            uploader.catch_up(max(writer.ts_floor() for writer in writers.values()))
            submitted = []
            with contextlib.suppress(UploadError):
                for step, rows in life["submissions"]:
                    submitted.append(rows)
                    uploader.submit(step, delta(rows, step))
                uploader.close(life["drain"])
            with contextlib.suppress(UploadError):
                uploader.close(drain=False)
        place.plan.set([])
        done = uploader.counters["steps"]
        self.acknowledged += done
        spilled = {
            entry.manifest.seq
            for entry in find(place.files).entries
            if entry.manifest.generation == f"g{number}" and entry.manifest.state == "spilled"
        }
        for seq, rows in enumerate(submitted):
            fate = "acknowledged" if seq < done else "spilled" if seq in spilled else "lost"
            self.order.append((fate, rows))

    @contextlib.contextmanager
    def _disk(self, plan: tuple[str, int] | None) -> Iterator[None]:
        """The n-th file fails to be written, perhaps after it was; and when the disk dies, so do all after it."""
        write, numbers = Files.write, itertools.count()

        def fails(files: Files, path: str, data: Any) -> None:
            assert plan is not None
            number = next(numbers)
            if number < plan[1] or (number > plan[1] and plan[0] == "fails") or (number == plan[1] and number % 2):
                write(files, path, data)
            if number == plan[1] or (number > plan[1] and plan[0] == "dies"):
                raise OSError("the disk failed")

        with pytest.MonkeyPatch.context() as patch:
            if plan is not None:
                patch.setattr(Files, "write", fails)
            yield

    def check(self) -> None:
        """What a reader trusts was acknowledged; what was acknowledged it finds; and the store agrees."""
        place, found = self.place, find(self.place.files)
        assert found.damaged == {}
        log = place.store.log("p", "v").to_pylist()
        was_stored = {(row["pk"], row["sk"], row["ts"], repr(row["embedding"])) for row in log}
        for entry in found.entries:
            verify(place.files, entry)
            if entry.manifest.state == "acknowledged":
                rows = pq.read_table(place.files.open(entry.shard)).to_pylist()
                for row in rows:
                    key = row["embedding_name"], row["key_id"], row["ts"], repr(row["embedding"])
                    assert key in was_stored, "a shard vouches for what the store never got"
        retained = [entry for entry in found.entries if entry.manifest.state == "acknowledged"]
        assert len(retained) >= self.acknowledged
        report = place.read_back()
        assert report.agrees or report.compared == 0
        assert not report.compared or not report.verdicts["CORRUPT_LOCAL"]

    def check_end(self) -> None:
        """After a resend each key has the value of the last submission that was not lost, or of a lost one after it."""
        may: dict[Key, set[str]] = {}
        for fate, rows in self.order:
            for key, value in rows:
                may[key] = (may.get(key, {"absent"}) if fate == "lost" else set()) | {repr(value)}
        stored = self.place.rows()
        for key, allowed in may.items():
            held = repr(stored[key][1][0]) if key in stored else "absent"
            assert held in allowed, f"{key}: the store has {held}, not one of {allowed}"


@hypothesis.given(lives=careers())
@hypothesis.settings(max_examples=40)
def test_through_failures_deaths_restarts_and_resends_store_and_shards_agree_and_nothing_newer_is_overwritten(
    kit: Any, lives: list[dict[str, Any]]
) -> None:
    with scene(kit) as place:
        career = Career(place)
        for number, life in enumerate(lives):
            career.live(number, life)
            career.check()
            if life["resend"] == "killed":
                Dies.left = 2
                with contextlib.suppress(SystemExit, UploadError):
                    place.send_again(Dies)
            if life["resend"]:
                place.send_again()
                career.check_end()
                career.check()
        place.send_again()
        career.check_end()


class Facade:
    """The view of a place, with some of its methods replaced, or hidden (None)."""

    def __init__(self, view: Any, **replaced: Any) -> None:
        self._view, self._replaced = view, replaced

    def __getattr__(self, name: str) -> Any:
        found = self._replaced.get(name, ...)
        if found is None:
            raise AttributeError(name)
        return getattr(self._view, name) if found is ... else found


@pytest.fixture
def place(kit: Any) -> Iterator[Place]:
    with scene(kit) as made:
        yield made


def publish(place: Place, count: int = 30) -> None:
    """`many_rows`, and the store has them."""
    many_rows(place, count)
    for step in range(3):
        for key in range(step * 10, count):
            place.put((NAMES[key % 2], key), step + 1, float(step))


def test_a_store_that_is_busy_is_asked_again_and_one_that_stays_so_is_named(place: Place) -> None:
    publish(place)
    place.plan.set([StatusFault(id="busy", route="lookup", count=2)])
    assert place.read_back().agrees
    place.plan.set([StatusFault(id="busy", route="lookup", count=3)])
    with pytest.raises(AttemptError, match="busy"):
        place.read_back()


def test_an_expired_token_is_renewed(place: Place) -> None:
    publish(place)
    expired = RuntimeError("SecurityToken.Expired")
    expired.status = 401  # type: ignore[attr-defined]

    def refuse(*_: Any) -> Any:
        raise expired

    view = Facade(place.view, lookup_arrow=refuse)
    reader = StoreReader(view, place.settings, 0, 1, reconnect=lambda: place.view)
    assert Readback(place.files, find(place.files), reader).run().agrees


@pytest.mark.parametrize(
    "change",
    [
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        lambda table: table.take(list(reversed(range(table.num_rows)))),
        lambda table: table.set_column(1, "sk", [pa.array([key + 1000 for key in table["sk"].to_pylist()])]),
        lambda table: table.set_column(1, "sk", [pa.array([key - 1 for key in table["sk"].to_pylist()])]),
    ],
    ids=["twice", "another-order", "other-keys", "neighbours"],
)
def test_an_answer_to_another_question_is_no_verdict(place: Place, change: Any) -> None:
    publish(place)
    view = Facade(place.view, lookup_arrow=lambda *question: change(place.view.lookup_arrow(*question)))
    with pytest.raises(ReadbackError, match="other keys"):
        Readback(place.files, find(place.files), StoreReader(view, place.settings, 0, 1)).run()


@pytest.mark.parametrize("field", ["sk", "key_id"])
def test_an_sdk_that_tells_no_ts_leaves_other_bits_undecided(place: Place, field: str) -> None:
    publish(place)
    place.put((NAMES[0], 4), 9, 7.0)
    ask = place.view.get_online_features

    def features(*question: Any) -> list[dict[str, Any]]:
        rows = [{("sk" if name == "sk" else name): value for name, value in row.items()} for row in ask(*question)]
        rows = [{(field if name == "sk" else name): value for name, value in row.items()} for row in rows]
        return [row | ({"embedding": None} if row[field] == 5 else {}) for row in reversed(rows)]

    view = Facade(place.view, lookup_arrow=None, get_online_features=features)
    reader = StoreReader(view, place.settings, 0, 1)
    report = Readback(place.files, find(place.files), reader).run()
    assert {name: count for name, count in report.verdicts.items() if count} == {
        "MATCH": 28,
        "UNDECIDED": 1,
        "MISSING": 1,
    }
    assert not report.agrees
    assert [(e["key"], e["store_ts"]) for e in report.examples if e["verdict"] == "UNDECIDED"] == [("4", None)]
    with pytest.raises(ReadbackError, match="how new a row is"):
        Resend(place.files, find(place.files), reader)


def test_rows_that_are_old_enough_to_have_expired_are_counted(kit: Any) -> None:
    with scene(kit) as place:
        many_rows(place, 30)
        report = Readback(place.files, find(place.files), place.reader()).run(expired_ms=2)
    assert (report.verdicts["MISSING"], report.maybe_expired) == (30, 20)
    assert len(report.examples) == 10


def test_a_row_that_is_published_while_a_resend_is_at_work_wins(place: Place) -> None:
    """A publisher's ts follow the clock; those of a resend come right after the store's."""
    key = (NAMES[0], 1)
    place.put(key, 10_000, 1.0)
    ShardWriter(place.files, place.settings, 0, 1, "g", state="spilled")(5, 0, delta([(key, 2.0)]), np.array([10_001]))

    class Late(StoreReader):
        def _write(self, rows: pa.RecordBatch, ts: int) -> None:
            place.put(key, 20_000, 3.0)
            super()._write(rows, ts)

    assert place.send_again(Late).sent == 1
    assert place.rows()[key] == (20_000, [3.0])


def test_what_the_store_refuses_to_take_again_stays_spilled(place: Place) -> None:
    key = (NAMES[0], 1)
    ShardWriter(place.files, place.settings, 0, 1, "g", state="spilled")(5, 0, delta([(key, 2.0)]), np.array([7]))
    place.plan.set([StatusFault(id="no", route="write", code=403)])
    with pytest.raises(UploadError, match=r"steps \[5\]|step 5"):
        place.send_again()
    assert [entry.manifest.state for entry in find(place.files).entries] == ["spilled"]
    assert place.send_again().sent == 1
    assert place.rows()[key] == (8, [2.0])


def test_int8_rows_are_compared_and_sent_again(kit: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, Place(kit, folder, value_type="uint8") as place:
        rows = kit.delta(1, [1, 2, 3])
        lists = pa.array([[0, 255, 1, 2, 3, 4]] * 3, pa.list_(pa.uint8()))
        at = rows.schema.get_field_index("embedding")
        table = rows.set_column(at, SCHEMAS["int8"].field("embedding"), lists)
        ShardWriter(place.files, place.settings, 0, 1, "g", state="spilled")(1, 0, table, np.array([5, 5, 6]))
        assert place.send_again().sent == 3
        assert place.store.snapshot("p", "v", "v1").table()["embedding"].to_pylist() == lists.to_pylist()
        stored = np.array([7, 7, 8])  # batches of two, above the spilled ones
        ShardWriter(place.files, place.settings, 0, 1, "g")(1, 1, table, stored)
        assert place.read_back().verdicts["MATCH"] == 3
        other = table.set_column(at, SCHEMAS["int8"].field("embedding"), pa.array([[9] * 6] * 3, lists.type))
        ShardWriter(place.files, place.settings, 0, 1, "g")(1, 2, other, stored)
        assert place.read_back().verdicts["MATCH"] == 3  # as new, and the store may have the one or the other


def test_a_store_of_the_other_type_has_different_rows(kit: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, Place(kit, folder, value_type="uint8") as place:
        batch = {"pk": [NAMES[0]], "sk": [1], "embedding": pa.array([[0, 0, 0, 0]], pa.list_(pa.uint8()))}
        place.store.write("p", "v", pa.record_batch(batch), version="v1", ts=1)
        ShardWriter(place.files, place.settings, 0, 1, "g")(1, 0, delta([((NAMES[0], 1), 0.0)]), np.array([1]))
        assert place.read_back().verdicts["DIFFERENT"] == 1


def test_one_version_is_chosen_and_damage_in_others_is_not_its(place: Place, kit: Any) -> None:
    for version, generation in [("v1", "g1"), ("v1", "g2"), ("v2", "g3")]:
        keep = ShardWriter(place.files, kit.settings(version=version), 0, 1, generation)
        for seq in range(2):
            keep(seq, seq, delta([((NAMES[0], seq), 1.0)]), np.array([1 + seq]))
    for generation in ("g2", "g3"):
        [manifest] = Path(place.folder).rglob(f"*.{generation}-000001.json")
        manifest.write_text("{}")
    found = find(place.files)
    with pytest.raises(ReadbackError, match=r"version 'v1', .* version 'v2': choose"):
        choose(found)
    with pytest.raises(ReadbackError, match=r"no manifest has \{'version': 'v3'\}; there are"):
        choose(found, version="v3")
    with pytest.raises(ReadbackError, match="g9"):
        choose(found, "g9")
    chosen = choose(found, version="v1")
    assert {entry.manifest.generation for entry in chosen.entries} == {"g1", "g2"}
    assert [".g2-" in path for path in chosen.damaged] == [True]
    only = choose(found, "g1", version="v1")
    assert (len(only.entries), only.damaged) == (2, {})
    assert len(choose(found, "g3").damaged) == 1
    for below in ("v", "v/v2", "v/v2/step-000000000000"):
        part = choose(find(Files(f"{place.folder}/{below}")), project="p", view="v", version="v2")
        assert [entry.manifest.version for entry in part.entries] == ["v2"]
        assert len(part.damaged) == (below != "v/v2/step-000000000000")
    assert choose(find(Files(f"{place.folder}/nothing"))) == ([], {}, [])


def test_memory_does_not_grow_with_the_rows_that_are_read(kit: Any) -> None:
    """Measured in Arrow's pool: embeddings, the larger part by far, are held one row group at a time."""
    rows, dim, pool = 5_000, 64, pa.default_memory_pool()
    nothing = SCHEMAS["float32"].empty_table()

    def peak_of(steps: int) -> int:
        with tempfile.TemporaryDirectory() as folder, Place(kit, folder) as place:
            keep = ShardWriter(place.files, place.settings, 0, 1, "g")
            for step in range(steps):
                keep(step, step, kit.delta(step, np.arange(rows) + step * rows, dim=dim), np.full(rows, step + 1))
            held, peaks = pool.bytes_allocated(), [0]

            def look_up(*_: Any) -> pa.Table:
                gc.collect()
                peaks.append(pool.bytes_allocated() - held)
                return place.view.lookup_arrow("v1", nothing["table_fqn"], nothing["key_id"])

            reader = StoreReader(Facade(place.view, lookup_arrow=look_up), place.settings, 0, 1)
            report = Readback(place.files, find(place.files), reader).run()
            assert report.verdicts["MISSING"] == steps * rows
            return max(peaks)

    assert peak_of(10) < 1.5 * peak_of(3) < 10 * rows * dim * 4


def test_no_more_keys_wait_to_be_merged_than_may_be_held(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq in range(10):
        many_rows(place, 40 + seq)
    settle, held = Survey._settle, []

    def noted(survey: Survey, newest: dict[str, Newest], *rest: Any) -> int:
        held.append(sum(len(keys) for table in newest.values() for keys, _ in table._waiting))
        return settle(survey, newest, *rest)

    monkeypatch.setattr(Survey, "_settle", noted)
    survey = Survey(place.files, find(place.files), "acknowledged")
    survey.keys_max = 10
    assert sum(len(newest.keys) for share in survey.shares() for newest in share.values()) == 49
    assert max(held) <= 2 * survey.keys_max + 49  # a row group here is a whole shard


def test_as_many_keys_are_held_as_documented() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "readback.md").read_text()
    assert f"at most 2<sup>{np.log2(Survey.keys_max):g}</sup> keys" in docs


def test_keys_are_drawn_by_splitmix64_in_every_release(place: Place) -> None:
    """Its first outputs for the seed 1234567 are known: each mixes a state that grows by the golden ratio."""
    survey = Survey(place.files, find(place.files), "acknowledged", seed=3)
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    salt = np.frombuffer(hashlib.sha256(b"3 t").digest()[:8], np.uint64)
    assert survey._numbers("t", (states ^ salt).view(np.int64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_sample_without_a_seed_is_that_of_seed_0(place: Place) -> None:
    many_rows(place, 60)

    def draw(**how: int) -> list[int]:
        [share] = Survey(place.files, find(place.files), "acknowledged", sample=10, **how).shares()
        return sorted(key for newest in share.values() for key in newest.keys.tolist())

    assert draw() == draw(seed=0)


def test_a_resend_sends_unless_told_not_to_and_states_are_compared_by_their_letters(place: Place) -> None:
    key = (NAMES[0], 1)
    ShardWriter(place.files, place.settings, 0, 1, "g", state="spilled")(5, 0, delta([(key, 2.0)]), np.array([7]))
    spilled: Any = "".join(list("spilled"))  # equal, but another object
    assert Survey(place.files, find(place.files), spilled).rows == 1
    assert Resend(place.files, find(place.files), place.reader()).run(dry_run=True).sent == 1
    assert place.rows() == {}
    assert Resend(place.files, find(place.files), place.reader()).run().sent == 1
    assert place.rows() == {key: (8, [2.0])}
    assert [entry.manifest.state for entry in find(place.files).entries] == ["resent"]

"""A saved history is the history: what is read back is equal, judged alike, and damage is told from it."""

import dataclasses
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltaproof.conformance.judge import judge
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.conformance.verdict import Report, Verdict
from deltaproof.simulator.disk import Shard
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.history import (
    CHANGED,
    INITIAL,
    LOOKED_UP,
    Attempt,
    EventWriter,
    History,
    Leak,
    LedgerTable,
    LedgerWriter,
    RankOutcome,
)
from deltaproof.simulator.recorded import begin_run, find, fingerprint
from deltaproof.simulator.scenario import Restart, Scenario
from deltaproof.simulator.virtual.engine import VirtualEngine, lacks

from ..conformance.histories import legal

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def same(left, right) -> bool:
    """Equal by value, arrays bit by bit and tables row by row, type by type."""
    if isinstance(left, np.ndarray):
        return left.shape == right.shape and (
            np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right.astype(left.dtype)).tobytes()
        )
    if isinstance(left, pa.Table):
        return left.schema.equals(right.schema) and left.combine_chunks().equals(right.combine_chunks())
    if isinstance(left, LedgerTable | Shard | History):
        fields = [f.name for f in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in fields)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def told(report: Report) -> list:
    """A report without the history it is about, as JSON has it: events that were saved know no tuples."""
    plain = [report.verdict.value, report.reason, [dataclasses.asdict(f) for f in report.findings]]
    return json.loads(msgspec.json.encode(plain, enc_hook=str))


@given(history=legal(), wall_s=st.floats(0, 1e6))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_read_back_is_what_was_saved(tmp_path_factory, history: History, wall_s: float) -> None:
    folder = tmp_path_factory.mktemp("history")
    history.wall_s = wall_s
    history.stacks = {1: "rank1\n  File \N{SNOWMAN}"}
    history.leaks = [Leak("PASSWORD", "rank0.log", "a [PASSWORD]")]
    history.schedule = [0, 3, 1]
    found = History.load(history.save(folder / "h"))
    assert same(found, history)
    assert fingerprint(found) == fingerprint(history)
    assert told(judge(found)) == told(judge(history))
    found.save(folder / "again")
    files = sorted(p.relative_to(folder / "h") for p in (folder / "h").rglob("*") if p.is_file())
    assert all((folder / "h" / f).read_bytes() == (folder / "again" / f).read_bytes() for f in files)


def test_every_field_is_kept(tmp_path) -> None:
    """Also one that somebody adds to History: it is in meta.json or has a file."""
    history = VirtualEngine().run(Scenario(name="small", seed=3))
    outcome = RankOutcome(1, "error", 1, "TypeError: x", "finish", (3, 4), 2)
    history.attempts = [Attempt(2, [outcome], 1, 0, 2), Attempt(2, [], begin_ms=5.0)]
    history.outcomes = [outcome]
    history.incomplete = "cut short"
    history.planted = ("A", "B")
    history.retained = [Shard("step-1/r", {"rows": 1}, None, "torn"), Shard("step-2/r", None, history.final)]
    unset = [
        f.name
        for f in dataclasses.fields(History)
        if f.default is not dataclasses.MISSING and getattr(history, f.name) == f.default and f.name != "wall_s"
    ]
    for name in unset:  # of a kind that another helper of this test would have to know
        kind = type(getattr(history, name))
        assert kind in (str, bool, int, float), f"set History.{name} in this test"
        setattr(history, name, kind(7))
    assert same(History.load(history.save(tmp_path / "h")), history)
    json.loads((tmp_path / "h" / "meta.json").read_bytes(), parse_constant=pytest.fail)  # no Infinity: other readers


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.json"))[::6], ids=lambda p: p.stem)
def test_a_scenario_of_the_corpus_is_judged_as_live(tmp_path, path: Path) -> None:
    scenario = Scenario.load(path)
    if (missing := lacks(scenario)) is not None:
        pytest.skip(f"the virtual engine has {missing}")
    live = VirtualEngine().run(scenario)
    found = History.load(live.save(tmp_path / "h"))
    assert told(judge(found)) == told(judge(live))


@pytest.mark.parametrize("specimen", ["S02", "S05", "S14", "S15", "S31", "S37"])
def test_a_known_bug_is_found_in_its_saved_history(tmp_path, specimen: str) -> None:
    live = VirtualEngine().run(SPECIMENS[specimen].scenario, f"specimen:{specimen}")
    report = judge(History.load(live.save(tmp_path / "h")))
    assert told(report) == told(judge(live))
    assert live.target == report.history.target == f"specimen:{specimen}"


def test_same_run_same_fingerprint_other_seed_another() -> None:
    scenario = Scenario(name="small", seed=3)
    first, second = (VirtualEngine().run(scenario) for _ in range(2))
    assert first.wall_s != second.wall_s
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(VirtualEngine().run(msgspec.structs.replace(scenario, seed=4))) != fingerprint(first)
    assert fingerprint(dataclasses.replace(first, events=first.events[:-1])) != fingerprint(first)
    cut = pa.concat_tables([first.writes.slice(0, 1), first.writes.slice(1)])
    assert fingerprint(dataclasses.replace(first, writes=cut)) == fingerprint(first)


def test_a_folder_keeps_its_first_history(tmp_path) -> None:
    history = VirtualEngine().run(Scenario())
    history.save(tmp_path / "h")
    with pytest.raises(ScenarioError, match="already holds a history"):
        history.save(tmp_path / "h")


def test_what_is_no_history_is_refused_with_one_line(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, message in (("empty", "holds no history"), ("file", "not a folder"), ("absent", "not there")):
        with pytest.raises(ScenarioError, match=message):
            History.load(tmp_path / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, History]:
    scenario = Scenario.load(SCENARIOS / "crash-then-one-rank-more.json")
    history = VirtualEngine().run(scenario)
    history.retained = [Shard("a", {"rows": 1}, history.final)]
    return history.save(tmp_path_factory.mktemp("saved") / "h"), history


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_is_told_and_never_read(tmp_path, saved, seed: int) -> None:
    folder, history = saved
    chance = random.Random(seed)
    files = {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    name = list(files)[seed % len(files)]
    content = bytearray(files[name])
    damage = chance.choice(["flip", "cut", "remove"])
    at = chance.randrange(len(content))
    if damage == "flip":
        content[at] ^= 1 << chance.randrange(8)
    for path, whole in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if path != name or damage != "remove":
            (tmp_path / path).write_bytes(whole if path != name else content[:at] if damage == "cut" else content)
    refused = ""
    try:
        found = History.load(tmp_path)
    except ScenarioError as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
        assert str(tmp_path) in refused
    else:
        assert same(found, history), f"{damage} of {name} at {at}"  # a blank between two JSON values


def test_a_changed_word_is_told(tmp_path, saved) -> None:
    for path in (p for p in saved[0].iterdir() if p.is_file()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    meta = json.loads((saved[0] / "meta.json").read_bytes())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "target": "another"}))
    with pytest.raises(ScenarioError, match=r"meta\.json is not what was saved"):
        History.load(tmp_path)


def test_a_newer_version_is_refused(tmp_path, saved) -> None:
    meta = json.loads((saved[0] / "meta.json").read_bytes())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "deltaproof_history": 2}))
    with pytest.raises(ScenarioError, match="newer than this deltaproof reads"):
        History.load(tmp_path)


def test_find_names_the_histories_of_a_folder(tmp_path, saved) -> None:
    for name in ("b", "a"):
        saved[1].save(tmp_path / name)
    (tmp_path / "c").mkdir()
    assert find(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert find(tmp_path / "a") == [tmp_path / "a"]


def test_a_run_that_was_cut_short_is_read_as_far_as_it_went_and_proves_nothing(tmp_path) -> None:
    scenario = Scenario(name="cut", world_size=2, restarts=(Restart(world_size=1),))
    begin_run(tmp_path, scenario, target="reference", engine="processes")
    rows, keys = np.ones((32, 4), np.float32), np.arange(32)
    for attempt, ranks in ((0, (0, 1)), (1, (0,))):
        place = tmp_path / f"attempt-{attempt}" if attempt else tmp_path
        place.mkdir(exist_ok=True)
        for rank in ranks:
            events = EventWriter(place / f"rank{rank}.events.jsonl", f"rank{rank}", rank, attempt)
            events.write("rank-start")
            if attempt:
                events.write("restored", step=0, checkpoint_of=None)
            events.write("step", step=1)
            events.close()
            ledger = LedgerWriter(place / f"rank{rank}.ledger.arrows")
            mine = [(INITIAL, 0, keys + 32 * part, rows) for part in ((rank,) if len(ranks) > 1 else (0, 1))]
            ledger.write(0, mine)
            ledger.write(1, [(CHANGED, 0, keys[:1] + 32 * rank, rows[:1] * 2), (LOOKED_UP, 0, keys[:1], None)])
            ledger.close()
    with open(tmp_path / "rank1.events.jsonl", "ab") as file:
        file.write(b'{"t_ms": 1, "who": "ra')  # killed in the middle of a record
    history = History.load(tmp_path)
    assert [e.kind for e in history.events] == ["rank-start", "step"] * 2 + ["rank-start", "restored", "step"]
    assert len(history.starts) == 2
    assert [o.status for o in history.outcomes] == ["vanished"]
    [table] = history.tables.values()
    assert table.steps.tolist() == [1, 1, 2, 2, 3]  # the restore, to the initial values, is the second
    report = judge(history)
    assert report.verdict is Verdict.NOT_EXERCISED
    assert "cut short" in report.reason
    assert same(History.load(history.save(tmp_path / "saved")), history)

"""``show`` and ``check``: what a person reads of a saved history, and that it is judged as it was live."""

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from deltaproof.conformance.judge import judge
from deltaproof.conformance.specimens import SPECIMENS
from deltaproof.simulator.faults import RankKill, StoreError
from deltaproof.simulator.history import History
from deltaproof.simulator.recorded import fingerprint
from deltaproof.simulator.scenario import Restart, Scenario, Table, Workload
from deltaproof.simulator.virtual.engine import VirtualEngine

TABLES = (Table(name="item", rows=12), Table(name="item", owner="tower.ebc", rows=12), Table(name="user", rows=12))
SCENARIO = Scenario(
    name="a crash/then one rank",
    seed=4,
    tables=TABLES,
    workload=Workload(steps=6, checkpoint_every_steps=2),
    faults=(RankKill(rank=1, point="train.after-step", nth=5), StoreError(skip=2)),
    restarts=(Restart(world_size=1),),
)


@pytest.fixture(scope="module")
def history() -> History:
    return VirtualEngine().run(SCENARIO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, history) -> Path:
    return history.save(tmp_path_factory.mktemp("histories") / "h")


def events_shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r" *\d+\.\d ", line)]


def test_show_prints_every_event_in_its_lane(typed, folder, history) -> None:
    code, text, _ = typed("show", folder, "--limit", "0")
    assert code == 0
    assert "2, then 1 ranks" in text
    assert "fault 0: rank-kill(rank=1, point=train.after-step, nth=5), fired 1 times" in text
    assert "rank 1 (attempt 0) killed" in text
    shown = events_shown(text)
    assert len(shown) == len(history.events)
    lanes = {"rank0": 0, "rank1": 1, "store": 2}
    header = next(line for line in text.splitlines() if line.split()[:2] == ["ms", "0"])
    columns = [header.index(f" {name} ") + 1 for name in ("0", "1")]
    columns.append(header.index("store"))
    for line, event in zip(shown, history.events, strict=True):
        lane = lanes[f"rank{event.rank}" if event.who == "supervisor" else event.who]
        assert line[columns[lane]] == "*", line
        assert line.count("*", 0, columns[2] + 1) == 1
    [killed] = [line for line in shown if "FAULT" in line and "rank-kill" in line]
    assert "rank1" in killed


def test_show_says_how_the_ranks_were_started(typed, tmp_path, history) -> None:
    torchrun = dataclasses.replace(history, launcher="torchrun", nodes=2, supervision="strict")
    torchrun.save(tmp_path / "h")
    _, text, _ = typed("show", tmp_path / "h")
    assert "(launcher torchrun, nodes 2, supervision strict)" in text


def test_show_cuts_a_long_history_and_says_how_much(typed, folder, history) -> None:
    _, text, _ = typed("show", folder, "--limit", "10")
    assert len(events_shown(text)) == 10
    assert f"{len(history.events) - 10} more" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_show_of_one_rank(typed, folder, history, rank: int) -> None:
    _, text, _ = typed("show", folder, "--rank", rank, "--json")
    events = json.loads(text)["events"]
    assert len(events) == sum(e.rank == rank for e in history.events)
    assert {e["who"] for e in events} >= {f"rank{rank}", "store"}


def test_show_of_some_steps(typed, folder, history) -> None:
    _, text, _ = typed("show", folder, "--step", "3-4", "--json")
    told = json.loads(text)
    moments = [e["moment"] for e in told["events"] if e["moment"] is not None]
    assert set(moments) == {3, 4}
    assert any(e["who"] == "store" for e in told["events"])
    assert len(moments) == sum(history.moment(e) in (3, 4) for e in history.events)


def test_show_of_a_key_tells_the_life_of_its_row(typed, folder, history) -> None:
    fqn = TABLES[1].fqn
    ledger = history.tables[fqn]
    key = int(ledger.keys[-1])
    _, text, _ = typed("show", folder, "--key", f"{fqn}:{key}")
    assert f"key {key} of {fqn}" in text
    served = next(r for r in history.final.to_pylist() if (r["pk"], r["sk"]) == (ledger.embedding_name, key))
    assert re.search(rf"at the end it serves the value of step \d+.*, under ts {served['ts']}", text)
    accepted = [r for r in history.writes.to_pylist() if (r["pk"], r["sk"]) == (ledger.embedding_name, key)]
    assert text.count("accepted from") == len(accepted) > 0
    life = json.loads(typed("show", folder, "--key", f"{fqn}:{key}", "--json")[1])["life"]
    assert life[0]["text"].startswith("before step 1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rank", "2"], "--rank 2: this history has ranks 0 to 1"),
        (["--step", "99"], "this history has steps up to "),
        (["--step", "4-3"], "--step 4-3: want a step"),
        (["--step", "x"], "--step x: want a step"),
        (["--key", "item:1"], "item is any of ebc.embedding_bags.item, tower.ebc.embedding_bags.item"),
        (["--key", "user"], "--key user: want TABLE:KEY"),
        (["--key", "user:x"], "want TABLE:KEY"),
        (["--key", "user:12"], "has 12 keys, and 12 is none"),
        (["--key", "gremlins:1"], "no such table; this history has ebc.embedding_bags.item"),
    ],
)
def test_show_refuses_what_is_not_there_with_one_line(typed, folder, args, message: str) -> None:
    code, text, error = typed("show", folder, *args)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not text


@pytest.mark.parametrize("command", ["show", "check"])
def test_what_is_no_history_is_refused_with_one_line(typed, tmp_path, folder, command: str) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in folder.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[: -1 if path.name == "events.arrow" else None])
    for path, message in (
        (tmp_path / "absent", "is not there"),
        (tmp_path, ""),  # names the damaged one in it
        (damaged, "events.arrow is not what was saved"),
        (Path(__file__), "not a folder"),
    ):
        code, text, error = typed(command, path)
        assert code == 2, (path, text)
        assert message in error
        assert error.count("\n") == 1


def test_a_folder_of_one_history_stands_for_it_and_one_of_several_does_not(typed, tmp_path, history) -> None:
    history.save(tmp_path / "a")
    assert typed("show", tmp_path)[0] == 0
    history.save(tmp_path / "b")
    code, _, error = typed("show", tmp_path)
    assert code == 2
    assert f"holds 2 histories; name one: {tmp_path}/a, {tmp_path}/b" in error
    _, text, _ = typed("check", tmp_path, "--json")
    assert [run["history"] for run in json.loads(text)["runs"]] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_check_judges_as_live(typed, folder, history, tmp_path) -> None:
    code, text, _ = typed("check", folder)
    assert code == 0
    assert "held" in text
    bug = VirtualEngine().run(SPECIMENS["S02"].scenario, "specimen:S02")
    live = judge(bug)
    bug.save(tmp_path / "bug")
    code, text, _ = typed("check", tmp_path / "bug")
    assert code == 1
    for finding in live.findings:
        assert all(v.message in text for v in finding.violations[:1])
    assert re.search(r"run \S*bug/scenario.json --target specimen:S02", text)
    code, text, _ = typed("check", folder, tmp_path / "bug", "--json")
    assert code == 1
    assert [run["verdict"] for run in json.loads(text)["runs"]] == ["held", "broken"]


@pytest.mark.parametrize("option", ["--history", "--keep"])
def test_a_folder_that_cannot_be_is_refused_before_the_run(typed, tmp_path, option: str) -> None:
    (tmp_path / "s.json").write_text(SCENARIO.to_json())
    code, _, error = typed("run", tmp_path / "s.json", option, tmp_path / "s.json")
    assert code == 2
    assert f"{option} {tmp_path}/s.json: " in error
    assert error.count("\n") == 1


@pytest.mark.timeout(300)
def test_run_saves_what_show_and_check_read(cli) -> None:
    scenario = SPECIMENS["S02"].scenario
    (cli.folder / "s.json").write_text(scenario.to_json())
    work = ["s.json", "s.json", "--target", "specimen:S02", "--history", "kept", "--keep", "raw"]
    ran = cli.run("run", *work, "--json", timeout_s=200)
    assert ran.returncode == 1, ran
    live = json.loads(ran.stdout)["runs"]
    histories = [cli.folder / "kept" / name for name in (scenario.name, f"{scenario.name}-2")]
    again = cli.run("check", *map(str, histories), "--json")
    assert again.returncode == 1, again
    assert [{k: v for k, v in run.items() if k != "history"} for run in json.loads(again.stdout)["runs"]] == live
    assert len(events_shown(cli.run("show", str(histories[1])).stdout)) > 10
    kept = sorted((cli.folder / "raw").iterdir())
    assert [fingerprint(History.load(k)) for k in kept] == [fingerprint(History.load(h)) for h in histories]


@pytest.mark.timeout(300)
def test_a_kept_run_is_readable_when_its_supervisor_was_killed(cli, typed) -> None:
    slow = Scenario(name="slow", workload=Workload(steps=100_000))
    (cli.folder / "s.json").write_text(slow.to_json())
    process = cli.start("run", "s.json", "--keep", "raw")
    events = cli.folder / "raw" / "run1-slow" / "rank1.events.jsonl"
    limit = time.monotonic() + 200
    while not (events.exists() and b'"kind":"step"' in events.read_bytes()):
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.02)  # a poll interval, not synchronisation
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    while cli.left_over():
        assert time.monotonic() < limit, "a rank outlived its supervisor"
        time.sleep(0.02)
    code, text, _ = typed("show", cli.folder / "raw")
    assert code == 0
    assert "incomplete: the run was cut short" in text
    assert "rank 1 vanished" in text
    assert "training step is over" in text
    code, text, _ = typed("check", cli.folder / "raw")
    assert code == 3
    assert "not exercised: the run was cut short" in text

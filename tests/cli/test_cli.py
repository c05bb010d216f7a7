"""What a person types: answers, exit codes, and what is left behind."""

import contextlib
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from deltaproof.conformance.check import load
from deltaproof.conformance.judge import judge
from deltaproof.simulator.faults import REGISTRY, RankKill
from deltaproof.simulator.history import History
from deltaproof.simulator.scenario import Deadlines, Scenario, Table, Workload

SMALL = Scenario(name="small", seed=5, tables=(Table(name="item"),), workload=Workload(steps=4))


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


def until(condition, what: str, timeout_s: float = 60.0) -> None:
    """Poll with a deadline: these are other processes, with no event of ours to wait on."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.02)  # a poll interval, not synchronisation


@pytest.mark.parametrize("what", ["faults", "properties", "specimens"])
def test_list(typed, what: str) -> None:
    table = typed("list", what)
    assert table.returncode == 0
    listed = json.loads(typed("list", what, "--json").stdout)
    assert len(listed) > 5
    if what == "faults":
        assert [row["fault"] for row in listed] == list(REGISTRY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 1, "faults": [{"fault": "gremlins"}]}', "unknown fault 'gremlins'"),
        ('{"version": 1, "world_size": 0}', "world_size is 0"),
        ('{"version": 1, "tables": [{"name": "a", "sharding": "column_wise"}]}', "column_wise sharding is refused"),
        ('{"version": 2}', "newer than this deltaproof reads"),
        ('{"version": 1, "workload": {"data": "clicks.parquet"}}', "no int64 column"),
        ('{"deltaproof_failure": 9}', "failure file version 9"),
        ('{"deltaproof_failure": 1, "target": 3}', "needs a text 'target'"),
        (
            '{"deltaproof_failure": 1, "target": "reference", "broken": [], "scenario": 4}',
            "a scenario is a JSON object",
        ),
        ("", "not JSON"),
    ],
)
@pytest.mark.parametrize("command", ["run", "replay"])
def test_bad_files_are_refused_with_one_line_and_exit_code_2(
    cli, typed, command: str, content: str, message: str
) -> None:
    pq.write_table(pa.table({"price": [1.5]}), cli.folder / "clicks.parquet")
    (cli.folder / "s.json").write_text(content)
    if command == "replay" and '"workload"' in content:
        content = '{"deltaproof_failure": 1, "target": "reference", "broken": ["x"], "scenario": ' + content + "}"
        (cli.folder / "s.json").write_text(content)
    ended = typed(command, "s.json")
    assert ended.returncode == 2, ended
    assert message in one_line(ended.stderr)
    assert message not in ended.stdout


def test_replay_wants_a_failure_file(cli) -> None:
    (cli.folder / "s.json").write_text(SMALL.to_json())
    ended = cli.run("replay", "s.json")
    assert ended.returncode == 2
    assert "not a failure file" in one_line(ended.stderr)


def test_version(cli) -> None:
    ended = cli.run("--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("deltaproof 0.")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "absent.json"], "cannot read absent.json"),
        (["run", "s.json", "--engine", "steam"], "unknown engine 'steam'"),
        (["run", "s.json", "--target", "no_such_module:make"], "cannot import target 'no_such_module:make'"),
        (["run", "s.json", "--target", "specimen:S99"], "unknown specimen 'S99'"),
        (["run", "s.json", "--data", "absent.parquet"], "absent.parquet"),
        (["run", "s.json", "--devices", "tpu"], "--devices tpu: want cpu, per-rank or shared"),
        (["run", "s.json", "--backend", "nccl"], "backend 'nccl' needs CUDA tensors"),
        (["explore", "--backend", "nccl"], "backend 'nccl' needs CUDA tensors"),
        (["demo", "--data", "s.json"], "cannot read interactions from s.json"),
        (["list", "gremlins"], "cannot list 'gremlins'"),
        (["explore", "--count", "0"], "--count"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--host", ""], "--host is empty"),
        (["serve", "--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run"], "Missing argument"),
    ],
)
def test_bad_arguments_are_refused_with_one_line_and_exit_code_2(cli, typed, args: list[str], message: str) -> None:
    (cli.folder / "s.json").write_text(SMALL.to_json())
    ended = typed(*args)
    assert ended.returncode == 2, ended
    assert message in one_line(ended.stderr)


def test_without_torch_the_missing_extra_is_named(cli) -> None:
    (cli.folder / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchrec'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    (cli.folder / "s.json").write_text(SMALL.to_json())
    ended = cli.run("run", "s.json", PYTHONPATH=str(cli.folder))
    assert ended.returncode == 2
    assert "install the extra deltaproof[torch]" in one_line(ended.stderr)
    assert cli.run("list", "faults", PYTHONPATH=str(cli.folder)).returncode == 0


def test_run_prints_seed_and_settings_first_and_exits_0(cli) -> None:
    (cli.folder / "s.json").write_text(SMALL.to_json())
    ended = cli.run("run", "s.json", "--engine", "virtual")
    assert ended.returncode == 0, ended
    assert "seed 5" in ended.stdout.splitlines()[0]
    assert "held" in ended.stdout


def test_a_broken_run_says_how_to_repeat_it_and_the_replay_reproduces(cli) -> None:
    scenario = SMALL.to_json()
    (cli.folder / "s.json").write_text(scenario)
    ended = cli.run("run", "s.json", "--target", "specimen:S02", "--engine", "virtual")
    assert ended.returncode == 1, ended
    [command] = [line.strip() for line in ended.stdout.splitlines() if " replay " in line]
    pasted = subprocess.run(
        command, shell=True, cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=100
    )
    assert pasted.returncode == 1, pasted
    words = shlex.split(command)
    replay = words[words.index("replay") :]
    again = cli.run(*replay)
    assert again.returncode == 1, again
    assert "no-silent-loss" in again.stdout
    mended = cli.run(*replay, "--target", "reference")
    assert mended.returncode == 3
    assert "did not reproduce" in mended.stdout


def test_where_no_failure_file_can_be_written_the_report_is_printed_all_the_same(cli) -> None:
    (cli.folder / "s.json").write_text(SMALL.to_json())
    (cli.folder / "taken").touch()
    ended = cli.run("run", "s.json", "--target", "specimen:S02", "--failures", "taken", "--engine", "virtual")
    assert ended.returncode == 1
    assert "no-silent-loss" in ended.stdout
    assert "no failure file in taken" in one_line(ended.stderr)


def test_a_fault_that_never_fires_exits_3_and_json_says_so(cli) -> None:
    scenario = Scenario(
        name="late", workload=Workload(steps=3), faults=(RankKill(rank=0, point="train.after-step", nth=9),)
    )
    (cli.folder / "s.json").write_text(scenario.to_json())
    ended = cli.run("run", "s.json", "--json", "--engine", "virtual")
    assert ended.returncode == 3
    answer = json.loads(ended.stdout)
    assert answer["verdict"] == "not exercised"
    assert answer["runs"][0]["faults"][0]["fired"] == 0


@pytest.mark.soak
def test_explore_draws_the_count_and_the_same_seed_repeats(cli) -> None:
    def explored() -> dict:
        ended = cli.run("explore", "--count", "2", "--seed", "3", "--ranks-max", "2", "--json")
        assert ended.returncode == 0, ended
        return json.loads(ended.stdout)

    first, second = explored(), explored()
    assert first["runs"] == 2
    assert first["drawn"] == second["drawn"]
    assert len(set(first["drawn"])) > 1


@pytest.mark.timeout(300)
def test_explore_finds_and_shrinks_a_specimen_with_two_jobs(cli) -> None:
    args = ["--count", "4", "--seed", "1", "--jobs", "2", "--target", "specimen:S02", "--shrink-s", "3"]
    ended = cli.run("explore", *args, "--json", timeout_s=250)
    assert ended.returncode == 1, ended
    failures = json.loads(ended.stdout)["failures"]
    assert failures
    assert all({"no-silent-loss", "restart-converges", "no-lost-rows"} & set(f["broken"]) for f in failures)
    found = [(load(cli.folder / f["path"]).scenario.to_json(), f["found"]) for f in failures]
    assert all(len(smallest) <= len(as_found) for smallest, as_found in found)
    assert any(len(smallest) < len(as_found) for smallest, as_found in found)
    for failure in failures:
        report = judge(History.load(cli.folder / failure["history"]))
        assert [f.property for f in report.findings if f.violations] == failure["broken"]


def test_serve_says_where_and_refuses_a_port_in_use(cli) -> None:
    process = cli.start("serve", "--json")
    try:
        port = json.loads(process.stdout.readline())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"200" in connection.recv(100)
        second = cli.run("serve", "--port", str(port))
        assert second.returncode == 2, second
        assert str(port) in one_line(second.stderr)
        assert "in use" in second.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_serve_keeps_its_folder_for_itself_and_over_a_kill(cli) -> None:
    arguments = ["serve", "--json", "--data-dir", "data", "--fsync", "always"]
    for _ in range(2):
        process = cli.start(*arguments)
        try:
            assert json.loads(process.stdout.readline())["scheme"] == "http"
            second = cli.run("serve", "--data-dir", "data")
            assert second.returncode == 2, second
            assert f"in use by another server (process {process.pid})" in one_line(second.stderr)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)
    segment = max((cli.folder / "data").glob("*.wal"))
    segment.write_bytes(b"something else")
    damaged = cli.run(*arguments)
    assert damaged.returncode == 2, damaged
    assert segment.name in one_line(damaged.stderr)


def test_serve_tells_a_damaged_folder_from_a_torn_tail_and_goes_on_when_the_loss_is_accepted(cli) -> None:
    from deltaproof.fakes.durable import DurableStore

    with DurableStore(cli.folder / "data") as store:
        store.create_project("first")
        store.create_project("last")
    (segment,) = (cli.folder / "data").glob("*.wal")
    segment.write_bytes(segment.read_bytes()[:-1])
    damaged = cli.run("serve", "--data-dir", "data")
    assert damaged.returncode == 2, damaged
    text = one_line(damaged.stderr)
    assert "Traceback" not in text
    assert segment.name in text
    assert "start once with --accept-loss" in text
    process = cli.start("serve", "--json", "--data-dir", "data", "--accept-loss")
    try:
        assert json.loads(process.stdout.readline())["command"] == "serve"
    finally:
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "set aside in data/set-aside-1" in one_line(told)
    with DurableStore(cli.folder / "data") as store:
        assert store.projects() == ["deltaproof", "first"]


def test_serve_over_tls_names_the_certificate_to_trust(cli) -> None:
    process = cli.start("serve", "--json", "--tls")
    try:
        found = json.loads(process.stdout.readline())
        assert found["endpoint"] == f"https://127.0.0.1:{found['port']}"
        context = ssl.create_default_context(cafile=found["ca_file"])
        with (
            socket.create_connection(("127.0.0.1", found["port"]), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"200" in connection.recv(100)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert not Path(found["ca_file"]).exists()
    text = cli.start("serve", "--tls", "--host", "0.0.0.0")
    try:
        lines = [text.stdout.readline() for _ in range(3)]
        assert "https://127.0.0.1:" in lines[0]
        assert "and every other address of this machine" in lines[0]
        assert '"https://127.0.0.1:' in lines[2]
        assert 'ca_file="' in lines[2]
    finally:
        text.send_signal(signal.SIGTERM)
        text.communicate(timeout=30)


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--fsync", "never"], "want os or always"),
        (["--cert", "x.pem"], "go together"),
        (["--cert", "x.pem", "--key", "y.pem"], "cannot read x.pem"),
        (["--data-dir", "a-file"], "a-file"),
        (["--data-dir", "stray"], "'segment-old.wal' is no segment that this server wrote: move it elsewhere"),
        (["--data-dir", "folder"], "'segment-00000003.wal' is no segment that this server wrote: move it elsewhere"),
        (["--data-dir", "foreign"], "acknowledged is missing beside segment-00000001.wal"),
        (["--accept-loss"], "--accept-loss is about the folder of --data-dir"),
        (["--fsync", "always"], "--fsync always is about the folder of --data-dir"),
        (["--data-dir", ""], "--data-dir is empty"),
        (["--tls", "--host", "a..b"], "no certificate can name the host"),
    ],
)
def test_serve_refuses_what_it_cannot_use(cli, arguments: list[str], phrase: str) -> None:
    (cli.folder / "a-file").write_text("x")
    for name in ("stray/segment-old.wal", "foreign/segment-00000001.wal"):
        (cli.folder / name).parent.mkdir()
        (cli.folder / name).write_text("x")
    (cli.folder / "folder" / "segment-00000003.wal").mkdir(parents=True)
    done = cli.run("serve", *arguments)
    assert done.returncode == 2, done
    assert phrase in one_line(done.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(cli, number: signal.Signals) -> None:
    process = cli.start("demo")
    try:
        # Ranks, store, forkserver and the command itself: the demo is in the middle of a scenario.
        until(lambda: any("rank" in "".join(os.listdir(d)) for d in run_folders(cli)), "a rank at work")
        # Ctrl-C reaches the whole foreground process group.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in one_line(err)
    until(lambda: not cli.left_over(), "every process to be gone")
    assert os.listdir(cli.temporary) == []


def test_kill_9_of_the_command_leaves_no_process_and_no_folder(cli) -> None:
    process = cli.start("demo")
    try:
        until(lambda: any("rank" in "".join(os.listdir(d)) for d in run_folders(cli)), "a rank at work")
        assert len(cli.left_over()) > 2
    finally:
        process.kill()
        process.communicate(timeout=30)
    nothing_is_left(cli)


@pytest.mark.parametrize(
    "nodes",
    [
        # Killed while the agent's ranks start: most of them have not even imported torch.
        pytest.param(1, id="ranks-start"),
        pytest.param(2, id="ranks-train", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_kill_9_of_the_command_leaves_nothing_of_torchrun_either(cli, nodes: int) -> None:
    hangs = msgspec.structs.replace(SMALL, workload=Workload(steps=100_000), deadlines=Deadlines(run_s=300))
    (cli.folder / "s.json").write_text(hangs.to_json())
    process = cli.start("run", "s.json", "--launcher", "torchrun", "--nnodes", str(nodes))
    try:
        if nodes == 1:
            until(lambda: len(ranks_of_torchrun(cli)) == 2, "the ranks' processes")
        else:
            until(lambda: len(list(cli.temporary.glob("deltaproof-*/run*/rank?.ledger.arrows"))) == 2, "training", 300)
        assert len(cli.left_over()) > 3 + nodes  # the command, the store and multiprocessing's own too
    finally:
        process.kill()
        process.communicate(timeout=30)
    nothing_is_left(cli)


def ranks_of_torchrun(cli) -> list:
    found = []
    for process in cli.left_over():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.cmdline()[1:3] == ["-u", "-m"] else []
    return found


def nothing_is_left(cli) -> None:
    """With the processes, the ports they listened on are gone."""
    # At once: without the store and the folder they would come to an end some time, too.
    until(lambda: not cli.left_over(), "every process to be gone", 10)
    until(lambda: os.listdir(cli.temporary) == [], "the folder to be removed")


def run_folders(cli) -> list:
    return [d for d in cli.temporary.glob("deltaproof-*/run*") if d.is_dir()]


def test_a_closed_pipe_is_no_crash(cli) -> None:
    process = cli.start("list", "faults")
    process.stdout.close()
    process.wait(timeout=60)
    assert "Traceback" not in process.stderr.read()
    assert process.returncode in (0, 141, -signal.SIGPIPE)


def test_help_names_every_command() -> None:
    from deltaproof.cli import app

    command: Any = typer.main.get_command(app)
    names = set(command.commands)
    assert names == {
        "demo",
        "run",
        "replay",
        "explore",
        "serve",
        "list",
        "readback",
        "resend",
        "show",
        "check",
        "conform",
        "init-target",
    }


def test_a_temporary_folder_with_too_long_a_name_is_bad_input(cli) -> None:
    (cli.folder / "s.json").write_text(SMALL.to_json())
    deep = cli.temporary / ("x" * 90)
    deep.mkdir()
    ended = cli.run("run", "s.json", TMPDIR=str(deep))
    assert ended.returncode == 2, ended
    assert "set TMPDIR to a shorter one" in one_line(ended.stderr)

"""The commands readback and resend, as a person types them, against a served store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import StatusFault
from deltaproof.fakes.store import ViewSpec
from deltaproof.reference.delta import make_delta
from deltaproof.reference.settings import Settings
from deltaproof.reference.shards import Files, ShardWriter, State, find

NAME, ROWS = "m.ebc.embedding_bags.t", 30
SETTINGS = Settings(project="deltaproof", view="v", version="v1", every_steps=1)
LOGIN = {
    "ALIBABA_CLOUD_ACCESS_KEY_ID": "deltaproof",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "deltaproof",
    "FEATUREDB_USERNAME": "me",
    "FEATUREDB_PASSWORD": "a-password-nobody-should-see",
}


@pytest.fixture(scope="module")
def server() -> Iterator[FeatureStoreServer]:
    with FeatureStoreServer() as running:
        yield running


@pytest.fixture
def view(server: FeatureStoreServer) -> FeatureStoreServer:
    server.reset()
    server.store.create_view(ViewSpec("deltaproof", "v", "e"))
    return server


def keep(folder: Path, step: int, ts: int, value: float, state: State = "acknowledged", keys: int = ROWS) -> pa.Table:
    table = make_delta(step, 0, 1, "f", NAME, np.arange(keys), np.full((keys, 2), value, np.float32), "dump")
    writer = ShardWriter(Files(str(folder)), SETTINGS, 0, 1, f"g{step}", state=state)
    writer(step, 0, table, np.full(keys, ts))
    return table


def put(server: FeatureStoreServer, table: pa.Table, ts: int) -> None:
    columns = [table[name].combine_chunks() for name in ("table_fqn", "key_id", "embedding")]
    batch = pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"])
    server.store.write("deltaproof", "v", batch, version="v1", ts=ts)


def test_shards_that_agree_then_not_then_are_sent_again(
    cli: Any, typed: Callable[..., Any], view: FeatureStoreServer
) -> None:
    where = ["kept", "--endpoint", view.endpoint]
    put(view, keep(cli.folder / "kept", 1, 10, 1.0), 10)
    agreed = cli.run("readback", *where, **LOGIN)
    assert (agreed.returncode, agreed.stderr) == (0, "")
    assert "MATCH            30" in agreed.stdout
    assert "store and shards agree" in agreed.stdout

    sampled = typed("readback", *where, "--sample", "7", "--seed", "3", "--json", "-", **LOGIN)
    told = json.loads(sampled.stdout)
    assert (sampled.returncode, told["compared"], told["agrees"], told["verdicts"]["MATCH"]) == (0, 7, True, 7)

    put(view, keep(cli.folder / "elsewhere", 1, 1, 9.0, keys=1), 10)
    differs = typed("readback", *where, "--json", "report.json", **LOGIN)
    assert differs.returncode == 1
    assert "they do not agree" in differs.stdout
    assert "[9.0, 9.0]" in differs.stdout
    told = json.loads((cli.folder / "report.json").read_text())
    assert told["verdicts"] == {
        "CORRUPT_LOCAL": 0,
        "DIFFERENT": 1,
        "MISSING": 0,
        "UNDECIDED": 0,
        "SUPERSEDED": 0,
        "MATCH": 29,
    }
    assert told["examples"][0]["key"] == "0"

    keep(cli.folder / "kept", 2, 12, 2.0, "spilled", keys=3)
    dry = typed("resend", *where, "--dry-run", **LOGIN)
    assert (dry.returncode, "3 would be sent, 0 superseded" in dry.stdout) == (0, True)
    sent = typed("resend", *where, **LOGIN)
    assert (sent.returncode, "3 sent, 0 superseded" in sent.stdout) == (0, True)
    again = typed("resend", *where, "--json", "-", **LOGIN)
    assert (again.returncode, json.loads(again.stdout)["sent"]) == (0, 0)
    rows = view.store.snapshot("deltaproof", "v", "v1").table().slice(0, 4).to_pylist()
    assert [(row["embedding"][0], row["ts"]) for row in rows] == [(2.0, 13), (2.0, 13), (2.0, 13), (1.0, 10)]


def test_damage_is_named_and_the_rest_is_compared(
    typed: Callable[..., Any], tmp_path: Path, view: FeatureStoreServer
) -> None:
    put(view, keep(tmp_path / "kept", 1, 10, 1.0), 10)
    put(view, keep(tmp_path / "kept", 2, 11, 2.0, keys=5), 11)
    entries = find(Files(str(tmp_path / "kept"))).entries
    path = tmp_path / "kept" / entries[1].shard
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "kept" / entries[0].shard).with_name("rank-00000-of-00001.g9-000000.parquet").write_bytes(b"")
    ended = typed("readback", "kept", "--endpoint", view.endpoint, **LOGIN)
    assert ended.returncode == 1
    assert f"CORRUPT_LOCAL {entries[1].path}: its shard has" in ended.stdout
    assert "CORRUPT_LOCAL     5" in ended.stdout
    assert "SUPERSEDED        5" in ended.stdout
    assert "1 shards have no manifest" in ended.stdout
    spilled = keep(tmp_path / "spill", 3, 12, 3.0, "spilled")
    assert spilled.num_rows == ROWS
    [entry] = find(Files(str(tmp_path / "spill"))).entries
    (tmp_path / "spill" / entry.shard).unlink()
    unsent = typed("resend", "spill", "--endpoint", view.endpoint, **LOGIN)
    assert (unsent.returncode, "its shard is missing" in unsent.stdout) == (1, True)


def test_what_the_store_refuses_is_an_exit_code_1_and_no_secret_is_told(
    typed: Callable[..., Any], tmp_path: Path, view: FeatureStoreServer
) -> None:
    keep(tmp_path / "spill", 3, 12, 3.0, "spilled")
    view.add_fault(StatusFault(id="no", route="write", code=403, count=100))
    ended = typed("resend", "spill", "--endpoint", view.endpoint, **LOGIN)
    assert ended.returncode == 1
    assert "no manifest was marked" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert LOGIN["FEATUREDB_PASSWORD"] not in ended.stdout + ended.stderr


@pytest.mark.parametrize("command", ["readback", "resend"])
def test_bad_input_is_one_line_and_exit_code_2(
    typed: Callable[..., Any], tmp_path: Path, view: FeatureStoreServer, command: str
) -> None:
    state: State = "spilled" if command == "resend" else "acknowledged"
    keep(tmp_path / "kept", 1, 10, 1.0, state)
    other = Settings(project="deltaproof", view="gone", version="v1", every_steps=1)
    table = make_delta(1, 0, 1, "f", NAME, np.arange(1), np.zeros((1, 2), np.float32), "dump")
    ShardWriter(Files(str(tmp_path / "other")), other, 0, 1, "g", state=state)(1, 0, table, np.array([1]))
    store = ["--endpoint", view.endpoint]
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (["nowhere", *store], LOGIN, "there is no nowhere"),
        (["s3://key:hunter2@bucket/x", *store], LOGIN, "holds a login"),
        (["kept", *store, "--version", "v7"], LOGIN, "there are shards of project 'deltaproof' view 'v' version 'v1'"),
        (["other", *store], LOGIN, "no view 'gone' in project 'deltaproof'"),
        (["kept", "--endpoint", "http://store.example"], LOGIN, "clear text"),
        (["kept", *store], LOGIN | {"FEATUREDB_PASSWORD": ""}, "FEATUREDB_PASSWORD"),
        (["kept", "--endpoint", "127.0.0.1:1"], LOGIN, "cannot be reached"),
        (["kept", *store, "--json", "no/such/folder/report.json"], LOGIN, "No such file or directory"),
        ([], LOGIN, "Missing argument"),
    ]
    for arguments, environment, message in cases:
        ended = typed(command, *arguments, **environment)
        assert ended.returncode == 2, (arguments, ended)
        assert message in ended.stderr, (arguments, ended)
        assert ended.stderr.count("\n") == 1, ended.stderr
        assert "hunter2" not in ended.stderr


def test_an_empty_folder_proves_nothing(typed: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    ended = typed("readback", "kept")
    assert (ended.returncode, "nothing was compared" in ended.stdout) == (1, True)
    assert typed("resend", "kept").returncode == 0

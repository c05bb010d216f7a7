"""docs/protocol.md, both ends of it. The transcripts are the test vectors: real conversations, word for word."""

import base64
import contextlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deltaproof.conformance.subprocess_target import (
    BreaksProtocol,
    PrintsOnStdout,
    Program,
    ProgramDied,
    ProgramError,
    ProgramUploader,
    arrow_stream,
    capabilities,
    json_rows,
)
from deltaproof.conformance.target import missing
from deltaproof.fakes.feature_store_py import FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import StatusFault
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.scenario import Scenario, Table
from deltaproof.simulator.target import RankContext, contents, resolve

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRANSCRIPTS = sorted((HERE / "transcripts").glob("*.jsonl"))
PYTHON = shlex.quote(sys.executable)
HELLO = '{"reply": 0, "ok": {"protocol": 1, "name": "x", "deltas": "json"}}'
#: What to send the conversations to: the examples and the template that users begin with.
PROGRAMS = {
    "json": f"{PYTHON} {ROOT / 'conformance/templates/program.py'}",
    "arrow": f"{PYTHON} {HERE / 'arrow_program.py'}",
    "node": f"node {ROOT / 'examples/targets/uploader.mjs'}",
}


def lines(transcript: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in transcript.read_text().splitlines()]


def saying(*answers: str, then: str = "") -> str:
    """A command that reads a line and prints an answer, once for each, and then runs ``then``."""
    code = "import sys\n" + "".join(f"sys.stdin.readline(); print({a!r}, flush=True)\n" for a in answers) + then
    return f"{PYTHON} -c {shlex.quote(code)}"


class View:
    """All that a program's uploader asks of a view."""

    def data_plane(self) -> tuple[str, dict[str, str]]:
        return "http://127.0.0.1:1/table", {"Auth": "c2VjcmV0"}


class Context(RankContext):
    """Of a rank that has a process group, as on the process engine."""

    def open_view(self) -> Any:
        return View()


def context(start: dict[str, Any], *tables: Table) -> Context:
    scenario = Scenario(world_size=start.get("world_size", 1), tables=tables or (Table(name="item"),))
    found = Context.reader(scenario, "run", None)
    object.__setattr__(found, "process_group", "WORLD")
    return found  # type: ignore[return-value]


def delta(call: dict[str, Any], payload: bytes) -> pa.Table:
    """The delta of a recorded submit, as the dumper gave it to the kit."""
    if payload:
        rows = pa.ipc.open_stream(payload).read_all()
        return rows.rename_columns(["table_fqn", "key_id", "embedding"])
    names, keys, values = zip(*call["delta"], strict=True)
    columns = [pa.array(names), pa.array([int(k) for k in keys]), pa.array(values, pa.list_(pa.float32()))]
    return pa.table(columns, names=["table_fqn", "key_id", "embedding"])


def act(uploader: ProgramUploader, call: dict[str, Any], payload: bytes) -> None:
    """What has the kit say this. `hello` is part of the start."""
    if call["call"] == "submit":
        uploader.submit(call["step"], delta(call, payload))
    elif call["call"] == "close":
        uploader.close(call["drain"])
    elif call["call"] != "hello":
        getattr(uploader, call["call"])()


# ------------------------------------------------------------------------------------------------------ the kit's end
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_kit_says_what_it_said(transcript: Path) -> None:
    """Driven with the same calls, it writes the recorded lines and bytes, and understands the recorded answers."""
    recorded = lines(transcript)
    start = next(line["kit"] for line in recorded if line.get("kit", {}).get("call") == "start")
    owners = [table["embedding_name"].split(".") for table in start["tables"]]
    uploader = ProgramUploader(
        f"{PYTHON} {HERE / 'player.py'} {transcript}",
        context(start, *(Table(name=name, owner=owner) for owner, _, name in owners)),
    )
    replies = {line["program"]["reply"]: line["program"] for line in recorded if "reply" in line.get("program", {})}
    for line in recorded:
        if "kit" not in line:
            continue
        call, error = line["kit"], replies[line["kit"]["id"]].get("error")
        payload = base64.b64decode(line.get("payload", ""))
        expected = contextlib.nullcontext()
        if error is not None:
            expected = pytest.raises(ProgramError, match=re.escape(error["message"]))  # type: ignore[assignment]
        with expected as raised:
            act(uploader, call, payload)
        if error is not None:
            assert raised.value.unacknowledged == tuple(error["unacknowledged"])  # type: ignore[attr-defined]
    uploader.close(False)


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(3)), elements=st.floats(width=32)))
def test_json_rows_lose_no_bit(values: np.ndarray) -> None:
    keys = [2**63 - 1, -(2**63), 0, 2**53 + 1][: len(values)]
    rows = pa.table({"embedding_name": ["t"] * len(values), "key_id": keys, "embedding": list(values)})
    told = json.loads(json.dumps(json_rows(rows), allow_nan=False))
    assert [int(key) for _, key, _ in told] == keys
    found = np.array([[np.float32(v) for v in row] for _, _, row in told])
    known = ~np.isnan(values)
    assert (found.view(np.uint32)[known] == values.view(np.uint32)[known]).all()
    assert np.isnan(found[~known]).all()


def test_an_arrow_delta_is_a_stream_of_three_columns() -> None:
    rows = pa.table({"embedding_name": ["t"], "key_id": [-5], "embedding": pa.array([[1.5]], pa.list_(pa.float32()))})
    assert pa.ipc.open_stream(arrow_stream(rows)).read_all() == rows


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        (saying("starting up..."), PrintsOnStdout, "wrote 'starting up...' on stdout; diagnostics go to stderr"),
        (saying("[1]"), PrintsOnStdout, r"wrote '\[1\]' on stdout"),
        (saying('{"reply": 7, "ok": null}'), BreaksProtocol, "want a reply to 0"),
        (saying('{"reply": 0}'), BreaksProtocol, "with either 'ok' or 'error'"),
        (saying('{"reply": 0, "ok": null}'), BreaksProtocol, r"want 'ok' with a 'protocol' of \[1\]"),
        (saying('{"reply": 0, "ok": {"protocol": 9}}'), BreaksProtocol, r"want 'ok' with a 'protocol' of \[1\]"),
        (saying('{"reply": 0, "ok": {"protocol": 1, "deltas": "xml"}}'), BreaksProtocol, "'deltas' is 'xml'"),
        (saying('{"reply": 0, "error": "no"}'), BreaksProtocol, "want an 'error' with a 'message'"),
        (saying('{"reply": 0, "error": {"message": "no disk"}}'), ProgramError, "^no disk$"),
        (
            saying(then="sys.exit('no such module: x')"),
            ProgramDied,
            r"exit code 1\); its last words: no such module: x",
        ),
        (saying(then="import time; time.sleep(60)"), ProgramDied, "has not answered in time"),
    ],
    ids=lambda value: "" if str(value).startswith(PYTHON) else None,
)
def test_an_answer_that_is_none_is_named(command: str, kind: type[ProgramError], message: str) -> None:
    program = Program(command)
    with pytest.raises(kind, match=message) as raised:
        program.hello(0.4 if "sleep" in command else 30)
    assert type(raised.value) is kind
    program.kill()
    program.close()


def test_a_program_that_dies_later_is_told_with_the_call() -> None:
    program = Program(saying(HELLO, then="sys.stdin.readline(); sys.exit(9)"))
    program.hello()
    with pytest.raises(ProgramDied, match=r"check_error: the program ended \(exit code 9\)"):
        program.call("check_error")
    program.close()


def test_last_words_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATUREDB_PASSWORD", "correct horse battery")
    program = Program(saying(then="import os; sys.exit('login: ' + os.environ['FEATUREDB_PASSWORD'])"))
    with pytest.raises(ProgramDied, match="last words: login") as raised:
        program.hello()
    assert "horse" not in str(raised.value)
    program.close()


def test_a_program_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaproof.conformance.subprocess_target.EXIT_S", 0.1)
    program = Program(saying(HELLO, then="import time; time.sleep(600)"))
    program.hello()
    program.close()
    assert program._process.returncode == -9


def test_a_transcript_holds_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAPROOF_TRANSCRIPTS", str(tmp_path))
    uploader = ProgramUploader(saying(HELLO, '{"reply": 1, "ok": null}'), context({}))
    uploader.start()
    uploader.close(False)
    text = (tmp_path / "rank0.jsonl").read_text()
    assert '"call": "start"' in text
    assert "c2VjcmV0" not in text


# ----------------------------------------------------------------------------------------------------- as a target
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program-xyz", "cannot be run: No such file"),
        ("", "names no command"),
        ("x 'y", "No closing quotation"),
        (saying("hello!"), "PrintsOnStdout"),
        (
            saying('{"reply": 0, "ok": {"protocol": 1, "deltas": "json", "capabilities": ["x"]}}'),
            "known: feature-store",
        ),
    ],
)
def test_a_program_that_is_none_is_bad_input(command: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        missing(f"exec:{command}", "processes")


def test_a_program_tells_what_it_can_do_and_is_asked_no_more() -> None:
    command = saying('{"reply": 0, "ok": {"protocol": 1, "deltas": "arrow", "capabilities": ["int8"]}}')
    assert capabilities(command) == {"arrow", "int8"}
    resolve(f"exec:{command}")
    assert contents(f"exec:{command}", context({})) is None


def test_a_program_cannot_run_in_virtual_time() -> None:
    with pytest.raises(ScenarioError, match="use the process engine"):
        missing(f"exec:{saying(HELLO)}", "virtual")


# ------------------------------------------------------------------------------------------------ the program's end
@pytest.mark.parametrize(
    ("name", "transcript"),
    [(n, t) for n in PROGRAMS for t in TRANSCRIPTS if (n == "arrow") == (t.stem == "arrow")],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_programs_answer_as_recorded(
    name: str, transcript: Path, feature_store: FeatureStoreServer, feature_store_client: FeatureStoreClient
) -> None:
    """Each gets the kit's lines of each conversation that has its kind of delta, with a real store to write to."""
    if name == "node" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    project = feature_store_client.get_project("deltaproof")
    assert project is not None
    project.create_entity("default_dynemb_entity", join_id="embedding_name")
    view = project.create_dynamic_embedding_feature_view(
        name="v",
        entity="default_dynemb_entity",
        pk_field_name="embedding_name",
        sk_field_name="key_id",
        embedding_field_name="embedding",
        pk_field_type="STRING",
        sk_field_type="INT64",
        ttl=1_296_000,
        shard_count=1,
        replication_count=1,
        embedding_field_type="ARRAY<FLOAT>",
    )
    url, headers = view.data_plane()
    if transcript.stem == "refused":
        feature_store.add_fault(StatusFault(id="0", code=403, skip=1))
    program = Program(PROGRAMS[name])
    sent: dict[tuple[str, int], list[float]] = {}
    for line in lines(transcript):
        if "kit" not in line:
            continue
        call = dict(line["kit"])
        payload = base64.b64decode(line.get("payload", ""))
        if call["call"] == "start":
            call["store"] = {"url": url, "headers": headers}
        wanted = answer_to(transcript, call.pop("id"))
        ask = call.pop("call")
        if "error" in wanted:
            with pytest.raises(ProgramError, match=r"step 2: .*403") as raised:
                program.call(ask, payload, 30, **call)
            assert raised.value.unacknowledged == (2,)
            continue
        told = program.call(ask, payload, 30, **call)
        assert told["protocol"] == 1 if ask == "hello" else told is None
        if ask == "submit":
            rows = delta(call, payload)
            keys = zip(rows["table_fqn"].to_pylist(), rows["key_id"].to_pylist(), strict=True)
            sent |= dict(zip(keys, rows["embedding"].to_pylist(), strict=True))
    program.close()
    held = view.scan("run-1").to_pylist()
    assert {(row["pk"], row["sk"]): row["embedding"] for row in held} == sent


def answer_to(transcript: Path, number: int) -> dict[str, Any]:
    answers = (line["program"] for line in lines(transcript) if "program" in line)
    return next(answer for answer in answers if answer.get("reply") == number)

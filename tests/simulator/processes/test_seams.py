"""Uploaders on real ranks: in Python, as programs, and with a store of their own."""

import importlib
import shlex
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest

from deltaproof.conformance.check import check
from deltaproof.conformance.diagnosis import diagnose
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.faults import RankKill, StoreError
from deltaproof.simulator.processes import engine as engine_module
from deltaproof.simulator.scenario import PublisherConfig, Scenario, Table, Workload

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).parent.parent.parent.parent
PYTHON = shlex.quote(sys.executable)
PROGRAM = f"exec:{PYTHON} {shlex.quote(str(ROOT / 'conformance/templates/program.py'))}"
SHORT = Scenario(
    name="seams",
    tables=(Table(name="item", rows=40),),
    workload=Workload(steps=4),
    publisher=PublisherConfig(every_steps=2),
)


def programs(marked: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(marked in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.mark.parametrize("target", ["deltaproof.conformance.templates.uploader:Adapter", PROGRAM])
def test_uploaders_hold_through_a_retry(engine, target: str) -> None:
    scenario = msgspec.structs.replace(SHORT, faults=(StoreError(status=503, rank=1, count=2),))
    report = check(engine, scenario, target)
    assert report.verdict.value == "held", report.reason
    assert report.history.fired == [2]
    assert report.rows_compared > 0
    assert not diagnose(report.history)


def test_a_rank_that_is_killed_takes_its_program_along(engine, tmp_path: Path) -> None:
    program = tmp_path / "a-program-of-this-test.py"
    program.write_text((ROOT / "conformance/templates/program.py").read_text())
    scenario = msgspec.structs.replace(SHORT, faults=(RankKill(rank=0, point="publish.after", nth=2),))
    report = check(engine, scenario, f"exec:{PYTHON} {shlex.quote(str(program))}")
    assert report.verdict.value == "held", report.reason
    _, alive = psutil.wait_procs(programs(program.name), timeout=10)
    assert not alive


def test_a_program_that_prints_and_one_that_dies_are_named(engine) -> None:
    told: dict[str, str] = {}
    for last in ("print('step done', flush=True)", "sys.exit(7)"):
        code = (ROOT / "conformance/templates/program.py").read_text()
        code = code.replace('"""Asked after each step: raise here', f'{last}\n    """', 1)
        report = check(engine, SHORT, f"exec:{PYTHON} -c {shlex.quote(code)}")
        told |= dict(diagnose(report.history))
    assert set(told) == {"prints-on-stdout", "program-dies"}
    assert "wrote 'step done' on stdout" in told["prints-on-stdout"]
    assert "check_error: the program ended (exit code 7)" in told["program-dies"]


def test_a_store_of_ones_own_is_found_by_the_name_of_the_run(engine) -> None:
    report = check(engine, SHORT, "deltaproof_seam_targets:Files")
    assert report.verdict.value == "held", report.reason
    assert report.rows_compared > 0
    assert not report.history.store_log


def test_a_store_that_does_not_say_what_it_holds_is_not_waited_for(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = importlib.import_module("deltaproof_seam_targets")  # on sys.path by now (conftest.py)
    monkeypatch.setattr(engine_module, "CONTENTS_S", 0.2)
    with pytest.raises(ScenarioError, match=r"contents\(\) of target .* did not return within 0.2 s"):
        engine.run(SHORT, "deltaproof_seam_targets:Hangs")
    [thread] = [t for t in threading.enumerate() if t.name == "deltaproof-contents"]
    targets.ENOUGH.set()
    thread.join(10)
    assert not thread.is_alive()

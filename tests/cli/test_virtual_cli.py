"""``run`` and ``replay`` on the virtual engine: what a report's command asks for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deltaproof import cli
from deltaproof.simulator.scenario import Scenario, Workload


def deltaproof(*arguments: str) -> int:
    return cli._guarded(lambda: cli.app(list(arguments), standalone_mode=False))


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "plain.json"
    path.write_text(Scenario(name="plain", world_size=1, workload=Workload(steps=4)).to_json())
    return path


def test_a_failure_is_run_and_repeated(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = str(scenario.parent / "failures")
    assert deltaproof("run", str(scenario), "--engine", "virtual") == 0
    assert "held" in capsys.readouterr().out
    broken = ["--target", "specimen:S02", "--failures", failures]
    assert deltaproof("run", str(scenario), "--engine", "virtual", *broken) == 1
    told = re.search(r"\breplay (\S+) --engine virtual$", capsys.readouterr().out, re.M)
    assert told is not None
    assert deltaproof(*shlex.split(told[0])) == 1
    assert "no-silent-loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "name"),
    [(["--launcher", "torchrun"], "launcher"), (["--supervision", "strict"], "supervision"), (["--keep", "x"], "keep")],
)
def test_what_only_processes_have_is_refused(
    scenario: Path, option: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deltaproof("run", str(scenario), "--engine", "virtual", *option) == 2
    assert f"--{name} needs --engine processes" in capsys.readouterr().err


def test_an_unknown_engine_is_refused(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deltaproof("run", str(scenario), "--engine", "steam") == 2
    assert "known engines: virtual, processes" in capsys.readouterr().err

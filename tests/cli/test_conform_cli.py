"""``deltaproof conform`` and ``init-target``, in this process: what they print, write and exit with."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from deltaproof import cli
from deltaproof.conformance import profiles
from deltaproof.conformance.target import capabilities
from deltaproof.simulator.faults import StoreError
from deltaproof.simulator.scenario import Deadlines, PublisherConfig, Scenario, Table, Workload

CALM = Scenario(
    name="calm",
    tables=(Table(name="item", rows=100),),
    workload=Workload(steps=4, zipf_exponent=0.0),
    publisher=PublisherConfig(every_steps=2),
    deadlines=Deadlines(run_s=5, grace_s=1),
)
ERROR = msgspec.structs.replace(CALM, name="error", faults=(StoreError(status=503, rank=0),))
TARGETS = Path(__file__).parent.parent / "conformance"
UPLOADER = "deltaproof.conformance.templates.uploader:Adapter"


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout, stderr of a command, with profiles of two scenarios."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TARGETS))
    monkeypatch.syspath_prepend(str(TARGETS.parent.parent))
    real = profiles.plan

    def plan(profile: str, engine: str, seed: int, target: str) -> list[Scenario]:
        real(profile, engine, seed, target)  # what it refuses is refused
        return [profiles._fitted(scenario, capabilities(target)) for scenario in (CALM, ERROR)]

    none = {name: profiles.Profile(*[{"virtual": 0, "processes": 0}] * 2) for name in profiles.PROFILES}
    monkeypatch.setattr(profiles, "PROFILES", none)
    monkeypatch.setattr(profiles, "plan", plan)

    def command(*arguments: str) -> tuple[int, str, str]:
        code = cli._guarded(lambda: cli.app(list(arguments), standalone_mode=False))
        told = capsys.readouterr()
        return code, told.out, told.err

    return command


def test_a_target_that_holds_exits_with_0(run) -> None:
    code, out, err = run("conform", UPLOADER)
    assert (code, err) == (0, "")
    assert "engine virtual, profile smoke, seed 0: 2 scenarios" in out
    assert f"HELD: nothing that {UPLOADER} was asked for broke (2 of 2 runs judged" in out
    assert f"conform {UPLOADER} --engine virtual --profile smoke --seed 0" in out


def test_a_target_that_breaks_exits_with_1_and_leaves_a_report(run, tmp_path: Path) -> None:
    code, out, _ = run("conform", "examples.targets.naive:NaiveUploader", "--report", "out/report", "--shrink-s", "0.5")
    assert code == 1
    assert re.search(r"BROKEN no-lost-rows .*store-error", out, re.DOTALL)
    for name in ("report.html", "report.json", "junit.xml"):
        assert (tmp_path / "out/report" / name).stat().st_size
    told = json.loads((tmp_path / "out/report/report.json").read_text())
    assert told["verdict"] == "broken"
    for failure in told["failures"]:
        assert (tmp_path / failure["file"]).is_file()
        assert Path(failure["file"]).parent == Path("out/report/failures")
        assert failure["replay"].endswith(f"replay {failure['file']} --engine virtual")


def test_json_is_the_report_and_nothing_else(run) -> None:
    code, out, _ = run("conform", UPLOADER, "--json")
    told = json.loads(out)
    assert (code, told["verdict"], told["target"], len(told["runs"])) == (0, "held", UPLOADER, 2)


def test_a_hopeless_target_is_asked_once(run) -> None:
    code, out, _ = run("conform", "deltaproof_bad_targets:HangsInStart", "--shrink-s", "0")
    assert code == 1
    assert "the target hangs-in-start (in 1 runs): rank 0: " in out
    assert "not tested: error: not asked: the target hangs-in-start" in out


def test_what_is_wrong_with_the_target_itself_is_told_of_one_that_holds(run) -> None:
    code, out, _ = run("conform", "deltaproof_bad_targets:LeaksThread")
    assert code == 0
    assert re.search(r"the target leaks-threads \(in 2 runs\): rank[01]: forgotten; close\(\) returned and left", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_module_xyz:make",), "cannot import target 'no_such_module_xyz:make': ModuleNotFoundError"),
        (("deltaproof_bad_targets:takes_two",), "wrong signature: target"),
        (("deltaproof_bad_targets:returns_none",), "returned None"),
        (("deltaproof_bad_targets:ClaimsNonsense",), "claims 'arow'; known capabilities"),
        (("deltaproof_bad_targets:CannotTell",), "contents() has to return"),
        (("gibberish",), "neither 'reference'"),
        (("exec:",), "names no command"),
        (("exec:true", "--engine", "virtual"), "use the process engine"),
        ((UPLOADER, "--profile", "hourly"), "unknown profile 'hourly'; known: smoke, ci, nightly"),
        ((UPLOADER, "--engine", "quantum"), "unknown engine 'quantum'; known: virtual, processes"),
        ((UPLOADER, "--report", "/dev/null/x"), "--report /dev/null/x: Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_2(run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("conform", *arguments)
    assert code == 2
    assert message in err
    assert err.startswith("deltaproof: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "files"),
    [
        ((), {"adapter.py", "test_conformance.py"}),
        (("--uploader",), {"adapter.py", "test_conformance.py"}),
        (("--publisher",), {"adapter.py", "test_conformance.py"}),
        (("--subprocess",), {"uploader.py", "test_conformance.py"}),
    ],
)
def test_init_target_writes_what_runs(run, tmp_path: Path, option: tuple[str, ...], files: set[str]) -> None:
    code, out, _ = run("init-target", *option, "a/b c")
    folder = tmp_path / "a/b c"
    assert code == 0
    assert {path.name for path in folder.iterdir()} == files
    for name in files:
        assert f"wrote a/b c/{name}" in out
        compile((folder / name).read_text(), name, "exec")
    assert "cd 'a/b c'" in out
    command = next(line for line in out.splitlines() if "deltaproof conform" in line)
    assert shlex.split(command)[2] == ("exec:python3 uploader.py" if "--subprocess" in option else "adapter:Adapter")
    code, _, err = run("init-target", *option, "a/b c")
    assert code == 2
    assert "is there already, and is not replaced" in err


def test_init_target_of_two_kinds_is_none(run, tmp_path: Path) -> None:
    code, _, err = run("init-target", "--uploader", "--publisher", "x")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "exclude one another" in err


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("option", ["--uploader", "--publisher", "--subprocess"])
def test_what_init_target_writes_passes_in_another_repository(run, tmp_path: Path, option: str) -> None:
    run("init-target", option, "mine")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""From the wheel, in a fresh virtual environment and a repository that is not this one, to a first report."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the naive target in it, and ``venv`` beside it, into which the wheel was installed.

    Nothing is fetched: what the wheel depends on comes from the environment that runs this test.
    """
    folder = tmp_path_factory.mktemp("foreign")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted, symlinks=True)
    run(folder, sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", ".", "tree")
    run(folder, sys.executable, "-m", "venv", "--without-pip", "venv")
    [wheel] = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    install = [
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "--no-index",
        "--no-deps",
    ]
    run(folder, sys.executable, *install, str(wheel))
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    # A folder named in a .pth file comes after the environment's own, and .pth files in it are not read: the editable
    # install of this tree stays outside.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "repository").mkdir()
    shutil.copy(ROOT / "examples" / "targets" / "naive.py", folder / "repository")
    return folder


def run(folder: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def test_the_package_comes_from_the_wheel(foreign: Path) -> None:
    script = "import deltaproof, importlib.metadata as m; print(deltaproof.__file__, m.version('deltaproof'))"
    told = run(foreign / "repository", "../venv/bin/python", "-c", script).stdout
    assert told.startswith(str(foreign / "venv"))


def test_the_first_report_names_the_bugs_of_the_naive_target(foreign: Path) -> None:
    began = time.monotonic()
    command = ["../venv/bin/python", "-m", "deltaproof", "conform", "naive:NaiveUploader", "--report", "out"]
    done = run(foreign / "repository", *command, code=1)
    assert time.monotonic() - began < 300
    assert "BROKEN: naive:NaiveUploader breaks " in done.stdout
    report = json.loads((foreign / "repository" / "out" / "report.json").read_text())
    broken = {(cell["property"], cell["family"]) for cell in report["cells"] if cell["verdict"] == "broken"}
    # A refused request is forgotten, nobody is told, and a clock that steps back loses rows.
    assert {("no-lost-rows", "store"), ("no-silent-loss", "store"), ("no-lost-rows", "clock")} <= broken
    # On a good day it works.
    assert not {property for property, family in broken if family == "none"}
    page = (foreign / "repository" / "out" / "report.html").read_text()
    for failure in report["failures"]:
        assert failure["property"] in page
        assert (foreign / "repository" / failure["file"]).exists()
    replay = report["failures"][0]["file"]
    again = ["../venv/bin/python", "-m", "deltaproof", "replay", replay, "--engine", "virtual"]
    assert report["failures"][0]["property"] in run(foreign / "repository", *again, code=1).stdout


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_the_plugin_in_their_repository(foreign: Path, workers: list[str]) -> None:
    command = ["../venv/bin/python", "-m", "pytest", "--deltaproof-target=naive:NaiveUploader", "--junitxml=junit.xml"]
    run(foreign / "repository", *command, "--deltaproof-report=out", "-p", "no:cacheprovider", *workers, code=1)
    cases = {
        (case.get("classname"), case.get("name")): case
        for case in ElementTree.parse(foreign / "repository" / "junit.xml").iter("testcase")
    }
    failed = {key for key, case in cases.items() if case.find("failure") is not None}
    assert ("deltaproof.store", "no-silent-loss") in failed
    assert ("deltaproof.none", "no-silent-loss") not in failed
    assert not [key for key, case in cases.items() if case.find("error") is not None]
    # It claims no copies and no restart: those rules are skipped, with the reason, and not passed.
    skipped = cases["deltaproof.restart", "restart-converges"].find("skipped")
    assert skipped is not None
    assert "restart" in (skipped.get("message") or "")

"""The README's programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def block(heading: str, number: int = 0) -> str:
    section = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.M)
    [text] = [s for s in section if s.startswith(heading + "\n")]
    return re.findall(r"```python\n(.*?)```", text, re.S)[number]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100)


def test_a_row_is_written_and_read(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", block("A feature store on your laptop"))
    assert done.returncode == 0, done.stderr
    assert "'success_records': 1" in done.stdout
    assert "[0.5, 1.0]" in done.stdout


@pytest.mark.xdist_group("processes")
def test_the_adapter_is_a_target(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "mine.py").write_text(block("Put your publisher under test"))
    scenario = str(ROOT / "tests" / "scenarios" / "one-rank-alone.json")
    done = run(tmp_path, "-m", "deltaproof.cli", "run", scenario, "--target", "mine:make")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " held " in done.stdout

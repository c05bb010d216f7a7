import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from alibabacloud_credentials.utils import auth_util

from deltaproof import cli as command_line


def _heed_ctrl_c() -> None:
    """A suite that a shell script started in the background ignores SIGINT, and its children would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Cli:
    """Runs the console script's entry point in a process of its own, marked so that whatever it leaves can be found."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        self.mark = f"DELTAPROOF_TEST_MARK={folder.name}-{os.getpid()}"
        name, _, value = self.mark.partition("=")
        self.env = {**os.environ, name: value, "TMPDIR": str(temporary), "COLUMNS": "150"}

    def start(self, *args: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "deltaproof.cli", *args],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_ctrl_c,
        )

    def run(self, *args: str, timeout_s: float = 100, **env: str) -> subprocess.CompletedProcess:
        process = self.start(*args, **env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def left_over(self) -> list[psutil.Process]:
        """Processes that carry this test's mark and still run."""
        name, _, value = self.mark.partition("=")
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end_left_over(self) -> None:
        for process in self.left_over():
            process.kill()


@pytest.fixture
def cli(tmp_path):
    # Not under tmp_path, whose name is too long for the forkserver's socket.
    with tempfile.TemporaryDirectory(prefix="dp-") as temporary:
        made = Cli(tmp_path, Path(temporary))
        yield made
        made.end_left_over()


class Typed(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Typed]:
    """The command in this process, in ``tmp_path``: to start one takes a second."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **environment: str) -> Typed:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # Alibaba's module has read the environment before, when another test imported it.
        for field in ("access_key_id", "access_key_secret"):
            monkeypatch.setattr(auth_util, f"environment_{field}", environment.get(f"ALIBABA_CLOUD_{field.upper()}"))
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        code = command_line._guarded(lambda: command_line.app(words, standalone_mode=False))
        return Typed(code, *capsys.readouterr())

    return run

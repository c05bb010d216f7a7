"""What the store's process does when it is over: it cleans up after a supervisor that was killed, and only then."""

from multiprocessing import Pipe
from pathlib import Path

import pytest

from deltaproof.fakes import server
from deltaproof.simulator.processes.store_process import serve


@pytest.fixture
def folders(tmp_path: Path, monkeypatch) -> tuple[Path, Path]:
    """The engine's and multiprocessing's, with something in them; the store itself ends at once."""
    monkeypatch.setattr(server, "process_main", lambda pipe: None)
    engine, sockets = tmp_path / "engine", tmp_path / "sockets"
    (engine / "run1").mkdir(parents=True)
    (engine / "run1" / "rank0.log").write_text("at work")
    sockets.mkdir()
    (sockets / "listener-1").touch()
    return engine, sockets


@pytest.mark.parametrize("said_goodbye", [True, False])
def test_a_supervisor_that_lives_removes_its_folder_itself(folders, said_goodbye: bool) -> None:
    mine, theirs = Pipe()
    with mine, theirs:  # where nothing was said SIGTERM ended the store
        if said_goodbye:
            mine.send(None)
        serve(theirs, *folders)
    assert all(folder.exists() for folder in folders)


def after_a_kill(engine: Path, sockets: Path) -> None:
    mine, theirs = Pipe()
    mine.close()
    with theirs:
        serve(theirs, engine, sockets)


def test_the_folders_of_a_killed_supervisor_are_removed(folders) -> None:
    after_a_kill(*folders)
    assert not any(folder.exists() for folder in folders)


def test_a_folder_with_files_of_somebody_else_stays(folders) -> None:
    engine, sockets = folders
    (sockets / "of a manager").touch()
    after_a_kill(engine, sockets)
    assert not engine.exists()
    assert [path.name for path in sockets.iterdir()] == ["of a manager"]

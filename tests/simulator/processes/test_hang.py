"""What is known of ranks whose time is over: also of those that cannot answer any more."""

import contextlib
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import given

from deltaproof.conformance.check import check
from deltaproof.simulator.catalogue import MIXED
from deltaproof.simulator.processes import hang, launchers, supervisor
from deltaproof.simulator.processes.hang import Call, Flight, FlightWriter, ended_as, read_flight, tell
from deltaproof.simulator.scenario import Deadlines, Scenario, Workload


@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["begin", "enter", "leave"]), st.integers(0, 99), st.text(max_size=8)), max_size=20
    )
)
def test_the_file_says_at_any_time_which_collectives_a_rank_is_in(tmp_path_factory, operations) -> None:
    path = tmp_path_factory.mktemp("flight") / "flight.json"
    writer = FlightWriter(path)
    begun: list[Call] = []
    inside: list[Call] = []
    try:
        for what, which, text in operations:
            if what == "begin":
                begun.append(writer.begin("all_reduce", text))
                inside.append(begun[-1])
            elif what == "enter" and begun:
                inside.append(begun[which % len(begun)])
                writer.enter(inside[-1])
            elif what == "leave" and inside:
                writer.leave(inside.pop(which % len(inside)))
            found = read_flight(path)
            assert sorted(found.waits, key=str) == sorted(inside, key=str)
            assert found.last == (begun[-1] if begun else None)
        assert [call.number for call in begun] == list(range(1, len(begun) + 1))
    finally:
        writer.close()


def test_a_rank_that_wrote_nothing_has_begun_no_collective(tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(b'{"last":')
    assert read_flight(tmp_path / "absent") == read_flight(tmp_path / "cut") == Flight()


def test_each_rank_gets_one_phrase() -> None:
    now_s = hang._now_s()
    vote = Call(14, "all_reduce", "train.py:88 in vote", now_s - 12)
    before = Call(13, "barrier", "train.py:80 in start", now_s - 13)
    flights = {
        0: Flight(before),
        1: Flight(vote, [vote]),
        2: Flight(before),
        3: Flight(vote),
        4: Flight(),
        5: Flight(before),
    }
    seen: dict[int, dict[str, Any]] = {
        1: {"process": "S (sleeping)", "flight_recorder": ["gloo:all_reduce #20 of 0:default_pg, scheduled"]},
        2: {"process": "T (stopped)", "flight_recorder": None},
        3: {"process": "S (sleeping)", "flight_recorder": ["gloo:all_reduce #21 of 0:default_pg, scheduled"]},
    }
    said = tell(flights, gone={0: ended_as(-9)}, raised={5}, seen=seen)
    assert said == {
        0: "rank 0 has ended (signal 9, Killed)",
        1: "rank 1 waits in all_reduce #14 at train.py:88 in vote, for 12.0 s",
        2: "rank 2 has not come to #14; its last collective was barrier #13 at train.py:80 in start; "
        "its process is in state T (stopped)",
        3: "rank 3 waits in no collective; its last one was all_reduce #14 at train.py:88 in vote; "
        "torch has not finished gloo:all_reduce #21 of 0:default_pg, scheduled",
        4: "rank 4 has begun no collective",
        5: "rank 5 raised but did not exit; it has not come to #14; its last collective was barrier #13 "
        "at train.py:80 in start",
    }


@pytest.fixture
def stopped():
    """A process that was stopped before it could be asked anything."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
        process.kill()


@pytest.mark.parametrize("installed", [True, False])
def test_of_a_process_that_cannot_answer_py_spy_or_the_kernel_tells(tmp_path, stopped, monkeypatch, installed) -> None:
    if installed:
        (tmp_path / "py-spy").write_text('#!/bin/sh\necho "Thread of $4: in forward"\n')
        (tmp_path / "py-spy").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep if installed else None)
    found = hang.collect(tmp_path, {3: stopped.pid})[3]
    assert found["process"] == "T (stopped)"
    assert found["flight_recorder"] is None
    if installed:
        assert (found["stacks_from"], found["stacks"]) == ("py-spy", f"Thread of {stopped.pid}: in forward\n")
    else:
        assert found["stacks_from"] == "/proc"
        assert "T (stopped)" in found["stacks"]
        assert f"/proc/{stopped.pid}/wchan:" in found["stacks"]


SHORT = Scenario(name="short", tables=MIXED, workload=Workload(steps=4), deadlines=Deadlines(run_s=4, grace_s=1))


@pytest.mark.xdist_group("processes")
def test_a_stopped_rank_is_named_and_so_is_what_its_peer_waits_in(engine) -> None:
    report = check(engine, SHORT, "deltaproof_test_targets:StopsItself")
    assert [o.status for o in report.history.outcomes] == ["deadline", "deadline"]
    hung = {e.rank: e.data for e in report.history.events if e.kind == "hang"}
    assert hung[0]["says"].startswith("rank 0 waits in all_")
    assert hung[0]["stacks_from"] == "faulthandler"
    assert any("gloo:all_" in entry for entry in hung[0]["flight_recorder"])
    assert "has not come to #" in hung[1]["says"]
    assert "stopped" in hung[1]["says"]
    assert hung[1]["stacks_from"] != "faulthandler"
    violation = next(v for v in report.violations if v.property == "terminates" and v.rank == 0)
    assert f"{hung[0]['says']}; {hung[1]['says']}" in violation.message
    assert "in forward" in report.history.stacks[0]
    assert "in _listen" not in report.history.stacks[0]


@pytest.mark.xdist_group("processes")
def test_the_collective_and_its_call_site_are_named(engine) -> None:
    report = check(engine, SHORT, "deltaproof_test_targets:VotesAlone")
    says = next(e.data["says"] for e in report.history.events if e.kind == "hang" and e.rank == 1)
    assert says.startswith("rank 1 waits in all_reduce #"), says
    assert "at deltaproof_test_targets.py:" in says
    assert "in after_step" in says
    # Rank 0 is gone, or it hangs in another collective: which one, depends on how far it came.
    assert {e.rank for e in report.history.events if e.kind == "hang"} == {0, 1}


@pytest.mark.xdist_group("processes")
def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(engine) -> None:
    report = check(engine, SHORT, "deltaproof_test_targets:IgnoresSigterm")
    assert [o.status for o in report.history.outcomes] == ["ended", "error"]
    assert report.history.wall_s < 20


class SlowToExit:
    """A rank that has failed and is seen alive so many times before it exits."""

    pid = sentinel = None

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_alive(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    @property
    def exitcode(self) -> int | None:
        return None if self.looks > 0 else 1


def test_who_fails_just_before_the_deadline_has_the_grace_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    scenario = Scenario(name="late", world_size=1, deadlines=Deadlines(run_s=0.05, grace_s=60))
    job: Any = launchers.Job([cast(Any, SlowToExit(looks=20))])
    watching = supervisor.Supervisor(scenario, 0, "reference", "", tmp_path, lambda specs: job, {})
    (tmp_path / "rank0.failed").touch()
    watching.wait()
    assert [event.kind for event in watching.events] == ["rank-exit"]


@pytest.mark.xdist_group("processes")
def test_what_a_rank_started_ends_with_it(engine) -> None:
    history = engine.run(SHORT, "deltaproof_test_targets:LeavesAChild")
    assert history.succeeded
    sessions = {e.data["pid"] for e in history.events if e.kind == "rank-start"}
    assert len(sessions) == 2
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    assert left == []

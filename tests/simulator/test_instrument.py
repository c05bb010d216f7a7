"""Named points strike once, at the passage planned; the observed client changes nothing but reports each call."""

import threading
import time
from pathlib import Path

import pytest

from deltaproof.simulator.clocks import SkewedClocks
from deltaproof.simulator.faults import InjectedFault, LeakyError, RankRaise, RankStall
from deltaproof.simulator.history import Event, EventWriter, read_events
from deltaproof.simulator.instrument import ObservedClient, ObservedView, Points
from deltaproof.simulator.scenario import Scenario


@pytest.fixture
def points(tmp_path):
    events = EventWriter(tmp_path / "events", "rank1", 1)
    scenario = Scenario(faults=(RankRaise(rank=0, point="sdk.write"), RankRaise(rank=1, point="sdk.write", nth=3)))
    yield Recorded(scenario, events, tmp_path / "events")
    events.close()


class Recorded(Points):
    """Points that can tell what they recorded."""

    def __init__(self, scenario: Scenario, events: EventWriter, path: Path) -> None:
        super().__init__(scenario, 1, events, die=pytest.fail)
        self.path = path

    def recorded(self) -> list[Event]:
        return read_events(self.path)


def test_a_fault_strikes_at_its_passage_only_and_is_recorded(points) -> None:
    points.passing("sdk.write")
    points.passing("sdk.flush")
    points.passing("sdk.write")
    with pytest.raises(InjectedFault, match=r"rank 1 raises at sdk\.write, passage 3"):
        points.passing("sdk.write")
    points.passing("sdk.write")
    [fired] = points.recorded()
    assert fired.kind == "fault"
    assert fired.data == {"index": 1, "point": "sdk.write", "nth": 3}


def test_passages_are_counted_across_threads(points) -> None:
    raised = []

    def pass_often() -> None:
        for _ in range(50):
            try:
                points.passing("sdk.write")
            except InjectedFault as error:
                raised.append(error)

    threads = [threading.Thread(target=pass_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(raised) == 1


class View:
    pk_field = "embedding_name"

    def __init__(self) -> None:
        self.calls: list = []

    def write_features(self, **kwargs):
        self.calls.append(kwargs)
        return "json"

    def write_features_arrow(self, **kwargs):
        self.calls.append(kwargs)
        return "arrow"

    def write_flush(self):
        return {"total_batches": 1, "errors": [ValueError("x")]}


class Project:
    def __init__(self, view) -> None:
        self.view = view

    def get_dynamic_embedding_feature_view(self, name):
        return self.view if name == "there" else None

    def create_dynamic_embedding_feature_view(self, **kwargs):
        return self.view


class Client:
    def __init__(self, project) -> None:
        self.project = project

    def get_project(self, name):
        return self.project if name == "there" else None


def test_the_observed_client_passes_everything_on_and_reports(points) -> None:
    view = View()
    client = ObservedClient(Client(Project(view)), points, points._events)
    assert client.get_project("absent") is None
    project = client.get_project("there")
    assert project.get_dynamic_embedding_feature_view("absent") is None
    for seen in (
        project.get_dynamic_embedding_feature_view("there"),
        project.create_dynamic_embedding_feature_view(name="new"),
    ):
        assert seen.pk_field == "embedding_name"
        assert seen.write_features(data=[1, 2], version="v", ts=7) == "json"
    assert view.calls[0] == {"data": [1, 2], "version": "v", "ts": 7}
    assert seen.write_flush()["total_batches"] == 1
    kinds = [(e.kind, e.data.get("rows"), e.data.get("ts")) for e in points.recorded()]
    assert kinds == [("sdk-write", 2, 7), ("sdk-write", 2, 7), ("sdk-flush", None, None)]


def test_skewed_clocks_are_wrong_by_their_offset_and_tell_when_they_were_read() -> None:
    reads: list[str] = []
    clocks = SkewedClocks(lambda wall: reads.append("wall" if wall else "monotonic"))

    def wall_s() -> float:
        return (clocks.time_ns() - time.time_ns()) / 1e9

    def monotonic_s() -> float:
        return (clocks.monotonic_ns() - time.monotonic_ns()) / 1e9

    assert abs(wall_s()) < 60 > abs(monotonic_s())
    clocks.shift(3600)
    clocks.shift(-7200)
    assert abs(monotonic_s()) < 60, "a jump of the wall clock leaves the other alone"
    assert not reads
    assert -3660 < wall_s() < -3540
    assert reads == ["wall"]
    clocks.advance(300)
    assert 240 < monotonic_s() < 360
    assert -3360 < wall_s() < -3240
    wall_s()
    monotonic_s()
    assert reads == ["wall", "monotonic", "wall"]


def test_a_clock_may_drift_and_stand_still(monkeypatch) -> None:
    now = {"time_ns": 10**18, "monotonic_ns": 10**12}
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name])
    reads: list[bool] = []
    clocks = SkewedClocks(reads.append)

    def gained_s(after_s: float) -> tuple[float, float]:
        before = clocks.time_ns(), clocks.monotonic_ns()
        for name in now:
            now[name] += int(after_s * 1e9)
        return (clocks.time_ns() - before[0]) / 1e9, (clocks.monotonic_ns() - before[1]) / 1e9

    assert gained_s(10) == (10, 10)
    clocks.drift(500_000)
    assert gained_s(10) == (15, 15)
    assert reads == [True, False]
    clocks.drift(-500_000)
    assert gained_s(10) == (5, 5)
    clocks.freeze()
    assert gained_s(10) == (0, 5)
    clocks.advance(100)
    assert gained_s(10) == (0, 5)
    assert clocks.monotonic_ns() == 10**12 + 140 * 10**9
    clocks.shift(7)
    assert clocks.time_ns() == 10**18 + (10 + 15 + 5 + 7) * 10**9


def test_a_stall_is_over_before_the_point_is_passed(tmp_path) -> None:
    scenario = Scenario(faults=(RankStall(rank=0, point="sdk.flush", nth=2, seconds=7),))
    stalls: list[float] = []
    points = Points(scenario, 0, EventWriter(tmp_path / "e", "rank0", 0), pytest.fail, stall=stalls.append)
    for expected in ([], [7], [7]):
        points.passing("sdk.flush")
        assert stalls == expected


def test_installed_clocks_mislead_the_target_and_not_the_events(points, monkeypatch) -> None:
    for name in ("time", "time_ns", "monotonic", "monotonic_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))
    clocks = SkewedClocks(lambda wall: None)
    clocks.install()
    points.fired(0)
    clocks.advance(1000)
    points.fired(0)
    first, second = points.recorded()
    assert second.t_ms - first.t_ms < 60_000
    assert time.monotonic() * 1000 - second.t_ms > 900_000
    assert abs(time.time() - time.time_ns() / 1e9) < 60


def test_a_leaky_error_comes_once_after_the_flush_with_the_secrets_in_its_text(tmp_path) -> None:
    scenario = Scenario(faults=(LeakyError(rank=0, nth=2),))
    events = EventWriter(tmp_path / "events", "rank0", 0)
    points = Points(scenario, 0, events, pytest.fail, {"FEATUREDB_PASSWORD": "opensesame"})
    view = ObservedView(View(), points, events)
    view.write_flush()
    with pytest.raises(ConnectionError, match="FEATUREDB_PASSWORD=opensesame"):
        view.write_flush()
    view.write_flush()
    kinds = [e.kind for e in read_events(tmp_path / "events")]
    assert kinds == ["sdk-flush", "sdk-flush", "fault", "sdk-flush"]


def test_views_of_one_rank_are_told_apart(points) -> None:
    for _ in range(2):
        ObservedView(View(), points, points._events).write_features(data=[1], version="v", ts=1)
    assert len({e.data["view"] for e in points.recorded()}) == 2


def test_a_flush_covers_the_writes_that_were_begun_when_it_was_called(points) -> None:
    class Busy(View):
        def write_flush(self):
            seen.write_features(data=[1], version="v", ts=2)
            return super().write_flush()

    seen = ObservedView(Busy(), points, points._events)
    seen.write_features(data=[1], version="v", ts=1)
    seen.write_flush()
    told = [(e.kind, e.data.get("number", e.data.get("covers"))) for e in points.recorded()]
    assert told == [("sdk-write", 1), ("sdk-write", 2), ("sdk-flush", 1)]

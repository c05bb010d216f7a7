"""Named points strike once, at the passage planned; the observed client changes nothing but reports each call."""

import threading
import time
from pathlib import Path

import pytest

from deltaproof.simulator.clocks import SkewedClock
from deltaproof.simulator.faults import InjectedFault, RankRaise
from deltaproof.simulator.history import Event, EventWriter, read_events
from deltaproof.simulator.instrument import ObservedClient, Points
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


def test_a_skewed_clock_is_wrong_by_its_offset_and_tells_when_it_was_read() -> None:
    reads = []
    clock = SkewedClock(lambda: reads.append(1))
    before = time.time_ns()
    assert clock.time_ns() - before < 60e9
    assert not reads
    clock.shift(3600)
    clock.shift(-7200)
    assert not reads
    assert -3601e9 < clock.time_ns() - time.time_ns() < -3599e9
    clock.time_ns()
    assert len(reads) == 1

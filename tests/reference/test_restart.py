"""What a checkpoint holds of a publisher, and what a restarted one does; sequences of events: test_convergence.py."""

from __future__ import annotations

import functools
import io
import logging
import pickle
import threading
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.feature_store_py import DynamicEmbeddingFeatureView, in_process_client
from deltaproof.fakes.server.faults import FaultPlan, StatusFault
from deltaproof.fakes.store import Store
from deltaproof.reference import publisher as publisher_module
from deltaproof.reference.delta import DeltaError
from deltaproof.reference.publisher import Publisher, PublisherError
from deltaproof.reference.readback import Resend, ResendReport, StoreReader
from deltaproof.reference.restart import RestartError, join
from deltaproof.reference.shards import Files, find
from deltaproof.reference.uploader import Uploader, UploadError

T, DP = "m.ebc.embedding_bags.t", "m.ebc.embedding_bags.dp"


class Place:
    """A store, and publishers on it. Weights are `source.weights`."""

    def __init__(self, kit: Any, **settings: Any) -> None:
        self.kit, self.plan = kit, FaultPlan()
        self.store = Store(lambda: 10**12)
        self.settings = kit.settings(project="deltaproof", **({"settle_s": 0.0} | settings))
        self.view: Any = None

    def publisher(self, rank: int = 0, world_size: int = 1, wall_s: float = 1e9, **how: Any) -> tuple[Any, Publisher]:
        source = self.kit.source(
            {("m.ebc", "ebc", "t"): (9, 2, "row_wise"), ("m.ebc", "ebc", "dp"): (9, 2, "data_parallel")}
        )
        clock = types.SimpleNamespace(time=lambda: wall_s, monotonic=lambda: 0.0)
        client = in_process_client(self.store, f"rank{rank}", self.plan)
        group: dict[str, Any] = {"rank": rank, "world_size": world_size, "barrier": lambda: None, "clock": clock}
        return source, Publisher(source, client, self.settings, **(group | how))

    def started(self, **how: Any) -> tuple[Any, Publisher]:
        source, publisher = self.publisher(**how)
        publisher.start()
        return source, publisher

    def stored(self) -> dict[tuple[str, int], float]:
        rows = self.store.snapshot("deltaproof", "v", "v1").table()
        columns = (rows[name].to_pylist() for name in ("pk", "sk", "embedding"))
        return {(pk, sk): embedding[0] for pk, sk, embedding in zip(*columns, strict=True)}

    def log(self) -> list[tuple[str, int]]:
        return list(zip(*(self.store.log("deltaproof", "v")[name].to_pylist() for name in ("pk", "sk")), strict=True))


@pytest.fixture
def place(kit: Any) -> Place:
    return Place(kit)


def keys_in(packed: bytes) -> list[int]:
    return np.frombuffer(packed, "<i8").tolist()


# -- the state ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(place: Place, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is sent to the store until this is set."""
    opened, write = threading.Event(), DynamicEmbeddingFeatureView.write_features_arrow

    def write_when_open(view: Any, **how: Any) -> None:
        assert opened.wait(place.kit.deadline_s)
        write(view, **how)

    monkeypatch.setattr(DynamicEmbeddingFeatureView, "write_features_arrow", write_when_open)
    return opened


def test_a_state_names_what_is_tracked_and_what_is_not_acknowledged_and_takes_nothing_away(
    place: Place, gate: threading.Event
) -> None:
    source, publisher = place.started()
    source.train(T, [1, 2], 1.0)
    source.train(DP, [5], 1.0)
    publisher.after_step(5)  # queued, and not acknowledged
    source.train(T, [2, 3], 2.0)  # tracked
    first = publisher.state_dict()
    again = publisher.state_dict()
    assert again == first | {"watermark_ms": again["watermark_ms"]}
    assert {fqn: keys_in(keys) for fqn, keys in first["pending"].items()} == {T: [1, 2, 3], DP: [5]}
    assert {fqn: keys_in(keys) for fqn, keys in first["replicated"].items()} == {DP: [5]}
    assert (first["rank"], first["world_size"], first["step"], first["version"]) == (0, 1, 5, "v1")
    gate.set()
    publisher.finish(6)
    assert place.stored() == {(T, 1): 1.0, (T, 2): 2.0, (T, 3): 2.0, (DP, 5): 1.0}
    last = publisher.state_dict(7)
    assert (last["pending"], last["step"]) == ({}, 7)
    publisher.close()
    assert publisher.state_dict(7) == last  # saved after the with block


def test_an_idle_ranks_watermark_moves_and_no_later_row_is_at_or_below_it(place: Place) -> None:
    now_s = [1e9]
    clock = types.SimpleNamespace(time=lambda: now_s[0], monotonic=lambda: 0.0)
    source, publisher = place.started(clock=clock)
    now_s[0] += 50
    assert publisher.state_dict()["watermark_ms"] == 1_000_000_050_000
    now_s[0] -= 10_000
    source.train(T, [1], 1.0)
    publisher.finish(1)
    assert place.store.high_water_ts("deltaproof", "v", "v1") == 1_000_000_050_001


def test_a_state_passes_through_torch_save_without_pickled_code(place: Place) -> None:
    torch = pytest.importorskip("torch")
    source, publisher = place.started()
    source.train(T, [1, 8], 1.0)
    file = io.BytesIO()
    state = publisher.state_dict(3)
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_there_is_no_state_before_start(place: Place) -> None:
    with pytest.raises(PublisherError, match=r"before start\(\)"):
        place.publisher()[1].state_dict()


def test_a_state_of_before_the_first_step_is_of_step_0(place: Place) -> None:
    assert place.started()[1].state_dict()["step"] == 0


@pytest.fixture
def states(place: Place) -> list[dict[str, Any]]:
    made = []
    for rank in range(3):
        source, publisher = place.started(rank=rank, world_size=3, wall_s=1e9 + rank)
        source.train(T, [rank], 1.0)
        made.append(publisher.state_dict(4))
    return made


def test_the_states_of_all_ranks_become_one(states: list[dict[str, Any]], place: Place) -> None:
    joined = join(states[::-1], place.settings)
    assert joined.ts_min == 1_000_000_000_000
    assert joined.ts_max == 1_000_000_002_000
    assert {fqn: keys.tolist() for fqn, keys in joined.pending.items()} == {T: [0, 1, 2]}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s[:2], r"states of ranks \[0, 1\], expected each of 0 to 2 once"),
        (lambda s: [*s, s[1]], r"states of ranks \[0, 1, 1, 2\]"),
        (lambda s: [], "no states; pass those of all ranks"),
        (lambda s: [*s[:2], s[2] | {"step": 5}], r"different checkpoints: step is \[4, 5\]"),
        (lambda s: [*s[:2], s[2] | {"world_size": 4}], r"different checkpoints: world_size is \[3, 4\]"),
        (lambda s: [*s[:2], s[2] | {"version": "v0"}], r"different checkpoints: version is"),
        (lambda s: [each | {"version": "v0"} for each in s], "published with version 'v0', the settings say 'v1'"),
        (lambda s: [each | {"naming": "role"} for each in s], "published with naming 'role', the settings say 'fqn'"),
        (lambda s: [*s[:2], s[2] | {"format": 2}], r"not made by a publisher of this version: .*`\$.format`"),
        (lambda s: [*s[:2], {"model": 1}], "not made by a publisher"),
        (lambda s: [*s[:2], s[2] | {"later": 1}], "not made by a publisher of this version: .*unknown field `later`"),
        (lambda s: [*s[:2], s[2] | {"pending": {T: b"1234567"}}], f"keys of table '{T}' are cut off: 7 bytes"),
    ],
)
def test_states_that_are_not_one_checkpoint_are_refused(
    states: list[dict[str, Any]], place: Place, spoil: Any, said: str
) -> None:
    with pytest.raises(RestartError, match=said):
        place.publisher()[1].load_state_dict(spoil(states))


# -- the restart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_first", [True, False])
def test_a_restart_sends_what_was_pending_and_repairs_what_came_after(place: Place, load_first: bool) -> None:
    source, publisher = place.started()
    source.train(T, [0, 1, 2], 1.0)
    publisher.finish(1)
    source.train(T, [3], 2.0)
    state, weights = pickle.dumps(publisher.state_dict()), source.weights[T].copy()
    source.train(T, [1, 4], 3.0)  # the discarded future
    publisher.finish(2)
    publisher.close()
    assert place.stored()[T, 1] == 3.0

    source, publisher = place.publisher(wall_s=1.0)  # its clock is far behind
    if load_first:
        publisher.load_state_dict(pickle.loads(state))
        publisher.start()
    else:
        publisher.start()
        source.train(T, [7], 0.0)  # a warm-up
        publisher.load_state_dict([pickle.loads(state)])
    source.weights[T][:] = weights  # the model may be restored after the publisher, but before the first step
    before = len(place.log())
    publisher.after_step(3)  # no dump is due at this step
    publisher.uploader.drain()
    assert place.log()[before:] == [(T, 1), (T, 3), (T, 4)]
    assert place.stored() == {(T, 0): 1.0, (T, 1): 1.0, (T, 2): 1.0, (T, 3): 2.0, (T, 4): 0.0}
    publisher.after_step(4)
    publisher.close()
    assert len(place.log()) == before + 3


def test_each_delta_says_why_its_rows_are_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    why: list[set[str]] = []
    submit = Uploader.submit

    def note(uploader: Any, step: int, table: pa.Table) -> None:
        why.append(set(table["source"].to_pylist()))
        submit(uploader, step, table)

    monkeypatch.setattr(Uploader, "submit", note)
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    publisher.load_state_dict(publisher.state_dict())  # which tracks the row again
    for step in (4, 5, 6):
        source.train(T, [step], 1.0)
        publisher.after_step(step)
    publisher.finish(6)
    assert why == [{"restore"}, {"dump"}, {"final"}]


def test_a_rank_that_makes_no_step_repairs_at_the_end(place: Place) -> None:
    source, publisher = place.started()
    state = publisher.state_dict()
    source.train(T, [1], 3.0)
    publisher.finish(2)
    source, publisher = place.publisher()
    publisher.load_state_dict(state)
    publisher.start()
    with pytest.raises(PublisherError, match="1 rows changed since the last dump"):
        publisher.close()
    source, publisher = place.publisher()
    publisher.load_state_dict(state)
    publisher.start()
    publisher.finish(0)
    assert place.stored() == {(T, 1): 0.0}


def test_the_rows_of_more_or_fewer_ranks_are_divided_and_replicated_ones_go_once(place: Place) -> None:
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    source.train(DP, [0, 1, 2, 5], 1.0)
    state = publisher.state_dict()
    taken = []
    for rank in range(3):
        source, publisher = place.publisher(rank=rank, world_size=3)
        source.hosts = lambda fqn, keys, rank=rank: (keys % 3 == rank) | (fqn == DP)
        publisher.load_state_dict(state)
        publisher.start()
        taken.append({fqn: keys_in(keys) for fqn, keys in publisher.state_dict()["pending"].items()})
    assert taken == [{DP: [0]}, {T: [1], DP: [1]}, {DP: [2, 5]}]


def test_replicated_rows_published_before_the_restart_are_read_again_at_the_end(place: Place) -> None:
    source, publisher = place.started()
    source.train(DP, [3], 1.0)
    publisher.finish(1)
    state = publisher.state_dict()
    source, publisher = place.publisher()
    publisher.load_state_dict(state)
    publisher.start()
    source.weights[DP][3] = 2.0  # moved by another rank's batch
    publisher.finish(2)
    assert place.stored() == {(DP, 3): 2.0}


def test_a_job_that_goes_back_lets_its_queue_arrive_before_it_reads_what_to_repair(
    place: Place, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = Uploader.drain

    def open_and_drain(uploader: Uploader) -> None:
        gate.set()
        drain(uploader)

    monkeypatch.setattr(Uploader, "drain", open_and_drain)
    source, publisher = place.started()
    state = publisher.state_dict()
    source.train(T, [1], 3.0)
    publisher.after_step(5)
    source.weights[T][:] = 0.0
    publisher.load_state_dict(state)
    publisher.finish(6)
    assert place.stored() == {(T, 1): 0.0}


def test_a_job_without_a_checkpoint_starts_over(place: Place) -> None:
    source, publisher = place.started()
    source.train(T, [1, 2], 3.0)
    publisher.finish(2)
    source, publisher = place.publisher(wall_s=1.0)
    publisher.start_over()
    publisher.start()
    source.train(T, [2], 4.0)
    publisher.finish(1)
    assert place.stored() == {(T, 1): 0.0, (T, 2): 4.0}


@pytest.mark.parametrize(("rank", "load", "warned"), [(0, False, True), (1, False, False), (0, True, False)])
def test_rows_of_an_earlier_run_that_nobody_accounts_for_are_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture, rank: int, load: bool, warned: bool
) -> None:
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    publisher.finish(1)
    assert not caplog.records
    source, publisher = place.started(rank=rank, world_size=2)
    if load:
        publisher.start_over()
    source.train(T, [2], 1.0)
    publisher.finish(1)
    publisher.finish(2)
    texts = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == warned
    assert not warned or "version 'v1' holds rows of an earlier run" in texts[0]


def test_rows_that_no_rank_can_host_stay_and_are_counted(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    _, publisher = place.started()
    state = publisher.state_dict()
    for name, keys in (("old.table", [1, 2]), (T, [4, 9])):
        rows = pa.table(
            {"pk": [name] * 2, "sk": pa.array(keys), "embedding": pa.array([[7.0, 7.0]] * 2, pa.list_(pa.float32()))}
        )
        place.store.write("deltaproof", "v", rows, version="v1", ts=2 * 10**12)
    for rank, spoken in ((1, 0), (0, 1)):  # of which rank 0 alone speaks
        _, publisher = place.publisher(rank=rank, world_size=2)
        publisher.load_state_dict(state)
        publisher.start()
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == spoken
    publisher.finish(1)
    assert place.stored() == {("old.table", 1): 7.0, ("old.table", 2): 7.0, (T, 4): 0.0, (T, 9): 7.0}
    [text] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert text.endswith(f"by table: {{'{T}': 1, 'old.table': 2}}")


def test_changes_are_read_portion_by_portion(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    source, publisher = place.started()
    state = publisher.state_dict()
    for key in range(6):
        source.train(T, [key], 3.0)
        publisher.finish(2)
    asked: list[int] = []
    original: Any = DynamicEmbeddingFeatureView.read_changes

    def one_at_a_time(self: Any, version: str, ts: int) -> tuple[pa.Table, int]:
        asked.append(ts)
        table, _ = original(self, version, ts)
        first = table.sort_by("ts").slice(0, 1)
        return first, max([ts, *first["ts"].to_pylist()])

    source, publisher = place.publisher()
    monkeypatch.setattr(DynamicEmbeddingFeatureView, "read_changes", one_at_a_time)
    publisher.load_state_dict(state)
    publisher.start()
    publisher.finish(3)
    assert place.stored() == {(T, key): 0.0 for key in range(6)}
    assert len(asked) == 6
    assert asked == sorted(set(asked))


def test_a_restart_asks_again_when_the_store_does_not_answer(place: Place) -> None:
    source, publisher = place.started()
    state = publisher.state_dict()
    source.train(T, [1], 3.0)
    publisher.finish(2)
    source, publisher = place.publisher()
    publisher.load_state_dict(state)
    place.plan.set([StatusFault(id="away", code=503, route="changes", count=7)])
    publisher.start()
    publisher.finish(3)
    assert place.plan.fired()[0].fired == 7
    assert place.stored() == {(T, 1): 0.0}
    place.plan.set([StatusFault(id="away", code=503, route="iterate_changes", count=100)])
    with pytest.raises(UploadError, match="what changed cannot be read: "):
        publisher.load_state_dict(state)


@pytest.mark.parametrize("lacks", ["read_changes", "high_water_ts"])
def test_an_sdk_that_cannot_list_changes_is_refused_unless_that_is_accepted(
    kit: Any, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    place = Place(kit)
    source, publisher = place.started()
    source.train(T, [1, 2], 1.0)
    publisher.finish(1)
    source.train(T, [3], 1.0)
    state = publisher.state_dict()
    source.train(T, [1], 3.0)
    publisher.finish(2)
    monkeypatch.delattr(DynamicEmbeddingFeatureView, lacks)
    _, publisher = place.publisher()
    publisher.load_state_dict(state)
    with pytest.raises(PublisherError, match=r'cannot list .* set restart = "pending-only"'):
        publisher.start()

    place.settings = kit.settings(project="deltaproof", settle_s=0.0, restart="pending-only")
    source, publisher = place.publisher(wall_s=1.0)
    publisher.load_state_dict(state)
    publisher.start()
    source.weights[T][3] = 5.0
    publisher.finish(3)
    # The discarded value of row 1 stays; row 3 is sent above the checkpoint's watermark although the clock is behind.
    assert place.stored() == {(T, 1): 3.0, (T, 2): 1.0, (T, 3): 5.0}


def test_the_last_requests_of_the_dead_job_are_awaited(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(kit, settle_s=2.5)
    state = place.started(wall_s=2e9)[1].state_dict()
    late = pa.table({"pk": [T], "sk": pa.array([4]), "embedding": pa.array([[7.0, 7.0]], pa.list_(pa.float32()))})
    waited: list[float] = []

    def sleep(wait_s: float) -> None:
        waited.append(wait_s)
        place.store.write("deltaproof", "v", late, version="v1", ts=2 * 10**12 + 5)

    monkeypatch.setattr(publisher_module, "time", types.SimpleNamespace(sleep=sleep))
    _, publisher = place.publisher(wall_s=1.0)
    publisher.load_state_dict(state)
    publisher.start()
    publisher.finish(1)
    assert waited == [2.5]
    assert place.stored() == {(T, 4): 0.0}


def test_a_refused_row_stays_in_the_state(place: Place) -> None:
    source, publisher = place.started()
    source.train(T, [1, 4], float("nan"))
    with pytest.raises(DeltaError, match="key 1, step 5"):
        publisher.after_step(5)
    assert keys_in(publisher.state_dict()["pending"][T]) == [1, 4]
    with pytest.raises(DeltaError):
        publisher.finish(6)
    source.train(T, [1, 4], 2.0)
    publisher.finish(7)
    assert place.stored() == {(T, 1): 2.0, (T, 4): 2.0}


# -- shards ------------------------------------------------------------------------------------------------------------


def test_acknowledged_deltas_are_retained_and_undeliverable_ones_spilled_under_this_start(
    kit: Any, tmp_path: Path
) -> None:
    place = Place(kit, retain=str(tmp_path / "kept"), spill=str(tmp_path / "spilled"))
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    publisher.finish(1)
    place.plan.set([StatusFault(id="no", code=403, count=10**6)])
    source.train(T, [2], 2.0)
    with pytest.raises(UploadError):
        publisher.finish(2)
    with pytest.raises(UploadError):
        publisher.close()
    [kept] = find(Files(str(tmp_path / "kept"))).entries
    [spilled] = find(Files(str(tmp_path / "spilled"))).entries
    assert (kept.manifest.step, kept.manifest.state) == (1, "acknowledged")
    assert (spilled.manifest.step, spilled.manifest.state) == (2, "spilled")
    assert kept.manifest.generation == spilled.manifest.generation == publisher.generation
    assert publisher.generation is not None
    assert publisher.generation.startswith("1000000000000-")
    place.plan.set([])
    source, publisher = place.started(wall_s=1.0)
    assert publisher.uploader.ts_last == spilled.manifest.ts_last > kept.manifest.ts_last  # the store never saw it
    assert publisher.generation not in (None, kept.manifest.generation)


def test_spilled_rows_alone_are_no_rows_of_an_earlier_run(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(kit, spill=str(tmp_path))
    place.plan.set([StatusFault(id="no", code=403, count=10**6)])
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    for end in (lambda: publisher.finish(1), publisher.close):
        with pytest.raises(UploadError):
            end()
    place.plan.set([])
    caplog.clear()
    source, publisher = place.started()
    source.train(T, [1], 2.0)
    publisher.finish(1)
    assert publisher.uploader.ts_last > 10**12
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_spilled_after_the_checkpoint_is_published_again_so_that_nothing_is_left_to_resend(
    kit: Any, tmp_path: Path
) -> None:
    place = Place(kit, spill=str(tmp_path))
    source, publisher = place.started()
    source.train(T, [1, 2], 1.0)
    publisher.finish(1)
    state = publisher.state_dict()
    place.plan.set([StatusFault(id="no", code=403, count=10**6)])
    source.train(T, [2, 3], 9.0)  # the discarded future, which never reached the store
    for end in (lambda: publisher.finish(2), publisher.close):
        with pytest.raises(UploadError):
            end()
    place.plan.set([])

    def resend() -> ResendReport:
        client: Any = in_process_client(place.store, "resend")
        view = client.get_project("deltaproof").get_dynamic_embedding_feature_view("v")
        files = Files(str(tmp_path))
        return Resend(files, find(files), StoreReader(view, place.settings, 0, 1)).run(dry_run=True)

    assert resend().sent == 2
    source, publisher = place.publisher(wall_s=1.0)
    source.weights[T][[1, 2]] = 1.0
    publisher.load_state_dict(state)
    publisher.start()
    publisher.finish(2)
    assert resend().sent == 0
    assert place.stored() == {(T, 1): 1.0, (T, 2): 1.0, (T, 3): 0.0}


def test_without_a_client_one_is_made_at_the_start_and_again_when_the_token_expired(kit: Any) -> None:
    made: list[Any] = []
    closed: list[int] = []

    def connect() -> Any:
        view = kit.view(script=["expired"] if not made else [])
        made.append(kit.client(view, exists=True))
        made[-1].close = functools.partial(closed.append, len(made) - 1)
        return made[-1]

    source = kit.source({("m.ebc", "ebc", "t"): (9, 2, "row_wise")})
    group: Any = {"rank": 0, "world_size": 1, "barrier": lambda: None}
    publisher = Publisher(source, None, kit.settings(), connect=connect, **group)
    assert not made
    publisher.start()
    source.train(T, [1], 1.0)
    publisher.finish(1)
    assert [len(client.view.stored) for client in made] == [0, 1]
    assert made[0].view.closed
    assert closed == [0]
    publisher.close()
    assert made[1].view.closed
    assert closed == [0, 1]
    with pytest.raises(PublisherError, match="needs a client, or connect"):
        Publisher(source, None, kit.settings(), **group).start()


def test_a_load_that_fails_forgets_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    state = publisher.state_dict()
    source.train(T, [2], 2.0)
    monkeypatch.setattr(publisher, "_discarded", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        publisher.load_state_dict(state)
    publisher.finish(1)
    assert place.stored() == {(T, 1): 1.0, (T, 2): 2.0}


def test_a_load_after_finish_needs_another_finish(place: Place) -> None:
    source, publisher = place.started()
    source.train(T, [1], 1.0)
    state = publisher.state_dict()
    publisher.finish(1)
    publisher.load_state_dict(state)
    with pytest.raises(PublisherError, match=r"1 rows .*call finish\(step\)"):
        publisher.close()


def test_rows_beyond_a_tables_ends_are_counted_and_no_key_is_beyond_those_of_a_table_without_any(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place, least, most = Place(kit), -(2**63), 2**63 - 1
    place.started()[1].close()
    keys = [least, -2, 0, 8, 9, most]
    batch = pa.record_batch(
        {"pk": [T] * 6 + [DP] * 6, "sk": keys * 2, "embedding": pa.array([[1.0, 2.0]] * 12, pa.list_(pa.float32()))}
    )
    place.store.write("deltaproof", "v", batch, version="v1", ts=10**12)
    _, publisher = place.publisher()
    publisher._tables[DP] = msgspec.structs.replace(publisher._tables[DP], rows=None)
    publisher.start_over()
    publisher.start()
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned.endswith(f"by table: {{'{T}': 4}}")
    publisher.finish(1)
    publisher.close()


@pytest.mark.parametrize("change", [{"world_size": 10**12}, {"world_size": -1, "rank": -1}, {"rank": 7}])
def test_a_damaged_number_of_ranks_is_refused_at_once(place: Place, change: dict[str, int]) -> None:
    _, publisher = place.started()
    with pytest.raises(RestartError, match="states of ranks"):
        publisher.load_state_dict(publisher.state_dict() | change)

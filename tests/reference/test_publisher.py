import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alibabacloud_credentials.utils import auth_util

from deltaproof.fakes.dynamicemb import DynamicTable, TableOptions
from deltaproof.reference import publisher as publisher_module
from deltaproof.reference.contract import ContractError, Manifest, TableRef, embedding_names
from deltaproof.reference.delta import DeltaError
from deltaproof.reference.dynamic import DynamicSource, DynamicSpec
from deltaproof.reference.publisher import Publisher, PublisherError, connect
from deltaproof.reference.shards import ShardError
from deltaproof.reference.uploader import UploadError

A, B = "m.a.embedding_bags.t", "m.b.embedding_bags.t"


@pytest.fixture
def source(kit: Any) -> Any:
    return kit.source({("m.a", "ebc", "t"): (20, 2, "row_wise"), ("m.b", "ebc", "t"): (20, 2, "row_wise")})


@pytest.fixture
def client(kit: Any) -> Any:
    return kit.client(kit.view())


def publisher_of(
    kit: Any, source: Any, client: Any, barrier: Any = lambda: None, rank: int = 0, **changes: Any
) -> Publisher:
    return Publisher(source, client, kit.settings(**changes), rank=rank, world_size=2, barrier=barrier)


def test_four_lines_publish_a_run(kit: Any, source: Any, client: Any) -> None:
    with publisher_of(kit, source, client) as publisher:
        publisher.start()
        for step in range(1, 14):
            source.train(A, [step], float(step))
            publisher.after_step(step)
        publisher.finish(13)
        assert publisher.acknowledged == 13
    assert client.view.closed
    assert {key: row[1][0] for (_, key), row in client.view.stored.items()} == {n: float(n) for n in range(1, 14)}
    assert client.steps == ["create entity", "missing", "create view", "open"]


@pytest.mark.parametrize("last", [4, 5, 6, 10])
def test_the_trailing_rows_go_out_wherever_the_rank_stops(kit: Any, source: Any, client: Any, last: int) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    for step in range(1, last + 1):
        source.train(B, [step], 1.0)
        publisher.after_step(step)
    source.train(B, [19], 1.0)  # touched, though the rank made no further step of its own
    publisher.finish(last)
    publisher.close()
    assert {key for _, key in client.view.stored} == {*range(1, last + 1), 19}


def test_equal_table_names_under_two_owners_stay_apart(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    source.train(B, [1], 2.0)
    publisher.finish(1)
    assert {key: row[1][0] for key, row in client.view.stored.items()} == {(A, 1): 1.0, (B, 1): 2.0}


def test_the_manifest_is_the_exporters_and_rows_carry_its_names(kit: Any, client: Any) -> None:
    source = kit.source({("m.ebc_user", "ebc", "t"): (9, 2, "row_wise"), ("m.ec", "ec", "t"): (9, 2, "row_wise")})
    publisher = publisher_of(kit, source, client, naming="role")
    refs = [TableRef("m.ebc_user", "ebc", "t"), TableRef("m.ec", "ec", "t")]
    assert publisher.manifest() == embedding_names(refs, "role")
    publisher.start()
    for name in source.infos:
        source.train(name, [1], 1.0)
    publisher.finish(1)
    assert set(client.view.stored) == {("t__ebc", 1), ("t__ec", 1)}


def test_twins_that_are_both_trained_are_refused(kit: Any, client: Any) -> None:
    source = kit.source({("m.ebc_user", "ebc", "t"): (9, 2, "row_wise"), ("m.ebc", "ebc", "t"): (9, 2, "row_wise")})
    with pytest.raises(ContractError, match="are both trained"):
        publisher_of(kit, source, client)


def test_lookups_before_start_and_in_evaluation_are_not_published(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    source.train(A, [1], 0.0)
    publisher.start()

    def evaluate() -> None:
        with publisher.paused():
            source.train(A, [2], 0.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    source.train(A, [3], 1.0)
    publisher.finish(1)
    assert {key for _, key in client.view.stored} == {3}


def test_a_store_failure_is_raised_at_the_next_step(kit: Any, source: Any, client: Any) -> None:
    client.view.script = ["fatal"]
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    publisher.after_step(5)
    with pytest.raises(UploadError):
        publisher.uploader.drain()
    with pytest.raises(UploadError, match="steps \\[5\\]"):
        publisher.after_step(6)
    with pytest.raises(UploadError, match="steps \\[5"):
        publisher.finish(6)


def test_a_row_that_must_not_be_sent_ends_the_step_that_made_it(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [4], float("inf"))
    with pytest.raises(DeltaError, match="key 4, step 5"):
        publisher.after_step(5)


def test_forgetting_finish_is_an_error_when_rows_were_touched(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    publisher.after_step(5)
    source.train(A, [2, 3], 1.0)
    publisher.after_step(6)
    with pytest.raises(PublisherError, match="rank 0: 2 rows changed since the last dump"):
        publisher.close()
    publisher.close()


def test_lookups_after_finish_are_nobodys_loss(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    publisher.finish(1)
    source.train(A, [1], 0.0)  # an evaluation at the end that was not paused
    publisher.close()


def test_training_after_finish_needs_another_finish(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    publisher.finish(1)
    source.train(A, [1], 1.0)
    publisher.after_step(2)
    with pytest.raises(PublisherError, match="call finish"):
        publisher.close()


def test_an_exception_of_training_is_the_one_raised_and_does_not_wait_for_the_store(
    kit: Any, source: Any, client: Any
) -> None:
    client.view.script = ["lost"]
    slow = {"retry_delay_ms_min": 60_000, "retry_delay_ms_max": 60_000}

    def train() -> None:
        with publisher_of(kit, source, client, **slow) as publisher:
            publisher.start()
            source.train(A, [1], 1.0)
            publisher.after_step(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "not acknowledged: 1 rows of steps [5]" in caught.value.__notes__[0]
    assert client.view.closed


def test_calls_before_start_say_so(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    for call in (lambda: publisher.after_step(1), lambda: publisher.finish(1), lambda: publisher.uploader):
        with pytest.raises(PublisherError, match=r"call start\(\) first"):
            call()
    assert publisher.acknowledged is None
    publisher.close()


def test_a_closed_publisher_stays_closed_and_still_says_what_was_acknowledged(
    kit: Any, source: Any, client: Any
) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    publisher.finish(7)
    publisher.close()
    publisher.close()
    assert publisher.acknowledged == 7
    with pytest.raises(PublisherError, match="is closed; make a new one"):
        publisher.after_step(8)


class Ranks:
    """Starts `world_size` publishers in threads with one real barrier; collects what each start raised."""

    def __init__(self, kit: Any, client: Any) -> None:
        self.barrier = threading.Barrier(3, timeout=kit.deadline_s)
        self.publishers = [
            Publisher(
                kit.source({("m", "ebc", "t"): (4, 2, "row_wise")}),
                client,
                kit.settings(),
                rank=rank,
                world_size=3,
                barrier=self.barrier.wait,
            )
            for rank in range(3)
        ]
        self.raised: list[Any] = ["not done"] * 3
        threads = [threading.Thread(target=self._start, args=(rank,), daemon=True) for rank in (1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(kit.deadline_s)

    def _start(self, rank: int) -> None:
        try:
            self.publishers[rank].start()
        except Exception as error:
            self.raised[rank] = error
        else:
            self.raised[rank] = None


def test_only_rank_0_creates_and_the_others_open_after_it(kit: Any, client: Any) -> None:
    ranks = Ranks(kit, client)
    assert ranks.raised == [None] * 3
    assert client.steps == ["create entity", "missing", "create view", "open", "open", "open"]
    again = Ranks(kit, client)
    assert again.raised == [None] * 3
    assert client.steps.count("create view") == client.steps.count("create entity") == 1


def test_rank_0_meets_the_others_although_it_failed(kit: Any, client: Any, monkeypatch: Any) -> None:
    def refuse(**how: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(client, "create_dynamic_embedding_feature_view", refuse)
    ranks = Ranks(kit, client)
    assert isinstance(ranks.raised[0], PublisherError)
    assert str(ranks.raised[0]) == "rank 0 could not create view 'v': ConnectionError: no route"
    assert [str(error) for error in ranks.raised[1:]] == [
        f"rank {rank}: there is no view 'v'; see rank 0's error, it creates the view" for rank in (1, 2)
    ]


@pytest.mark.parametrize(
    ("method", "rank", "verb"),
    [("create_entity", 0, "create"), ("get_dynamic_embedding_feature_view", 1, "open"), ("get_project", 1, "open")],
)
def test_an_sdk_that_quotes_a_secret_at_the_start_is_not_repeated(
    kit: Any, source: Any, client: Any, monkeypatch: Any, method: str, rank: int, verb: str
) -> None:
    def refuse(*what: Any, **how: Any) -> None:
        raise ConnectionError("login of planted-password failed")

    monkeypatch.setenv("FEATUREDB_PASSWORD", "planted-password")
    monkeypatch.setattr(client, method, refuse)
    with pytest.raises(
        PublisherError, match=f"rank {rank} could not {verb} view 'v': ConnectionError: login of"
    ) as caught:
        publisher_of(kit, source, client, rank=rank).start()
    assert caught.value.retriable
    assert "planted" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(("grouped", "rank", "world_size"), [(False, 0, 1), (True, 2, 3)])
@pytest.mark.parametrize("given", [False, True])
def test_a_publisher_for_a_model_takes_its_place_from_the_process_group_and_connects_when_it_must(
    kit: Any, source: Any, client: Any, monkeypatch: Any, grouped: bool, rank: int, world_size: int, given: bool
) -> None:
    met, made, closed, wanted = list[int](), list[Any](), list[int](), kit.settings()
    released = list[int]()
    source.release = lambda: released.append(1)
    client.exists, client.close = True, lambda: closed.append(1)
    dist = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: grouped,
        get_rank=lambda: 2,
        get_world_size=lambda: 3,
        barrier=lambda: met.append(1),
    )

    def connect_once(settings: Any) -> Any:
        made.append(settings)
        return client

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(distributed=dist))
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    tracker = types.SimpleNamespace(TorchRecSource=lambda model, dynamic: model)
    monkeypatch.setitem(sys.modules, "deltaproof.reference.tracker", tracker)
    monkeypatch.setattr(publisher_module, "connect", connect_once)
    publisher = Publisher.for_model(source, wanted, client if given else None)
    publisher.start()
    assert (len(met), made) == (int(grouped), [] if given else [wanted])
    state = publisher.state_dict()
    assert (state["rank"], state["world_size"]) == (rank, world_size)
    assert not released
    publisher.close()
    assert len(closed) == len(made)  # a client that was given is not ours to close
    with pytest.raises(AttributeError):
        Publisher.for_model(source, None)  # type: ignore[arg-type]
    assert released == [1, 1]  # the model is there for the next one, however this one ended


def test_a_start_is_named_by_its_time_and_8_hexadecimal_digits(kit: Any, source: Any, client: Any) -> None:
    names = []
    for _ in range(2):
        publisher = Publisher(
            source,
            client,
            kit.settings(),
            rank=0,
            world_size=1,
            barrier=lambda: None,
            clock=types.SimpleNamespace(time=lambda: 1.5, monotonic=lambda: 0.0),
        )
        publisher.start()
        names.append(str(publisher.generation))
        publisher.close()
    assert all(re.fullmatch(r"0000000001500-[0-9a-f]{8}", name) for name in names)
    assert names[0] != names[1]


def test_a_missing_project_is_named(kit: Any, source: Any, client: Any) -> None:
    with pytest.raises(PublisherError, match="no project 'nope'"):
        publisher_of(kit, source, client, project="nope").start()


def test_a_view_of_another_type_is_refused(kit: Any, source: Any, client: Any) -> None:
    client.exists = True
    client.view.embedding_field_type = "ARRAY<UINT8>"
    with pytest.raises(PublisherError, match="holds ARRAY<UINT8>"):
        publisher_of(kit, source, client).start()


def test_an_sdk_that_does_not_say_the_type_is_accepted(kit: Any, source: Any, client: Any, monkeypatch: Any) -> None:
    client.exists = True
    monkeypatch.delattr(type(client.view), "embedding_field_type")
    publisher_of(kit, source, client).start()


def test_connect_takes_fresh_credentials_from_the_chain_and_the_login_from_the_environment(
    kit: Any, monkeypatch: Any
) -> None:
    seen: list[dict[str, Any]] = []
    sdk = types.ModuleType("feature_store_py")
    sdk.FeatureStoreClient = lambda **how: seen.append(how)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "feature_store_py", sdk)
    # The package reads these variables when it is imported, so setting them now would be too late.
    monkeypatch.setattr(auth_util, "environment_access_key_id", "id-1")
    monkeypatch.setattr(auth_util, "environment_access_key_secret", "secret-1")
    monkeypatch.setattr(auth_util, "environment_security_token", "token-1")
    monkeypatch.setenv("FEATUREDB_USERNAME", "rank0")
    monkeypatch.setenv("FEATUREDB_PASSWORD", "pass-1")
    connect(kit.settings(endpoint="127.0.0.1:1"))
    monkeypatch.setattr(auth_util, "environment_security_token", "token-2")
    connect(kit.settings(endpoint="127.0.0.1:1"))
    assert seen[0] == {
        "access_key_id": "id-1",
        "access_key_secret": "secret-1",
        "region": "cn-hangzhou",
        "endpoint": "127.0.0.1:1",
        "security_token": "token-1",
        "featuredb_username": "rank0",
        "featuredb_password": "pass-1",
    }
    assert seen[1]["security_token"] == "token-2"


def test_connect_names_the_package_that_is_missing(kit: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "feature_store_py", None)
    with pytest.raises(PublisherError, match="feature_store_py"):
        connect(kit.settings())


def test_the_publisher_writes_the_manifest_that_an_exporter_writes(kit: Any, tmp_path: Path) -> None:
    tables: dict[Any, Any] = {("m.ebc_user", "ebc", "t"): (9, 2, "row_wise"), ("m.ec", "ec", "t"): (9, 4, "row_wise")}
    settings = kit.settings(naming="role", embedding_type="int8")
    publisher = Publisher(
        kit.source(tables), kit.client(kit.view()), settings, rank=0, world_size=1, barrier=lambda: None
    )
    publisher.write_manifest(str(tmp_path / "published.json"))
    exported = {TableRef(*ref): dim for ref, (_, dim, _) in reversed(tables.items())}
    Manifest.of(exported, "role", "int8").write(tmp_path / "exported.json")
    assert (tmp_path / "published.json").read_bytes() == (tmp_path / "exported.json").read_bytes()
    names = {table.table_fqn: table.embedding_name for table in Manifest.read(tmp_path / "published.json").tables}
    assert names == publisher.manifest() == {"m.ebc_user.embedding_bags.t": "t__ebc", "m.ec.embeddings.t": "t__ec"}


def threads_named_upload() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("deltaproof-upload")]


@pytest.mark.parametrize("breaks", ["barrier", "spill", "retain", "mark", "restart"])
def test_a_start_that_fails_half_way_leaves_nothing_open(
    kit: Any, source: Any, client: Any, tmp_path: Path, breaks: str
) -> None:
    closed = list[int]()
    client.exists, client.close = True, lambda: closed.append(1)
    (tmp_path / "file").write_text("")
    changes = {breaks: str(tmp_path / "file")} if breaks in ("spill", "retain") else {}

    def interrupted() -> None:
        raise KeyboardInterrupt

    def unreadable(version: str) -> int:
        raise PermissionError("no access")

    if breaks == "mark":
        client.view.high_water_ts = unreadable
    barrier: Any = interrupted if breaks == "barrier" else lambda: None
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "barrier": barrier, "connect": lambda: client}
    before = threads_named_upload()
    publisher = Publisher(source, None, kit.settings(**changes), **how)
    if breaks == "restart":
        publisher.start_over()  # which a view without read_changes cannot do
    with pytest.raises((KeyboardInterrupt, PublisherError, ShardError, UploadError)):
        publisher.start()
    assert threads_named_upload() == before
    assert (client.view.closed, closed) == (breaks != "barrier", [1])
    for call in (lambda: publisher.after_step(1), publisher.start):
        with pytest.raises(PublisherError, match="make a new one"):
            call()
    with pytest.raises(PublisherError, match="no state"):  # one would say that nothing is owed
        publisher.state_dict()
    publisher.close()
    assert closed == [1]


def test_a_publisher_starts_once(kit: Any, source: Any, client: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    running = threads_named_upload()
    with pytest.raises(PublisherError, match="starts once; make a new one"):
        publisher.start()
    assert threads_named_upload() == running
    source.train(A, [1], 1.0)
    publisher.finish(1)
    publisher.close()
    never = publisher_of(kit, source, client)
    never.close()
    for closed in (publisher, never):
        with pytest.raises(PublisherError, match="starts once; make a new one"):
            closed.start()


def test_an_sdk_that_fails_to_close_hides_no_error_and_quotes_no_secret(
    kit: Any, source: Any, client: Any, monkeypatch: Any, caplog: Any
) -> None:
    def refuse(wait: bool = True) -> None:
        raise ConnectionError("login of planted-password failed")

    monkeypatch.setenv("FEATUREDB_PASSWORD", "planted-password")
    client.view.close, client.view.script = refuse, ["fatal"]
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    publisher.after_step(5)
    with pytest.raises(UploadError, match=r"no access.*steps \[5\]"):
        publisher.close()
    assert "view or client could not be closed" in caplog.text
    assert "planted" not in caplog.text


def test_a_client_made_while_the_publisher_was_closed_is_let_go(kit: Any, source: Any) -> None:
    clients, entered, release = list[Any](), threading.Event(), threading.Event()

    def connect_slowly() -> Any:
        if clients:
            entered.set()
            assert release.wait(kit.deadline_s)
        clients.append(kit.client(kit.view(["expired"]), exists=True))
        return clients[-1]

    how: dict[str, Any] = {"rank": 0, "world_size": 1, "barrier": lambda: None, "connect": connect_slowly}
    publisher = Publisher(source, None, kit.settings(), **how)
    publisher.start()
    thread = publisher.uploader._thread
    assert thread is not None
    source.train(A, [1], 1.0)
    publisher.after_step(5)
    assert entered.wait(kit.deadline_s)
    with pytest.raises(UploadError):
        publisher.close(drain=False)
    release.set()
    thread.join(kit.deadline_s)
    assert [made.view.closed for made in clients] == [True, True]


def test_what_a_signal_handler_interrupted_is_still_tracked(
    kit: Any, source: Any, client: Any, monkeypatch: Any
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    for where in ("deltaproof.reference.uploader.validate", "deltaproof.reference.dumper.merge_keys"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.finish(5)
        source.train(A, [2], 2.0)
        assert set(publisher.state_dict()["pending"]) == {A}
    publisher.finish(6)
    publisher.close()
    assert {key for _, key in client.view.stored} == {1, 2}


def test_what_submit_could_not_queue_any_more_is_pending_once(kit: Any, source: Any, client: Any) -> None:
    client.view.script = ["fatal"]
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1, 2], 1.0)
    for step in range(1, 4):
        with pytest.raises(UploadError):
            publisher.finish(step)
        if step == 1:
            source.train(A, [3], 1.0)
    with pytest.raises(UploadError, match=r"3 rows of steps \[1, 2\]"):
        publisher.close()


@pytest.mark.parametrize("step", [5.0, "5", None])
def test_a_step_is_a_whole_number(kit: Any, source: Any, client: Any, step: Any) -> None:
    publisher = publisher_of(kit, source, client)
    publisher.start()
    source.train(A, [1], 1.0)
    calls = [publisher.after_step, publisher.finish] + [publisher.state_dict] * (step is not None)
    for call in calls:
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            call(step)
    five: Any = np.int64(5)
    publisher.after_step(five)
    assert type(publisher.state_dict()["step"]) is type(publisher.state_dict(five)["step"]) is int
    publisher.finish(five)
    publisher.close()
    assert len(client.view.stored) == 1


def test_what_the_source_says_at_the_end_is_a_note_to_the_error_of_training(
    kit: Any, source: Any, client: Any, monkeypatch: Any
) -> None:
    def broken() -> None:
        raise DeltaError("id outside", table=A, key=99, step=None)

    def run() -> None:
        with publisher_of(kit, source, client) as publisher:
            publisher.start()
            monkeypatch.setattr(source, "drain", broken)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert "while closing the publisher: id outside" in caught.value.__notes__[0]


def test_a_model_with_dynamic_tables_is_published_with_them(
    kit: Any, source: Any, client: Any, monkeypatch: Any
) -> None:
    pytest.importorskip("torch")
    table = DynamicTable("t", 2, TableOptions(capacity=4, retain_evicted=True))
    dynamic = DynamicSource([DynamicSpec(TableRef("m.d", "ec", "t"), table, ("f",))])
    told = list[Any]()
    source.release = lambda: None

    def track(*what: Any) -> Any:
        told.append(what)
        return source

    tracker = types.SimpleNamespace(TorchRecSource=track)
    monkeypatch.setitem(sys.modules, "deltaproof.reference.tracker", tracker)
    with Publisher.for_model("model", kit.settings(), client, dynamic=dynamic) as publisher:
        publisher.start()
        source.train(A, [1], 1.0)
        table.lookup(np.array([2**63 - 1]))
        dynamic.record("m.d.embeddings.t", np.array([2**63 - 1]))
        publisher.finish(1)
    assert told == [("model", dynamic)]
    assert set(client.view.stored) == {(A, 1), ("m.d.embeddings.t", 2**63 - 1)}


def test_an_error_that_closing_only_repeats_is_told_once(kit: Any, source: Any, client: Any) -> None:
    def run() -> None:
        with publisher_of(kit, source, client) as publisher:
            publisher.start()
            client.view.script = ["fatal"]
            source.train(A, [1], 1.0)
            publisher.finish(1)

    with pytest.raises(UploadError, match="no access") as caught:
        run()
    assert not hasattr(caught.value, "__notes__")

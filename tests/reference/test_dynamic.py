"""Sources of tables whose rows come and go, against the stand-in of dynamicemb. ZCH is in test_tracker.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from deltaproof.fakes.dynamicemb import DynamicTable, TableOptions
from deltaproof.fakes.feature_store_py import FeatureStoreClient
from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.reference import dynamic
from deltaproof.reference.contract import TableRef
from deltaproof.reference.delta import DeltaError
from deltaproof.reference.dumper import Dumper
from deltaproof.reference.dynamic import (
    FOLD_AT_IDS,
    CombinedSource,
    DynamicSource,
    DynamicSpec,
    IdLog,
    TrackerError,
    ZchTable,
    round_robin,
)
from deltaproof.reference.publisher import Publisher
from deltaproof.reference.settings import Settings

DIM = 2
REFS = (TableRef("a.ec", "ec", "t"), TableRef("b.ec", "ec", "t"))
FQNS = ("a.ec.embeddings.t", "b.ec.embeddings.t")
SETTINGS = Settings(project="p", view="v", version="v1", every_steps=1)
#: More than fit, and where a float, a sign or an off-by-one would show.
KEYS = st.sampled_from([*range(12), -2, 2**53 + 1, 2**63 - 1, -(2**63), -(2**63) + 1])
OPTIONS = st.builds(
    TableOptions,
    capacity=st.integers(4, 8),
    init_capacity=st.sampled_from([None, 1, 3]),
    load_max=st.sampled_from([0.5, 1.0]),
    score=st.sampled_from(["timestamp", "step", "lfu", "custom"]),
    admit_count=st.integers(1, 3),
    counter_capacity=st.integers(1, 20),
    eval_value=st.sampled_from([0.0, 0.25]),
    caching=st.booleans(),
    retain_evicted=st.just(True),
)


def source_of(*tables: DynamicTable, **more: Any) -> DynamicSource:
    specs = [
        DynamicSpec(ref, table, ("f",), table.options.eval_value) for ref, table in zip(REFS, tables, strict=False)
    ]
    return DynamicSource(specs, **more)


def table_of(**options: Any) -> DynamicTable:
    return DynamicTable("t", DIM, TableOptions(**{"capacity": 4, "retain_evicted": True, "eval_value": 0.25} | options))


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Publication(RuleBasedStateMachine):
    """After each dump, every key that any dump held has in the store what its table serves for it at that moment."""

    @initialize(options=st.tuples(OPTIONS, OPTIONS), fold_at=st.sampled_from([1, 5, 1 << 20]))
    def start(self, options: tuple[TableOptions, TableOptions], fold_at: int) -> None:
        dynamic.FOLD_AT_IDS = fold_at
        self.tables = [DynamicTable("t", DIM, each) for each in options]
        self.source = source_of(*self.tables)
        self.dumper = Dumper(CombinedSource([self.source]), SETTINGS, 0, 1)
        self.store: dict[tuple[str, int], list[float]] = {}
        self.step = 0

    def teardown(self) -> None:
        dynamic.FOLD_AT_IDS = FOLD_AT_IDS
        if hasattr(self, "store"):
            self.dump()

    @rule(which=st.integers(0, 1), batch=st.lists(KEYS, min_size=1, max_size=6), unsigned=st.booleans())
    def train(self, which: int, batch: list[int], unsigned: bool) -> None:
        ids = keys(*batch)
        self.tables[which].lookup(ids)
        self.source.record(FQNS[which], ids.view(np.uint64) if unsigned else ids)
        ids[:] = 99  # the batch is the caller's: nothing may hold on to it
        self.tables[which].add(keys(*batch), np.full((len(batch), DIM), 1 + self.step / 8))
        self.step += 1

    @rule(which=st.integers(0, 1), batch=st.lists(KEYS, max_size=6))
    def evaluate(self, which: int, batch: list[int]) -> None:
        with self.source.paused():
            self.tables[which].lookup(keys(*batch), training=False)
            self.source.record(FQNS[which], keys(*batch))

    @rule(which=st.integers(0, 1))
    def flush(self, which: int) -> None:
        self.tables[which].flush()

    @precondition(lambda self: any(table.options.score == "custom" for table in self.tables))
    @rule(score=st.integers(0, 3))
    def rescore(self, score: int) -> None:
        for table in self.tables:
            if table.options.score == "custom":
                table.set_score(score)

    @rule()
    def dump(self) -> None:
        delta = self.dumper.dump(self.step)
        self.dumper.submitted()
        rows = delta.to_pylist() if delta is not None else []
        assert len({(row["table_fqn"], row["key_id"]) for row in rows}) == len(rows), "a key is in a delta twice"
        self.store |= {(row["table_fqn"], row["key_id"]): row["embedding"] for row in rows}
        for (fqn, key), row in self.store.items():
            assert row == self.tables[FQNS.index(fqn)].served(keys(key))[0].tolist(), (fqn, key)
        assert self.source.drain() == {}


def test_no_key_ever_published_keeps_a_row_that_its_table_gave_up() -> None:
    run_state_machine_as_test(Publication, settings=settings(max_examples=60, stateful_step_count=25))


def test_an_evicted_key_is_published_as_what_serving_uses_for_it_though_nobody_looked_it_up() -> None:
    table = table_of(load_max=1.0)
    source = source_of(table)
    table.lookup(keys(1, 2, 3, 4))
    source.record(FQNS[0], keys(1, 2, 3, 4))
    assert source.drain()[FQNS[0]].tolist() == [1, 2, 3, 4]
    table.lookup(keys(5))
    source.record(FQNS[0], keys(5))
    assert source.drain()[FQNS[0]].tolist() == [1, 5]
    rows = source.gather(FQNS[0], keys(1, 5))
    assert rows[0].tolist() == [0.25, 0.25]
    assert rows[1].tolist() == table.served(keys(5))[0].tolist() != [0.25, 0.25]
    assert rows.dtype == np.float32


def test_ids_are_folded_when_they_are_more_than_a_million_not_at_each_lookup() -> None:
    folds: list[int] = []

    def first_alone(parts: list[np.ndarray]) -> np.ndarray:
        folds.append(sum(map(len, parts)))
        return parts[0][:1]

    log, many = IdLog(first_alone), np.zeros(2**20 - 1, np.int64)
    log.add(many)
    log.add(keys(1))
    assert (folds, log.count) == ([], 2**20)
    log.add(keys(2))
    assert (folds, log.count) == ([2**20 + 1], 1)


def test_a_dynamic_table_has_room_for_every_key_and_serves_zeros_unless_told_otherwise() -> None:
    source = DynamicSource([DynamicSpec(REFS[0], table_of(), ("f",))])
    info = source.tables()[FQNS[0]]
    assert (info.rows, info.dim, info.hosted) == (None, DIM, True)
    assert source.gather(FQNS[0], keys(1)).tolist() == [[0.0, 0.0]]


def test_rows_are_read_past_the_cache() -> None:
    table = table_of(caching=True)
    source = source_of(table)
    table.lookup(keys(1))
    assert source.gather(FQNS[0], keys(1)).tolist() == table.served(keys(1)).tolist() != [[0.25, 0.25]]


def test_the_reserved_key_is_refused_with_table_key_and_step_and_nothing_is_forgotten() -> None:
    first, second = table_of(), table_of()
    source = source_of(first, second)
    dumper = Dumper(source, SETTINGS, 0, 1)
    first.lookup(keys(7))
    source.record(FQNS[0], keys(7))
    source.record(FQNS[1], np.array([3, 2**64 - 1], np.uint64))
    for _ in range(2):
        with pytest.raises(DeltaError, match=r"key -1 is reserved \(table 'b.ec.embeddings.t', key -1, step 12\)"):
            dumper.dump(12)
    source._logs[FQNS[1]].clear()
    delta = dumper.dump(13)
    assert delta is not None
    assert delta["key_id"].to_pylist() == [7]


@pytest.mark.parametrize("ids", [np.array([1.0]), np.array([1], np.int32), keys(1).reshape(1, 1)])
def test_keys_that_are_not_64_bits_wide_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(DeltaError, match=r"expected int64 or uint64 \(n,\) \(table 'a.ec.embeddings.t'"):
        source_of(table_of()).record(FQNS[0], ids)


def test_a_table_that_forgets_what_it_evicts_is_refused() -> None:
    with pytest.raises(TrackerError, match=r"'a.ec.embeddings.t' does not say which keys it evicts.*RETAIN_KEY"):
        source_of(table_of(retain_evicted=False))
    with pytest.raises(TrackerError, match="two dynamic tables have one name"):
        DynamicSource([DynamicSpec(REFS[0], table_of(), ("f",))] * 2)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(1, 9))
def test_each_key_is_hosted_by_the_rank_that_its_unsigned_remainder_names(values: list[int], world_size: int) -> None:
    ids = np.array([*values, -1, -2, 2**63 - 1], np.int64)
    assert round_robin(ids, world_size).tolist() == [key % 2**64 % world_size for key in ids.tolist()]
    ranks = [source_of(table_of(), rank=rank, world_size=world_size) for rank in range(world_size)]
    masks = np.array([source.hosts(FQNS[0], ids) for source in ranks])
    assert masks.dtype == np.bool_
    assert masks.sum(axis=0).tolist() == (ids != -1).astype(int).tolist()
    for source, mask in zip(ranks, masks, strict=True):
        assert (mask == ((ids.view(np.uint64) % world_size == source._rank) & (ids != -1))).all()
        assert not source.hosts("elsewhere", ids).any()


def test_combined_sources_answer_each_for_its_own_tables(kit: Any) -> None:
    table = table_of()
    arrays, dynamic_source = kit.source({("m", "ebc", "s"): (5, DIM, "row_wise")}), source_of(table)
    combined = CombinedSource([arrays, dynamic_source])
    static = "m.embedding_bags.s"
    assert list(combined.tables()) == [static, FQNS[0]]
    assert combined.tables()[FQNS[0]].sharding == "dynamic"
    with combined.paused():
        arrays.train(static, [1], 1.0)
        dynamic_source.record(FQNS[0], keys(1))
    assert combined.drain() == {}
    arrays.train(static, [2], 1.0)
    table.lookup(keys(-(2**63)))
    dynamic_source.record(FQNS[0], keys(-(2**63)))
    assert {fqn: ids.tolist() for fqn, ids in combined.drain().items()} == {static: [2], FQNS[0]: [-(2**63)]}
    assert combined.gather(static, keys(2)).tolist() == [[1, 1]]
    assert combined.gather(FQNS[0], keys(3)).tolist() == [[0.25, 0.25]]
    assert combined.hosts(static, keys(4, 5)).tolist() == [True, False]
    assert combined.hosts(FQNS[0], keys(4, 5)).tolist() == [True, True]
    assert combined.hosts("unknown", keys(4, 5)).tolist() == [False, False]
    with pytest.raises(TrackerError, match="in two of the combined sources"):
        CombinedSource([dynamic_source, dynamic_source])


def test_what_one_source_drained_is_kept_when_the_next_one_raises(kit: Any) -> None:
    arrays, dynamic_source = kit.source({("m", "ebc", "s"): (5, DIM, "row_wise")}), source_of(table_of())
    combined = CombinedSource([arrays, dynamic_source])
    arrays.train("m.embedding_bags.s", [2], 1.0)
    dynamic_source.record(FQNS[0], keys(-1))
    with pytest.raises(DeltaError, match="key -1 is reserved"):
        combined.drain()
    dynamic_source._logs[FQNS[0]].clear()
    arrays.train("m.embedding_bags.s", [3], 1.0)
    assert {fqn: ids.tolist() for fqn, ids in combined.drain().items()} == {"m.embedding_bags.s": [2, 3]}
    assert combined.drain() == {}


def test_a_dynamic_table_reaches_the_store_with_every_bit_of_its_keys(kit: Any) -> None:
    """Over HTTP, with more keys than fit: what is evicted in one interval is put right in the same."""
    table, draw = table_of(capacity=16, init_capacity=2), np.random.default_rng(3)
    pool = np.array([*draw.integers(-(2**63), 2**63 - 1, 40), 2**63 - 1, -(2**63), 2**53 + 1], np.int64)
    source = source_of(table)
    with FeatureStoreServer() as server:
        client = FeatureStoreClient(
            access_key_id="deltaproof",
            access_key_secret="deltaproof",
            endpoint=server.endpoint,
            featuredb_username="rank0",
            featuredb_password="password",
        )
        settings_ = kit.settings(project="deltaproof", every_steps=2, batch_size=7)
        with Publisher(source, client, settings_, rank=0, world_size=1, barrier=lambda: None) as publisher:
            publisher.start()
            for step in range(1, 61):
                ids = draw.choice(pool, 8)
                table.lookup(ids)
                source.record(FQNS[0], ids)
                table.add(ids, np.full((8, DIM), step))
                publisher.after_step(step)
            publisher.finish(60)
        stored = server.store.snapshot("deltaproof", "v", "v1").table()
    assert set(stored["sk"].to_pylist()) == set(pool.tolist())
    assert stored["embedding"].to_pylist() == table.served(stored["sk"].to_numpy()).tolist()
    assert [0.25, 0.25] in stored["embedding"].to_pylist()


def test_the_program_of_the_documentation_runs(capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(program, "docs/tables.md", "exec"), {})
    served = ast.literal_eval(capsys.readouterr().out)
    assert list(served) == [7, 8, 2**63 - 1]
    assert [key for key, number in served.items() if number == 0.25] == [7]


class ZchModule:
    """The buffers of an MCHManagedCollisionModule: four places, of which the first three can be given, from row 100."""

    _output_global_offset, _zch_size = 100, 4

    def __init__(self) -> None:
        self.put({})

    def put(self, places: dict[int, int]) -> None:
        """Raw id -> row. Free places are at the end and have the rows that are left, as TorchRec keeps them."""
        torch = pytest.importorskip("torch")
        free = [row for row in range(100, 104) if row not in places.values()]
        self._mch_sorted_raw_ids = torch.tensor(sorted(places) + [2**63 - 1] * len(free))
        self._mch_remapped_ids_mapping = torch.tensor([places[key] for key in sorted(places)] + free)


def test_a_zch_table_says_which_published_ids_are_served_another_row() -> None:
    module = ZchModule()
    module.put({5: 101, 9: 100})
    zch = ZchTable(module)
    assert zch.shared_slot == 103
    assert zch.slots(keys(5, 9, 7, -8, 2**63 - 1)).tolist() == [101, 100, 103, 103, 102]
    zch.published(keys(5, 7))
    assert zch.changed(b"row").tolist() == [7], "the shared row was not known before"
    assert zch.changed(b"row").tolist() == []
    assert zch.changed(b"new").tolist() == [7]
    module.put({5: 101, 7: 100})
    assert zch.changed(b"new").tolist() == [7, 9], "7 took the place of 9, which had been given one before all this"
    module.put({5: 100, 7: 101})
    assert zch.changed(b"new").tolist() == [5, 7]


def test_the_greatest_raw_id_is_followed_through_the_free_places() -> None:
    module = ZchModule()
    zch = ZchTable(module)
    assert zch.slots(keys(2**63 - 1)).tolist() == [100]
    zch.published(keys(2**63 - 1))
    assert zch.changed(b"row").tolist() == []
    module.put({5: 100})
    assert zch.changed(b"row").tolist() == [2**63 - 1]
    zch.published(keys(5))
    module.put({5: 100, 6: 101, 7: 102})
    assert zch.changed(b"row").tolist() == [2**63 - 1]
    assert zch.changed(b"new").tolist() == [2**63 - 1], "it shares the last row by now"

"""Dynamic tables against a dictionary; ZCH maps against TorchRec's own module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from deltaproof.fakes.dynamicemb import DynamicTable, DynamicTableError, Score, TableOptions, ZchMap

DIM = 4  # a multiple of 4: fbgemm refuses others
BIG = 2**63 - 1


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def table(**options: Any) -> DynamicTable:
    return DynamicTable("t", DIM, TableOptions(**{"capacity": 8, **options}))


# Dynamic tables


class DictTable:
    """What a dynamic table does, key by key and without NumPy's help. Rows are tuples of float32."""

    def __init__(self, options: TableOptions, initial: Any) -> None:
        self.options, self.initial = options, initial
        self.rows: dict[int, tuple] = {}
        self.stored: dict[int, tuple] = {}
        self.scores: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.evicted: set[int] = set()
        self.clock = self.step = self.custom = self.not_stored = 0

    def score(self, count: int, place: int) -> int:
        by = {"timestamp": self.clock + place + 1, "step": self.step, "lfu": count, "custom": self.custom}
        return by[self.options.score]

    def lookup(self, batch: list[int]) -> list[tuple]:
        if not batch:
            return []
        self.step += 1
        answer: dict[int, tuple] = {}
        last = {key: place for place, key in enumerate(batch)}
        hits = {key for key in batch if key in self.rows}
        for key in hits:
            score = self.score(batch.count(key), last[key])
            self.scores[key] = score + (self.scores[key] if self.options.score == "lfu" else 0)
        fresh: dict[int, int] = {}
        for key in set(batch) - hits:
            self.counts[key] = self.counts.get(key, 0) + batch.count(key)
            answer[key] = self.initial(key)
            if self.counts[key] >= self.options.admit_count:
                fresh[key] = self.score(self.counts[key], last[key])
        while len(self.counts) > self.options.counter_capacity:
            del self.counts[min(self.counts, key=lambda key: (self.counts[key], key % 2**64))]
        for key in fresh:
            self.counts.pop(key, None)
        for key in self.insert({key: (answer[key], score) for key, score in fresh.items()}, hits):
            self.not_stored += 1
            answer[key] = (np.float32(0),) * DIM
        self.clock += len(batch)
        return [self.rows[key] if key in self.rows else answer[key] for key in batch]

    def insert(self, fresh: dict[int, tuple[tuple, int]], protected: set[int]) -> list[int]:
        """Returns the keys for which there was no room."""
        refused = []
        protected = set(protected)
        for key in sorted(fresh, key=lambda key: (-fresh[key][1], key % 2**64)):
            row, score = fresh[key]
            if len(self.rows) == self.options.capacity:
                victims = self.rows.keys() - protected
                victim = min(victims, key=lambda key: (self.scores[key], key % 2**64), default=None)
                if victim is None or self.scores[victim] > score:
                    refused.append(key)
                    continue
                self.remove(victim)
                self.evicted.add(victim)
            self.rows[key], self.scores[key] = row, score
            protected.add(key)
            if not self.options.caching:
                self.stored[key] = row
        return refused

    def remove(self, key: int) -> None:
        for kept in (self.rows, self.scores, self.stored):
            kept.pop(key, None)


SOME_KEYS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, -2, -(2**63), BIG, 2**53 + 1])
BATCHES = st.lists(SOME_KEYS, max_size=12)


class Machine(RuleBasedStateMachine):
    """A table and the dictionary do the same; everything they answer must be equal, bit for bit."""

    SCORE: Score = "timestamp"

    @initialize(
        capacity=st.integers(1, 6),
        small=st.booleans(),
        admit_count=st.sampled_from([1, 1, 2, 3]),
        counter_capacity=st.sampled_from([2, 4, 100]),
        caching=st.booleans(),
        load_max=st.sampled_from([0.5, 1.0]),
    )
    def make(self, capacity: int, small: bool, **options: Any) -> None:
        chosen = TableOptions(
            capacity=capacity,
            init_capacity=1 if small else None,
            retain_evicted=True,
            eval_value=0.25,
            score=self.SCORE,
            **options,
        )
        self.table = DynamicTable("t", DIM, chosen)
        self.model = DictTable(chosen, lambda key: tuple(self.table.initial(keys(key))[0]))

    def rows_of(self, found: np.ndarray) -> list[tuple]:
        return [tuple(row) for row in found]

    @rule(batch=BATCHES, unsigned=st.booleans())
    def lookup(self, batch: list[int], unsigned: bool) -> None:
        asked = keys(*batch)
        rows = self.table.lookup(asked.view(np.uint64) if unsigned else asked)
        assert self.rows_of(rows) == self.model.lookup(batch)

    @rule(batch=BATCHES, step=st.integers(1, 3))
    def add(self, batch: list[int], step: int) -> None:
        deltas = np.full((len(batch), DIM), step, np.float32)
        assert self.table.add(keys(*batch), deltas).tolist() == [key in self.model.rows for key in batch]
        for key in batch:
            if key in self.model.rows:
                self.model.rows[key] = tuple(np.float32(value + np.float32(step)) for value in self.model.rows[key])
                if not self.model.options.caching:
                    self.model.stored[key] = self.model.rows[key]

    @rule(batch=st.lists(SOME_KEYS, unique=True, max_size=5), value=st.integers(0, 9), score=st.integers(0, 9))
    def insert(self, batch: list[int], value: int, score: int) -> None:
        row = (np.float32(value),) * DIM
        kept = self.table.insert(keys(*batch), np.full((len(batch), DIM), value), np.full(len(batch), score))
        self.model.step += 1
        held = {key for key in batch if key in self.model.rows}
        for key in held:
            self.model.scores[key] = score
        refused = self.model.insert({key: (row, score) for key in batch if key not in held}, held)
        for key in set(batch) - set(refused):
            self.model.rows[key] = self.model.stored[key] = row
        self.model.clock += len(batch)
        assert kept.tolist() == [key not in refused for key in batch]

    @rule(batch=BATCHES)
    def erase(self, batch: list[int]) -> None:
        assert self.table.erase(keys(*batch)).tolist() == [key in self.model.rows for key in batch]
        for key in batch:
            self.model.remove(key)

    @rule()
    def flush(self) -> None:
        self.table.flush()
        self.model.stored = dict(self.model.rows)

    @rule(score=st.integers(0, 9))
    def set_score(self, score: int) -> None:
        if self.model.options.score == "custom":
            self.table.set_score(score)
            self.model.custom = score

    @rule()
    def pop_evicted(self) -> None:
        assert self.table.pop_evicted().tolist() == sorted(self.model.evicted)
        self.model.evicted = set()

    @rule(batch=BATCHES)
    def read(self, batch: list[int]) -> None:
        rows, found = self.table.find(keys(*batch))
        assert found.tolist() == [key in self.model.stored for key in batch]
        assert self.rows_of(rows[found]) == [self.model.stored[key] for key in batch if key in self.model.stored]
        assert np.isnan(rows[~found]).all()
        fallback = (np.float32(0.25),) * DIM
        assert self.rows_of(self.table.served(keys(*batch))) == [self.model.rows.get(key, fallback) for key in batch]
        assert self.table.scores(keys(*batch)).tolist() == [self.model.scores.get(key, -1) for key in batch]

    @rule(batch_size=st.integers(1, 4), low=st.one_of(st.none(), st.integers(0, 20)))
    def export(self, batch_size: int, low: int | None) -> None:
        parts = list(self.table.export(batch_size, low))
        assert all(len(part[0]) <= batch_size for part in parts)
        got = [(int(key), tuple(row), int(score)) for part in parts for key, row, score in zip(*part, strict=True)]
        scores = self.model.scores
        assert got == [
            (key, row, scores[key])
            for key, row in sorted(self.model.stored.items())
            if low is None or scores[key] >= low
        ]

    @invariant()
    def same_size(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) == len(self.model.rows) <= self.model.options.capacity
            assert self.table.not_stored == self.model.not_stored
            taken = ~np.isnan(self.table.weights).any(axis=1)
            assert taken.sum() == len(self.table), "a free slot holds a row, or a taken one none"


@pytest.mark.parametrize("score", ["timestamp", "step", "lfu", "custom"])
def test_a_dynamic_table_is_a_dictionary(score: str) -> None:
    machine = type("ScoredMachine", (Machine,), {"SCORE": score})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=20))


def test_a_key_is_served_its_row_only_from_its_admission_to_its_eviction() -> None:
    dynamic = table(capacity=2, admit_count=2)
    first = dynamic.lookup(keys(7))
    assert dynamic.find(keys(7))[1].tolist() == [False]
    assert dynamic.served(keys(7)).tolist() == [[0.0] * DIM], "a key that was not admitted is served the eval value"
    assert dynamic.add(keys(7), np.ones((1, DIM))).tolist() == [False], "an optimizer's step has nowhere to go"
    assert (dynamic.lookup(keys(7)) == first).all()
    assert dynamic.add(keys(7), np.ones((1, DIM))).tolist() == [True]
    assert (dynamic.served(keys(7)) == first + 1).all()
    dynamic.lookup(keys(8, 8, 9, 9))
    rows, found = dynamic.find(keys(7))
    assert not found.any()
    assert np.isnan(rows).all()
    assert dynamic.served(keys(7)).tolist() == [[0.0] * DIM], (
        "an evicted key is served neither its old nor its first row"
    )


def test_lru_and_lfu_evict_different_keys() -> None:
    evicted = {}
    for score in ("timestamp", "step", "lfu"):
        dynamic = table(capacity=2, score=score, retain_evicted=True)
        for batch in ([1, 1, 1], [2], [3]):
            dynamic.lookup(keys(*batch))
        evicted[score] = dynamic.pop_evicted().tolist()
        assert dynamic.pop_evicted().tolist() == [], "evicted keys were not cleared as they were read"
    assert evicted == {"timestamp": [1], "step": [1], "lfu": [2]}


def test_a_batch_larger_than_the_table_evicts_none_of_its_own_keys() -> None:
    dynamic = table(capacity=2)
    rows = dynamic.lookup(keys(1, 2, 3, 4))
    assert (len(dynamic), dynamic.not_stored) == (2, 2)
    assert (rows == 0).all(axis=1).tolist() == [True, True, False, False]
    assert dynamic.find(keys(1, 2, 3, 4))[1].tolist() == [False, False, True, True]


def test_before_a_flush_the_last_tier_lags_behind() -> None:
    dynamic = table(caching=True)
    dynamic.lookup(keys(1))
    assert dynamic.find(keys(1))[1].tolist() == [False]
    dynamic.flush()
    old = dynamic.find(keys(1))[0]
    dynamic.add(keys(1), np.ones((1, DIM)))
    assert (dynamic.find(keys(1))[0] == old).all()
    assert (dynamic.served(keys(1)) == old + 1).all()
    dynamic.flush()
    assert (dynamic.find(keys(1))[0] == old + 1).all()


def test_growth_replaces_the_storage_under_a_kept_handle() -> None:
    dynamic = table(init_capacity=2)
    dynamic.lookup(keys(1))
    handle = dynamic.weights
    assert len(handle) == 2
    dynamic.lookup(keys(2))
    assert len(dynamic.weights) == 4
    before = handle.copy()
    dynamic.add(keys(1), np.ones((1, DIM)))
    assert np.array_equal(handle, before, equal_nan=True), "the old handle still sees updates"


def test_growth_leaves_the_last_tier_as_far_behind_as_it_was() -> None:
    dynamic = table(init_capacity=2, caching=True)
    dynamic.lookup(keys(1))
    dynamic.flush()
    old = dynamic.find(keys(1))[0]
    dynamic.lookup(keys(2))
    dynamic.add(keys(1), np.ones((1, DIM)))
    assert len(dynamic.weights) == 4
    assert (dynamic.find(keys(1))[0] == old).all()
    assert dynamic.find(keys(1, 2))[1].tolist() == [True, False]


def test_keys_of_the_running_batch_are_not_evicted_however_low_their_score() -> None:
    dynamic = table(capacity=2, score="custom")
    dynamic.set_score(9)
    dynamic.lookup(keys(1, 2))
    dynamic.set_score(0)
    dynamic.lookup(keys(1))
    dynamic.lookup(keys(1, 3))
    assert dynamic.scores(keys(1, 2, 3)).tolist() == [0, 9, -1]
    assert dynamic.not_stored == 1
    dynamic.lookup(keys(3))
    assert dynamic.scores(keys(1, 2, 3)).tolist() == [-1, 9, 0], (
        "of equal scores the older key goes when it is not in use"
    )


def test_an_incremental_export_has_the_keys_whose_score_is_not_less() -> None:
    dynamic = table(score="custom")
    for key, score in ((1, 4), (2, 5), (3, 6)):
        dynamic.set_score(score)
        dynamic.lookup(keys(key))
    ((found, rows, scores),) = dynamic.export(min_score=5)
    assert (found.tolist(), scores.tolist()) == ([2, 3], [5, 6])
    assert (rows == dynamic.initial(found)).all()


def test_initial_rows_depend_on_seed_and_key_alone() -> None:
    drawn = keys(5, -(2**63), BIG, 2**53, 2**53 + 1)
    one = table(seed=1)
    assert (one.lookup(drawn) == table(seed=1).lookup(drawn[::-1])[::-1]).all()
    assert (one.lookup(drawn) != table(seed=2).lookup(drawn)).any(axis=1).all()
    assert len({tuple(row) for row in one.initial(drawn)}) == len(drawn)
    rows = table(initial_min=-1, initial_max=1).initial(np.arange(10_000))
    assert rows.dtype == np.float32
    assert (-1 <= rows.min() < -0.99, 0.99 < rows.max() < 1, abs(rows.mean()) < 0.02) == (True, True, True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda dynamic: dynamic.lookup([1.0]), "float64"),
        (lambda dynamic: dynamic.lookup(np.array([1], np.int32)), "int32"),
        (lambda dynamic: dynamic.lookup(keys(1).reshape(1, 1)), "want int64"),
        (lambda dynamic: dynamic.lookup(keys(3, -1)), "key -1 is reserved"),
        (lambda dynamic: dynamic.find(np.array([2**64 - 1], np.uint64)), "key -1 is reserved"),
        (lambda dynamic: dynamic.add(keys(1), np.ones((1, DIM + 1))), "rows"),
        (lambda dynamic: dynamic.insert(keys(1, 1), np.ones((2, DIM))), "unique"),
        (lambda dynamic: dynamic.insert(keys(1), np.ones((1, DIM)), [-1]), "scores"),
        (lambda dynamic: dynamic.set_score(1), "scores by timestamp"),
        (lambda dynamic: dynamic.pop_evicted(), "retain_evicted"),
        (lambda _: table(capacity=0), "capacity"),
        (lambda _: table(init_capacity=9), "capacity"),
        (lambda _: table(load_max=0), "load_max"),
        (lambda _: DynamicTable("t", 0, TableOptions(capacity=1)), "dim"),
    ],
)
def test_what_a_table_cannot_hold_is_refused(call: Any, message: str) -> None:
    with pytest.raises(DynamicTableError, match=message):
        call(table())


# ZCH on TorchRec's own module

SLOTS = 5


@pytest.fixture(scope="module")
def torchrec() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("torchrec")


class Zch:
    """An unsharded ManagedCollisionEmbeddingBagCollection with one table; one id per bag."""

    def __init__(
        self, torchrec: Any, policy: str = "LFU_EvictionPolicy", interval: int = 1, offset: int = 0, init_fn: Any = None
    ) -> None:
        import torch
        from torchrec.modules import mc_modules
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

        torch.manual_seed(0)
        self.torch, self.torchrec = torch, torchrec
        config = torchrec.EmbeddingBagConfig(
            name="t", embedding_dim=DIM, num_embeddings=SLOTS, feature_names=["f"], init_fn=init_fn
        )
        self.module = mc_modules.MCHManagedCollisionModule(
            zch_size=SLOTS,
            device=torch.device("cpu"),
            eviction_policy=getattr(mc_modules, policy)(),
            eviction_interval=interval,
            output_global_offset=offset,
        )
        if offset:
            return  # a shard's module alone: the unsharded collection knows no offset
        collection = mc_modules.ManagedCollisionCollection({"t": self.module}, [config])
        self.model = ManagedCollisionEmbeddingBagCollection(
            torchrec.EmbeddingBagCollection(tables=[config]), collection
        )

    def features(self, *ids: int) -> Any:
        return self.torchrec.KeyedJaggedTensor.from_lengths_sync(
            ["f"], self.torch.tensor(ids), self.torch.ones(len(ids), dtype=self.torch.int64)
        )

    def forward(self, *ids: int) -> np.ndarray:
        """What the model answers for bags of one id each."""
        answer, _ = self.model(self.features(*ids))
        rows: np.ndarray = answer["f"].detach().numpy()
        return rows

    def train(self, *ids: int) -> ZchMap:
        self.model.train()
        self.forward(*ids)
        return ZchMap.of(self.module)

    def serve(self, *ids: int) -> np.ndarray:
        self.model.eval()
        return self.forward(*ids).copy()

    @property
    def weights(self) -> np.ndarray:
        (weight,) = self.model.parameters()
        rows: np.ndarray = weight.detach().numpy()
        return rows


ASKED = (7, 8, 9, 10, 11, 12, -3, 0, -(2**63), 2**62, BIG)


@pytest.mark.parametrize("policy", ["LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy"])
def test_the_map_serves_what_the_model_serves(torchrec: Any, policy: str) -> None:
    """Random ids over many evictions: for every id, admitted or not, the row is the model's own, bit for bit."""
    zch, random = Zch(torchrec, policy, interval=2), np.random.default_rng(5)
    evicted = 0
    before = ZchMap.of(zch.module)
    for _ in range(20):
        few = random.choice(ASKED[:-1], size=2)  # twelve ids, two different ones: new ids can outnumber old ones
        now = zch.train(*random.choice(few, size=12).tolist())
        evicted += len(now.moves_since(before).evicted)
        assert np.array_equal(now.served(ASKED, zch.weights), zch.serve(*ASKED))
        assert np.array_equal(ZchMap.of(zch.module).raw_ids, now.raw_ids), "evaluation changed the map"
        before = now
    assert evicted > 0, "nothing was evicted, so nothing was shown"


def test_ids_are_admitted_at_the_end_of_an_interval_only(torchrec: Any) -> None:
    zch = Zch(torchrec, interval=2)
    assert zch.train(7, 8).admitted().tolist() == []
    assert zch.train(9).admitted().tolist() == [7, 8, 9]
    assert zch.train(10).admitted().tolist() == [7, 8, 9]


def test_an_eviction_changes_what_is_served_for_an_id_nobody_looked_up(torchrec: Any) -> None:
    zch = Zch(torchrec)
    full = zch.train(7, 7, 7, 8, 8, 8, 9, 9, 10)
    assert full.find([7, 8, 9, 10])[1].all()
    served = zch.serve(10)
    after = zch.train(11, 11, 11, 11)
    moves = after.moves_since(full)
    assert (moves.admitted.tolist(), moves.evicted.tolist(), moves.moved.tolist()) == ([11], [10], [])
    slots, admitted = after.find([10, 11])
    assert admitted.tolist() == [False, True]
    assert slots.tolist() == [SLOTS - 1, full.find([10])[0][0]], "the new id did not take the evicted one's slot"
    assert (zch.serve(11) == served).all(), "unsharded, the new id inherits the row of the evicted one"
    assert (zch.serve(10) == zch.weights[SLOTS - 1]).all()
    assert (zch.serve(10) != served).any()


def test_ids_without_a_slot_share_a_row_so_training_one_changes_all(torchrec: Any) -> None:
    zch = Zch(torchrec, interval=1000)
    before = zch.serve(7, 8)
    assert (before[0] == before[1]).all()
    zch.model.train()
    zch.model(zch.features(7))[0]["f"].sum().backward()
    (weight,) = zch.model.parameters()
    with zch.torch.no_grad():
        weight -= weight.grad
    assert (zch.serve(8) == before[1] - 1).all(), "8 was not looked up, and its row has changed"


def test_ids_beyond_the_first_batch_s_measure_are_not_counted(torchrec: Any) -> None:
    """The history holds 1.25 times what the first batch would fill; a later, larger batch loses its tail."""
    zch = Zch(torchrec)
    zch.train(7, 7, 7, 7)
    assert zch.train(7, 8, 8, 8, 9, 9, 9, 9).admitted().tolist() == [7, 8, 9]
    assert zch.train(7, 8, 9, 9, 9, 10, 10, 10).admitted().tolist() == [7, 8, 9]


def test_the_greatest_raw_id_passes_for_a_free_place(torchrec: Any) -> None:
    zch = Zch(torchrec)
    now = zch.train(7, 8)
    slots, admitted = now.find([BIG])
    assert slots[0] != now.fallback, "it is looked up in the first free slot"
    assert not admitted[0]
    assert np.array_equal(zch.serve(BIG), zch.weights[slots])


def test_an_id_that_comes_back_may_get_another_slot(torchrec: Any) -> None:
    zch = Zch(torchrec, "LRU_EvictionPolicy")
    first = zch.train(7, 8, 9, 10)
    assert zch.train(11).moves_since(first).evicted.tolist() == [10]
    moves = zch.train(10).moves_since(first)
    assert (moves.admitted.tolist(), moves.evicted.tolist(), moves.moved.tolist()) == ([11], [9], [10])
    assert np.array_equal(ZchMap.of(zch.module).served(ASKED, zch.weights), zch.serve(*ASKED))


def test_a_shard_s_map_holds_global_slots(torchrec: Any) -> None:
    import torch
    from torchrec import JaggedTensor

    shard = Zch(torchrec, offset=100).module
    ids = JaggedTensor(torch.tensor([7, 8]), lengths=torch.tensor([2]))
    remapped = shard({"f": ids})["f"].values().tolist()
    now = ZchMap.of(shard)
    slots, admitted = now.find([7, 8, 9])
    assert slots.tolist() == [*remapped, 100 + SLOTS - 1]
    assert admitted.tolist() == [True, True, False]
    weights = np.arange(SLOTS * DIM, dtype=np.float32).reshape(SLOTS, DIM)
    assert np.array_equal(now.served([7, 8, 9], weights, first_row=100), weights[slots - 100])


def test_a_sharded_module_resets_an_evicted_row_before_the_new_id_uses_it(torchrec: Any, tmp_path: Path) -> None:
    """World size 1 on gloo. The map of the sharded module is read as that of an unsharded one."""
    import torch
    from torch import distributed as dist
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    def seven(weight: torch.Tensor) -> torch.Tensor:
        in_place = isinstance(weight, torch.nn.Parameter)  # else rows taken out of it, to be put back
        return torch.nn.init.constant_(weight, 7.0) if in_place else torch.full_like(weight, 7.0)

    zch = Zch(torchrec, init_fn=seven)
    apply_optimizer_in_backward(torch.optim.SGD, zch.model.parameters(), {"lr": 1.0})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            zch.model,
            {"t": row_wise(compute_kernel="fused")},
            sharder=sharder,
            world_size=1,
            local_size=1,
            device_type="cpu",
        )
        sharded = DistributedModelParallel(
            torch.nn.ModuleDict({"mc": zch.model}),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            plan=ShardingPlan({"mc": plan}),
            sharders=[sharder],
            device=torch.device("cpu"),
        ).module["mc"]
        module = sharded._managed_collision_collection._managed_collision_modules["t"]

        def train(*ids: int) -> tuple[ZchMap, np.ndarray]:
            answer, _ = sharded(zch.features(*ids))
            answer["f"].sum().backward()
            return ZchMap.of(module), answer["f"].detach().numpy()

        def weights() -> np.ndarray:
            (weight,) = [value for name, value in sharded.state_dict().items() if name.endswith("t.weight")]
            rows: np.ndarray = weight.local_shards()[0].tensor.detach().numpy().copy()
            return rows

        full, _ = train(7, 7, 7, 8, 8, 8, 9, 9, 10)
        assert full.served([7, 8, 9, 10, 99], weights())[:, 0].tolist() == [4, 4, 5, 6, 7]
        after, answered = train(11, 11, 11, 11)
        assert after.moves_since(full).evicted.tolist() == [10]
        assert (answered == 7).all(), "the new id inherited the evicted one's row"
        assert after.served([10, 11], weights())[:, 0].tolist() == [7, 3]
    finally:
        dist.destroy_process_group()

"""Dynamic tables: keys of any 64 bits that map back, one host each, and what serving uses after an eviction."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.simulator.dynamic import DynamicTables
from deltaproof.simulator.history import LedgerTable
from deltaproof.simulator.scenario import Scenario, Table

AD = Table(name="ad", owner="dyn", rows=50, sharding="dynamic", capacity=4, missing=0.25)


def scenario(world_size: int) -> Scenario:
    return Scenario(world_size=world_size, tables=(Table(name="item"), AD)).checked()


@given(st.lists(st.integers(0, 2**31 - 2), min_size=1, unique=True))
def test_keys_are_scattered_and_no_two_are_equal(numbers: list[int]) -> None:
    keys = AD.key_ids(np.array(numbers, np.int64))
    assert len(set(keys.tolist())) == len(numbers)
    assert -1 not in keys


def test_keys_have_both_signs_and_do_not_survive_a_float() -> None:
    keys = AD.key_ids(np.arange(50))
    assert (keys < 0).any()
    assert (keys > 2**53).any()
    assert (keys.astype(np.float64).astype(np.int64) != keys).any()
    assert (Table(name="item").key_ids(np.arange(50)) == np.arange(50)).all()


def test_a_ledger_finds_its_rows_by_the_stores_keys() -> None:
    empty = np.empty(0, np.int64)
    ledger = LedgerTable(
        table=AD,
        embedding_name="ad",
        initial=np.zeros((50, 4), np.float32),
        steps=empty,
        keys=empty,
        values=np.empty((0, 4), np.float32),
        lookup_steps=empty,
        lookup_ranks=empty.astype(np.int32),
        lookup_keys=empty,
        host=np.zeros(50, np.int32),
    )
    assert ledger.numbers(np.append(ledger.key_ids[::-1], [-1, 0, 7])).tolist() == [*range(49, -1, -1), -1, -1, -1]


@given(st.integers(1, 5))
def test_each_key_has_one_host(world_size: int) -> None:
    ranks = [DynamicTables(scenario(world_size), rank) for rank in range(world_size)]
    assert np.sort(np.concatenate([rank.hosted(1) for rank in ranks])).tolist() == list(range(50))


def test_a_key_that_lost_its_row_is_served_what_serving_uses_for_missing_keys() -> None:
    tables = DynamicTables(scenario(1), 0)
    seen: list[np.ndarray] = []
    tables.handles[1].listeners.append(seen.append)
    assert (tables.served(1) == 0.25).all()
    for step, numbers in enumerate(([0, 1, 2, 3], [4, 5, 6, 7]), 1):
        tables.look_up([{"item": np.arange(3), "ad": np.array(numbers)}], training=True)
        tables.update(step)
    served = tables.served(1)
    assert (served[:4] == 0.25).all(), "evicted"
    assert (served[4:8] != 0.25).all()
    assert [keys.tolist() for keys in seen] == [AD.key_ids(np.array(n)).tolist() for n in ([0, 1, 2, 3], [4, 5, 6, 7])]
    tables.look_up([{"item": np.arange(3), "ad": np.array([0])}], training=False)
    assert (tables.served(1) == served).all(), "evaluation admits nothing"
    assert len(seen) == 3, "and is told of all the same, for whoever listens has to tell the two apart"

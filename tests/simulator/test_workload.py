"""Batches are a pure function of the scenario."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.faults import QuietTable
from deltaproof.simulator.scenario import Scenario, Table, Workload
from deltaproof.simulator.strategies import scenarios
from deltaproof.simulator.workload import Workload as Batches
from deltaproof.simulator.workload import initial_rows, looked_up


def flat(batches: Batches, rank: int, step: int) -> list[list[int]]:
    return [b.values.tolist() + b.lengths.tolist() for b in batches.batch(rank, step).values()]


@settings(max_examples=50)
@given(scenarios(), st.integers(1, 20))
def test_same_seed_same_ids_and_all_in_range(scenario: Scenario, step: int) -> None:
    first, second = Batches(scenario), Batches(scenario)
    for rank in range(scenario.world_size):
        assert flat(first, rank, step) == flat(second, rank, step)
        for batch in (first.batch(rank, step), first.eval_batch(rank, step), first.empty_batch()):
            for bags in batch.values():
                assert bags.lengths.sum() == len(bags.values)
                assert len(bags.lengths) == scenario.workload.batch_size
            for table in scenario.tables:
                keys = looked_up(table, batch)
                assert ((keys >= 0) & (keys < table.rows)).all()


def test_another_seed_rank_or_step_gives_other_ids() -> None:
    base = Scenario(tables=(Table(name="item", rows=1000),), workload=Workload(batch_size=16, zipf_exponent=0))
    other = Scenario(seed=1, tables=base.tables, workload=base.workload)
    batches = Batches(base)
    drawn = [flat(batches, 0, 1), flat(batches, 1, 1), flat(batches, 0, 2), flat(Batches(other), 0, 1)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_zipf_makes_some_rows_popular_and_zero_is_uniform() -> None:
    def share_of_top(exponent: float) -> float:
        work = Workload(batch_size=2000, ids_per_sample_max=3, zipf_exponent=exponent)
        values = Batches(Scenario(tables=(Table(name="item", rows=100),), workload=work)).batch(0, 1)["item"].values
        return np.bincount(values, minlength=100).max() / len(values)

    assert share_of_top(0.0) < 0.03
    assert share_of_top(1.5) > 0.2


def test_a_replicated_embedding_collection_gets_one_id_per_bag() -> None:
    table = Table(name="item", owner="ec", collection="ec", sharding="data_parallel")
    assert Batches(Scenario(tables=(table,))).batch(0, 1)["item"].lengths.tolist() == [1] * 4


def test_initial_rows_differ_between_tables_and_seeds() -> None:
    scenario = Scenario(tables=(Table(name="a"), Table(name="b")))
    a, b = initial_rows(scenario, 0), initial_rows(scenario, 1)
    assert a.shape == (64, 4)
    assert a.dtype == np.float32
    assert not np.array_equal(a, b)
    assert len(np.unique(a, axis=0)) == 64
    assert np.array_equal(a, initial_rows(scenario, 0))


def test_ids_come_from_the_parquet_file_and_ranks_share_it(tmp_path) -> None:
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"item": pa.array(range(100, 160), pa.int64()), "price": pa.array([1.5] * 60)}), path)
    scenario = Scenario(
        tables=(Table(name="item", rows=1000), Table(name="other", rows=50)), workload=Workload(data=str(path))
    )
    batches = Batches(scenario)
    even, odd = (np.concatenate([batches.batch(r, s)["item"].values for s in range(1, 9)]) for r in (0, 1))
    assert set(even) <= set(range(100, 160, 2))
    assert set(odd) <= set(range(101, 160, 2))
    assert (batches.batch(0, 1)["other"].values < 50).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"price": pa.array([1.5])}, "has no int64 column to take ids from .it has price double"),
        ({"id": pa.array([1], pa.int32())}, "cast the id columns to int64"),
        ({"id": pa.array([None, None], pa.int64())}, "hold no ids"),
        ({"id": pa.array([], pa.int64())}, "hold no ids"),
    ],
)
def test_a_file_without_ids_is_refused(tmp_path, content: dict, message: str) -> None:
    pq.write_table(pa.table(content), tmp_path / "clicks.parquet")
    with pytest.raises(ScenarioError, match=message):
        Batches(Scenario(workload=Workload(data=str(tmp_path / "clicks.parquet"))))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"id\n1\n2\n"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "clicks.parquet").write_bytes(content)
    with pytest.raises(ScenarioError, match="cannot read interactions") as refused:
        Batches(Scenario(workload=Workload(data=str(tmp_path / "clicks.parquet"))))
    assert "\n" not in str(refused.value)


def test_an_absent_file_is_refused(tmp_path) -> None:
    with pytest.raises(ScenarioError, match="cannot read interactions"):
        Batches(Scenario(workload=Workload(data=str(tmp_path / "absent.parquet"))))


def test_negative_and_extreme_ids_fall_into_the_table(tmp_path) -> None:
    path = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"item": pa.array([-1, -(2**63), 2**63 - 1], pa.int64())}), path)
    values = Batches(Scenario(workload=Workload(data=str(path)))).batch(0, 1)["item"].values
    assert ((values >= 0) & (values < 64)).all()


def test_a_quiet_table_draws_nothing_for_its_steps_and_changes_no_other_batch() -> None:
    tables = (Table(name="item", rows=50), Table(name="user", rows=50, features=("user", "owner")))
    calm = Scenario(tables=tables, workload=Workload(batch_size=8))
    quiet = Scenario(tables=tables, workload=calm.workload, faults=(QuietTable(table="user", step=3, steps=2),))
    for step in range(1, 7):
        wanted, drawn = Batches(calm).batch(1, step), Batches(quiet).batch(1, step)
        assert drawn["item"].values.tolist() == wanted["item"].values.tolist()
        for feature in ("user", "owner"):
            values = [] if step in (3, 4) else wanted[feature].values.tolist()
            assert drawn[feature].values.tolist() == values
            assert len(drawn[feature].lengths) == 8
    assert len(Batches(quiet).eval_batch(1, 3)["user"].values) > 0, "evaluation is no training"


def test_each_attempt_reads_other_batches_and_a_warm_up_others_again(tmp_path) -> None:
    pq.write_table(pa.table({"item": np.arange(1000)}), tmp_path / "clicks.parquet")
    for data in (None, str(tmp_path / "clicks.parquet")):
        scenario = Scenario(
            tables=(Table(name="item", rows=1000),), workload=Workload(batch_size=16, zipf_exponent=0, data=data)
        )
        drawn = [flat(Batches(scenario, attempt), 0, 3) for attempt in range(3)]
        drawn.append([b.values.tolist() for b in Batches(scenario).warmup_batch(0, 3).values()])
        assert len({repr(batch) for batch in drawn}) == 4
        assert flat(Batches(scenario, 1), 0, 3) == drawn[1]

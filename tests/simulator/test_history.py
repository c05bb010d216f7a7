"""Histories survive a rank that dies in the middle of a record, and contradictions in the ledger do not pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.simulator.history import (
    CHANGED,
    INITIAL,
    LOOKED_UP,
    EventWriter,
    LedgerWriter,
    build_tables,
    read_events,
    read_ledger,
)
from deltaproof.simulator.scenario import Scenario, Table

KEYS = np.array([3, 5], np.int64)
ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


def write_ledger(path, entries_by_step: dict) -> None:
    writer = LedgerWriter(path)
    for step, entries in entries_by_step.items():
        writer.write(step, entries)
    writer.close()


@given(st.integers(0, 10_000))
def test_events_cut_short_anywhere_give_the_whole_ones_before(tmp_path_factory, cut: int) -> None:
    path = tmp_path_factory.mktemp("events") / "e.jsonl"
    writer = EventWriter(path, "rank0", 0)
    for step in range(20):
        writer.write("step", step=step, text="\N{SNOWMAN}\n" * step)
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    events = read_events(path)
    assert [e.step for e in events] == list(range(len(events)))
    assert len(events) >= path.read_bytes().count(b"\n")


def test_events_of_a_rank_that_never_started() -> None:
    from pathlib import Path

    assert read_events(Path("does/not/exist")) == []
    assert read_ledger(Path("does/not/exist")) == []


@given(st.integers(0, 10_000))
def test_a_ledger_cut_short_anywhere_gives_the_whole_batches_before(tmp_path_factory, cut: int) -> None:
    path = tmp_path_factory.mktemp("ledger") / "l.arrows"
    write_ledger(path, {0: [(INITIAL, 0, KEYS, ROWS)], **{s: [(CHANGED, 0, KEYS, ROWS + s)] for s in range(1, 5)}})
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    batches = read_ledger(path)
    assert [b["step"][0].as_py() for b in batches] == list(range(len(batches)))


def test_ledgers_of_two_ranks_make_one_table(tmp_path) -> None:
    scenario = Scenario(tables=(Table(name="item", rows=4),))
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    write_ledger(
        tmp_path / "0",
        {0: [(INITIAL, 0, np.array([0, 1]), rows[:2])], 1: [(CHANGED, 0, np.array([1]), rows[:1] + 0.5)]},
    )
    write_ledger(
        tmp_path / "1",
        {
            0: [(INITIAL, 0, np.array([2, 3]), rows[2:])],
            1: [(CHANGED, 0, np.array([2]), rows[:1]), (LOOKED_UP, 0, np.array([1, 2]), None)],
            2: [(CHANGED, 0, np.array([2]), rows[:1] + 9), (LOOKED_UP, 0, np.array([2]), None)],
        },
    )
    ledgers = [read_ledger(tmp_path / "0"), read_ledger(tmp_path / "1")]
    table = build_tables(scenario, {scenario.tables[0].fqn: "n"}, ledgers)[scenario.tables[0].fqn]
    assert table.host.tolist() == [0, 0, 1, 1]
    assert table.final.tolist() == [
        rows[0].tolist(),
        (rows[0] + 0.5).tolist(),
        (rows[0] + 9).tolist(),
        rows[3].tolist(),
    ]
    assert [step for step, _ in table.versions(2)] == [0, 1, 2]
    assert table.last_lookup == {1: 1, 2: 2}
    assert table.responsible(0).tolist() == [1]
    assert table.responsible(1).tolist() == [2]


def test_of_a_replicated_table_a_rank_answers_for_what_it_looked_up(tmp_path) -> None:
    scenario = Scenario(tables=(Table(name="item", rows=2, sharding="data_parallel"),))
    rows = np.ones((2, 4), np.float32)
    for rank in (0, 1):
        write_ledger(
            tmp_path / str(rank),
            {
                0: [(INITIAL, 0, np.arange(2), rows)],
                1: [(CHANGED, 0, np.arange(2), rows + 1), (LOOKED_UP, 0, np.array([rank]), None)],
            },
        )
    ledgers = [read_ledger(tmp_path / "0"), read_ledger(tmp_path / "1")]
    table = build_tables(scenario, {scenario.tables[0].fqn: "n"}, ledgers)[scenario.tables[0].fqn]
    assert table.responsible(0).tolist() == [0]
    assert table.responsible(1).tolist() == [1]
    assert table.steps.tolist() == [1, 1]  # one record per step and key, though both replicas wrote theirs


def test_replicas_that_differ_are_an_error_of_the_kit(tmp_path) -> None:
    scenario = Scenario(tables=(Table(name="item", rows=2, sharding="data_parallel"),))
    rows = np.ones((2, 4), np.float32)
    for rank in (0, 1):
        write_ledger(
            tmp_path / str(rank), {0: [(INITIAL, 0, np.arange(2), rows)], 1: [(CHANGED, 0, np.arange(2), rows + rank)]}
        )
    with pytest.raises(ValueError, match=r"data-parallel table ebc\.embedding_bags\.item hold different values"):
        build_tables(
            scenario, {scenario.tables[0].fqn: "n"}, [read_ledger(tmp_path / "0"), read_ledger(tmp_path / "1")]
        )

"""Histories survive a rank that dies in the middle of a record, and contradictions in the ledger do not pass."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.simulator.history import (
    CHANGED,
    INITIAL,
    LOOKED_UP,
    EventWriter,
    LedgerTable,
    LedgerWriter,
    build_tables,
    continue_tables,
    find_leaks,
    read_events,
    read_ledger,
    values_at,
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


def test_a_leak_is_told_by_name_once_per_file_and_without_the_value(tmp_path) -> None:
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / "rank0.log").write_bytes(b"calm\n\xff url?p=opensesame&t=tok3n\nopensesame again\n")
    (tmp_path / "ledger").write_bytes(b"\0tok3n\0")
    (tmp_path / "clean").write_text("open sesame")
    leaks = find_leaks(tmp_path, {"PASSWORD": "opensesame", "TOKEN": "tok3n"})
    assert [(leak.secret, leak.file) for leak in leaks] == [
        ("PASSWORD", "attempt-1/rank0.log"),
        ("TOKEN", "attempt-1/rank0.log"),
        ("TOKEN", "ledger"),
    ]
    assert leaks[0].line == "\ufffd url?p=[PASSWORD]&t=[TOKEN]"
    assert not any("opensesame" in leak.line or "tok3n" in leak.line for leak in leaks)


def ledger_of(tmp_path, name: str, entries_by_step: dict) -> dict[str, LedgerTable]:
    write_ledger(tmp_path / name, entries_by_step)
    scenario = Scenario(world_size=1, tables=(Table(name="item", rows=8),))
    return build_tables(scenario, scenario.manifest(), [read_ledger(tmp_path / name)])


def test_an_attempt_goes_on_where_its_restore_left_the_ledger(tmp_path) -> None:
    all_keys, zeros = np.arange(8), np.zeros((8, 4), np.float32)
    restored = zeros.copy()
    restored[KEYS] = ROWS
    first = ledger_of(
        tmp_path,
        "first",
        {
            0: [(INITIAL, 0, all_keys, zeros)],
            1: [(LOOKED_UP, 0, KEYS, None), (CHANGED, 0, KEYS, ROWS)],
            2: [(LOOKED_UP, 0, KEYS, None), (CHANGED, 0, KEYS, -ROWS)],
        },
    )
    second = ledger_of(
        tmp_path,
        "second",
        {
            0: [(INITIAL, 0, all_keys, restored)],
            2: [(LOOKED_UP, 0, KEYS[:1], None), (CHANGED, 0, KEYS[:1], 3 * ROWS[:1])],
        },
    )
    # The checkpoint was made after step 1, the crash came after step 2: the restore is the history's step 3.
    table = continue_tables(first, second, shift=2, restored=1)["ebc.embedding_bags.item"]
    assert [values_at(table, step)[3, 0] for step in range(5)] == [0, 1, -1, 1, 3]
    assert [values_at(table, step)[5, 0] for step in range(5)] == [0, 5, -5, 5, 5]
    assert table.final.tobytes() == values_at(table, 4).tobytes()
    assert table.lookup_steps.tolist() == [1, 1, 2, 2, 4]
    assert table.since == 3
    assert table.responsible(0).tolist() == [3], "what only earlier attempts looked up is not this one's to publish"


def test_a_file_that_goes_while_leaks_are_sought_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log", "rendezvous"):
        (tmp_path / name).write_text("opensesame")
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "rendezvous":
            path.unlink()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert [leak.file for leak in find_leaks(tmp_path, {"PASSWORD": "opensesame"})] == ["log"]

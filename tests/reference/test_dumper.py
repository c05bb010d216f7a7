import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaproof.reference.delta import DeltaError
from deltaproof.reference.dumper import Cadence, Dumper, Pause, keys_of, merge_keys

EBC, DP = "m.ebc.embedding_bags.t", "m.ebc.embedding_bags.dp"


class FakeClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def source(kit: Any) -> Any:
    return kit.source({("m.ebc", "ebc", "t"): (20, 2, "row_wise"), ("m.ebc", "ebc", "dp"): (20, 2, "data_parallel")})


@pytest.fixture
def dumper(kit: Any, source: Any) -> Dumper:
    return Dumper(source, kit.settings(), rank=1, world_size=2)


def sent(dumper: Dumper, step: int, why: Any = "dump") -> Any:
    """A dump whose delta was submitted."""
    table = dumper.dump(step, why)
    dumper.submitted()
    return table


def rows_of(table: Any) -> dict[tuple[str, int], float]:
    return {(r["table_fqn"], r["key_id"]): r["embedding"][0] for r in table.to_pylist()} if table else {}


def test_a_dump_holds_what_was_touched_since_the_last_one_at_present_values(source: Any, dumper: Dumper) -> None:
    source.train(EBC, [3, 4], 1.0)
    source.train(EBC, [4, 9], 2.0)
    table = sent(dumper, 5)
    assert table is not None
    assert rows_of(table) == {(EBC, 3): 1.0, (EBC, 4): 2.0, (EBC, 9): 2.0}
    row = table.to_pylist()[0]
    assert (row["global_step"], row["rank"], row["world_size"], row["source"]) == (5, 1, 2, "dump")
    source.train(EBC, [4], 3.0)
    assert rows_of(sent(dumper, 10)) == {(EBC, 4): 3.0}


def test_a_quiet_interval_gives_no_delta_and_loses_nothing_after_it(source: Any, dumper: Dumper) -> None:
    assert sent(dumper, 5) is None
    source.touched[EBC] = set()
    assert sent(dumper, 10) is None
    source.train(EBC, [1], 1.0)
    assert rows_of(sent(dumper, 15)) == {(EBC, 1): 1.0}


def test_the_final_dump_reads_again_every_replicated_row_this_rank_published(source: Any, dumper: Dumper) -> None:
    source.train(DP, [1, 2], 1.0)
    source.train(EBC, [7], 1.0)
    sent(dumper, 5)
    source.train(DP, [3], 1.0)
    source.weights[DP][[1, 2]] = 5.0  # another rank's batch moved them
    source.train(EBC, [8], 2.0)
    last = sent(dumper, 7, "final")
    assert last is not None
    assert rows_of(last) == {(DP, 1): 5.0, (DP, 2): 5.0, (DP, 3): 1.0, (EBC, 8): 2.0}
    assert set(last["source"].to_pylist()) == {"final"}


@pytest.mark.parametrize("why", ["dump", "restore"])
def test_no_dump_but_the_final_one_sends_a_replicated_row_again(source: Any, dumper: Dumper, why: Any) -> None:
    source.train(DP, [1, 2], 1.0)
    sent(dumper, 5)
    source.train(DP, [2, 3], 2.0)
    assert rows_of(sent(dumper, 6, why)) == {(DP, 2): 2.0, (DP, 3): 2.0}


def test_what_a_source_says_of_a_table_is_never_changed(source: Any) -> None:
    info = source.tables()[EBC]
    with pytest.raises(AttributeError, match="immutable"):
        info.dim = 3
    assert info in {info}


def test_a_dump_that_raises_forgets_no_id(source: Any, dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    source.train(EBC, [1, 2], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(source, "gather", lambda fqn, keys: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sent(dumper, 5)
    source.train(EBC, [3], 1.0)
    assert len(dumper.tracked()[EBC]) == 3
    assert set(rows_of(sent(dumper, 6))) == {(EBC, 1), (EBC, 2), (EBC, 3)}
    assert dumper.tracked() == {}


def test_a_dump_is_tracked_until_it_is_submitted_and_so_is_what_was_added_meanwhile(
    source: Any, dumper: Dumper
) -> None:
    source.train(EBC, [1, 2], 1.0)
    assert set(rows_of(dumper.dump(5))) == set(rows_of(dumper.dump(6))) == {(EBC, 1), (EBC, 2)}
    source.train(EBC, [3], 1.0)
    assert dumper.tracked()[EBC].tolist() == [1, 2, 3]  # asked by a signal handler, say
    dumper.submitted()
    assert set(rows_of(sent(dumper, 7))) == {(EBC, 1), (EBC, 2), (EBC, 3)}
    assert dumper.dump(8) is None


def test_an_error_of_the_source_gets_the_step(source: Any, dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise DeltaError("id outside this rank's shard", table=EBC, key=99, step=None)

    monkeypatch.setattr(source, "drain", refuse)
    with pytest.raises(DeltaError, match=r"key 99, step 5"):
        sent(dumper, 5)


def test_discard_forgets_a_warm_up(source: Any, dumper: Dumper) -> None:
    source.train(EBC, [1], 1.0)
    dumper.discard()
    assert sent(dumper, 1, "final") is None


def test_the_step_cadence_is_due_at_each_boundary(kit: Any) -> None:
    cadence = Cadence(kit.settings(every_steps=5))
    assert [step for step in range(1, 21) if cadence.due(step)] == [5, 10, 15, 20]


def test_the_step_cadence_starts_anywhere_and_takes_gaps_as_crossings(kit: Any) -> None:
    cadence = Cadence(kit.settings(every_steps=5))
    assert [step for step in (10, 11, 14, 17, 29, 31, 8, 9, 10) if cadence.due(step)] == [10, 17, 29, 31, 10]
    assert not Cadence(kit.settings(every_steps=5)).due(0)


@given(st.integers(1, 7), st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_no_interval_of_steps_stays_without_a_dump(every: int, strides: list[int]) -> None:
    from deltaproof.reference.settings import Settings

    cadence = Cadence(Settings(project="p", view="v", version="v1", every_steps=every))
    steps = np.cumsum(strides).tolist()
    due = [step for step in steps if cadence.due(step)]
    before = steps[0] - 1
    expected = []
    for step in steps:
        if any(number % every == 0 for number in range(before + 1, step + 1)):
            expected.append(step)
        before = step
    assert due == expected


def test_missed_minute_deadlines_are_skipped_and_the_phase_is_kept(kit: Any) -> None:
    clock = FakeClock(1000.0)
    cadence = Cadence(kit.settings(every_minutes=1.0), clock)
    due_at = []
    for now_s in (1030, 1059.9, 1060, 1061, 1100, 1125, 1400, 1401, 1419, 1420, 1479, 1480):
        clock.now_s = now_s
        if cadence.due(1):
            due_at.append(now_s)
    assert due_at == [1060, 1125, 1400, 1420, 1480]


@given(st.lists(st.floats(0, 500), min_size=1, max_size=50), st.floats(0.01, 5.0))
def test_minute_dumps_never_outnumber_the_periods(gaps_s: list[float], minutes: float) -> None:
    from deltaproof.reference.settings import Settings

    clock = FakeClock(50.0)
    cadence = Cadence(Settings(project="p", view="v", version="v1", every_minutes=minutes), clock)
    fired: list[int] = []
    for gap_s in gaps_s:
        clock.now_s += gap_s
        if cadence.due(1):
            fired.append(int((clock.now_s - 50.0) / (60 * minutes)))
            assert not cadence.due(1)
    assert len(fired) <= (clock.now_s - 50.0) / (60 * minutes) + 1e-6


def test_a_monotonic_clock_that_goes_back_silences_a_rank_for_one_period_at_most(kit: Any) -> None:
    clock = FakeClock(10_000.0)
    cadence = Cadence(kit.settings(every_minutes=1.0), clock)
    clock.now_s = 0.0
    assert not cadence.due(1)
    for now_s, due in ((59, False), (60, True), (119, False), (120, True)):
        clock.now_s = now_s
        assert cadence.due(1) == due


def test_a_pause_nests_and_ends_with_its_block_however_that_ends() -> None:
    pause = Pause()
    with contextlib.suppress(ZeroDivisionError), pause():
        with pause():
            assert pause
        assert pause
        raise ZeroDivisionError
    assert not pause


def test_a_pause_holds_for_its_own_thread_and_what_it_hands_work_to() -> None:
    """An evaluation beside the training thread must not hide what that looks up."""
    pause, other = Pause(), Pause()
    entered, leave, seen = threading.Event(), threading.Event(), []

    def evaluate() -> None:
        with pause():
            seen.append(bool(pause))
            seen.append(asyncio.run(asyncio.to_thread(bool, pause)))
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=evaluate, daemon=True)
    thread.start()
    assert entered.wait(20)
    seen += [bool(pause), bool(other)]
    with pause():
        leave.set()
        thread.join(20)
        assert pause
    assert seen == [True, True, False, False]


named_keys = st.lists(st.tuples(st.sampled_from(["a", "b", "ü" * 200]), st.integers(-(2**63), 2**63 - 1)), max_size=30)


@given(named_keys, st.integers(1, 7))
def test_the_keys_of_a_table_are_those_of_its_rows_sorted_and_unique(rows: list[tuple[str, int]], size: int) -> None:
    names, keys = ([row[place] for row in rows] for place in (0, 1))
    whole = pa.table({"table_fqn": pa.array(names, pa.string()), "key_id": pa.array(keys, pa.int64())})
    chunked = pa.Table.from_batches(whole.to_batches(max_chunksize=size), whole.schema)
    expected = {name: sorted({key for each, key in rows if each == name}) for name in set(names)}
    assert {name: found.tolist() for name, found in keys_of(chunked).items()} == expected


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.sets(st.integers(-5, 5))), max_size=4))
def test_merged_keys_are_the_union(several: list[dict[str, set[int]]]) -> None:
    arrays = [{name: np.array(sorted(keys), np.int64) for name, keys in each.items()} for each in several]
    expected = {
        name: sorted(set().union(*(each.get(name, set()) for each in several))) for each in several for name in each
    }
    assert {name: keys.tolist() for name, keys in merge_keys(*arrays).items()} == expected

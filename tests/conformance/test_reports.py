"""What a report says: verdicts, messages to act on, and rows shown so that different bits look different."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from deltaproof.conformance import evidence
from deltaproof.conformance.explain import as_dict, explain, show
from deltaproof.conformance.judge import judge
from deltaproof.conformance.properties import PROPERTIES
from deltaproof.conformance.verdict import VIOLATIONS_KEPT, Finding, Verdict, Violation, worst
from deltaproof.simulator import faults
from deltaproof.simulator.history import Event, History, LedgerTable, RankOutcome
from deltaproof.simulator.scenario import PublisherConfig, Scenario, Table, Workload

from .histories import Model, rows_of, with_writes

TWO_OWNERS = Scenario(
    seed=5,
    tables=(Table(name="item", rows=8), Table(name="item", owner="tower.ebc", rows=8)),
    workload=Workload(steps=6, batch_size=3),
    publisher=PublisherConfig(every_steps=2, retry_attempts_max=4),
)
EBC, TOWER = "ebc.embedding_bags.item", "tower.ebc.embedding_bags.item"


@pytest.fixture
def history() -> History:
    return Model(TWO_OWNERS).run()


def broken_row(history: History, name: str, pick: Any, **changes: Any) -> tuple[History, dict[str, Any]]:
    """The history with the first accepted row of ``name`` that ``pick`` accepts changed, and that row as it was."""
    rows = rows_of(history)
    row = next(r for r in rows if r["pk"] == name and pick(r))
    before = dict(row)
    row.update(changes)
    return with_writes(history, rows), before


def violations(name: str, history: History) -> list[Violation]:
    return PROPERTIES[name](history).violations


# ------------------------------------------------------------------------------------------------------------ verdicts
def test_a_run_without_faults_that_was_compared_held(history: History) -> None:
    report = judge(history)
    assert report.verdict is Verdict.HELD
    assert report.rows_compared > 10
    assert [f.property for f in report.findings] == list(PROPERTIES)


def test_a_fault_that_never_fired_makes_the_run_not_exercised(history: History) -> None:
    planned = (faults.StoreSlow(), faults.RankKill(rank=1, point="finish.after"))
    idle = dataclasses.replace(history, scenario=msgspec.structs.replace(TWO_OWNERS, faults=planned), fired=[1, 0])
    report = judge(idle)
    assert report.verdict is Verdict.NOT_EXERCISED
    assert report.reason == "never struck: rank-kill(rank=1, point=finish.after)"


def test_broken_wins_over_not_exercised(history: History) -> None:
    scenario = msgspec.structs.replace(TWO_OWNERS, faults=(faults.StoreSlow(),))
    lost = dataclasses.replace(with_writes(history, []), scenario=scenario, fired=[0])
    assert judge(lost).verdict is Verdict.BROKEN


def unpublished(history: History) -> History:
    """The history of a job that sent nothing: no row in the store, none retained, nothing to read back."""
    events = [event for event in history.events if event.kind != "readback"]
    return dataclasses.replace(with_writes(history, []), retained=None, events=events)


def test_a_job_that_succeeded_without_a_row_proves_nothing(history: History) -> None:
    untouched = {
        fqn: dataclasses.replace(
            ledger,
            steps=ledger.steps[:0],
            keys=ledger.keys[:0],
            values=ledger.values[:0],
            lookup_steps=ledger.steps[:0],
            lookup_ranks=ledger.lookup_ranks[:0],
            lookup_keys=ledger.keys[:0],
        )
        for fqn, ledger in history.tables.items()
    }
    report = judge(dataclasses.replace(unpublished(history), tables=untouched))
    assert report.verdict is Verdict.NOT_EXERCISED
    assert report.reason == "the job succeeded without a row to compare"


def test_a_planned_failure_before_the_first_row_is_held(history: History) -> None:
    fault = faults.RankRaise(rank=0, point="publisher.start")
    outcomes = [
        RankOutcome(rank=0, status="error", exitcode=1, error="rank 0 raises at publisher.start"),
        RankOutcome(rank=1, status="ended", exitcode=-9),
    ]
    scenario = msgspec.structs.replace(TWO_OWNERS, faults=(fault,))
    failed = dataclasses.replace(unpublished(history), scenario=scenario, outcomes=outcomes, fired=[1])
    assert judge(failed).verdict is Verdict.HELD


def test_the_worst_verdict_of_several_runs() -> None:
    assert worst([Verdict.HELD, Verdict.BROKEN, Verdict.NOT_EXERCISED]) is Verdict.BROKEN
    assert worst([Verdict.HELD, Verdict.NOT_EXERCISED]) is Verdict.NOT_EXERCISED
    assert worst([Verdict.BROKEN, Verdict.KIT_ERROR]) is Verdict.KIT_ERROR
    assert worst([Verdict.HELD, Verdict.NOT_TESTED]) is Verdict.NOT_TESTED
    assert worst([Verdict.HELD]) is Verdict.HELD
    assert worst([]) is Verdict.NOT_EXERCISED
    assert [v.exit_code for v in Verdict] == [0, 1, 3, 3, 4]


def test_a_finding_counts_all_and_describes_a_few() -> None:
    finding = Finding("no-lost-rows", checked=9)
    finding.report([1, 2], lambda n: Violation("no-lost-rows", f"a{n}"))
    finding.report(list(range(1000)), lambda n: Violation("no-lost-rows", f"b{n}"))
    assert finding.total == 1002
    assert [v.message for v in finding.violations] == ["a1", "a2", "b0", "b1", "b2"]
    assert len(finding.violations) == VIOLATIONS_KEPT
    assert finding.verdict is Verdict.BROKEN


# ------------------------------------------------------------------------------------------------------------ messages
def test_a_row_of_another_owner_is_called_that(history: History) -> None:
    tower = history.tables[TOWER]
    broken, row = broken_row(history, EBC, lambda r: r["sk"] in tower.last_lookup)
    key = row["sk"]
    broken, _ = broken_row(history, EBC, lambda r: r["arrival"] == row["arrival"], embedding=tower.final[key])
    (found,) = violations("no-phantom-rows", broken)
    assert "never held this value for this key" in found.message
    assert f"the value of key {key} of another table, {TOWER}, since step " in found.message
    assert (found.table, found.key, found.ts, found.rank) == (EBC, key, row["ts"], int(row["client"][4:]))


def test_a_local_id_is_called_that(history: History) -> None:
    broken, row = broken_row(history, EBC, lambda r: r["sk"] >= 4 and r["client"] == "rank1")
    key = row["sk"] - 4
    broken, _ = broken_row(history, EBC, lambda r: r["arrival"] == row["arrival"], sk=key)
    (found,) = violations("no-phantom-rows", broken)
    assert f"{key} is that row's local id in the shard of rank 1, which begins at 4" in found.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pk": "item"}, "no table is published under this name"),
        ({"sk": 8}, "outside the table's 8 rows"),
        ({"sk": -1}, "outside the table's 8 rows"),
        ({"embedding": np.zeros(3, np.float32)}, "does not have the table's dimension 4"),
        ({"t_ms": 0.0}, "arrived before step"),
    ],
)
def test_each_kind_of_phantom_row_has_its_message(history: History, changes: dict[str, Any], message: str) -> None:
    ledger = history.tables[EBC]
    last = {ledger.final[key].tobytes() for key in ledger.keys[ledger.steps > 2].tolist()}
    broken, _ = broken_row(history, EBC, lambda r: r["embedding"].tobytes() in last, **changes)
    (found,) = violations("no-phantom-rows", broken)
    assert message in found.message


def test_a_lost_row_says_which_older_value_hides_it(history: History) -> None:
    ledger = history.tables[EBC]
    key = next(int(k) for k in ledger.keys if len(ledger.versions(int(k))) == 3)
    (_, initial), (first, _), (second, _) = ledger.versions(key)
    rows = rows_of(history)
    old = {**rows[-1], "pk": EBC, "sk": key, "ts": 10**7, "embedding": np.frombuffer(initial, np.float32)}
    (found,) = violations("no-lost-rows", with_writes(history, [*rows, old]))
    assert (
        f"serves the initial value, which the model held until step {first - 1}, under the greater ts {10**7}"
        in found.message
    )
    assert (found.key, found.rank, found.step) == (key, ledger.host[key], ledger.last_lookup[key])
    assert found.expected.tobytes() == ledger.final[key].tobytes()
    assert found.found.tobytes() == initial
    assert second > first


def test_a_row_that_was_never_sent_says_so_with_the_events_of_its_rank(history: History) -> None:
    ledger = history.tables[EBC]
    key, step = next((k, s) for k, s in ledger.last_lookup.items() if ledger.host[k] == 1)
    left = [r for r in rows_of(history) if (r["pk"], r["sk"]) != (EBC, key)]
    lost = with_writes(history, left)
    (found,) = violations("no-lost-rows", lost)
    assert found.message == "the store never received a row for this key"
    (silent,) = violations("no-silent-loss", lost)
    assert silent.message.startswith("rank 1 ended without an error, but the store never accepted the value")
    assert silent.message.endswith("the newest it accepted: none")
    assert {e.who for e in silent.events} == {"rank1"}
    assert step in [e.step for e in silent.events]


def test_a_rank_answers_for_its_own_lookups_of_a_replicated_row_only(history: History) -> None:
    """Rank 0 published what it saw; rank 1 saw the row again later, and fell before it could publish."""
    ledger = ledger_of([(1, 0, 5.0), (2, 0, 6.0)])
    ledger = dataclasses.replace(
        ledger,
        table=msgspec.structs.replace(ledger.table, sharding="data_parallel"),
        host=np.full(3, -1, np.int32),
        lookup_steps=np.array([1, 2]),
        lookup_ranks=np.array([0, 1]),
        lookup_keys=np.array([0, 0]),
    )
    outcomes = [history.outcomes[0], RankOutcome(rank=1, status="killed", exitcode=-9)]
    row = {**rows_of(history)[0], "pk": "item", "sk": 0, "client": "rank0"}
    for value, holds in ((5.0, True), (0.0, False)):
        left = dataclasses.replace(history, tables={"item": ledger}, manifest={"item": "item"}, outcomes=outcomes)
        left = with_writes(left, [{**row, "embedding": np.array([value], np.float32)}])
        assert (violations("no-silent-loss", left) == []) is holds


def test_two_tables_of_one_name_are_named(history: History) -> None:
    both = dataclasses.replace(history, manifest={EBC: EBC, TOWER: EBC})
    assert f"one name to {EBC}, {TOWER}" in violations("names-match-export", both)[0].message


def test_a_hang_shows_where_the_rank_stood(history: History) -> None:
    outcomes = [history.outcomes[0], RankOutcome(rank=1, status="deadline", exitcode=-9)]
    hung = dataclasses.replace(history, outcomes=outcomes, stacks={1: "Thread 0x1:\n  queue.py line 3 in put"})
    (found,) = violations("terminates", hung)
    assert (found.rank, found.step) == (1, 6)
    assert "queue.py line 3 in put" in "\n".join(explain(found))


def test_store_faults_add_up_to_a_failure_that_is_allowed(history: History) -> None:
    outcomes = [RankOutcome(rank=0, status="error", exitcode=1, error="rank 0 step 2: gave up"), history.outcomes[1]]
    for counts, allowed in (((3,), False), ((2, 2), True)):
        planned = tuple(faults.StoreError(count=n) for n in counts)
        scenario = msgspec.structs.replace(TWO_OWNERS, faults=planned)
        failed = dataclasses.replace(history, scenario=scenario, outcomes=outcomes, fired=list(counts))
        assert (violations("fails-loudly", failed) == []) is allowed


def test_the_training_loops_own_error_need_not_name_a_place(history: History) -> None:
    scenario = msgspec.structs.replace(TWO_OWNERS, faults=(faults.StoreError(status=403),))
    for where, vague in (("train", False), ("finish", True), ("", True)):
        outcome = RankOutcome(rank=0, status="error", exitcode=1, error="boom", where=where)
        failed = dataclasses.replace(history, scenario=scenario, outcomes=[outcome, history.outcomes[1]], fired=[1])
        assert [v.message for v in violations("fails-loudly", failed)] == (
            ["rank 0 failed with a text that names neither the rank nor a step"] if vague else []
        )


# ------------------------------------------------------------------------------------------------------- explanations
def test_an_explanation_holds_all_that_is_needed(history: History) -> None:
    event = Event(
        t_ms=1500.0, who="store", kind="fault", rank=1, step=None, data={"client": "rank1", "traceback": "a\nb"}
    )
    violation = Violation(
        property="no-lost-rows",
        message="it is gone",
        table=EBC,
        name="item__ebc",
        key=2**53 + 1,
        rank=1,
        step=49,
        ts=1700000000001,
        expected=np.array([1.5, -0.0], np.float32),
        found=np.array([1.5, 0.0], np.float32),
        events=[event],
    )
    assert explain(violation, start_ms=1000.0) == [
        "no-lost-rows: it is gone",
        "  table           ebc.embedding_bags.item, published as 'item__ebc'",
        "  key             9007199254740993",
        "  rank            1",
        "  step            49",
        "  ts              1700000000001 (2023-11-14 22:13:20 UTC, of the row in the store)",
        "  the model holds [1.5, -0.0]",
        "  the store holds [1.5, 0.0]",
        "  events:",
        "       500.0 ms  store      fault  client=rank1",
    ]
    violation.found = None
    assert "  the store holds nothing" in explain(violation)


def test_rows_of_different_bits_look_different() -> None:
    def nan(bits: int) -> np.float32:
        return np.array([bits], np.uint32).view(np.float32)[0]

    one = np.float32(0.1)
    alike = [one, np.nextafter(one, np.float32(1)), np.float32(0.0), np.float32(-0.0), np.float32(1e-45)]
    alike += [nan(0x7FC00000), nan(0x7FC00001), nan(0xFFC00000), np.float32(np.inf), np.float32(-np.inf)]
    assert len({show(np.array([x], np.float32)) for x in alike}) == len(alike)


def test_a_long_row_shows_what_differs() -> None:
    row = np.arange(64, dtype=np.float32)
    other = row.copy()
    other[[40, 50]] += 1
    assert show(row, other) == "[0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 40: 40.0, 50: 50.0, … (64 values, 2 differ)]"
    assert show(row) == "[0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, … (64 values)]"


def test_a_violation_is_json_that_keeps_every_float32(history: History) -> None:
    row = np.array([0.1, np.float32(1e-45), -0.0, np.nan], np.float32)
    violation = Violation("no-lost-rows", "gone", expected=row, found=None, events=history.events[:1])
    plain = json.loads(json.dumps(as_dict(violation), allow_nan=False))
    assert np.array(plain["expected"][:3], np.float32).tobytes() == row[:3].tobytes()
    assert plain["expected"][3] == "nan(0x7fc00000)"
    assert plain["events"][0]["kind"] == history.events[0].kind


# ------------------------------------------------------------------------------------------------------------ evidence
def ledger_of(changes: list[tuple[int, int, float]]) -> LedgerTable:
    """Three rows of dim 1, initially 0, 1, 2; ``changes``: (step, key, value)."""
    empty = np.empty(0, np.int64)
    return LedgerTable(
        table=Table(name="item", rows=3),
        embedding_name="item",
        initial=np.arange(3, dtype=np.float32).reshape(3, 1),
        steps=np.array([c[0] for c in changes], np.int64),
        keys=np.array([c[1] for c in changes], np.int64),
        values=np.array([c[2] for c in changes], np.float32).reshape(-1, 1),
        lookup_steps=empty,
        lookup_ranks=empty,
        lookup_keys=empty,
        host=np.zeros(3, np.int32),
    )


def test_when_a_value_was_held() -> None:
    ledger = ledger_of([(2, 0, 5.0), (4, 0, 6.0), (7, 0, 5.0)])
    asked = [(0, 0.0), (0, 5.0), (0, 6.0), (0, 9.0), (1, 1.0), (1, 5.0), (3, 2.0), (-1, 2.0), (0, -0.0)]
    first, last = evidence.held(
        ledger, np.array([k for k, _ in asked], np.int64), np.array([[v] for _, v in asked], np.float32)
    )
    until = evidence.FOREVER
    expected = [(0, 1), (2, until), (4, 6), (-1, -1), (0, until), (-1, -1), (-1, -1), (-1, -1), (-1, -1)]
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == expected


def test_a_huge_key_is_never_taken_for_a_small_one() -> None:
    # One row of the model and two asked for, so pairs are key * 4 + code: 2**62 would wrap around to key 0.
    keys = np.array([0, 2**62], np.int64)
    first, last = evidence.held(ledger_of([]), keys, np.zeros((2, 1), np.float32))
    assert first.tolist() == [0, -1]
    assert last.tolist() == [evidence.FOREVER, -1]


def test_no_step_begins_before_the_first_rank_ended_the_one_before(history: History) -> None:
    def step(t_ms: float, number: int) -> Event:
        return Event(t_ms=t_ms, who="rank0", kind="step", rank=0, step=number)

    # Nobody wrote down step 2: step 3 began before step 4 did, at least.
    events = [step(10, 1), step(12, 1), step(30, 3), step(31, 3)]
    starts = evidence.step_starts(dataclasses.replace(history, events=events))
    assert starts.tolist() == [-np.inf, -np.inf, 10, 30, 30]
    assert evidence.step_starts(dataclasses.replace(history, events=[])).tolist() == [-np.inf, -np.inf]

"""No property ever reports a legal history; each one always reports a history that was broken in its own way."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deltaproof.conformance import evidence
from deltaproof.conformance.judge import judge
from deltaproof.conformance.properties import PROPERTIES
from deltaproof.conformance.verdict import Verdict
from deltaproof.simulator import faults
from deltaproof.simulator.disk import Shard
from deltaproof.simulator.history import Event, History, Leak, RankOutcome
from deltaproof.simulator.scenario import PublisherConfig, Scenario, Workload

from .histories import (
    SHARD_SCHEMA,
    Model,
    failed,
    legal,
    restarted,
    rows_of,
    succeeded,
    touched_keys,
    varied,
    with_writes,
)

Breaker = Callable[[History, random.Random], History | None]


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """The rows of these histories are few: what is a lot of memory has to be scaled to them."""
    with pytest.MonkeyPatch.context() as patch:
        bounded_memory = importlib.import_module("deltaproof.conformance.properties.bounded_memory")
        patch.setattr(bounded_memory, "ALLOWANCE_BYTES", 16)
        yield


def test_a_legal_history_is_never_reported() -> None:
    exercised: Counter[str] = Counter()

    @given(legal())
    @settings(max_examples=200)
    def judged(history: History) -> None:
        report = judge(history)
        assert [v.message for v in report.violations] == []
        exercised.update(finding.property for finding in report.findings if finding.checked)
        if history.succeeded and any(True for _ in touched_keys(history)):
            assert report.verdict is Verdict.HELD
            assert report.rows_compared == sum(1 for _ in touched_keys(history))

    judged()
    # What had nothing to check in any of them would be silent about all of them, right or wrong.
    assert min(exercised[name] for name in PROPERTIES) >= 20, exercised


# ------------------------------------------------------------------------------------------- a restart leaves a remnant
def surviving_row_dropped(history: History, chance: random.Random) -> History | None:
    """The store lacks a row that the restored or further trained model was trained on."""
    keys = [
        (ledger.embedding_name, key)
        for ledger in history.tables.values()
        for key in set(ledger.lookup_keys[evidence.survived(history, ledger.lookup_steps)].tolist())
    ]
    found = chance_of(chance, keys)
    rows = rows_of(history)
    return None if found is None else with_writes(history, [r for r in rows if (r["pk"], r["sk"]) != found])


def discarded_value_served(history: History, chance: random.Random) -> History | None:
    """The store serves what a discarded step had made of a row."""
    candidates = []
    for ledger in history.tables.values():
        lost = ~evidence.survived(history, ledger.steps) & (ledger.steps < ledger.since)
        for key, value in zip(ledger.keys[lost].tolist(), ledger.values[lost], strict=True):
            if value.tobytes() != ledger.final[key].tobytes():
                candidates.append((ledger.embedding_name, key, value))
    found, rows = chance_of(chance, candidates), rows_of(history)
    if found is None or not rows:
        return None
    return with_writes(
        history, [*rows, {**rows[-1], "pk": found[0], "sk": found[1], "embedding": found[2], "ts": 10**9}]
    )


RESTART_BREAKERS: list[Breaker] = [surviving_row_dropped, discarded_value_served]


@pytest.mark.parametrize("breaker", RESTART_BREAKERS)
@given(history=restarted(), chance=st.randoms(use_true_random=False))
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_what_a_restart_leaves_behind_is_reported(breaker: Breaker, history: History, chance: random.Random) -> None:
    broken = breaker(history, chance)
    assume(broken is not None)
    assert broken is not None
    assert PROPERTIES["restart-converges"](broken).verdict is Verdict.BROKEN
    assert PROPERTIES["no-lost-rows"](broken).verdict is Verdict.NOT_EXERCISED


def test_only_a_job_that_was_restarted_is_asked_whether_it_converged() -> None:
    finding = PROPERTIES["restart-converges"](Model(Scenario(workload=Workload(steps=2))).run())
    assert finding.verdict is Verdict.NOT_EXERCISED
    assert finding.reason == "the job was not restarted"


# ---------------------------------------------------------------------------------------------------- rows are lost
def served_row_dropped(history: History, chance: random.Random) -> History | None:
    rows = history.final.num_rows
    gone = chance.randrange(rows) if rows else None
    return gone if gone is None else dataclasses.replace(history, final=without(history.final, gone))


def served_bit_flipped(history: History, chance: random.Random) -> History | None:
    rows = history.final.to_pylist()
    if not rows:
        return None
    row = chance.choice(rows)
    row["embedding"] = flip(np.array(row["embedding"], np.float32), chance)
    return dataclasses.replace(history, final=type(history.final).from_pylist(rows, history.final.schema))


def served_zero_of_the_other_sign(history: History, chance: random.Random) -> History | None:
    rows = history.final.to_pylist()
    row = chance_of(chance, [r for r in rows if 0.0 in r["embedding"]])
    if row is None:
        return None
    row["embedding"] = [-x if x == 0.0 else x for x in row["embedding"]]
    return dataclasses.replace(history, final=type(history.final).from_pylist(rows, history.final.schema))


def old_value_under_a_greater_ts(history: History, chance: random.Random) -> History | None:
    found = chance_of(chance, [(led, key) for _, led, key, _ in touched_keys(history) if stale(led, key)])
    if found is None:
        return None
    ledger, key = found
    rows = rows_of(history)
    again = {**last_row(rows, ledger.embedding_name, key), "embedding": chance.choice(stale(ledger, key))}
    return with_writes(history, [*rows, {**again, "ts": 10**9}])


def new_value_under_a_smaller_ts(history: History, chance: random.Random) -> History | None:
    """A clock that stepped back: the last value arrives, and loses."""
    candidates = []
    rows = rows_of(history)
    for _, ledger, key, _ in touched_keys(history):
        mine = [r for r in rows if (r["pk"], r["sk"]) == (ledger.embedding_name, key)]
        old = [r for r in mine if r["embedding"].tobytes() != ledger.final[key].tobytes()]
        if old:
            candidates.append((mine, ledger.final[key].tobytes(), min(r["ts"] for r in old)))
    found = chance_of(chance, candidates)
    if found is None:
        return None
    mine, final, ts = found
    for row in mine:
        if row["embedding"].tobytes() == final:
            row["ts"] = ts - 1
    return with_writes(history, rows)


def key_never_written(history: History, chance: random.Random) -> History | None:
    found = chance_of(chance, [(led, key) for _, led, key, _ in touched_keys(history)])
    if found is None:
        return None
    name, key = found[0].embedding_name, found[1]
    return with_writes(history, [r for r in rows_of(history) if (r["pk"], r["sk"]) != (name, key)])


# ------------------------------------------------------------------------------------------------- rows are phantoms
def changed_row(change: Callable[[History, dict[str, Any], random.Random], bool]) -> Breaker:
    """A breaker that changes one accepted row; ``change`` says whether it could."""

    def breaker(history: History, chance: random.Random) -> History | None:
        rows = rows_of(history)
        chance.shuffle(order := list(range(len(rows))))
        return with_writes(history, rows) if any(change(history, rows[i], chance) for i in order) else None

    breaker.__name__ = change.__name__
    return breaker


@changed_row
def bit_flipped(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    row["embedding"] = flip(row["embedding"], chance)
    return True


@changed_row
def another_owners_row(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    others = [t for t in history.tables.values() if t.embedding_name != row["pk"] and row["sk"] < len(t.initial)]
    if others:
        row["embedding"] = chance.choice(others).initial[row["sk"]]
    return bool(others)


@changed_row
def local_id(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    host = history.by_name[row["pk"]].host
    offset = int(np.flatnonzero(host == host[row["sk"]])[0])
    row["sk"] -= offset
    return offset > 0 and row["embedding"].tobytes() not in values(history.by_name[row["pk"]], row["sk"])


@changed_row
def unknown_name(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    row["pk"] = row["pk"].rpartition(".")[2]
    return True


@changed_row
def key_outside(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    row["sk"] = chance.choice([-1, len(history.by_name[row["pk"]].initial), 2**62, -(2**63)])
    return True


@changed_row
def wrong_dimension(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    row["embedding"] = np.append(row["embedding"], np.float32(0))
    return True


@changed_row
def nan(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    row["embedding"] = np.full(4, np.nan, np.float32)
    return True


@changed_row
def before_its_time(history: History, row: dict[str, Any], chance: random.Random) -> bool:
    """The row arrives before the step before the one that made it was over."""
    ledger = history.by_name[row["pk"]]
    made = [step for step, value in ledger.versions(row["sk"]) if value == row["embedding"].tobytes()]
    over = [e.t_ms for e in history.events if e.kind == "step" and (e.step or 0) >= made[0] - 1]
    row["t_ms"] = min(over) - 1
    return made[0] >= 2


def key_never_looked_up(history: History, chance: random.Random) -> History | None:
    """An evaluation batch was recorded: a true value, of a key that no training batch touched."""
    keys = [
        (ledger, key)
        for ledger in history.tables.values()
        for key in set(range(len(ledger.initial))) - ledger.last_lookup.keys()
    ]
    found, rows = chance_of(chance, keys), rows_of(history)
    if found is None or not rows:
        return None
    extra = {"pk": found[0].embedding_name, "sk": found[1], "embedding": found[0].initial[found[1]]}
    return with_writes(history, [*rows, {**rows[-1], **extra}])


def value_from_before_the_first_touch(history: History, chance: random.Random) -> History | None:
    keys = [
        (ledger, key)
        for _, ledger, key, _ in touched_keys(history)
        if ledger.lookup_steps[ledger.lookup_keys == key].min() == min([*ledger.steps[ledger.keys == key], 10**9])
        and ledger.initial[key].tobytes() not in values(ledger, key)[1:]
    ]
    found, rows = chance_of(chance, keys), rows_of(history)
    if found is None or not rows:
        return None
    ledger, key = found
    extra = (
        {**last_row(rows, ledger.embedding_name, key), "embedding": ledger.initial[key]} if has(rows, *found) else None
    )
    return None if extra is None else with_writes(history, [*rows, extra])


# --------------------------------------------------------------------------------------------------- loss is silent
def last_value_missing(history: History, chance: random.Random) -> History | None:
    """No accepted row holds what the key held at its last touch or later, as if the final flush had not been."""
    ok = [o.rank for o in history.outcomes if o.status == "ok"]
    keys = [
        (ledger, key, step)
        for _, ledger, key, step in touched_keys(history)
        if any(key in ledger.responsible(rank) for rank in ok)
    ]
    found = chance_of(chance, keys)
    if found is None:
        return None
    ledger, key, step = found
    if ledger.table.sharding == "data_parallel":
        mine = np.isin(ledger.lookup_ranks, ok) & (ledger.lookup_keys == key)
        step = int(ledger.lookup_steps[mine].max())
    late = {value for at, value in ledger.versions(key) if at > step} | {
        [value for at, value in ledger.versions(key) if at <= step][-1]
    }
    rows = rows_of(history)
    left = [
        r for r in rows if (r["pk"], r["sk"]) != (ledger.embedding_name, key) or r["embedding"].tobytes() not in late
    ]
    return with_writes(history, left)


def last_value_missing_though_the_job_failed(history: History, chance: random.Random) -> History | None:
    """One rank claims success, another one failed."""
    broken = last_value_missing(history, chance)
    if broken is None or len(broken.outcomes) < 2:
        return None
    missing = {v.rank for v in PROPERTIES["no-silent-loss"](broken).violations}
    other = chance_of(chance, [o.rank for o in broken.outcomes if {o.rank} != missing])
    if other is None:
        return None
    outcomes = [
        RankOutcome(rank=o.rank, status="error", exitcode=1, error=f"rank {o.rank}: no") if o.rank == other else o
        for o in broken.outcomes
    ]
    return dataclasses.replace(broken, outcomes=outcomes)


# ------------------------------------------------------------------------------------------------ reads go backwards
def resent_later(history: History, chance: random.Random) -> History | None:
    """A row is sent again under a new ts, long after the model and the store went on."""
    rows, keys = rows_of(history), []
    for _, ledger, key, _ in touched_keys(history):
        mine = [r for r in rows if (r["pk"], r["sk"]) == (ledger.embedding_name, key)]
        once = [
            r
            for r in mine
            if values(ledger, key).count(r["embedding"].tobytes()) == 1
            and r["embedding"].tobytes() != ledger.final[key].tobytes()
        ]
        one_writer = ledger.table.sharding != "data_parallel" or len({r["client"] for r in mine}) == 1
        if once and one_writer and values(ledger, key).count(ledger.final[key].tobytes()) == 1:
            keys.append(chance.choice(once))
    again = chance_of(chance, keys)
    return None if again is None else with_writes(history, [*rows, {**again, "ts": 10**9}])


def resent_in_between(history: History, chance: random.Random) -> History | None:
    """A row is sent again, and then the last one too: at the end all is well, and readers saw it flip."""
    broken = resent_later(history, chance)
    if broken is None:
        return None
    *rows, again = rows_of(broken)
    final = history.by_name[again["pk"]].final[again["sk"]]
    again["t_ms"] = max(row["t_ms"] for row in rows) + 1
    return with_writes(history, [*rows, again, {**again, "embedding": final, "ts": again["ts"] + 1}])


# --------------------------------------------------------------------------------------------------- names are wrong
def renamed_in_the_store(history: History, chance: random.Random) -> History | None:
    rows = rows_of(history)
    name = chance_of(chance, sorted({r["pk"] for r in rows}))
    for row in rows:
        row["pk"] = f"{name}__drifted" if row["pk"] == name else row["pk"]
    return None if name is None else with_writes(history, rows)


def one_more_name_in_the_store(history: History, chance: random.Random) -> History | None:
    rows = rows_of(history)
    return with_writes(history, [*rows, {**chance.choice(rows), "pk": "item"}]) if rows else None


def table_missing_in_the_store(history: History, chance: random.Random) -> History | None:
    rows = rows_of(history)
    name = chance_of(chance, sorted({r["pk"] for r in rows}))
    return None if name is None else with_writes(history, [r for r in rows if r["pk"] != name])


def one_name_for_two_tables(history: History, chance: random.Random) -> History | None:
    if len(history.manifest) < 2:
        return None
    first, second = chance.sample(sorted(history.manifest), 2)
    return dataclasses.replace(history, manifest={**history.manifest, first: history.manifest[second]})


def table_missing_in_the_manifest(history: History, chance: random.Random) -> History | None:
    gone = chance.choice(sorted(history.manifest))
    return dataclasses.replace(history, manifest={f: n for f, n in history.manifest.items() if f != gone})


# ------------------------------------------------------------------------------------------- ranks hang, or fail badly
def with_outcome(**fields: Any) -> Breaker:
    """One rank ends otherwise than it did; nothing that was planned explains it."""

    def breaker(history: History, chance: random.Random) -> History | None:
        rank = chance.randrange(len(history.outcomes))
        outcomes = list(history.outcomes)
        outcomes[rank] = RankOutcome(rank=rank, **fields)
        return dataclasses.replace(history, outcomes=outcomes)

    breaker.__name__ = "outcome_" + "_".join(map(str, fields.values())).replace(" ", "_")[:30]
    return breaker


def hang_of_an_earlier_attempt(history: History, chance: random.Random) -> History | None:
    """Before the attempt that succeeded, a rank had to be ended by the deadline."""
    *earlier, last = history.attempts
    if not earlier:
        return None
    outcomes = list(earlier[0].outcomes)
    rank = chance.randrange(len(outcomes))
    outcomes[rank] = dataclasses.replace(outcomes[rank], status="deadline")
    return dataclasses.replace(
        history, attempts=[dataclasses.replace(earlier[0], outcomes=outcomes), *earlier[1:], last]
    )


def failure_of_an_earlier_attempt(history: History, chance: random.Random) -> History | None:
    """Before the attempt that succeeded, a rank vanished."""
    broken = hang_of_an_earlier_attempt(history, chance)
    if broken is None:
        return None
    first, *later = broken.attempts
    outcomes = [
        dataclasses.replace(o, status="vanished" if o.status == "deadline" else o.status) for o in first.outcomes
    ]
    return dataclasses.replace(broken, attempts=[dataclasses.replace(first, outcomes=outcomes), *later])


def without_a_reason(text: str) -> Breaker:
    """A rank fails first, under a fault that allows it, with this text for an error."""

    def breaker(history: History, chance: random.Random) -> History | None:
        rank = chance.randrange(len(history.outcomes))
        fault = faults.StoreError(status=403)
        scenario = msgspec.structs.replace(history.scenario, faults=(*history.scenario.faults, fault))
        outcomes = list(history.outcomes)
        outcomes[rank] = RankOutcome(rank=rank, status="error", exitcode=1, error=text)
        event = Event(t_ms=0.0, who=f"rank{rank}", kind="error", rank=rank)
        return dataclasses.replace(
            history, scenario=scenario, outcomes=outcomes, fired=[*history.fired, 1], events=[event, *history.events]
        )

    breaker.__name__ = f"error_text_{text.strip().replace(' ', '_')}"
    return breaker


def kill_that_struck_another_rank(history: History, chance: random.Random) -> History | None:
    if len(history.outcomes) < 2:
        return None
    planned, dead = chance.sample(range(len(history.outcomes)), 2)
    fault = faults.RankKill(rank=planned, point="finish.after")
    outcomes = list(history.outcomes)
    outcomes[dead] = RankOutcome(rank=dead, status="killed", exitcode=-11)
    scenario = msgspec.structs.replace(history.scenario, faults=(*history.scenario.faults, fault))
    return dataclasses.replace(history, scenario=scenario, outcomes=outcomes, fired=[*history.fired, 1])


def with_fault(history: History, fault: faults.AnyFault) -> History:
    """The history, with one more fault that struck once."""
    scenario = msgspec.structs.replace(history.scenario, faults=(*history.scenario.faults, fault))
    return dataclasses.replace(history, scenario=scenario, fired=[*history.fired, 1])


def survived_what_nobody_may(history: History, chance: random.Random) -> History | None:
    fatal: list[faults.AnyFault] = [
        faults.RefusedVersion(),
        faults.BadRow(rank=0, table="item", step=1),
        faults.StoreViewDeleted(),
    ]
    return with_fault(history, chance.choice(fatal))


def the_store_refused_a_row(history: History, chance: random.Random) -> History | None:
    code = chance.choice(["NonFiniteValue", "ReservedKey", "DimensionMismatch"])
    event = Event(t_ms=10**9, who="store", kind="request", rank=0, data={"client": "rank0", "code": code})
    return dataclasses.replace(history, events=[*history.events, event])


# ------------------------------------------------------------------------------- incremental readers miss rows
def row_below_the_cursor(history: History, chance: random.Random) -> History | None:
    """An acknowledged row comes under a ts that a reader of its rank, polling after the flush before, had passed."""
    rows = rows_of(history)
    candidates = []
    for i, row in enumerate(rows):
        told = [e for e in history.events if e.who == row["client"]]
        polls = [e.t_ms for e in told if e.kind == "sdk-flush" and e.t_ms < row["t_ms"]]
        seen = [r["ts"] for r in rows if polls and r["client"] == row["client"] and r["t_ms"] <= polls[-1]]
        others = [r["ts"] for r in rows if (r["pk"], r["sk"]) == (row["pk"], row["sk"]) and r is not row]
        if seen and max(seen) > max(others, default=0):
            candidates.append((i, chance.randint(max(others, default=0) + 1, max(seen))))
    found = chance_of(chance, candidates)
    if found is None:
        return None
    i, ts = found
    writes = [e for e in history.events if e.who == rows[i]["client"] and e.data.get("ts") == rows[i]["ts"]]
    flush = next(
        e for e in history.events if e.who == rows[i]["client"] and e.kind == "sdk-flush" and e.t_ms > writes[0].t_ms
    )
    if flush.data["failed_batches"]:
        return None  # nobody said that this row had arrived
    rows[i]["ts"] = ts
    renamed = msgspec.structs.replace(writes[0], data={**writes[0].data, "ts": ts})
    events = sorted([*history.events, renamed], key=lambda e: e.t_ms)
    return with_writes(dataclasses.replace(history, events=events), rows)


# ------------------------------------------------------------------------------- the hot path is not quiet
def changed_call(change: Callable[[Event, random.Random], dict[str, Any]]) -> Breaker:
    """A breaker that changes what was seen during one call of after_step()."""

    def breaker(history: History, chance: random.Random) -> History | None:
        calls = [i for i, e in enumerate(history.events) if e.kind == "after-step"]
        i = chance_of(chance, calls)
        if i is None:
            return None
        events = list(history.events)
        data = {**events[i].data, **change(events[i], chance)}
        events[i] = msgspec.structs.replace(events[i], data=data)
        return dataclasses.replace(history, events=events)

    breaker.__name__ = change.__name__
    return breaker


@changed_call
def collective_in_a_step(call: Event, chance: random.Random) -> dict[str, Any]:
    return {"collectives": {"allreduce at trainer.py:12 in vote": chance.randint(1, 3)}}


def dumps_in_a_row(history: History, chance: random.Random) -> History | None:
    """A key changes at every step, and each of its values is published: a dump per step, at a cadence of four."""
    steps = history.scenario.workload.steps
    failed = [e for e in history.events if e.kind == "sdk-flush" and e.data["failed_batches"]]
    if steps < 8 or failed:
        return None
    fqn, ledger = chance.choice(sorted(history.tables.items()))
    key, rank = chance.randrange(len(ledger.initial)), chance.randrange(len(history.outcomes))
    values = np.random.default_rng(1).standard_normal((steps, ledger.initial.shape[1]), dtype=np.float32)
    kept = ledger.keys != key
    at = [np.append(ledger.steps[kept], np.arange(1, steps + 1)), np.append(ledger.keys[kept], np.full(steps, key))]
    order = np.lexsort(at[::-1])
    changed = dataclasses.replace(
        ledger,
        steps=at[0][order],
        keys=at[1][order],
        values=np.concatenate([ledger.values[kept], values])[order],
    )
    row = {"version": "run-1", "pk": ledger.embedding_name, "sk": key, "client": f"rank{rank}", "request_id": "r"}
    rows = [{**row, "t_ms": 10.0**9 + n, "ts": 10**9 + n, "embedding": values[n]} for n in range(steps)]
    publisher = msgspec.structs.replace(history.scenario.publisher, every_steps=4)
    scenario = msgspec.structs.replace(history.scenario, publisher=publisher)
    broken = dataclasses.replace(history, scenario=scenario, tables={**history.tables, fqn: changed})
    return with_writes(broken, [*rows_of(history), *rows])


# ------------------------------------------------------------------------------- memory grows and secrets get out
def little_room(history: History, chance: random.Random) -> History | None:
    """A queue of one byte, more rows than that from every rank, and memory that grows after the first step."""
    publisher = msgspec.structs.replace(history.scenario.publisher, queue_bytes_max=1)
    scenario = msgspec.structs.replace(history.scenario, publisher=publisher)
    ranks = [o.rank for o in history.outcomes if (history.writes["client"].to_numpy() == f"rank{o.rank}").sum() > 1]
    later = [i for i, e in enumerate(history.events) if e.kind == "after-step" and e.rank in ranks and e.step != 1]
    i = chance_of(chance, later)
    if i is None:
        return None
    events = list(history.events)
    grown = {"resident_bytes": 1010 + 17 + chance.randrange(10**6)}
    events[i] = msgspec.structs.replace(events[i], data={**events[i].data, **grown})
    return dataclasses.replace(history, scenario=scenario, events=events)


def secret_in_a_file(history: History, chance: random.Random) -> History | None:
    leak = Leak(history.planted[0], chance.choice(["rank0.log", "shards/x.json"]), "url: /write?[FEATUREDB_PASSWORD]")
    return dataclasses.replace(history, leaks=[leak])


# --------------------------------------------------------------- copies and readbacks are not what they say
def changed_shard(change: Callable[[Shard, random.Random], Shard]) -> Breaker:
    """A breaker that changes one retained shard with rows."""

    def breaker(history: History, chance: random.Random) -> History | None:
        shards = list(history.retained or [])
        i = chance_of(chance, [i for i, shard in enumerate(shards) if shard.rows is not None and shard.rows.num_rows])
        if i is None:
            return None
        shards[i] = change(shards[i], chance)
        return dataclasses.replace(history, retained=shards)

    breaker.__name__ = change.__name__
    return breaker


@changed_shard
def torn_shard(shard: Shard, chance: random.Random) -> Shard:
    return dataclasses.replace(shard, rows=None, damage="the shard is torn: 7 bytes that are no Parquet file")


@changed_shard
def manifest_without_its_shard(shard: Shard, chance: random.Random) -> Shard:
    return dataclasses.replace(shard, rows=None, damage="there is a manifest and no shard")


@changed_shard
def retained_row_of_nobody(shard: Shard, chance: random.Random) -> Shard:
    rows = shard.rows.to_pylist() if shard.rows is not None else []
    row = chance.choice(rows)
    row["ts" if chance.random() < 0.5 else "key_id"] += 10**6
    return dataclasses.replace(shard, rows=pa.Table.from_pylist(rows, SHARD_SCHEMA))


def served_row_in_no_shard(history: History, chance: random.Random) -> History | None:
    """The shard of a delta was replaced by that of an empty one."""
    served = {(r["pk"], r["sk"], r["ts"]) for r in history.final.to_pylist()}
    shards = list(history.retained or [])
    full = [
        i
        for i, shard in enumerate(shards)
        if any(
            (r["embedding_name"], r["key_id"], r["ts"]) in served
            for r in (shard.rows.to_pylist() if shard.rows is not None else [])
        )
    ]
    i = chance_of(chance, full)
    if i is None:
        return None
    shards[i] = dataclasses.replace(shards[i], rows=SHARD_SCHEMA.empty_table())
    return dataclasses.replace(history, retained=shards)


def changed_readback(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Breaker:
    """A breaker that changes what the readback said."""

    def breaker(history: History, chance: random.Random) -> History | None:
        events = list(history.events)
        i = next(i for i, e in enumerate(events) if e.kind == "readback")
        report = change(dict(events[i].data["report"]))
        events[i] = msgspec.structs.replace(events[i], data={"report": report})
        return None if report is None else dataclasses.replace(history, events=events)

    breaker.__name__ = change.__name__
    return breaker


@changed_readback
def match_called_a_mismatch(report: dict[str, Any]) -> dict[str, Any] | None:
    counts = report["verdicts"]
    moved = {**counts, "MATCH": counts["MATCH"] - 1, "DIFFERENT": counts["DIFFERENT"] + 1}
    return {**report, "verdicts": moved, "agrees": False} if counts["MATCH"] else None


@changed_readback
def key_left_out(report: dict[str, Any]) -> dict[str, Any] | None:
    counts = report["verdicts"]
    return {**report, "verdicts": {**counts, "MATCH": counts["MATCH"] - 1}} if counts["MATCH"] else None


@changed_readback
def agreement_denied(report: dict[str, Any]) -> dict[str, Any] | None:
    return {**report, "agrees": not report["agrees"]}


@changed_readback
def sound_shards_called_damaged(report: dict[str, Any]) -> dict[str, Any] | None:
    return {**report, "damaged": {"a.json": "torn"}}


@changed_readback
def readback_that_failed(report: dict[str, Any]) -> dict[str, Any] | None:
    return {"error": "TransportError: no"}


def corrupt_shard_trusted(history: History, chance: random.Random) -> History | None:
    """A shard is damaged, and the readback says what it would have said of the sound one."""
    return torn_shard(history, chance)


BREAKERS: dict[str, list[Breaker]] = {
    "no-lost-rows": [
        served_row_dropped,
        served_bit_flipped,
        served_zero_of_the_other_sign,
        old_value_under_a_greater_ts,
        new_value_under_a_smaller_ts,
        key_never_written,
    ],
    "no-phantom-rows": [
        bit_flipped,
        another_owners_row,
        local_id,
        unknown_name,
        key_outside,
        wrong_dimension,
        nan,
        before_its_time,
        key_never_looked_up,
        value_from_before_the_first_touch,
    ],
    "no-silent-loss": [key_never_written, last_value_missing, last_value_missing_though_the_job_failed],
    "monotonic-reads": [resent_later, resent_in_between],
    "names-match-export": [
        renamed_in_the_store,
        one_more_name_in_the_store,
        table_missing_in_the_store,
        one_name_for_two_tables,
        table_missing_in_the_manifest,
    ],
    "terminates": [with_outcome(status="deadline")],
    "fails-loudly": [
        with_outcome(status="error", exitcode=1, error="rank 0 step 3: gave up"),
        with_outcome(status="killed", exitcode=-11),
        with_outcome(status="vanished", exitcode=0),
        without_a_reason(" "),
        without_a_reason("something went wrong"),
        kill_that_struck_another_rank,
        survived_what_nobody_may,
        the_store_refused_a_row,
    ],
    "incremental-read-complete": [row_below_the_cursor],
    "quiet-hot-path": [collective_in_a_step, dumps_in_a_row],
    "bounded-memory": [little_room],
    "no-secret-leak": [secret_in_a_file],
    "retained-equals-store": [
        torn_shard,
        manifest_without_its_shard,
        retained_row_of_nobody,
        served_row_in_no_shard,
    ],
    "readback-agrees": [
        match_called_a_mismatch,
        key_left_out,
        agreement_denied,
        sound_shards_called_damaged,
        readback_that_failed,
        corrupt_shard_trusted,
    ],
}


@pytest.mark.parametrize(
    ("name", "breaker"),
    [pytest.param(n, b, id=f"{n}-{b.__name__}") for n, breakers in BREAKERS.items() for b in breakers],
)
@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_broken_history_is_always_reported(name: str, breaker: Breaker, data: st.DataObject) -> None:
    history = data.draw(succeeded())
    broken = breaker(history, data.draw(st.randoms(use_true_random=False)))
    assume(broken is not None)
    assert broken is not None
    finding = PROPERTIES[name](broken)
    assert finding.verdict is Verdict.BROKEN
    assert finding.property == name
    assert finding.total >= len(finding.violations) >= 1
    assert judge(broken).verdict is Verdict.BROKEN


#: What is broken in jobs that failed, or were restarted, is broken as well.
IN_OTHER_JOBS: list[tuple[str, Breaker, st.SearchStrategy[History]]] = [
    ("no-phantom-rows", bit_flipped, failed()),
    ("no-phantom-rows", key_outside, restarted()),
    ("monotonic-reads", resent_in_between, restarted()),
    ("terminates", hang_of_an_earlier_attempt, restarted()),
    ("fails-loudly", failure_of_an_earlier_attempt, restarted()),
    ("fails-loudly", the_store_refused_a_row, failed()),
    ("quiet-hot-path", collective_in_a_step, restarted()),
    ("bounded-memory", little_room, restarted()),
    ("no-secret-leak", secret_in_a_file, failed()),
    ("retained-equals-store", torn_shard, failed()),
    ("incremental-read-complete", row_below_the_cursor, varied()),
    ("no-silent-loss", last_value_missing, varied()),
    ("no-lost-rows", served_bit_flipped, varied()),
]


@pytest.mark.parametrize(
    ("name", "breaker", "jobs"), [pytest.param(n, b, j, id=f"{n}-{b.__name__}") for n, b, j in IN_OTHER_JOBS]
)
@given(data=st.data())
@settings(max_examples=5, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_it_is_reported_in_jobs_that_end_otherwise_too(
    name: str, breaker: Breaker, jobs: st.SearchStrategy[History], data: st.DataObject
) -> None:
    broken = breaker(data.draw(jobs), data.draw(st.randoms(use_true_random=False)))
    assume(broken is not None)
    assert broken is not None
    assert PROPERTIES[name](broken).verdict is Verdict.BROKEN


def test_every_property_has_histories_that_it_must_reject() -> None:
    assert {*BREAKERS, "restart-converges"} == set(PROPERTIES)
    assert all(BREAKERS.values())


def test_a_flip_in_between_is_for_monotonic_reads_alone_to_see() -> None:
    """The store ends as it should, nothing is lost, and no row is a phantom: only whoever polls would know."""
    chance = random.Random(1)
    model = Scenario(seed=4, workload=Workload(steps=8, batch_size=3), publisher=PublisherConfig(every_steps=1))
    broken = resent_in_between(Model(model).run(), chance)
    assert broken is not None
    copies = {"retained-equals-store", "readback-agrees"}  # of this row there is no copy
    assert {f.property for f in judge(broken).findings if f.violations} - copies == {"monotonic-reads"}


# ------------------------------------------------------------------------------------------------------------- helpers
def chance_of(chance: random.Random, options: list[Any]) -> Any:
    return chance.choice(options) if options else None


def without(table: Any, index: int) -> Any:
    return table.filter(np.arange(table.num_rows) != index)


def flip(row: np.ndarray, chance: random.Random) -> np.ndarray:
    """Another row: one bit of the mantissa differs."""
    bits = row.copy().view(np.uint32)
    bits[chance.randrange(len(bits))] ^= np.uint32(1 << chance.randrange(20))
    return bits.view(np.float32)


def values(ledger: Any, key: int) -> list[bytes]:
    return [value for _, value in ledger.versions(key)]


def stale(ledger: Any, key: int) -> list[np.ndarray]:
    """Values the model once held for the key and holds no more."""
    return [np.frombuffer(v, np.float32) for v in values(ledger, key) if v != ledger.final[key].tobytes()]


def has(rows: list[dict[str, Any]], ledger: Any, key: int) -> bool:
    return any((r["pk"], r["sk"]) == (ledger.embedding_name, key) for r in rows)


def last_row(rows: list[dict[str, Any]], name: str, key: int) -> dict[str, Any]:
    return [r for r in rows if (r["pk"], r["sk"]) == (name, key)][-1]

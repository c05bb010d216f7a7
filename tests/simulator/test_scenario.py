"""Scenarios are plain data: what goes out comes in again, and what makes no sense is refused with one line."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deltaproof.fakes.server.faults import AnyFault as ServerFault
from deltaproof.simulator import store_faults
from deltaproof.simulator.catalogue import demo_scenarios
from deltaproof.simulator.errors import ScenarioError
from deltaproof.simulator.faults import (
    POINTS,
    REGISTRY,
    AnyStoreFault,
    ClockStall,
    Fault,
    RankKill,
    StoreError,
    StoreOutage,
    StoreSlow,
    summary,
)
from deltaproof.simulator.scenario import SCENARIO_VERSION, PublisherConfig, Restart, Scenario, Table, Workload
from deltaproof.simulator.strategies import faults, scenarios, wide_faults, wide_scenarios


@given(scenarios())
def test_json_round_trip(scenario: Scenario) -> None:
    assert Scenario.from_json(scenario.to_json()) == scenario


@given(scenarios())
def test_generated_scenarios_are_runnable(scenario: Scenario) -> None:
    assert scenario.checked() is scenario
    assert scenario.expect in ("tolerate", "fail-loudly")


@given(wide_scenarios(world_size_max=8, steps_max=8))
@settings(max_examples=40)
def test_generated_scenarios_of_every_kind_are_runnable(scenario: Scenario) -> None:
    assert scenario.checked() is scenario
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert scenario.world_size <= 8
    assert all((restart.world_size or 1) <= 8 for restart in scenario.restarts)


def test_every_kind_of_fault_is_generated() -> None:
    """A new kind has a strategy too: no fault is left to hand-written files alone."""
    scenario = Scenario(
        tables=(
            Table(name="item"),
            Table(name="item", owner="tower.ebc"),
            Table(name="ad", owner="dyn", sharding="dynamic"),
        ),
        workload=Workload(eval_every_steps=2),
        publisher=PublisherConfig(retain=True, spill=True, readback=True),
    )
    seen = set()

    @given(faults(2, 10, scenario.tables, 3), wide_faults(scenario))
    @settings(max_examples=400, phases=[Phase.generate])
    def draw(narrow: Fault, wide: Fault) -> None:
        seen.update([narrow.kind, wide.kind])

    draw()
    assert seen == set(REGISTRY)


CORPUS = [Scenario.load(path) for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*.json"))]


@pytest.mark.parametrize("family", sorted({kind.family for kind in REGISTRY.values()}))
def test_every_family_of_faults_has_three_scenario_files(family: str) -> None:
    named = [
        s.name for s in CORPUS if any(f.family == family for f in s.faults) or (family == "restart" and s.restarts)
    ]
    assert len(named) >= 3, named


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_kind_of_fault_has_a_scenario_file(kind: str) -> None:
    assert any(f.kind == kind for s in CORPUS for f in s.faults)


BAD = {
    "world size 0": ({"world_size": 0}, "world_size is 0"),
    "negative world size": ({"world_size": -3}, "world_size is -3"),
    "unknown fault": ({"faults": [{"fault": "gremlins"}]}, "unknown fault 'gremlins'; known faults: exhaustion"),
    "fault without kind": ({"faults": [{"rank": 1}]}, "unknown fault None"),
    "fault that is a number": ({"faults": [7]}, "unknown fault None"),
    "column-wise": ({"tables": [{"name": "item", "sharding": "column_wise"}]}, "column_wise sharding is refused"),
    "unknown sharding": ({"tables": [{"name": "item", "sharding": "diagonal"}]}, "unknown sharding 'diagonal'"),
    "rank without rows": ({"world_size": 4, "tables": [{"name": "a", "rows": 5}]}, "the last of 4 ranks with none"),
    "role names that collide": (
        {"tables": [{"name": "a"}, {"name": "a", "owner": "t.ebc"}], "publisher": {"naming": "role"}},
        "publisher.naming 'role': table 'a' is used by",
    ),
    "a bad row in a replicated table": (
        {
            "tables": [{"name": "item", "sharding": "data_parallel"}],
            "faults": [{"fault": "bad-row", "rank": 0, "table": "item", "step": 1}],
        },
        "no table of the scenario is called 'item' and not replicated",
    ),
    "twins": (
        {"tables": [{"name": "a"}, {"name": "a", "owner": "ebc_user"}]},
        "would both be published as",
    ),
    "a clock that is NaN": (
        {"faults": [{"fault": "clock-offset", "rank": 0, "seconds": float("nan")}]},
        "seconds is nan",
    ),
    "an infinite jump": (
        {"faults": [{"fault": "clock-jump", "rank": 0, "step": 1, "seconds": float("inf")}]},
        "seconds is inf",
    ),
    "a clock beyond all clocks": ({"faults": [{"fault": "clock-offset", "rank": 0, "seconds": 1e17}]}, "at most 1e+10"),
    "a deadline that is NaN": ({"deadlines": {"run_s": float("nan")}}, "deadlines.run_s is nan"),
    "a wait that is NaN": (
        {"faults": [{"fault": "store-error", "status": 429, "retry_after_s": float("nan")}]},
        "retry_after_s is nan",
    ),
    "slower than the deadline": (
        {"faults": [{"fault": "store-slow", "delay_ms": 10000, "count": 5}], "deadlines": {"run_s": 12}},
        "over half of deadlines.run_s",
    ),
    "a fault whose kind is a list": ({"faults": [{"fault": []}]}, "unknown fault []"),
    "half a surrogate pair": ({"name": "\ud800"}, "not valid Unicode"),
    "no rows to fail": ({"faults": [{"fault": "store-partial", "rows_failed": 0}]}, "rows_failed is 0"),
    "no tables": ({"tables": []}, "tables is empty"),
    "same table twice": ({"tables": [{"name": "a"}, {"name": "a"}]}, "already has a table 'a'"),
    "odd dim": ({"tables": [{"name": "a", "dim": 3}]}, "dim is 3"),
    "placement out of the world": ({"tables": [{"name": "a", "sharding": "table_wise", "rank": 2}]}, "rank 2"),
    "owner is no path": ({"tables": [{"name": "a", "owner": "a-b"}]}, "owner must be a module path"),
    "owner inside a collection": (
        {"tables": [{"name": "a", "owner": "ebc"}, {"name": "a", "owner": "ebc.inner"}]},
        "owner lies inside the collection 'ebc'",
    ),
    "one owner of two kinds": ({"tables": [{"name": "a"}, {"name": "b", "collection": "ec"}]}, "is an EBC for table"),
    "unknown field": ({"worldsize": 2}, "unknown field `worldsize`"),
    "text for a number": ({"world_size": "two"}, "Expected `int`"),
    "newer version": ({"version": SCENARIO_VERSION + 1}, "is newer than this deltaproof reads"),
    "version 0": ({"version": 0}, "field 'version' is 0"),
    "rank out of the world": (
        {"faults": [{"fault": "rank-kill", "rank": 5, "point": "sdk.write"}]},
        "rank 5 does not exist in a world of 2",
    ),
    "unknown point": (
        {"faults": [{"fault": "rank-kill", "rank": 0, "point": "lunch"}]},
        "unknown point 'lunch'; known points",
    ),
    "passage 0": ({"faults": [{"fault": "rank-raise", "rank": 0, "point": "sdk.write", "nth": 0}]}, "nth is 0"),
    "status 200": ({"faults": [{"fault": "store-error", "status": 200}]}, "status is 200"),
    "4xx after commit": ({"faults": [{"fault": "store-error", "status": 429, "commit": True}]}, "nothing was applied"),
    "duplicate that is none": ({"faults": [{"fault": "duplicate-table", "table": "item"}]}, "under two owners"),
    "a stall that goes back": (
        {"faults": [{"fault": "clock-stall", "rank": 0, "step": 1, "seconds": -5}]},
        "a monotonic clock only goes forward",
    ),
    "step 0": ({"faults": [{"fault": "storage-replaced", "rank": 0, "step": 0}]}, "step is 0"),
    "a quiet table that is none": ({"faults": [{"fault": "quiet-table", "table": "x", "step": 1}]}, "called 'x'"),
    "a table that cannot be quiet": (
        {
            "tables": [{"name": "a", "owner": "ec", "collection": "ec", "sharding": "data_parallel"}],
            "faults": [{"fault": "quiet-table", "table": "a", "step": 1}],
        },
        "cannot be quiet",
    ),
    "a bad row of no table": ({"faults": [{"fault": "bad-row", "rank": 0, "step": 1, "table": "x"}]}, "called 'x'"),
    "a reserved key in a table of row numbers": (
        {"faults": [{"fault": "reserved-key", "rank": 0, "step": 1, "table": "item"}]},
        "no dynamic table of the scenario is called 'item'",
    ),
    "a value that is not bad": (
        {"faults": [{"fault": "bad-row", "rank": 0, "step": 1, "table": "item", "value": "1"}]},
        "Invalid enum value '1'",
    ),
    "no evaluation to raise": (
        {"workload": {"eval_every_steps": 2}, "faults": [{"fault": "evaluation-raises", "rank": 0, "step": 3}]},
        "no evaluation after step 3",
    ),
    "a route of nobody": ({"faults": [{"fault": "store-slow", "route": "lunch"}]}, "unknown route 'lunch'"),
    "a reply too slow for any client": (
        {"faults": [{"fault": "store-slow-body", "bytes_per_s": 1}]},
        "bytes_per_s is 1",
    ),
    "less than no bytes": ({"faults": [{"fault": "store-truncated", "bytes_kept": -1}]}, "bytes_kept is -1"),
    "an outage of a year": ({"faults": [{"fault": "store-outage", "duration_ms": 10**9}]}, "duration_ms is"),
    "a rank that the restart has not": (
        {
            "restarts": [{"world_size": 1}],
            "faults": [{"fault": "clock-offset", "rank": 1, "seconds": 1, "attempt": 1}],
        },
        "rank 1 does not exist in a world of 1",
    ),
    "an attempt that is not made": (
        {"faults": [{"fault": "clock-offset", "rank": 1, "seconds": 1, "attempt": 1}]},
        "attempt is 1, but the scenario has 0 restarts",
    ),
    "a restart on no rank": ({"restarts": [{"world_size": 0}]}, "restarts[0].world_size is 0"),
    "a restart on more ranks than rows": (
        {"tables": [{"name": "a", "rows": 5}], "restarts": [{"world_size": 4}]},
        "after restart 1: tables[0] (ebc/a): TorchRec gives each rank",
    ),
    "data that ends, and a restart": (
        {"faults": [{"fault": "exhaustion", "rank": 0, "batches": 1}], "restarts": [{}]},
        "do not go together",
    ),
    "a disk that nobody writes to": (
        {"faults": [{"fault": "disk-error", "rank": 0}]},
        "publisher.retain and publisher.spill are false",
    ),
    "a damage that nobody looks for": (
        {"publisher": {"retain": True}, "faults": [{"fault": "shard-corrupted"}]},
        "publisher.readback is false",
    ),
    "the shard before the first": (
        {"publisher": {"retain": True, "readback": True}, "faults": [{"fault": "shard-corrupted", "nth": 0}]},
        "nth is 0",
    ),
    "a readback of nothing": ({"publisher": {"readback": True}}, "publisher.readback needs publisher.retain"),
    "a dynamic table in an owner of others": (
        {"tables": [{"name": "a"}, {"name": "b", "sharding": "dynamic"}]},
        "holds dynamic tables and others",
    ),
    "nothing for TorchRec to shard": (
        {"tables": [{"name": "a", "sharding": "dynamic"}]},
        "all tables are dynamic",
    ),
    "a dynamic table and a restart": (
        {"tables": [{"name": "a"}, {"name": "b", "owner": "d", "sharding": "dynamic"}], "restarts": [{}]},
        "dynamic tables make no checkpoints here",
    ),
    "no room": ({"tables": [{"name": "a", "capacity": -1}]}, "capacity is -1"),
    "no queue": ({"publisher": {"queue_steps_max": 0}}, "publisher.queue_steps_max is 0"),
    "no minutes": ({"publisher": {"every_minutes": 0}}, "publisher.every_minutes is 0"),
    "clocks that go back": ({"workload": {"step_seconds": -1}}, "workload.step_seconds is -1"),
    "two policies": (
        {
            "faults": [
                {"fault": "exhaustion", "rank": 0, "batches": 1},
                {"fault": "exhaustion", "rank": 1, "batches": 1, "policy": "fail-loudly"},
            ]
        },
        "must share one policy",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(change: dict, message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        Scenario.from_json(json.dumps({"version": 1, **change}), where="s.json")
    text = str(refused.value)
    assert text.startswith("s.json: ")
    assert message in text
    assert "\n" not in text


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_refused_with_a_scenario_error(text: str) -> None:
    with pytest.raises(ScenarioError):
        Scenario.from_json(text)


@given(st.data())
def test_any_mangled_field_is_refused_or_means_something(data: st.DataObject) -> None:
    raw = json.loads(data.draw(scenarios()).to_json())
    field = data.draw(st.sampled_from(sorted(raw)))
    raw[field] = data.draw(
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.just({"x": 1})
    )
    try:
        scenario = Scenario.from_json(json.dumps(raw))
    except ScenarioError:
        return
    assert Scenario.from_json(scenario.to_json()) == scenario


def test_load_says_which_file(tmp_path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot read .*absent\.json"):
        Scenario.load(tmp_path / "absent.json")
    with pytest.raises(ScenarioError, match="cannot read"):
        Scenario.load(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(ScenarioError, match="not UTF-8"):
        Scenario.load(tmp_path / "latin.json")


def test_a_parquet_path_is_relative_to_the_scenario_file(tmp_path) -> None:
    (tmp_path / "s.json").write_text('{"version": 1, "workload": {"data": "clicks.parquet"}}')
    (tmp_path / "clicks.parquet").touch()
    assert Scenario.load(tmp_path / "s.json").workload.data == str(tmp_path / "clicks.parquet")


def test_one_fault_that_may_fail_decides_what_is_expected() -> None:
    calm, kill = StoreError(count=1), RankKill(rank=0, point="sdk.write")
    assert Scenario(faults=(calm,)).expect == "tolerate"
    assert Scenario(faults=(calm, kill)).expect == "fail-loudly"
    assert Scenario(faults=(StoreError(status=403),)).expect == "fail-loudly"
    attempts = Scenario().publisher.retry_attempts_max
    assert Scenario(faults=(StoreError(count=attempts),)).expect == "fail-loudly"


def test_the_demo_runs_on_two_and_on_four_ranks() -> None:
    found = demo_scenarios()
    assert len(found) >= 12
    assert {s.world_size for s in found} == {2, 4}
    assert len({s.name for s in found}) == len(found)


def test_demo_and_corpus_plan_every_fault() -> None:
    corpus = [Scenario.load(p) for p in (Path(__file__).parents[1] / "scenarios").glob("*.json")]
    assert {f.kind for s in (*demo_scenarios(), *corpus) for f in s.faults} == set(REGISTRY)


def test_a_fault_outlasts_the_patience_that_the_publisher_was_given() -> None:
    patience_ms = Scenario().publisher.patience_ms
    assert 0 < patience_ms < 1000
    assert Scenario(faults=(StoreOutage(duration_ms=int(patience_ms) - 1),)).expect == "tolerate"
    assert Scenario(faults=(StoreOutage(duration_ms=int(patience_ms) + 1),)).expect == "fail-loudly"
    assert Scenario(faults=(StoreOutage(duration_ms=1, status=403),)).expect == "fail-loudly"
    hasty = PublisherConfig(close_timeout_s=0.5)
    assert Scenario(publisher=hasty, faults=(StoreSlow(delay_ms=400),)).expect == "tolerate"
    assert Scenario(publisher=hasty, faults=(StoreSlow(delay_ms=600),)).expect == "fail-loudly"
    assert Scenario(publisher=hasty, faults=(ClockStall(rank=0, step=1, seconds=60),)).expect == "fail-loudly"


def test_a_crash_that_is_followed_by_a_restart_is_no_excuse() -> None:
    kill, again = RankKill(rank=0, point="sdk.write"), RankKill(rank=0, point="sdk.write", attempt=1)
    assert Scenario(faults=(kill,), restarts=(Restart(),)).expect == "tolerate"
    assert Scenario(faults=(kill, again), restarts=(Restart(),)).expect == "fail-loudly"
    assert Scenario(faults=(kill, again), restarts=(Restart(), Restart())).expect == "tolerate"


def test_an_attempt_runs_on_its_own_number_of_ranks() -> None:
    tables = (Table(name="a", rows=99), Table(name="b", sharding="table_wise", rank=2))
    scenario = Scenario(world_size=3, tables=tables, restarts=(Restart(world_size=2), Restart()))
    assert [scenario.of_attempt(n).world_size for n in range(3)] == [3, 2, 2]
    assert [scenario.of_attempt(n).tables[1].rank for n in range(3)] == [2, 0, 0]
    assert scenario.checked() is scenario


def test_only_writes_are_sure_to_be_tried_again() -> None:
    assert Scenario(faults=(StoreError(route="write_arrow"),)).expect == "tolerate"
    assert Scenario(faults=(StoreError(route="create_view"),)).expect == "fail-loudly"
    assert Scenario(faults=(StoreSlow(route="create_view"),)).expect == "tolerate"


@pytest.mark.parametrize("cls", get_args(AnyStoreFault), ids=lambda cls: cls.__struct_config__.tag)
def test_the_fake_server_takes_each_store_fault_as_it_is_planned(cls: Any) -> None:
    [planned] = store_faults.planned(Scenario(faults=(cls(rank=1, skip=2, count=3),)))
    planned.check()
    assert (planned.id, planned.client, planned.skip, planned.count) == ("0", "rank1", 2, 3)
    assert msgspec.convert(msgspec.to_builtins([planned]), list[ServerFault]) == [planned]


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_fault_is_documented_and_says_which_family(kind: str) -> None:
    assert len(summary(kind)) > 20
    assert REGISTRY[kind].family
    assert REGISTRY[kind].strikes in ("rank", "store", "model")


def test_every_point_is_documented() -> None:
    assert all(len(text) > 10 for text in POINTS.values())


def test_fqn_is_torchrecs() -> None:
    assert Table(name="item", owner="tower.ebc").fqn == "tower.ebc.embedding_bags.item"
    assert Table(name="item", owner="ec", collection="ec").fqn == "ec.embeddings.item"


def test_describe_shows_what_differs_from_the_default() -> None:
    assert StoreError(count=3).describe() == "store-error(count=3)"
    fault = msgspec.convert({"fault": "rank-kill", "rank": 0, "point": "sdk.write"}, RankKill)
    assert fault.describe() == "rank-kill(rank=0, point=sdk.write)"

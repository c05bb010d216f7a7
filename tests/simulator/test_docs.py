"""docs/scenarios.md describes what the code reads."""

import re
from pathlib import Path

import msgspec

from deltaproof.simulator.faults import POINTS, REGISTRY
from deltaproof.simulator.history import FINAL_SCHEMA, WRITES_SCHEMA
from deltaproof.simulator.recorded import EVENTS_SCHEMA, MERGED_SCHEMA
from deltaproof.simulator.scenario import Deadlines, PublisherConfig, Restart, Scenario, Table, Workload

STRUCTS: list[type[msgspec.Struct]] = [
    Scenario,
    Table,
    Workload,
    PublisherConfig,
    Restart,
    Deadlines,
    *REGISTRY.values(),
]
PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()


def test_the_example_is_a_scenario() -> None:
    example = re.findall(r"```json\n(.*?)```", PAGE, re.S)[0]
    scenario = Scenario.from_json(example)
    assert len(scenario.faults) == 3
    assert scenario.expect == "tolerate"


def test_the_restart_is_part_of_a_scenario() -> None:
    part = re.findall(r"```json\n(.*?)```", PAGE, re.S)[1]
    scenario = Scenario.from_json(f'{{"version": 1, {part}}}')
    assert scenario.of_attempt(1).world_size == 3
    assert scenario.expect == "tolerate"


def test_every_field_fault_and_point_is_described() -> None:
    missing = [
        field.name
        for struct in STRUCTS
        for field in msgspec.structs.fields(struct)
        if not re.search(rf"[`.]{field.name}[`.]", PAGE) and field.name != "retry_delay_ms_max"
    ]
    missing += [name for name in (*REGISTRY, *POINTS) if f"`{name}`" not in PAGE]
    assert not missing


def test_every_column_of_a_saved_history_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "histories.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, schema in (
        ("events.arrow", EVENTS_SCHEMA),
        ("ledger.arrow", MERGED_SCHEMA),
        ("writes.arrow", WRITES_SCHEMA),
        ("final.arrow", FINAL_SCHEMA),
    ):
        assert [c for c in schema.names if f"`{c}`" not in rows[name]] == []

"""docs/scenarios.md describes what the code reads."""

import json
import re
from pathlib import Path

import msgspec
import pytest

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
CORPUS = [Scenario.load(path) for path in sorted((Path(__file__).parents[1] / "scenarios").glob("*.json"))]
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


def rows_about_faults() -> dict[str, list[str]]:
    """kind -> family, strikes, fields, may follow."""
    head = "| fault | family | strikes | fields (default) | may follow |\n"
    table = PAGE.split(head)[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table]
    return {kind: row[1:] for row in cells for kind in re.findall("`([^`]+)`", row[0])}


@pytest.mark.parametrize("kind", REGISTRY)
def test_the_table_of_faults_says_what_the_code_does(kind: str) -> None:
    fault, (family, strikes, fields, may_follow) = REGISTRY[kind], rows_about_faults()[kind]
    assert (family, strikes) == (fault.family, fault.strikes)
    if strikes == "store":
        fields += PAGE.split("Store faults also take ")[1].split("\n\n")[0]
    for field in msgspec.structs.fields(fault):
        if field.name != "attempt":
            assert f"`{field.name}`" in fields
        if not field.required and type(field.default) in (int, float, bool) and field.name != "attempt":
            assert re.search(rf"`{field.name}` \({json.dumps(field.default)}[;:)]", fields), (field.name, fields)
    seen = {(f.expect(s), f.must_fail) for s in CORPUS for f in s.faults if f.kind == kind}
    for expected, must_fail in seen:
        assert ("must fail" if must_fail else expected) in may_follow
    assert not ("must fail" in may_follow and any(not must_fail for _, must_fail in seen))


def test_the_table_of_faults_has_no_others() -> None:
    assert set(rows_about_faults()) == set(REGISTRY)


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

"""A scenario in sentences, for somebody who has never seen one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...simulator.faults import POINTS, Fault, summary
from ...simulator.scenario import Scenario, Table

#: How a table's rows lie on the ranks.
PLACES = {
    "row_wise": "split by rows over the ranks",
    "table_wise": "whole, on rank {rank}",
    "data_parallel": "copied to every rank",
    "dynamic": "dynamic: keys from anywhere in int64",
}


def in_words(scenario: Scenario) -> list[str]:
    """One sentence or two for each thing that happens, in the order in which it happens."""
    return list(_sentences(scenario))


def _sentences(s: Scenario) -> Iterator[str]:
    work, publisher = s.workload, s.publisher
    ranks = "One rank trains" if s.world_size == 1 else f"{s.world_size} ranks train"
    yield f"{ranks} {_count(work.steps, 'step')}, on {_count(work.batch_size, 'sample')} per rank and step."
    for table in s.tables:
        yield _table(table)
    if work.warmup_batches:
        yield f"{_count(work.warmup_batches, 'batch', 'batches')} of warm-up come before start() and are then undone."
    if publisher.every_minutes is None:
        often = "every step" if publisher.every_steps == 1 else f"every {publisher.every_steps} steps"
    else:
        often = f"every {publisher.every_minutes:g} minutes, and a step takes {work.step_seconds:g} s"
    size = _count(publisher.batch_size, "row")
    yield f"Each rank publishes the rows that changed {often}, {size} to a request, and what is left at the end."
    if work.eval_every_steps:
        every = _count(work.eval_every_steps, "step")
        yield f"After every {every} it evaluates on other ids, which must not be published."
    if work.checkpoint_every_steps:
        yield f"Model and publisher are saved every {_count(work.checkpoint_every_steps, 'step')}."
    if publisher.retain:
        yield "A copy of every acknowledged delta is kept" + (
            ", and compared with the store at the end." if publisher.readback else "."
        )
    for fault in s.faults:
        yield fault_in_words(fault)
    if not s.faults:
        yield "Nothing goes wrong: no fault is planned."
    for restart in s.restarts:
        size = "as many ranks" if restart.world_size is None else _count(restart.world_size, "rank")
        yield f"When the job has failed it is started again from its newest checkpoint, on {size}."
    yield (
        "The job must survive this and lose nothing."
        if s.expect == "tolerate"
        else "The job may fail, but then it must say so, say where, and end in time."
    )


def _table(table: Table) -> str:
    place = PLACES.get(table.sharding, table.sharding).format(rank=table.rank)
    return f"Table {table.fqn}: {table.rows} rows of {table.dim} values, {place}."


def fault_in_words(fault: Fault) -> str:
    """What a fault does, and its settings; a number or name that its description speaks of stands in its place."""

    def value(match: re.Match[str]) -> str:
        found = getattr(fault, match[1], None)
        return match[1] if found is None or isinstance(found, bool) else _with_unit(match[1], found)

    settings = fault.describe().removeprefix(fault.kind).strip("()")
    where = f" ({settings})" if settings else ""
    what = re.sub(r"``([^`]*)``", value, summary(fault.kind))
    if isinstance(nth := getattr(fault, "nth", None), int):
        what = re.sub(r"\bnth\b", _with_unit("nth", nth), what)
    point = getattr(fault, "point", None)
    return f"Fault {fault.kind}{where}: {what}" + (f" Point {point}: {POINTS[point]}." if point in POINTS else "")


def _with_unit(name: str, value: object) -> str:
    if name == "nth" and isinstance(value, int):
        ends = {1: "st", 2: "nd", 3: "rd"}
        return f"{value}{'th' if value % 100 in (11, 12, 13) else ends.get(value % 10, 'th')}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name == "table":
        return f"table {text!r}"
    for ending, unit in (("bytes_per_s", "bytes a second"), ("_ms", "ms"), ("_ms_max", "ms"), ("seconds", "s")):
        if name.endswith(ending):
            return f"{text} {unit}"
    return text


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"

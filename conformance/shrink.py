"""Make a failing scenario smaller while it still fails: what is left is what the failure needs.

Hypothesis shrinks what it has drawn (`simulator.explore`); this takes any scenario, such as one of a profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ..simulator.errors import ScenarioError
from ..simulator.scenario import PublisherConfig, Scenario, Table, Workload
from .verdict import Report

#: Numbers of a fault that say where, when or how often it strikes, with the least that each may be; the smaller, the
#: sooner a reader gets there.
_COUNTS = {"rank": 0, "step": 1, "nth": 1, "skip": 0, "count": 1, "batches": 0, "steps": 1, "rows_failed": 1}


@dataclass(frozen=True)
class Smallest:
    """The judged run of the smallest scenario found, and how many runs it took."""

    report: Report
    runs: int


def shrink(judged: Callable[[Scenario], Report | None], report: Report, property: str, seconds: float) -> Smallest:
    """The smallest scenario that still breaks ``property`` with every planned fault striking, within ``seconds``.

    ``judged``: runs and judges a scenario, or None when it cannot be run.
    """
    until, runs = time.monotonic() + seconds, 0
    smaller = True
    while smaller:
        smaller = False
        for scenario in _smaller(report.history.scenario):
            if time.monotonic() > until:
                return Smallest(report, runs)
            if not _possible(scenario):
                continue
            runs += 1
            found = judged(scenario)
            if found is not None and breaks(found, property) and all(found.history.fired):
                report, smaller = found, True
                break
    return Smallest(report, runs)


def breaks(report: Report, property: str) -> bool:
    """Whether a run broke a property."""
    return any(f.property == property and f.violations for f in report.findings)


def _possible(scenario: Scenario) -> bool:
    try:
        scenario.checked()
    except ScenarioError:
        return False
    return True


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, those with the least first."""

    def but(**fields: Any) -> Scenario:
        return msgspec.structs.replace(scenario, **fields)

    if len(scenario.faults) > 1:
        yield but(faults=())
    for index in range(len(scenario.faults)):
        yield but(faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    if scenario.restarts:
        workload = msgspec.structs.replace(scenario.workload, checkpoint_every_steps=0)
        yield but(restarts=(), workload=workload)
        yield but(restarts=scenario.restarts[:-1])
    for index in range(len(scenario.tables)) if len(scenario.tables) > 1 else ():
        yield but(tables=scenario.tables[:index] + scenario.tables[index + 1 :])
    for size in _less(scenario.world_size, 1):
        yield but(
            world_size=size, tables=tuple(msgspec.structs.replace(t, rank=t.rank % size) for t in scenario.tables)
        )
    for fewer in _less(scenario.workload.steps, 1):
        yield but(workload=msgspec.structs.replace(scenario.workload, steps=fewer))
    for index, fault in enumerate(scenario.faults):
        for name, least in _COUNTS.items():
            value = getattr(fault, name, None)
            if isinstance(value, int):
                for less in _less(value, least):
                    changed = msgspec.structs.replace(fault, **{name: less})
                    yield but(faults=(*scenario.faults[:index], changed, *scenario.faults[index + 1 :]))
    # What is as usual needs no words. Sizes have their own turn, and only ever go down.
    for part, usual in (("workload", Workload()), ("publisher", PublisherConfig())):
        mine = getattr(scenario, part)
        for field in msgspec.structs.fields(mine):
            if field.name not in ("steps", "batch_size") and getattr(mine, field.name) != getattr(usual, field.name):
                plain = {field.name: getattr(usual, field.name)}
                if field.name == "retain":
                    plain["readback"] = False
                yield but(**{part: msgspec.structs.replace(mine, **plain)})
    for fewer in _less(scenario.workload.batch_size, 1):
        yield but(workload=msgspec.structs.replace(scenario.workload, batch_size=fewer))
    for index, table in enumerate(scenario.tables):
        for smaller in _smaller_tables(table):
            yield but(tables=(*scenario.tables[:index], smaller, *scenario.tables[index + 1 :]))


def _smaller_tables(table: Table) -> Iterator[Table]:
    for rows in _less(table.rows, 8):
        yield msgspec.structs.replace(table, rows=rows)
    if table.dim > 4:
        yield msgspec.structs.replace(table, dim=4)


def _less(value: int, least: int) -> list[int]:
    """Smaller values to try: the least, half of it, one less."""
    return sorted({n for n in (least, (value + least) // 2, value - 1) if least <= n < value})

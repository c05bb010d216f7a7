"""Hypothesis strategies that build scenarios, valid by construction, and shrink towards few ranks, steps and faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from .faults import (
    AnyFault,
    BadRow,
    ClockJump,
    ClockOffset,
    ClockStall,
    DiskCrash,
    DiskError,
    DuplicateTable,
    EvaluationRaises,
    Exhaustion,
    LeakyError,
    QuietTable,
    RankKill,
    RankRaise,
    StorageReplaced,
    StoreDuplicated,
    StoreError,
    StoreOutage,
    StorePartial,
    StoreReordered,
    StoreReset,
    StoreSchemaChanged,
    StoreSlow,
    StoreSlowBody,
    StoreTokenRevoked,
    StoreTruncated,
    StoreViewDeleted,
)
from .scenario import Deadlines, PublisherConfig, Restart, Scenario, Table, Workload

#: Owners that a generated model may have, with their kind. Bare table names repeat across owners on purpose.
OWNERS: tuple[tuple[str, Literal["ebc", "ec"]], ...] = (("ebc", "ebc"), ("tower.ebc", "ebc"), ("ec", "ec"))
NAMES = ("item", "user", "item__ec")

#: Points at which a generated rank fault may strike, with the greatest useful passage there (None: the steps of the
#: run).
_RANK_POINTS: Sequence[tuple[str, int | None]] = (
    ("train.before-forward", None),
    ("train.before-backward", None),
    ("train.after-step", None),
    ("publish.before", None),
    ("publish.after", None),
    ("sdk.write", 2),
    ("sdk.flush", 2),
    ("finish.before", 1),
    ("publisher.start", 1),
)


@st.composite
def tables(draw: st.DrawFn, world_size: int) -> tuple[Table, ...]:
    """One to four tables under up to three owners; no table name twice under one owner."""
    pairs = draw(
        st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from(NAMES)), min_size=1, max_size=4, unique=True)
    )
    found = []
    for (owner, collection), name in pairs:
        # A replicated EmbeddingCollection needs bags of one id on CPU; left to hand-written scenarios.
        kinds = ["row_wise", "table_wise"] + (["data_parallel"] if collection == "ebc" else [])
        sharding = draw(st.sampled_from(kinds))
        found.append(
            Table(
                name=name,
                owner=owner,
                collection=collection,
                # Every rank gets a row of a row-wise table: TorchRec deals out ceil(rows / world_size) each.
                rows=draw(st.integers((world_size - 1) ** 2 + 1, 40)),
                dim=4 if collection == "ec" else draw(st.sampled_from([4, 8])),
                sharding=sharding,
                rank=draw(st.integers(0, world_size - 1)) if sharding == "table_wise" else 0,
            )
        )
    return tuple(found)


@st.composite
def faults(draw: st.DrawFn, world_size: int, steps: int, found: tuple[Table, ...], attempts: int) -> AnyFault:
    """One fault that can strike in a run of this shape."""
    rank = st.integers(0, world_size - 1)
    owners: dict[str, int] = {}
    for table in found:
        owners[table.name] = owners.get(table.name, 0) + 1
    doubled = sorted(name for name, count in owners.items() if count > 1)
    kinds = ["exhaustion", "clock", "store", "store", "partial", "slow", "rank"] + ["names"] * bool(doubled)
    kind = draw(st.sampled_from(kinds))
    if kind == "names":
        return DuplicateTable(table=draw(st.sampled_from(doubled)))
    if kind == "exhaustion":
        return Exhaustion(
            rank=draw(rank),
            batches=draw(st.integers(0, steps - 1)),
            policy=draw(st.sampled_from(["stop-together", "empty-batches", "fail-loudly"])),
        )
    if kind == "clock":
        seconds = draw(st.sampled_from([-86400.0, -60.0, -1.0, 1.0, 3600.0]))
        if draw(st.booleans()):
            return ClockOffset(rank=draw(rank), seconds=seconds)
        return ClockJump(rank=draw(rank), step=draw(st.integers(1, steps)), seconds=seconds)
    if kind == "rank":
        point, most = draw(st.sampled_from(_RANK_POINTS))
        where: dict[str, Any] = {"rank": draw(rank), "point": point, "nth": draw(st.integers(1, most or steps))}
        return RankKill(**where) if draw(st.booleans()) else RankRaise(**where)
    skip = draw(st.integers(0, 2))
    count = draw(st.integers(1, max(1, attempts - 1)))
    if kind == "partial":
        return StorePartial(skip=skip, count=count, rows_failed=draw(st.integers(1, 3)))
    if kind == "slow":
        return StoreSlow(skip=skip, count=count, delay_ms=draw(st.sampled_from([1, 20, 100])))
    if draw(st.booleans()):
        return StoreReset(skip=skip, count=count, commit=draw(st.booleans()))
    status = draw(st.sampled_from([503, 500, 429, 403]))
    retry_after = 0.05 if status == 429 else None
    # A 4xx says that nothing was applied, so only a 5xx can come after the commit.
    commit = status >= 500 and draw(st.booleans())
    return StoreError(skip=skip, count=count, status=status, commit=commit, retry_after_s=retry_after)


@st.composite
def scenarios(draw: st.DrawFn, *, world_size_max: int = 4, steps_max: int = 12, faults_max: int = 2) -> Scenario:
    """Scenarios for any engine: up to ``world_size_max`` ranks, ``steps_max`` steps and ``faults_max`` planned
    faults."""
    # sampled_from is uniform; integers() leans towards its ends, and a campaign of tiny runs compares few rows.
    world_size = draw(st.sampled_from(range(1, world_size_max + 1)))
    steps = draw(st.sampled_from(range(1, steps_max + 1)))
    found = draw(tables(world_size))
    # Role naming refuses two tables of one name in collections of one kind.
    roles_differ = len({(t.collection, t.name) for t in found}) == len(found)
    publisher = PublisherConfig(
        every_steps=draw(st.integers(1, 5)),
        upload_format=draw(st.sampled_from(["arrow", "json"])),
        naming=draw(st.sampled_from(["fqn", "role"] if roles_differ else ["fqn"])),
        batch_size=draw(st.sampled_from([16, 5, 1, 64])),
        max_workers=draw(st.integers(1, 3)),
    )
    # Two faults that spend one retry budget could exceed it together: each gets an equal part of it.
    attempts = publisher.retry_attempts_max // max(1, faults_max)
    planned: list[AnyFault] = []
    # Uniform, where integers() would lean towards runs without any fault.
    for _ in range(draw(st.sampled_from([0, *range(1, faults_max + 1), *range(1, faults_max + 1)]))):
        fault = draw(faults(world_size, steps, found, attempts))
        if not (fault.kind == "exhaustion" and any(f.kind == "exhaustion" for f in planned)):
            planned.append(fault)
    return Scenario(
        name="generated",
        seed=draw(st.integers(0, 2**31 - 1)),
        world_size=world_size,
        tables=found,
        workload=Workload(
            steps=steps,
            batch_size=draw(st.sampled_from(range(1, 9))),
            ids_per_sample_max=draw(st.sampled_from(range(1, 5))),
            zipf_exponent=draw(st.sampled_from([1.1, 0.0, 2.0])),
            eval_every_steps=draw(st.sampled_from([0, 2])),
        ),
        publisher=publisher,
        faults=tuple(planned),
        deadlines=Deadlines(run_s=60.0, grace_s=10.0),
    ).checked()


@st.composite
def _wide_fault(draw: st.DrawFn, scenario: Scenario) -> AnyFault | None:
    """One fault of a kind that ``faults`` leaves out, or None where the kind that was drawn means nothing here."""
    rank = draw(st.integers(0, scenario.world_size - 1))
    step = draw(st.integers(1, scenario.workload.steps))
    table = draw(st.sampled_from(sorted({t.name for t in scenario.tables})))
    skip, count = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    every, keeps = scenario.workload.eval_every_steps, scenario.publisher.retain
    kinds: list[AnyFault | None] = [
        StoreTruncated(skip=skip, count=count, bytes_kept=draw(st.sampled_from([0, 20]))),
        StoreSlowBody(skip=skip, count=count, bytes_per_s=2000),
        StoreDuplicated(skip=skip, count=count, delay_ms=draw(st.sampled_from([0, 50]))),
        StoreReordered(skip=skip, count=count, hold_ms_max=50),
        StoreOutage(
            skip=skip, duration_ms=draw(st.sampled_from([10, 50, 5000])), status=draw(st.sampled_from([503, None]))
        ),
        StoreTokenRevoked(skip=skip),
        StoreViewDeleted(skip=skip),
        StoreSchemaChanged(skip=skip),
        LeakyError(rank=rank, nth=count),
        ClockStall(rank=rank, step=step, seconds=draw(st.sampled_from([30.0, 200.0]))),
        QuietTable(table=table, step=step, steps=draw(st.integers(1, 4))),
        StorageReplaced(rank=rank, step=step),
        BadRow(rank=rank, table=table, step=step, value=draw(st.sampled_from(["nan", "inf", "-inf"]))),
        EvaluationRaises(rank=rank, step=step - step % every) if every and step >= every else None,
        DiskError(rank=rank, nth=skip + 1, count=count) if keeps else None,
        DiskCrash(rank=rank, nth=skip + 1) if keeps else None,
    ]
    return draw(st.sampled_from(kinds))


@st.composite
def wide_scenarios(draw: st.DrawFn, *, world_size_max: int = 4, steps_max: int = 12) -> Scenario:
    """Scenarios for an engine that carries out every fault: warm-ups, minutes, checkpoints, crashes and restarts on
    other numbers of ranks, retained shards with a readback, and the kinds of fault that ``scenarios`` leaves out."""
    base = draw(scenarios(world_size_max=world_size_max, steps_max=steps_max, faults_max=1))
    restarts: tuple[Restart, ...] = ()
    planned = list(base.faults)
    rows_min = min([t.rows for t in base.tables if t.sharding == "row_wise"], default=100)
    sizes = [n for n in range(1, world_size_max + 1) if (n - 1) ** 2 < rows_min]
    exhausts = any(isinstance(fault, Exhaustion) for fault in planned)
    if not exhausts and draw(st.booleans()):
        restarts = (Restart(world_size=draw(st.sampled_from([None, *sizes]))),)
        rank = draw(st.integers(0, base.world_size - 1))
        planned.append(RankKill(rank=rank, point="train.after-step", nth=draw(st.integers(1, base.workload.steps))))
    keeps = draw(st.booleans())
    minutes = draw(st.sampled_from([None, None, 0.5]))
    publisher = msgspec.structs.replace(
        base.publisher,
        every_minutes=minutes,
        queue_steps_max=draw(st.sampled_from([8, 1])),
        retain=keeps,
        readback=keeps,
    )
    workload = msgspec.structs.replace(
        base.workload,
        warmup_batches=draw(st.sampled_from([0, 0, 2])),
        step_seconds=0.0 if minutes is None else draw(st.sampled_from([5.0, 20.0])),
        checkpoint_every_steps=draw(st.sampled_from([0, 2, 3])) if restarts else 0,
    )
    wide = msgspec.structs.replace(base, workload=workload, publisher=publisher, restarts=restarts)
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        if (fault := draw(_wide_fault(wide))) is not None:
            planned.append(fault)
    return msgspec.structs.replace(wide, faults=tuple(planned)).checked()

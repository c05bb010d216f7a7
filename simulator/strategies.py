"""Hypothesis strategies that build scenarios, valid by construction, and shrink towards few ranks, steps and faults."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from .faults import (
    AnyFault,
    BadRow,
    ClockDrift,
    ClockFreeze,
    ClockJump,
    ClockOffset,
    ClockStall,
    CloseRaces,
    DiskCrash,
    DiskError,
    DuplicateTable,
    EvaluationRaises,
    Exhaustion,
    LeakyError,
    QuietTable,
    RankKill,
    RankRaise,
    RankStall,
    RefusedVersion,
    ReservedKey,
    ShardCorrupted,
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


#: What sets a wide scenario apart from one of ``scenarios``, besides its faults.
SHAPES = ("restart", "dynamic", "restart")


@functools.cache
def _world_sizes(rows: int) -> frozenset[int]:
    """On how many ranks, up to 16, each gets one of the rows: TorchRec deals out ceil(rows / world_size) to each."""
    return frozenset(n for n in range(1, 17) if -(-rows // n) * (n - 1) < rows)


@st.composite
def tables(draw: st.DrawFn, world_size: int) -> tuple[Table, ...]:
    """One to four tables under up to three owners; no table name twice under one owner."""
    pairs = draw(
        st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from(NAMES)), min_size=1, max_size=4, unique=True)
    )
    found = []
    rows = [n for n in range(1, 41) if world_size in _world_sizes(n)]  # each rank gets some of a row-wise table
    for (owner, collection), name in pairs:
        # A replicated EmbeddingCollection needs bags of one id on CPU; left to hand-written scenarios.
        kinds = ["row_wise", "table_wise"] + (["data_parallel"] if collection == "ebc" else [])
        sharding = draw(st.sampled_from(kinds))
        found.append(
            Table(
                name=name,
                owner=owner,
                collection=collection,
                rows=draw(st.sampled_from(rows)),
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
        # Long, because nothing that goes well waits for them, and a machine may have a lot else to do.
        deadlines=Deadlines(run_s=120.0, grace_s=30.0),
    ).checked()


@st.composite
def wide_faults(draw: st.DrawFn, scenario: Scenario) -> AnyFault:
    """One fault of the kinds that ``faults`` leaves out, and that can strike in this scenario; tolerable ones first."""
    sizes = [scenario.of_attempt(attempt).world_size for attempt in range(1 + len(scenario.restarts))]
    whom = {"rank": st.integers(0, min(sizes) - 1), "attempt": st.sampled_from(range(len(sizes)))}
    step = st.integers(1, scenario.workload.steps)
    table = st.sampled_from(sorted({t.name for t in scenario.tables if t.sharding != "dynamic"}))
    nth = st.integers(1, 4)
    requests = {"skip": st.integers(0, 3), "count": st.integers(1, 2)}
    later = {"skip": requests["skip"]}
    # st.builds would look up type hints for each kind and each scenario, which takes longer than many a run.
    kinds: list[tuple[type[AnyFault], dict[str, Any]]] = [
        (StoreDuplicated, {**requests, "delay_ms": st.sampled_from([0, 50])}),
        (StoreReordered, {**requests, "hold_ms_max": st.just(50)}),
        (StoreTruncated, {**requests, "bytes_kept": st.sampled_from([0, 20])}),
        (StoreSlowBody, {**requests, "bytes_per_s": st.just(2000)}),
        (
            StoreOutage,
            {**later, "duration_ms": st.sampled_from([10, 50, 5000]), "status": st.sampled_from([503, None])},
        ),
        (StoreTokenRevoked, later),
        (LeakyError, {"rank": whom["rank"], "nth": nth}),
        (ClockDrift, {**whom, "step": step, "ppm": st.sampled_from([200.0, 500_000.0, -500_000.0])}),
        (ClockFreeze, {**whom, "step": step}),
        (
            RankStall,
            {**whom, "point": st.sampled_from([p for p, _ in _RANK_POINTS]), "nth": nth, "seconds": st.just(0.3)},
        ),
        (ClockStall, {**whom, "step": step, "seconds": st.sampled_from([30.0, 200.0])}),
        (StorageReplaced, {**whom, "step": step}),
        (QuietTable, {"table": table, "step": step, "steps": nth}),
        # Of these routes there are few requests: the first ones are struck.
        (StoreError, {"count": requests["count"], "route": st.sampled_from(["changes", "control", "create_view"])}),
        (CloseRaces, {"rank": whom["rank"], "delay_ms": st.sampled_from([0, 20])}),
        (StoreViewDeleted, later),
        (StoreSchemaChanged, later),
        (RefusedVersion, {"store_version": st.sampled_from(["default", ""])}),
    ]
    every = scenario.workload.eval_every_steps
    if every and every <= scenario.workload.steps:
        rounds = st.integers(1, scenario.workload.steps // every)
        kinds.append((EvaluationRaises, {**whom, "step": rounds.map(lambda n: n * every)}))
    if scenario.publisher.retain or scenario.publisher.spill:
        error = st.sampled_from(["ENOSPC", "EIO"])
        kinds += [
            (DiskError, {**whom, "nth": nth, "count": requests["count"], "error": error}),
            (DiskCrash, {**whom, "nth": nth}),
        ]
    if scenario.publisher.readback:
        kinds.append((ShardCorrupted, {"nth": st.sampled_from([1, -1])}))
    placed = sorted({t.name for t in scenario.tables if t.sharding in ("row_wise", "table_wise")})
    if placed:
        value = st.sampled_from(["nan", "inf", "-inf"])
        kinds.append((BadRow, {**whom, "table": st.sampled_from(placed), "step": step, "value": value}))
    dynamic = [t.name for t in scenario.tables if t.sharding == "dynamic"]
    if dynamic:
        kinds.append((ReservedKey, {**whom, "table": st.sampled_from(dynamic), "step": step}))
    kind, fields = draw(st.sampled_from(kinds))
    return kind(**{name: draw(strategy) for name, strategy in fields.items()})


@st.composite
def wide_scenarios(draw: st.DrawFn, *, world_size_max: int = 4, steps_max: int = 12) -> Scenario:
    """Scenarios for an engine that carries out every fault: warm-ups, minutes, checkpoints, crashes and restarts on
    other numbers of ranks, dynamic tables, int8 rows, retained and spilled shards with a readback, and every kind of
    fault."""
    base = draw(scenarios(world_size_max=world_size_max, steps_max=steps_max, faults_max=1))
    shapes = ["plain", "dynamic"] if any(isinstance(f, Exhaustion) for f in base.faults) else ["plain", *SHAPES]
    shape = draw(st.sampled_from(shapes))
    minutes = draw(st.sampled_from([None, None, 0.5]))
    keeps = draw(st.booleans())
    publisher = msgspec.structs.replace(
        base.publisher,
        every_minutes=minutes,
        embedding_type=draw(st.sampled_from(["float32", "float32", "int8"])),
        queue_steps_max=draw(st.sampled_from([8, 1])),
        retain=keeps,
        readback=keeps,
        spill=keeps and draw(st.booleans()),
    )
    workload = msgspec.structs.replace(
        base.workload,
        step_seconds=0.0 if minutes is None else draw(st.sampled_from([5.0, 20.0])),
        warmup_batches=0 if shape == "dynamic" else draw(st.sampled_from([0, 0, 2])),
        checkpoint_every_steps=draw(st.sampled_from([0, 2, 3])) if shape == "restart" else 0,
    )
    tables, restarts, planned = base.tables, base.restarts, list(base.faults)
    if shape == "dynamic":
        capacity, missing = draw(st.sampled_from([0, 12])), draw(st.sampled_from([0.0, -0.5]))
        tables += (Table(name="ad", owner="dyn", rows=40, sharding="dynamic", capacity=capacity, missing=missing),)
    if shape == "restart":
        row_wise = [t for t in base.tables if t.sharding == "row_wise"]
        sizes = [n for n in range(1, world_size_max + 1) if all(n in _world_sizes(t.rows) for t in row_wise)]
        again = draw(st.lists(st.sampled_from([None, *sizes]), min_size=1, max_size=2))
        restarts = tuple(Restart(world_size=size) for size in again)
        size, left, every = base.world_size, base.workload.steps, workload.checkpoint_every_steps
        for attempt, restart in enumerate(restarts):
            rank, nth = draw(st.integers(0, size - 1)), draw(st.integers(1, left))
            planned.append(RankKill(rank=rank, point="train.after-step", nth=nth, attempt=attempt))
            size = restart.world_size or size
            saved = base.workload.steps - left + nth - 1  # a checkpoint due after the step of the crash is not made
            left = base.workload.steps - (saved - saved % every if every else 0)
    wide = msgspec.structs.replace(base, tables=tables, workload=workload, publisher=publisher, restarts=restarts)
    planned += draw(st.lists(wide_faults(wide), max_size=2))
    return msgspec.structs.replace(wide, faults=tuple(planned)).checked()

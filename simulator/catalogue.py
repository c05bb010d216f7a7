"""The scenarios of ``deltaproof demo``: small, named after what happens in them, every fault at least once."""

from __future__ import annotations

from .faults import (
    ClockJump,
    ClockOffset,
    DuplicateTable,
    Exhaustion,
    RankKill,
    RankRaise,
    StoreError,
    StorePartial,
    StoreReset,
    StoreSlow,
)
from .scenario import PublisherConfig, Scenario, Table, Workload

#: One table of each sharding.
MIXED = (
    Table(name="item", rows=80, dim=8),
    Table(name="user", rows=40, dim=4, sharding="table_wise", rank=1),
    Table(name="city", rows=12, dim=4, sharding="data_parallel"),
)
#: Equal names under three owners, one of them a collection of another kind.
TWICE = (
    Table(name="item", rows=60, dim=8),
    Table(name="item", owner="tower.ebc", rows=60, dim=8, sharding="table_wise", rank=1),
    Table(name="item", owner="ec", collection="ec", rows=60, dim=8),
)


def demo_scenarios(*, seed: int = 2026, data: str | None = None) -> list[Scenario]:
    """All scenarios of the demo, on ids from the Parquet file ``data`` when given. A pure function of its arguments."""
    work = Workload(steps=10, data=data)
    short = Workload(steps=8, data=data)

    def scenario(name: str, *faults: object, **settings: object) -> Scenario:
        plain = {"tables": MIXED, "workload": work, "faults": faults, "seed": seed} | settings
        return Scenario(name=name, **plain).checked()  # type: ignore[arg-type]

    role = PublisherConfig(naming="role", upload_format="json")
    return [
        scenario("calm", workload=Workload(steps=10, data=data, eval_every_steps=4)),
        scenario("same-name-three-owners", DuplicateTable(table="item"), tables=TWICE),
        scenario("same-name-role-names", DuplicateTable(table="item"), tables=TWICE[::2], publisher=role),
        scenario("data-ends-stop-together", Exhaustion(rank=1, batches=7)),
        scenario("data-ends-empty-batches", Exhaustion(rank=1, batches=5, policy="empty-batches")),
        scenario("data-ends-fail-loudly", Exhaustion(rank=1, batches=5, policy="fail-loudly")),
        scenario("rank-raises-after-step", RankRaise(rank=1, point="train.after-step", nth=4), workload=short),
        scenario("client-raises-in-worker", RankRaise(rank=0, point="sdk.write", nth=3), workload=short),
        scenario("rank-killed-in-step", RankKill(rank=1, point="train.before-backward", nth=5), workload=short),
        scenario("rank-killed-in-upload", RankKill(rank=0, point="sdk.flush", nth=2), workload=short),
        scenario("clock-one-hour-ahead", ClockOffset(rank=0, seconds=3600)),
        scenario("clock-jumps-back", ClockJump(rank=1, step=6, seconds=-600)),
        scenario("store-503-before-commit", StoreError(status=503, skip=1, count=2)),
        scenario("store-500-after-commit", StoreError(status=500, commit=True, skip=1, count=2)),
        scenario("store-429-retry-after", StoreError(status=429, retry_after_s=0.05, count=2)),
        scenario("store-403", StoreError(status=403, skip=2)),
        scenario("connection-reset-after-commit", StoreReset(commit=True, skip=1, count=2)),
        scenario("store-slow", StoreSlow(delay_ms=120, count=4)),
        scenario("batch-partly-applied", StorePartial(rows_failed=2, skip=1, count=2)),
        scenario(
            "four-ranks-all-at-once",
            DuplicateTable(table="item"),
            ClockJump(rank=2, step=5, seconds=-120),
            StoreError(status=503, count=2),
            Exhaustion(rank=3, batches=6, policy="empty-batches"),
            world_size=4,
            tables=TWICE,
        ),
        scenario(
            "four-ranks-one-killed",
            RankKill(rank=2, point="train.after-step", nth=5),
            world_size=4,
            workload=short,
        ),
    ]

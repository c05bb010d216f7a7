"""Legal histories, correct by construction: a small model of ranks that train, dump, retry, lag behind and finish.

Nothing here imports the reference, the fakes or an engine, so a property that is wrong about what is legal shows here.
What the model holds to is stated where it is done; anything it leaves to chance is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from deltaproof.simulator import faults
from deltaproof.simulator.disk import Shard
from deltaproof.simulator.history import (
    FINAL_SCHEMA,
    WRITES_SCHEMA,
    Attempt,
    Event,
    History,
    LedgerTable,
    RankOutcome,
)
from deltaproof.simulator.scenario import PublisherConfig, Restart, Scenario, Table, Workload

ATTEMPTS_MAX = 4

Strike = faults.RankRaise | faults.RankKill
SHARD_SCHEMA = pa.schema(
    [("embedding_name", pa.string()), ("key_id", pa.int64()), ("ts", pa.int64()), ("embedding", pa.list_(pa.float32()))]
)

Delta = list[tuple[int, int, np.ndarray]]  # (table index, key, row)
Batch = tuple[int, Delta]  # ts, rows


@st.composite
def scenarios(draw: st.DrawFn, world_size_min: int = 1) -> Scenario:
    """Small scenarios: 1 to 3 tables, some of equal name under two owners, any sharding; faults that a run survives."""
    world_size = draw(st.integers(world_size_min, 3))
    owners = draw(st.lists(st.sampled_from(["ebc", "tower.ebc", "seq"]), min_size=1, max_size=3, unique=True))
    tables = tuple(
        Table(
            name=draw(st.sampled_from(["item", "user"])),
            owner=owner,
            collection="ec" if owner == "seq" else "ebc",
            rows=draw(st.integers(world_size * 2, 12)),
            dim=4,
            sharding=draw(st.sampled_from(["row_wise", "table_wise", "data_parallel"])),
            rank=draw(st.integers(0, world_size - 1)),
        )
        for owner in owners
    )
    survived: list[faults.AnyFault] = []
    if draw(st.booleans()):
        survived.append(faults.StoreError(count=draw(st.integers(1, ATTEMPTS_MAX - 1))))
    if draw(st.booleans()):
        survived.append(faults.ClockJump(rank=0, step=1, seconds=-3600.0))
    scenario = Scenario(
        seed=draw(st.integers(0, 2**32 - 1)),
        world_size=world_size,
        tables=tables,
        workload=Workload(steps=draw(st.integers(1, 9)), batch_size=draw(st.integers(1, 3))),
        publisher=PublisherConfig(every_steps=draw(st.integers(1, 4)), retry_attempts_max=ATTEMPTS_MAX),
        faults=tuple(survived),
    )
    return scenario.checked()


@st.composite
def variants(draw: st.DrawFn) -> Scenario:
    """What ``scenarios`` leaves out: a cadence of minutes, a small queue, data that ends on one rank before the
    others."""
    scenario = draw(scenarios())
    publisher, workload, planned = scenario.publisher, scenario.workload, scenario.faults
    if draw(st.booleans()):
        publisher = msgspec.structs.replace(publisher, every_minutes=0.5)
        workload = msgspec.structs.replace(workload, step_seconds=draw(st.sampled_from([5.0, 20.0, 70.0])))
    if draw(st.booleans()):
        publisher = msgspec.structs.replace(publisher, queue_bytes_max=draw(st.integers(1, 8)))
    if draw(st.booleans()) and not any(t.collection == "ec" and t.sharding == "data_parallel" for t in scenario.tables):
        rank = draw(st.integers(0, scenario.world_size - 1))
        batches = draw(st.integers(0, workload.steps - 1))
        planned = (*planned, faults.Exhaustion(rank=rank, batches=batches, policy="empty-batches"))
    return msgspec.structs.replace(scenario, publisher=publisher, workload=workload, faults=planned).checked()


@st.composite
def succeeded(draw: st.DrawFn, world_size_min: int = 1) -> History:
    """Histories of jobs in which every rank ended well."""
    return Model(draw(scenarios(world_size_min))).run()


@st.composite
def varied(draw: st.DrawFn) -> History:
    """Histories of ``variants`` in which every rank ended well."""
    return Model(draw(variants())).run()


@st.composite
def dynamic(draw: st.DrawFn) -> History:
    """Histories of jobs with a table whose keys lie anywhere in int64, where every rank ended well."""
    scenario = draw(variants())
    table = Table(name="ad", owner="dyn", rows=draw(st.integers(1, 12)), sharding="dynamic")
    return Model(msgspec.structs.replace(scenario, tables=(*scenario.tables, table)).checked()).run()


@st.composite
def failed(draw: st.DrawFn) -> History:
    """Histories of jobs that a planned fault brought down, loudly."""
    scenario = draw(scenarios())
    rank = draw(st.integers(0, scenario.world_size - 1))
    step = draw(st.integers(1, scenario.workload.steps))
    kinds: list[type[Strike]] = [faults.RankKill, faults.RankRaise]
    fault = draw(st.sampled_from(kinds))
    at_the_end = draw(st.booleans())
    strike = (
        fault(rank=rank, point="finish.before") if at_the_end else fault(rank=rank, point="train.after-step", nth=step)
    )
    scenario = msgspec.structs.replace(scenario, faults=(*scenario.faults, strike))
    return Model(scenario).run(strike)


@st.composite
def restarted(draw: st.DrawFn) -> History:
    """Histories of jobs that a planned fault brought down in training, and that succeeded after a restart, on as many
    ranks or on others."""
    scenario = draw(scenarios())
    rows = min(table.rows for table in scenario.tables)
    sizes = [None, *(n for n in (1, 2, 3) if -(-rows // n) * (n - 1) < rows)]
    restart = Restart(world_size=draw(st.sampled_from(sizes)))
    strike = faults.RankKill(
        rank=draw(st.integers(0, scenario.world_size - 1)),
        point="train.after-step",
        nth=draw(st.integers(1, scenario.workload.steps)),
    )
    workload = msgspec.structs.replace(scenario.workload, checkpoint_every_steps=draw(st.integers(0, 3)))
    scenario = msgspec.structs.replace(
        scenario, workload=workload, faults=(*scenario.faults, strike), restarts=(restart,)
    )
    return Model(scenario).run(strike)


def legal() -> st.SearchStrategy[History]:
    return succeeded() | varied() | dynamic() | failed() | restarted()


class Model:
    """Runs one scenario in its head. Time is a counter of milliseconds; a rank's queue is sent when chance says so."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world_size = scenario.world_size  # of the attempt under way
        self.rng = np.random.default_rng(scenario.seed)
        self.now_ms = 1000.0
        self.events: list[Event] = []
        self.writes: list[dict[str, Any]] = []
        self.outcomes: dict[int, RankOutcome] = {}
        self.ledgers = [self._ledger(t) for t in scenario.tables]
        self.values = [ledger.initial.copy() for ledger in self.ledgers]
        self.changes: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in self.ledgers]
        self.lookups: list[list[tuple[int, int, int]]] = [[] for _ in self.ledgers]
        ranks = range(scenario.world_size)
        self.tracked: list[list[set[int]]] = [[set() for _ in self.ledgers] for _ in ranks]
        self.published: list[list[set[int]]] = [[set() for _ in self.ledgers] for _ in ranks]
        self.queues: list[list[Delta]] = [[] for _ in ranks]
        # Wall clocks of ranks have nothing to do with each other; only one rank's ts are ordered.
        self.ts = [int(self.rng.integers(1, 10_000)) for _ in ranks]
        self.refusals = sum(f.count for f in scenario.faults if isinstance(f, faults.StoreError))
        self.refused = 0
        self.written = [0 for _ in ranks]
        self.shards: list[Shard] = []
        self.attempts: list[Attempt] = []
        self.attempt = self.shift = self.restored = 0
        self.begin_ms = self.now_ms
        self.checkpoint: tuple[int, int, list[np.ndarray]] | None = None  # attempt, step, rows
        self.checkpoint_of: int | None = None
        self.late: list[list[Batch]] = [[] for _ in ranks]  # batches that the network will deliver once more

    def _ledger(self, table: Table) -> LedgerTable:
        empty = np.empty(0, np.int64)
        return LedgerTable(
            table=table,
            embedding_name=table.fqn,
            initial=self.rng.standard_normal((table.rows, table.dim), dtype=np.float32),
            steps=empty,
            keys=empty,
            values=np.empty((0, table.dim), np.float32),
            lookup_steps=empty,
            lookup_ranks=empty.astype(np.int32),
            lookup_keys=empty,
            host=self._host(table),
        )

    def _host(self, table: Table) -> np.ndarray:
        """The rank that has each row, int32 (rows,): -1 where every one has it."""
        host = np.full(table.rows, -1, np.int32)
        if table.sharding == "table_wise":
            host[:] = table.rank % self.world_size
        elif table.sharding == "row_wise":
            host[:] = np.minimum(np.arange(table.rows) // -(-table.rows // self.world_size), self.world_size - 1)
        elif table.sharding == "dynamic":
            host[:] = np.arange(table.rows) % self.world_size
        return host

    def _own_step(self, rank: int, step: int) -> int:
        """How many batches of its own a rank has had: fewer than steps where its data ended."""
        ends = [f.batches for f in self.scenario.faults if isinstance(f, faults.Exhaustion) and f.rank == rank]
        return min([step, *ends])

    def _clock_s(self, step: int) -> float:
        return step * (self.scenario.workload.step_seconds or 1.0)

    def _is_due(self, rank: int, step: int) -> bool:
        """Whether the cadence asks for a dump: every so many own steps, or at the deadlines of the rank's clock."""
        publisher = self.scenario.publisher
        if publisher.every_minutes is None:
            return self._own_step(rank, step) % publisher.every_steps == 0
        period = 60 * publisher.every_minutes
        return self._clock_s(step) // period > self._clock_s(step - 1) // period  # what was missed is skipped

    def run(self, strike: Strike | None = None) -> History:
        while not self._attempt_job(strike) and len(self.attempts) <= len(self.scenario.restarts):
            self._begin_again()
            strike = None
        return self._history()

    def _attempt_job(self, strike: Strike | None) -> bool:
        """One start of the job, from the step it was restored to; whether it succeeded."""
        self._event("rank-start")
        every = self.scenario.workload.checkpoint_every_steps
        for step in range(self.restored + 1, self.scenario.workload.steps + 1):
            self._train(step)
            if strike is not None and strike.point == "train.after-step" and strike.nth == step:
                self._bring_down(strike, step)
                return self._ended(False)
            for rank in range(self.world_size):
                if self._own_step(rank, step) < step:
                    continue  # only its rows are asked for: no batch, and no call of the target
                if self._is_due(rank, step):
                    self._dump(rank)
                resident_bytes = 1000 + int(self.rng.integers(0, 10))
                self._event("after-step", rank, step, resident_bytes=resident_bytes, collectives={})
                while self.queues[rank] and self.rng.random() < 0.5:  # the thread behind lags as it likes
                    self._send(rank)
            if every and step % every == 0:
                self.checkpoint = (self.attempt, step, [rows.copy() for rows in self.values])
        finishing = list(range(self.world_size))
        if strike is not None:  # training is over: peers need not notice
            finishing.remove(strike.rank)
            self.queues[strike.rank].clear()
            self._fall(strike, self.scenario.workload.steps)
        for rank in self.rng.permutation(finishing).tolist():
            self._dump(rank, final=True)
        while any(self.queues):
            self._send(int(self.rng.choice([r for r, queue in enumerate(self.queues) if queue])))
        for rank in finishing:
            self.outcomes[rank] = RankOutcome(rank=rank, status="ok", exitcode=0, attempt=self.attempt)
            self._event("rank-end", rank)
        return self._ended(strike is None)

    def _ended(self, well: bool) -> bool:
        outcomes = [self.outcomes[rank] for rank in range(self.world_size)]
        made_in = None if self.checkpoint is None or not self.attempt else self.checkpoint_of
        self.attempts.append(
            Attempt(self.world_size, outcomes, self.shift, made_in, self.restored, self.begin_ms, self.now_ms + 1)
        )
        return well

    def _begin_again(self) -> None:
        """Restore the newest checkpoint. A careful publisher then sends every row that may differ from the store's."""
        steps = [[step for step, *_ in [*c, *lo]] for c, lo in zip(self.changes, self.lookups, strict=True)]
        moment = 1 + max((step for each in steps for step in each), default=self.shift + self.restored)
        self.checkpoint_of, self.restored, rows = self.checkpoint or (None, 0, [led.initial for led in self.ledgers])
        self.attempt, self.shift = self.attempt + 1, moment - self.restored
        self.begin_ms = self.now_ms = self.now_ms + 10
        self.world_size = self.scenario.of_attempt(self.attempt).world_size
        ranks = range(self.world_size)
        self.queues, self.late, self.written = [[] for _ in ranks], [[] for _ in ranks], [0 for _ in ranks]
        self.ts = [max(self.ts) + int(self.rng.integers(1, 50)) for _ in ranks]
        self.tracked = [[set() for _ in self.ledgers] for _ in ranks]
        self.published = [[set() for _ in self.ledgers] for _ in ranks]
        self.ledgers = [dataclasses.replace(led, host=self._host(led.table)) for led in self.ledgers]
        for index, ledger in enumerate(self.ledgers):
            for key in range(len(ledger.initial)):
                if rows[index][key].tobytes() != self.values[index][key].tobytes():
                    self.changes[index].append((moment, key, rows[index][key].copy()))
            self.values[index] = rows[index].copy()
            for key in {key for _, _, key in self.lookups[index]}:
                host = int(ledger.host[key])
                self.tracked[host if host >= 0 else key % self.world_size][index].add(key)
        self._event("restored", step=self.restored)

    def _train(self, step: int) -> None:
        for index, table in enumerate(self.scenario.tables):
            touched = set()
            for rank in range(self.world_size):
                count = int(self.rng.integers(0, self.scenario.workload.batch_size + 1))
                if self._own_step(rank, step) < step:
                    count = 0
                for key in self.rng.integers(0, table.rows, count).tolist():
                    self.lookups[index].append((self.shift + step, rank, key))
                    touched.add(key)
                    host = int(self.ledgers[index].host[key])
                    self.tracked[rank if host < 0 else host][index].add(key)
            for key in touched:
                chance = self.rng.random()
                if chance < 0.1:
                    continue  # a gradient of zero: touched, and published, but not changed
                earlier = [value for _, k, value in self.changes[index] if k == key]
                new = self.rng.standard_normal(table.dim, dtype=np.float32)
                if chance < 0.2 and earlier:
                    new = earlier[0]  # a value that comes back
                elif chance < 0.25:
                    new = np.copysign(np.zeros(table.dim, np.float32), new)  # 0.0 and -0.0 differ
                if new.tobytes() != self.values[index][key].tobytes():
                    self.values[index][key] = new
                    self.changes[index].append((self.shift + step, key, new.copy()))
        for rank in self.rng.permutation(self.world_size).tolist():
            self._event("step", rank, step, own_step=self._own_step(rank, step), clock_s=self._clock_s(step))

    def _dump(self, rank: int, final: bool = False) -> None:
        """What was touched since the last dump, at its present value; at the end also all replicated keys once more."""
        delta: Delta = []
        for index, keys in enumerate(self.tracked[rank]):
            if final and self.scenario.tables[index].sharding == "data_parallel":
                keys = keys | self.published[rank][index]
            delta += [(index, key, self.values[index][key].copy()) for key in sorted(keys)]
            self.published[rank][index] |= keys
            self.tracked[rank][index] = set()
        if delta:
            self.queues[rank].append(delta)

    def _send(self, rank: int) -> None:
        """The first delta of the queue, whole; a refused attempt leaves some batches behind and all go again, later."""
        delta = self.queues[rank].pop(0)
        while self.refusals and self.rng.random() < 0.5:
            self.refusals -= 1
            self._attempt(rank, delta, refused=True)
            self._refuse(rank)
        self._retain(rank, delta, self._attempt(rank, delta))

    def _retain(self, rank: int, delta: Delta, stamps: list[int]) -> None:
        """A copy of what was acknowledged, kept before anybody is told."""
        rows = [
            {
                "embedding_name": self.ledgers[index].embedding_name,
                "key_id": self._key(index, key),
                "ts": ts,
                "embedding": value,
            }
            for (index, key, value), ts in zip(delta, stamps, strict=True)
        ]
        manifest = {"state": "acknowledged", "rank": rank, "rows": len(rows)}
        self.shards.append(Shard(f"shard-{len(self.shards):06d}", manifest, pa.Table.from_pylist(rows, SHARD_SCHEMA)))

    def _key(self, index: int, key: int) -> int:
        """What the store calls a row number."""
        return int(self.ledgers[index].key_ids[key])

    def _refuse(self, rank: int) -> None:
        self.refused += 1
        self._event("fault", rank, who="store", index=0, client=f"rank{rank}")

    def _attempt(self, rank: int, delta: Delta, refused: bool = False) -> list[int]:
        """Windows of batches, each closed by a flush; in the one that is refused any of the rows may be missing.

        Returns the ts of each row.
        """
        size, width = int(self.rng.integers(1, 5)), int(self.rng.integers(1, 4))
        batches: list[Batch] = []
        for start in range(0, len(delta), size):
            self.ts[rank] += int(self.rng.integers(1, 50))
            batches.append((self.ts[rank], delta[start : start + size]))
        windows = [batches[start : start + width] for start in range(0, len(batches), width)]
        fatal = int(self.rng.integers(0, len(windows))) if refused else len(windows)
        for number, window in enumerate(windows[: fatal + 1]):
            self._window(rank, window, refused=number == fatal)
        return [ts for ts, batch in batches for _ in batch]

    def _window(self, rank: int, window: list[Batch], refused: bool) -> None:
        for ts, _ in window:
            self.written[rank] += 1
            self._event("sdk-write", rank, view=0, number=self.written[rank], ts=ts)
        if refused:
            window = [(ts, [row for row in batch if self.rng.random() < 0.5]) for ts, batch in window]
        self.rng.shuffle(window)  # requests of one window are answered in any order
        self.late[rank], again = [b for b in window if self.rng.random() < 0.1], self.late[rank]
        for ts, batch in [*window, *again]:  # delivered twice, under one ts, when newer rows are there already
            self.now_ms += 1
            for index, key, value in batch:
                self.writes.append(
                    {
                        "arrival": len(self.writes),
                        "t_ms": self.now_ms,
                        "version": "run-1",
                        "pk": self.ledgers[index].embedding_name,
                        "sk": self._key(index, key),
                        "ts": ts,
                        "embedding": value,
                        "client": f"rank{rank}",
                        "request_id": f"r{ts}",
                    }
                )
        self._event("sdk-flush", rank, view=0, covers=self.written[rank], failed_batches=int(refused))

    def _fall(self, strike: Strike, step: int) -> None:
        """The struck rank is killed, or raises and says where."""
        self._event("fault", strike.rank, step, index=len(self.scenario.faults) - 1)
        killed = isinstance(strike, faults.RankKill)
        if not killed:
            self._event("error", strike.rank, step, message="injected")
        text = "" if killed else f"InjectedFault: rank {strike.rank} raises at {strike.point}, passage {strike.nth}"
        self.outcomes[strike.rank] = RankOutcome(
            rank=strike.rank,
            status="killed" if killed else "error",
            exitcode=-9 if killed else 1,
            error=text,
            attempt=self.attempt,
        )
        self._event("rank-exit", strike.rank, who="supervisor")

    def _bring_down(self, strike: Strike, step: int) -> None:
        """The struck rank fails; each peer falls over the broken collective, or waits until the supervisor ends it."""
        self._fall(strike, step)
        for rank in range(self.world_size):
            if rank == strike.rank:
                continue
            while self.queues[rank] and self.rng.random() < 0.7:  # what was queued may still arrive
                self._send(rank)
            if self.rng.random() < 0.5:
                self._event("error", rank, step, message="peer")
                text = "RuntimeError: closed by peer"
                outcome = RankOutcome(rank=rank, status="error", exitcode=1, error=text, attempt=self.attempt)
            else:
                outcome = RankOutcome(rank=rank, status="ended", exitcode=-9, attempt=self.attempt)
            self.outcomes[rank] = outcome

    def _event(self, kind: str, rank: int | None = None, step: int | None = None, who: str = "", **data: Any) -> None:
        for one in range(self.world_size) if rank is None else (rank,):
            self.now_ms += 1
            self.events.append(
                Event(
                    t_ms=self.now_ms,
                    who=who or f"rank{one}",
                    kind=kind,
                    rank=one,
                    step=step,
                    data=data,
                    attempt=0 if who == "store" else self.attempt,
                )
            )

    def _history(self) -> History:
        while self.refusals:  # requests that were refused whole and sent again leave nothing behind
            self.refusals -= 1
            self._refuse(0)
        tables = {}
        for ledger, changes, lookups in zip(self.ledgers, self.changes, self.lookups, strict=True):
            lookup_array = np.array(lookups, np.int64).reshape(-1, 3)
            order = np.lexsort(([key for _, key, _ in changes], [step for step, _, _ in changes]))
            tables[ledger.table.fqn] = dataclasses.replace(
                ledger,
                steps=np.array([changes[i][0] for i in order], np.int64),
                keys=np.array([changes[i][1] for i in order], np.int64),
                values=np.array([changes[i][2] for i in order], np.float32).reshape(-1, ledger.table.dim),
                lookup_steps=lookup_array[:, 0],
                lookup_ranks=lookup_array[:, 1].astype(np.int32),
                lookup_keys=lookup_array[:, 2],
                since=self.attempts[-1].since,
            )
        fired = [self.refused if isinstance(f, faults.StoreError) else 1 for f in self.scenario.faults]
        history = with_writes(
            History(
                scenario=self.scenario,
                target="model",
                engine="none",
                events=self.events,
                outcomes=self.attempts[-1].outcomes,
                attempts=self.attempts if len(self.attempts) > 1 else [],
                tables=tables,
                manifest={fqn: fqn for fqn in tables},
                writes=pa.Table.from_pylist([], WRITES_SCHEMA),
                final=pa.Table.from_pylist([], FINAL_SCHEMA),
                fired=fired,
                planted=("FEATUREDB_PASSWORD",),
                retained=self.shards,
            ),
            self.writes,
        )
        if history.succeeded:
            history.events.append(
                Event(t_ms=self.now_ms + 1, who="rank0", kind="readback", rank=0, data={"report": told(history)})
            )
        return history


def told(history: History) -> dict[str, Any]:
    """What a readback has to say of this history: of each key, how its newest retained row compares with the store."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in (row for shard in history.retained or [] if shard.rows is not None for row in shard.rows.to_pylist()):
        where = (row["embedding_name"], row["key_id"])
        if where not in newest or newest[where]["ts"] < row["ts"]:
            newest[where] = row
    served = {(row["pk"], row["sk"]): row for row in history.final.to_pylist()}
    verdicts = dict.fromkeys(("MATCH", "SUPERSEDED", "MISSING", "DIFFERENT", "CORRUPT_LOCAL"), 0)
    for where, row in newest.items():
        now = served.get(where)
        if now is None:
            verdicts["MISSING"] += 1
        elif now["ts"] > row["ts"]:
            verdicts["SUPERSEDED"] += 1
        else:
            verdicts["MATCH" if (now["ts"], now["embedding"]) == (row["ts"], row["embedding"]) else "DIFFERENT"] += 1
    sound = not verdicts["MISSING"] and not verdicts["DIFFERENT"]
    return {"verdicts": verdicts, "damaged": {}, "agrees": bool(newest) and sound}


def with_writes(history: History, writes: list[dict[str, Any]]) -> History:
    """The history of a store that accepted these rows in this order, and serves by greatest ts, then later arrival."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in writes:
        held = best.get((row["pk"], row["sk"]))
        if held is None or row["ts"] >= held["ts"]:
            best[row["pk"], row["sk"]] = row
    served = [{name: row[name] for name in FINAL_SCHEMA.names} for row in best.values()]
    return dataclasses.replace(
        history,
        writes=pa.Table.from_pylist([{**row, "arrival": n} for n, row in enumerate(writes)], WRITES_SCHEMA),
        final=pa.Table.from_pylist(served, FINAL_SCHEMA),
    )


def rows_of(history: History) -> list[dict[str, Any]]:
    """The accepted rows as dicts, embeddings as float32 arrays: what ``with_writes`` takes."""
    return [{**row, "embedding": np.array(row["embedding"], np.float32)} for row in history.writes.to_pylist()]


def touched_keys(history: History) -> Iterator[tuple[str, LedgerTable, int, int]]:
    """(FQN, table, key, step of its last lookup) of every key that training looked up."""
    for fqn, ledger in history.tables.items():
        for key, step in sorted(ledger.last_lookup.items()):
            yield fqn, ledger, key, step

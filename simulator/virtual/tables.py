"""A model of NumPy shards: what a sharded TorchRec model is to a publisher, at a thousandth of its cost.

A step has the collectives of a real one: ids go to the ranks that host the rows, gradients come back. The update is not
a real optimizer's: row = 0.9 * row + noise(row) / (step + 1), which changes every row that was looked up, on the ranks
that host it, alike on every replica. Dynamic tables are the process engine's own (dynamic.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import numpy as np

from ...reference.delta import DeltaError, Keys, Mask, Rows
from ...reference.dumper import DATA_PARALLEL, Pause, TableInfo
from ..dynamic import DynamicTables
from ..history import LedgerTable
from ..scenario import Scenario, Table
from ..workload import Bags, Workload, initial_rows, looked_up
from .collectives import Group

#: How long the model computes in one step, in seconds: uniform in this interval.
STEP_S: Final = (0.002, 0.02)


class Shard(msgspec.Struct, eq=False):
    """The rows of one table that a rank hosts: ``weight`` float32 (rows, dim), from global row ``first_row`` on."""

    first_row: int
    rows: int
    weight: Rows


class Model:
    """What follows from the scenario: initial weights, and the noise that training adds."""

    def __init__(self, scenario: Scenario) -> None:
        self.initial = [initial_rows(scenario, index) for index in range(len(scenario.tables))]
        self.noise = [
            np.random.default_rng([scenario.seed, 13, index]).standard_normal(rows.shape, dtype=np.float32)
            for index, rows in enumerate(self.initial)
        ]


def shard_range(scenario: Scenario, table: Table, rank: int) -> tuple[int, int]:
    """[first, end) of the rows that ``rank`` hosts; row-wise as TorchRec deals them out: ceil(rows / ranks)."""
    if table.sharding == "row_wise":
        share = -(-table.rows // scenario.world_size)
        return min(rank * share, table.rows), min((rank + 1) * share, table.rows)
    if table.sharding == "table_wise" and table.rank != rank:
        return 0, 0
    return 0, table.rows


class Ledger:
    """Ground truth of one attempt, in memory: what the ledgers of real ranks say, told by all of them at once."""

    def __init__(self, scenario: Scenario, model: Model) -> None:
        self._scenario = scenario
        tables = range(len(model.initial))
        self._initial = [np.full_like(rows, np.nan) for rows in model.initial]
        self._changes: list[dict[tuple[int, int], tuple[Keys, Rows]]] = [{} for _ in tables]
        self._lookups: list[list[tuple[int, int, Keys]]] = [[] for _ in tables]

    def begins(self, index: int, keys: Keys, rows: Rows) -> None:
        """From which weights training starts."""
        self._initial[index][keys] = rows

    def looked_up(self, rank: int, step: int, index: int, keys: Keys) -> None:
        """What a rank's own training batch looks up."""
        self._lookups[index].append((rank, step, keys))

    def changed(self, rank: int, step: int, index: int, keys: Keys, rows: Rows) -> None:
        """What a step changed, and to what. Replicas change alike: the first rank that tells is enough."""
        teller = 0 if self._scenario.tables[index].sharding == DATA_PARALLEL else rank
        self._changes[index].setdefault((step, teller), (keys, rows))

    def tables(self, manifest: dict[str, str]) -> dict[str, LedgerTable]:
        """By FQN, for the history."""
        scenario = self._scenario
        found = {}
        for index, table in enumerate(scenario.tables):
            host = np.full(table.rows, -1, np.int32)
            if table.sharding == "dynamic":
                host = (table.key_ids(np.arange(table.rows)).view(np.uint64) % scenario.world_size).astype(np.int32)
            elif table.sharding != DATA_PARALLEL:
                for rank in range(scenario.world_size):
                    first, end = shard_range(scenario, table, rank)
                    host[first:end] = rank
            changes = sorted(self._changes[index].items())
            steps = [np.full(len(keys), step) for (step, _), (keys, _) in changes]
            keys, values = [keys for _, (keys, _) in changes], [rows for _, (_, rows) in changes]
            lookups = self._lookups[index]
            found[table.fqn] = LedgerTable(
                table=table,
                embedding_name=manifest[table.fqn],
                initial=self._initial[index],
                steps=_joined(steps, np.int64),
                keys=_joined(keys, np.int64),
                values=np.concatenate(values) if values else np.empty((0, table.dim), np.float32),
                lookup_steps=_joined([np.full(len(keys), step) for _, step, keys in lookups], np.int64),
                lookup_ranks=_joined([np.full(len(keys), rank) for rank, _, keys in lookups], np.int32),
                lookup_keys=_joined([keys for _, _, keys in lookups], np.int64),
                host=host,
            )
        return found


def _joined(parts: list[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.empty(0, kind)


class VirtualTrainer:
    """Model of one rank (`loop.Trainer`). ``source`` is what its publisher dumps from."""

    def __init__(
        self,
        scenario: Scenario,
        model: Model,
        workload: Workload,
        rank: int,
        group: Group,
        ledger: Ledger,
        chance: random.Random,
    ) -> None:
        self.workload, self._chance = workload, chance
        self._scenario, self._model, self._rank, self._group, self._ledger = scenario, model, rank, group, ledger
        self._tables = scenario.tables
        self._shards: dict[int, Shard] = {}
        for index, table in enumerate(self._tables):
            if table.sharding != "dynamic":
                first, end = shard_range(scenario, table, rank)
                self._shards[index] = Shard(first, end - first, model.initial[index][first:end].copy())
        self.source = VirtualSource(scenario, rank, self._shards.__getitem__)
        self.dynamic = DynamicTables(scenario, rank)
        self._served: dict[int, Rows] = {}
        self._touched: dict[int, Keys] = {}
        self._began: dict[int, Rows] = {}

    @property
    def bytes(self) -> int:
        """Memory of the weights that this rank hosts."""
        return sum(shard.weight.nbytes for shard in self._shards.values())

    def begin(self) -> None:
        """Tell the ledger from which weights training starts."""
        self._began = {index: shard.weight.copy() for index, shard in self._shards.items()}
        for index, shard in self._shards.items():
            self._ledger.begins(index, np.arange(shard.first_row, shard.first_row + shard.rows), shard.weight)
        self._served = {index: self.dynamic.served(index) for index in self.dynamic.handles}
        for index, rows in self._served.items():
            self._ledger.begins(index, self.dynamic.hosted(index), rows)

    def shards(self) -> list[tuple[int, Rows]]:
        """(first row, rows) per table, for a checkpoint."""
        return [(shard.first_row, shard.weight.copy()) for shard in self._shards.values()]

    def assembled(self, ranks: Sequence[list[tuple[int, Rows]]]) -> list[Rows]:
        """Whole tables from the shards of all ranks; dynamic ones are in no checkpoint."""
        tables = [np.empty_like(rows) for rows in self._model.initial]
        for shards in ranks:
            for index, (first, part) in zip(self._shards, shards, strict=True):
                tables[index][first : first + len(part)] = part
        return tables

    def load(self, tables: Sequence[Rows]) -> None:
        """Put the weights of a checkpoint of any number of ranks into the shards."""
        for index, shard in self._shards.items():
            shard.weight[:] = tables[index][shard.first_row : shard.first_row + shard.rows]

    def announce(self, step: int, bags: dict[str, Bags]) -> None:
        for index, table in enumerate(self._tables):
            self._ledger.looked_up(self._rank, step, index, looked_up(table, bags))

    def forward(self, bags: dict[str, Bags], rank_step: tuple[int, int], training: bool = True) -> int:
        time.sleep(self._chance.uniform(*STEP_S))
        batches = self._group.exchange(self._rank, "all_to_all (forward)", bags)
        for index, shard in self._shards.items():
            table, first, end = self._tables[index], shard.first_row, shard.first_row + shard.rows
            ids = [batch[f].values for batch in batches for f in table.feature_names]
            keys = np.unique(np.concatenate(ids))
            hosted = self._touched[index] = keys[(keys >= first) & (keys < end)]
            # A replica's tracker sees the ids of its own batch; a shard's, whatever was looked up in it.
            seen = looked_up(table, bags) if table.sharding == DATA_PARALLEL else hosted
            self.source.record(index, seen - first)
        if self.dynamic.handles:
            self.dynamic.look_up([{name: bag.values for name, bag in batch.items()} for batch in batches], training)
        return rank_step[1]

    def backward(self, loss: int) -> None:
        self._group.exchange(self._rank, "all_to_all (backward)")
        for index, keys in self._touched.items():
            shard = self._shards[index]
            local = keys - shard.first_row
            shard.weight[local] = shard.weight[local] * np.float32(0.9) + self._model.noise[index][keys] / np.float32(
                loss + 1
            )
        self.dynamic.update(loss)

    def record(self, step: int) -> int:
        changed = 0
        for index, keys in self._touched.items():
            shard = self._shards[index]
            changed += len(keys)
            if len(keys):
                self._ledger.changed(self._rank, step, index, keys, shard.weight[keys - shard.first_row])
        for index, before in self._served.items():
            now = self._served[index] = self.dynamic.served(index)
            rows = np.flatnonzero((now.view(np.uint32) != before.view(np.uint32)).any(axis=1))
            changed += len(rows)
            if len(rows):
                self._ledger.changed(self._rank, step, index, self.dynamic.hosted(index)[rows], now[rows])
        return changed

    def warm_up(self) -> None:
        for number in range(1, self._scenario.workload.warmup_batches + 1):
            self.backward(self.forward(self.workload.warmup_batch(self._rank, number), (self._rank, number)))
        for index, rows in self._began.items():
            self._shards[index].weight[:] = rows

    def replace_storage(self) -> None:
        for index, shard in self._shards.items():
            if self._tables[index].sharding != DATA_PARALLEL:
                shard.weight = shard.weight.copy()

    def spoil(self, table: str, value: float) -> int | None:
        for index, keys in self._touched.items():
            mine = self._tables[index].name == table and self._tables[index].sharding != "data_parallel"
            if mine and len(keys):
                key = int(keys[0])
                self._shards[index].weight[key - self._shards[index].first_row, 0] = value
                return key
        return None

    def evaluate(self, bags: dict[str, Bags], step: int) -> None:
        self.forward(bags, (self._rank, step), training=False)

    def holders(self, table: str) -> list[str]:
        return [t.fqn for t in self._tables if t.name == table]


class VirtualSource:
    """Table source (`reference.dumper.TableSource`) of one rank, in the shape of `reference.tracker.TorchRecSource`.

    Its small methods have that class's names, so that a known bug of the tracker can be put into either.
    """

    def __init__(self, scenario: Scenario, rank: int, shard: Callable[[int], Shard]) -> None:
        fixed = {index: table for index, table in enumerate(scenario.tables) if table.sharding != "dynamic"}
        self._index = {table.fqn: index for index, table in fixed.items()}
        self._fqns = {index: table.fqn for index, table in fixed.items()}
        self._find = shard
        self._tables = {}
        for table in fixed.values():
            first, end = shard_range(scenario, table, rank)
            self._tables[table.fqn] = TableInfo(
                fqn=table.fqn,
                owner=table.owner,
                collection=table.collection,
                table=table.name,
                feature_names=table.feature_names,
                rows=table.rows,
                dim=table.dim,
                sharding=table.sharding,
                hosted=end > first,
            )
        self._records: dict[str, list[Keys]] = {key: [] for key in self._index}
        self._paused = Pause()

    def tables(self) -> dict[str, TableInfo]:
        return dict(self._tables)

    def record(self, index: int, local: Keys) -> None:
        """Note the local ids of one lookup."""
        if not self._paused and len(local):
            self._entry(self._fqns[index]).append(local)

    def drain(self) -> dict[str, Keys]:
        taken = {key: np.unique(np.concatenate(parts)) for key, parts in self._records.items() if parts}
        for key in taken:
            self._records[key].clear()
        return {key: self._global_keys(key, local) for key, local in taken.items()}

    def gather(self, fqn: str, keys: Keys) -> Rows:
        return self._weights(fqn)[keys - self._first_row(fqn)]

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        shard = self._find(self._index[fqn])
        return (keys >= shard.first_row) & (keys < shard.first_row + shard.rows)

    def paused(self) -> AbstractContextManager[None]:
        return self._paused()

    def _entry(self, key: str) -> list[Keys]:
        return self._records[key]

    def _shard(self, key: str) -> Shard:
        shard = self._find(self._index[key])
        if not shard.rows:
            raise LookupError(f"table {key!r} has no rows on this rank")
        return shard

    def _first_row(self, key: str) -> int:
        return self._shard(key).first_row

    def _weights(self, key: str) -> Rows:
        return self._shard(key).weight

    def _global_keys(self, key: str, local: Keys) -> Keys:
        shard = self._shard(key)
        outside = local[(local < 0) | (local >= shard.rows)]
        if len(outside):
            raise DeltaError(
                f"id outside this rank's {shard.rows} rows from row {shard.first_row}",
                table=key,
                key=int(outside[0]) + shard.first_row,
                step=None,
            )
        return local + self._first_row(key)

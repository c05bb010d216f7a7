"""Dynamic tables of a scenario: rows come with their keys and go when there is no room, and keys are any 64 bits.

Each rank has a table of the fakes (fakes/dynamicemb.py) and holds the keys whose unsigned value modulo the number of
ranks is its own. The workload draws numbers below ``rows``; a key is such a number, scattered over all of int64. The
update is not a real optimizer's: noise of the key and the step is added to every row that was looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..fakes.dynamicemb import DynamicTable, TableOptions
from .scenario import Scenario, Table


@dataclass(frozen=True)
class DynamicHandle:
    """What a publisher is given of one rank's dynamic table. ``listeners`` are called with the int64 keys of each
    lookup, in training and evaluation alike, as trackers of a model are. Serving uses ``missing`` in every place of
    the row for a key without one."""

    table: DynamicTable
    spec: Table
    missing: float
    listeners: list[Callable[[np.ndarray], object]] = field(default_factory=list)


class DynamicTables:
    """The dynamic tables of one rank, by index in the scenario."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.handles: dict[int, DynamicHandle] = {}
        self._seed = scenario.seed
        self._hosted: dict[int, np.ndarray] = {}
        self._looked_up: dict[int, np.ndarray] = {}
        for index, table in enumerate(scenario.tables):
            if table.sharding != "dynamic":
                continue
            options = TableOptions(
                capacity=table.capacity or table.rows,
                eval_value=table.missing,
                retain_evicted=True,
                seed=scenario.seed + index,
            )
            self.handles[index] = DynamicHandle(DynamicTable(table.fqn, table.dim, options), table, table.missing)
            keys = table.key_ids(np.arange(table.rows))
            self._hosted[index] = np.flatnonzero(keys.view(np.uint64) % np.uint64(scenario.world_size) == rank)

    def hosted(self, index: int) -> np.ndarray:
        """int64: the numbers below ``rows`` whose keys this rank holds."""
        return self._hosted[index]

    def look_up(self, batches: list[Mapping[str, np.ndarray]], training: bool) -> None:
        """One forward of all ranks: ``batches`` has the numbers drawn by each, by feature."""
        for index, handle in self.handles.items():
            drawn = [batch[feature] for batch in batches for feature in handle.spec.feature_names]
            numbers = np.concatenate(drawn)
            mine = handle.spec.key_ids(numbers[np.isin(numbers, self._hosted[index])])
            handle.table.lookup(mine, training=training)
            for listener in handle.listeners:
                listener(mine)
            if training:
                self._looked_up[index] = np.unique(mine)

    def update(self, step: int) -> None:
        """Change the rows that the last training forward looked up."""
        for index, keys in self._looked_up.items():
            noise = np.random.default_rng([self._seed, 17, index, step % 2**32])
            change = noise.standard_normal((len(keys), self.handles[index].table.dim), dtype=np.float32)
            self.handles[index].table.add(keys, change)

    def served(self, index: int) -> np.ndarray:
        """float32 (n, dim): what serving would use now for each of ``hosted(index)``."""
        return self.handles[index].table.served(self.handles[index].spec.key_ids(self._hosted[index]))

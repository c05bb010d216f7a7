"""The ids that ranks train on: a pure function of the scenario, so that anyone can recompute every batch.

Ids are Zipf-distributed (probability of the k-th most popular row proportional to 1 / k**exponent) over rows shuffled
per feature, or they come from the int64 columns of a Parquet file of interactions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import ScenarioError
from .faults import QuietTable
from .scenario import Scenario, Table


@dataclass(frozen=True)
class Bags:
    """Ids of one feature in one batch: int64 ``values`` (n,), int32 ``lengths`` (batch_size,), sum(lengths) == n."""

    values: np.ndarray
    lengths: np.ndarray


class Workload:
    """Draws batches for a scenario. Raises ScenarioError when its Parquet file cannot be used."""

    def __init__(self, scenario: Scenario, attempt: int = 0) -> None:
        """``attempt``: a restarted job reads other batches than the ones before it."""
        self.scenario, self._attempt = scenario, attempt
        self.features: list[str] = list(dict.fromkeys(f for t in scenario.tables for f in t.feature_names))
        self._rows = {f: min(t.rows for t in scenario.tables if f in t.feature_names) for f in self.features}
        # TorchRec on CPU: a data-parallel EmbeddingCollection fails unless every bag holds exactly one id.
        self._single = {
            f
            for t in scenario.tables
            if t.collection == "ec" and t.sharding == "data_parallel"
            for f in t.feature_names
        }
        self._quiet: dict[str, set[int]] = {}
        for fault in scenario.faults:
            if isinstance(fault, QuietTable):
                steps = range(fault.step, fault.step + fault.steps)
                for feature in (f for t in scenario.tables if t.name == fault.table for f in t.feature_names):
                    self._quiet.setdefault(feature, set()).update(steps)
        self._columns = None if scenario.workload.data is None else self._assign(read_columns(scenario.workload.data))
        self._rankings: dict[str, np.ndarray] = {}

    def batch(self, rank: int, step: int) -> dict[str, Bags]:
        """The training batch of ``rank`` at lockstep ``step`` (from 1)."""
        drawn, empty = self._draw(rank, step, 0), self.empty_batch()
        return {f: empty[f] if step in self._quiet.get(f, ()) else bags for f, bags in drawn.items()}

    def eval_batch(self, rank: int, step: int) -> dict[str, Bags]:
        """The evaluation batch after ``step``: uniformly drawn, so it meets rows that training never looked up."""
        return self._draw(rank, step, 1)

    def warmup_batch(self, rank: int, number: int) -> dict[str, Bags]:
        """The warm-up batch ``number`` (from 1), drawn as evaluation batches are."""
        return self._draw(rank, number, 2)

    def empty_batch(self) -> dict[str, Bags]:
        size = self.scenario.workload.batch_size
        return {f: Bags(np.empty(0, np.int64), np.zeros(size, np.int32)) for f in self.features}

    def _draw(self, rank: int, step: int, kind: int) -> dict[str, Bags]:
        config = self.scenario.workload
        again = [self._attempt] if self._attempt else []
        rng = np.random.default_rng([self.scenario.seed, rank, step, kind, *again])
        bags: dict[str, Bags] = {}
        for feature in self.features:
            if feature in self._single:
                lengths = np.ones(config.batch_size, np.int32)
            else:
                lengths = rng.integers(0, config.ids_per_sample_max + 1, config.batch_size, dtype=np.int32)
            rows, n = self._rows[feature], int(lengths.sum())
            if kind != 0:
                values = rng.integers(0, rows, n)
            elif self._columns is not None:
                # Each rank reads every world_size-th row, starting over at the end of the file.
                column = self._columns[feature]
                turn = step - 1 + self._attempt * config.steps
                index = np.arange(n) + turn * config.batch_size * config.ids_per_sample_max
                values = column[(index * self.scenario.world_size + rank) % len(column)] % rows
            else:
                values = self._popular[feature][np.searchsorted(self._cumulative[feature], rng.random(n), side="right")]
            bags[feature] = Bags(np.asarray(values, np.int64), lengths)
        return bags

    @cached_property
    def _cumulative(self) -> dict[str, np.ndarray]:
        result = {}
        for feature, rows in self._rows.items():
            weights = np.arange(1, rows + 1, dtype=np.float64) ** -self.scenario.workload.zipf_exponent
            cumulative = np.cumsum(weights / weights.sum())
            cumulative[-1] = 1.0
            result[feature] = cumulative
        return result

    @cached_property
    def _popular(self) -> dict[str, np.ndarray]:
        return {
            feature: np.random.default_rng([self.scenario.seed, 7, index]).permutation(rows)
            for index, (feature, rows) in enumerate(self._rows.items())
        }

    def _assign(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A feature takes the column of its own name when there is one, else the columns in turn."""
        names = list(columns)
        return {f: columns[f if f in columns else names[i % len(names)]] for i, f in enumerate(self.features)}


def read_columns(path: str | Path) -> dict[str, np.ndarray]:
    """int64 columns of a Parquet file, nulls left out. Raises ScenarioError when there is none that holds an id."""
    try:
        schema = pq.read_schema(path)
        names = [f.name for f in schema if pa.types.is_int64(f.type)]
        table = pq.read_table(path, columns=names) if names else None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ScenarioError(f"cannot read interactions from {path}: {reason}") from None
    if table is None:
        has = ", ".join(f"{f.name} {f.type}" for f in schema) or "no columns"
        raise ScenarioError(f"{path} has no int64 column to take ids from (it has {has}); cast the id columns to int64")
    columns = {name: table[name].drop_null().to_numpy() for name in names}
    columns = {name: column for name, column in columns.items() if len(column)}
    if not columns:
        raise ScenarioError(f"{path}: its int64 columns ({', '.join(names)}) hold no ids")
    return columns


def looked_up(table: Table, batch: dict[str, Bags]) -> np.ndarray:
    """Sorted unique int64 keys of ``table`` that this batch looks up."""
    return np.unique(np.concatenate([batch[f].values for f in table.feature_names]))


def initial_rows(scenario: Scenario, index: int) -> np.ndarray:
    """float32 (rows, dim) starting weights of table ``index``: distinct between tables and rows with overwhelming
    odds."""
    table = scenario.tables[index]
    rng = np.random.default_rng([scenario.seed, 11, index])
    return rng.standard_normal((table.rows, table.dim), dtype=np.float32)

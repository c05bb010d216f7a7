"""A small TorchRec model made from a scenario, sharded over real ranks, with its weights in view of the ledger."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchrec
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ..dynamic import DynamicTables
from ..history import CHANGED, INITIAL, LOOKED_UP, LedgerWriter
from ..scenario import Scenario, Table
from ..workload import Bags, Workload, initial_rows, looked_up

LEARNING_RATE = 0.1


class TowerModel(nn.Module):
    """Holds every owner of the scenario at its module path; forward gives the concatenated embeddings of all of
    them."""

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        super().__init__()
        fixed = [t for t in scenario.tables if t.sharding != "dynamic"]
        self._pooled = {t.owner: t.collection == "ebc" for t in fixed}
        self.owners = list(self._pooled)
        for owner in self.owners:
            tables = [t for t in fixed if t.owner == owner]
            *path, leaf = owner.split(".")
            parent: nn.Module = self
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(leaf, _collection(tables, device))

    def forward(self, features: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for owner in self.owners:
            values = self.get_submodule(owner)(features).values()
            # An EBC gives one KeyedTensor, an EC a dict of JaggedTensors, and both only once awaited.
            found = [values] if self._pooled[owner] else [jagged.values() for jagged in values]
            parts += [v.reshape(-1) for v in found]
        return torch.cat(parts)


def _collection(tables: list[Table], device: torch.device) -> nn.Module:
    if tables[0].collection == "ebc":
        bags = [
            torchrec.EmbeddingBagConfig(
                name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=list(t.feature_names)
            )
            for t in tables
        ]
        return torchrec.EmbeddingBagCollection(tables=bags, device=device)
    rows = [
        torchrec.EmbeddingConfig(
            name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=list(t.feature_names)
        )
        for t in tables
    ]
    return torchrec.EmbeddingCollection(tables=rows, device=device)


def _sharding(table: Table) -> Any:
    if table.sharding == "row_wise":
        return row_wise(compute_kernel="fused")
    if table.sharding == "table_wise":
        return table_wise(rank=table.rank, compute_kernel="fused")
    return data_parallel()


class Trainer:
    """Model, optimizer and ledger of one rank. ``step`` trains one batch and writes what it changed."""

    def __init__(
        self, scenario: Scenario, rank: int, ledger: LedgerWriter, device: torch.device, attempt: int = 0
    ) -> None:
        self.scenario, self.rank, self.ledger, self.device = scenario, rank, ledger, device
        self.workload, self._attempt = Workload(scenario, attempt), attempt
        # TorchRec warns about every data-parallel table and about owners it is about to shard; neither is news here.
        logging.getLogger("torchrec").setLevel(logging.ERROR)
        model = TowerModel(scenario, device)
        replicated = {t.fqn for t in scenario.tables if t.sharding == "data_parallel"}
        fused = [p for n, p in model.named_parameters() if n.removesuffix(".weight") not in replicated]
        if fused:
            apply_optimizer_in_backward(torch.optim.SGD, fused, {"lr": LEARNING_RATE})
        sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        plan = {}
        for owner in model.owners:
            tables = [t for t in scenario.tables if t.owner == owner]
            plan[owner] = construct_module_sharding_plan(
                model.get_submodule(owner),
                {t.name: _sharding(t) for t in tables},
                sharder=sharders[0 if tables[0].collection == "ebc" else 1],
                local_size=1,
                world_size=scenario.world_size,
                device_type=device.type,
            )
        env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        self.model = DistributedModelParallel(model, env=env, device=device, plan=ShardingPlan(plan), sharders=sharders)
        dense = [p for n, p in self.model.named_parameters() if n.removesuffix(".weight") in replicated]
        self._dense = torch.optim.SGD(dense, lr=LEARNING_RATE) if dense else None
        self._shards = self._find_shards()
        self.dynamic = DynamicTables(scenario, rank)
        self._served: dict[int, np.ndarray] = {}
        self._updates = 0
        self._before: list[np.ndarray] = []
        for index, offset, weight in self._shards:
            rows = initial_rows(scenario, index)[offset : offset + weight.shape[0]]
            with torch.no_grad():
                weight.copy_(torch.from_numpy(rows))

    def _find_shards(self) -> list[tuple[int, int, torch.Tensor]]:
        """(table index, row offset, local weight) of every shard on this rank."""
        state = self.model.state_dict()
        found = []
        for index, table in enumerate(self.scenario.tables):
            if table.sharding == "dynamic":
                continue
            value = state[f"{table.fqn}.weight"]
            if hasattr(value, "local_shards"):
                found += [(index, s.metadata.shard_offsets[0], s.tensor) for s in value.local_shards()]
            else:
                found.append((index, 0, value))
        return found

    def begin(self) -> None:
        """Tell the ledger from which weights training starts."""
        self._before = [weight.detach().cpu().numpy().copy() for _, _, weight in self._shards]
        entries = [
            (INITIAL, index, np.arange(offset, offset + len(rows)), rows)
            for (index, offset, _), rows in zip(self._shards, self._before, strict=True)
        ]
        self._served = {index: self.dynamic.served(index) for index in self.dynamic.handles}
        entries += [(INITIAL, index, self.dynamic.hosted(index), rows) for index, rows in self._served.items()]
        self.ledger.write(0, entries)

    def save(self, folder: Path) -> None:
        """Write the model to a checkpoint. A collective."""
        save({"model": self.model.state_dict()}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read the model from a checkpoint of any number of ranks. A collective."""
        weights = self.model.state_dict()
        load({"model": weights}, checkpoint_id=folder)
        self.model.load_state_dict(weights)

    def _restore(self) -> None:
        """Put back, in place, what the ledger says that the model holds."""
        with torch.no_grad():
            for (_, _, weight), rows in zip(self._shards, self._before, strict=True):
                weight.copy_(torch.from_numpy(rows))

    def warm_up(self) -> None:
        """Train on batches that do not count, as a job does to fill its optimizer's state, then restore."""
        for number in range(1, self.scenario.workload.warmup_batches + 1):
            self.backward(self.forward(self.workload.warmup_batch(self.rank, number), (self.rank, -number)))
        self._restore()

    def replace_storage(self) -> None:
        """Move the weights of the sharded tables to other memory. What held on to the old memory sees no update."""
        shards = {w.untyped_storage().data_ptr() for i, _, w in self._shards if not self._replicated(i)}
        moved: dict[int, torch.Tensor] = {}
        lookups = [lookup for module in self.model.modules() for lookup in getattr(module, "_lookups", ())]
        for kernel in (module for lookup in lookups for module in lookup.modules()):
            # TorchRec's own modules share this memory for their state dicts; the kernels are who works with it.
            if type(kernel).__module__.startswith("fbgemm_gpu"):
                for tensor in (*kernel.parameters(recurse=False), *kernel.buffers(recurse=False)):
                    at = tensor.untyped_storage().data_ptr()
                    if at in shards:
                        tensor.data = moved[at] = tensor.data.clone()
        if moved.keys() != shards:
            raise RuntimeError("the memory of some table was not found in TorchRec's kernels")
        for position, (index, offset, weight) in enumerate(self._shards):
            new = moved.get(weight.untyped_storage().data_ptr())
            if new is not None:
                view = new.as_strided(weight.shape, weight.stride(), weight.storage_offset())
                self._shards[position] = (index, offset, view)

    def spoil(self, table: str, value: float) -> int | None:
        """Put ``value`` into a row of the table that changed since the last record; its key, None if there is none."""
        for (index, offset, weight), before in zip(self._shards, self._before, strict=True):
            mine = self.scenario.tables[index].name == table and not self._replicated(index)
            if mine and len(rows := _differing(weight, before)):
                with torch.no_grad():
                    weight[int(rows[0]), 0] = value
                return int(rows[0]) + offset
        return None

    def _replicated(self, index: int) -> bool:
        return self.scenario.tables[index].sharding == "data_parallel"

    def forward(self, bags: dict[str, Bags], rank_step: tuple[int, int]) -> torch.Tensor:
        """Loss of one batch: half the squared distance to targets drawn for (rank, step), so each step moves each
        row."""
        features = torchrec.KeyedJaggedTensor(
            keys=self.workload.features,
            values=torch.from_numpy(np.concatenate([bags[f].values for f in self.workload.features])),
            lengths=torch.from_numpy(np.concatenate([bags[f].lengths for f in self.workload.features])),
        ).to(self.device)
        out = self.model(features)
        if self.dynamic.handles:
            batches: list[Any] = [None] * self.scenario.world_size
            torch.distributed.all_gather_object(batches, {name: bag.values for name, bag in bags.items()})
            self.dynamic.look_up(batches, training=self.model.training)
        again = [self._attempt] if self._attempt else []
        rng = np.random.default_rng([self.scenario.seed, 13, *(n % 2**32 for n in rank_step), *again])
        target = torch.from_numpy(rng.standard_normal(out.numel(), dtype=np.float32)).to(self.device)
        loss: torch.Tensor = 0.5 * ((out - target) ** 2).sum()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        if self._dense is not None:
            self._dense.zero_grad()
        loss.backward()
        if self._dense is not None:
            self._dense.step()
        self._updates += 1
        self.dynamic.update(self._updates)

    def announce(self, step: int, bags: dict[str, Bags]) -> None:
        """Write the keys that this rank is about to look up: should it die in the step, they may have been touched."""
        tables = enumerate(self.scenario.tables)
        self.ledger.write(step, ((LOOKED_UP, index, looked_up(table, bags), None) for index, table in tables))

    def record(self, step: int) -> int:
        """Write the rows that changed since the last call; returns how many there were."""
        entries: list[tuple[int, int, np.ndarray, np.ndarray | None]] = []
        changed = 0
        for position, (index, offset, weight) in enumerate(self._shards):
            now = weight.detach().cpu().numpy()
            rows = _differing(weight, self._before[position])
            entries.append((CHANGED, index, rows + offset, now[rows]))
            if len(rows):
                self._before[position] = now.copy()
                changed += len(rows)
        for index, before in self._served.items():
            now = self._served[index] = self.dynamic.served(index)
            rows = np.flatnonzero((now.view(np.uint32) != before.view(np.uint32)).any(axis=1))
            entries.append((CHANGED, index, self.dynamic.hosted(index)[rows], now[rows]))
            changed += len(rows)
        self.ledger.write(step, entries)
        return changed

    def evaluate(self, bags: dict[str, Bags], step: int) -> None:
        """A forward in evaluation mode, with lookups that must not be published."""
        self.model.eval()
        try:
            with torch.no_grad():
                self.forward(bags, (self.rank, step))
        finally:
            self.model.train()

    def holders(self, table: str) -> list[str]:
        """FQNs of the tables that bear this bare name."""
        names = [name.removesuffix(".weight") for name in self.model.state_dict()]
        names += [handle.spec.fqn for handle in self.dynamic.handles.values()]
        return [name for name in names if name.rsplit(".", 1)[-1] == table]


def _differing(weight: torch.Tensor, before: np.ndarray) -> np.ndarray:
    """Indices of the rows whose bits are not those of ``before``."""
    now = weight.detach().cpu().numpy()
    return np.flatnonzero((now.view(np.uint32) != before.view(np.uint32)).any(axis=1))

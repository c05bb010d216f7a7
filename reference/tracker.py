"""Which rows TorchRec's sharded embedding modules looked up, and what those rows hold now. The only user of torch.

Ids come from TorchRec's own tracker interface, `register_post_lookup_tracker_fn` of a sharded module (torchrec 1.6 to
1.9; the callback's later arguments differ between them and are not used). State is keyed by table FQN, so equal table
names under different owners stay apart. What the callback sees depends on the sharding: row-wise ids are local to the
shard, table-wise ids appear on the owning rank alone, data-parallel ids are those of the rank's own batch.

A row counts as changed when it was looked up since the last dump. Not followed, therefore: rows that a dense optimizer
moves without a lookup (momentum, weight decay on data-parallel tables; those published before are read again at the
end), and pipelines that look up the next batch before the update of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from .contract import Collection, fqn, strip_wrappers
from .delta import DeltaError, Keys, Mask, Rows
from .dumper import TableInfo

SHARDINGS = ("row_wise", "table_wise", "data_parallel")
KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching")
COMPACT_AT_IDS = 1 << 20  # pending ids of one table before duplicates are folded


class TrackerError(RuntimeError):
    """The model cannot be followed row by row. Usual causes: column-wise or grid sharding, a table left unsharded."""


class _Shard(msgspec.Struct, eq=False):
    """Where one table's local rows live: the i-th weight of an embedding kernel, `first_row` rows into the table."""

    kernel: Any
    index: int
    first_row: int
    rows: int


class _Record:
    """Ids of one table since the last drain; duplicates are folded now and then so that memory stays bounded."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.count = 0
        self.fold_at = COMPACT_AT_IDS

    def add(self, ids: torch.Tensor) -> None:
        self.parts.append(ids.detach().clone())
        self.count += ids.numel()
        if self.count > self.fold_at:
            self.parts = [torch.unique(torch.cat(self.parts))]
            self.count = self.parts[0].numel()
            self.fold_at = max(COMPACT_AT_IDS, 2 * self.count)

    def take(self) -> torch.Tensor:
        """Unique ids, sorted."""
        parts, self.parts, self.count = self.parts, [], 0
        return torch.unique(torch.cat([part.long() for part in parts]))


class TorchRecSource:
    """Table source (dumper.TableSource) of one rank of a sharded TorchRec model.

    Raises:
        TrackerError: a sharding other than row-wise, table-wise and data-parallel, or an unsharded embedding module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: dict[str, TableInfo] = {}
        self._shards: dict[str, _Shard] = {}
        self._records: dict[str, _Record] = {}
        self._hooks: list[tuple[Any, Any]] = []
        self._paused = 0
        self._lock = threading.Lock()  # a pipelined model looks up in one thread while another dumps
        for path, module in model.named_modules():
            if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                raise TrackerError(
                    f"{path!r} is not sharded, so its changes cannot be tracked; give it a sharding plan"
                )
            if hasattr(module, "_managed_collision_collection"):
                raise TrackerError(f"{path!r} remaps ids (managed collision), so rows cannot be told from ids")
            if isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
                self._follow(strip_wrappers(path), module)
        if not self._tables:
            raise TrackerError("the model has no sharded EmbeddingBagCollection or EmbeddingCollection")

    def tables(self) -> dict[str, TableInfo]:
        return dict(self._tables)

    def drain(self) -> dict[str, Keys]:
        """Global keys touched since the last drain, per FQN (int64, sorted, unique); quiet tables are absent.

        Raises:
            DeltaError: an id outside this rank's shard. TrackerError: another tracker took this one's place.
        """
        for module, hook in self._hooks:
            if module.post_lookup_tracker_fn is not hook:
                raise TrackerError(
                    "another tracker was registered after this one, so lookups went unseen; make it first"
                )
        with self._lock:
            taken = {full: record.take() for full, record in self._records.items() if record.count}
        return {full: self._global_keys(full, ids.cpu().numpy()) for full, ids in taken.items()}

    def gather(self, fqn: str, keys: Keys) -> Rows:
        """Rows that the global `keys` hold now, float32 (n, dim), whatever storage the kernel uses by now."""
        local = torch.from_numpy(keys - self._first_row(fqn))
        with torch.no_grad():
            weights = self._weights(fqn)
            rows = weights.index_select(0, local.to(weights.device)).float().cpu()
        return rows.numpy()

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        """Which global keys lie in this rank's shard of the table, bool (n,)."""
        if fqn not in self._shards:
            return np.zeros(len(keys), np.bool_)
        row = keys - self._first_row(fqn)
        return (row >= 0) & (row < self._shards[fqn].rows)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lookups inside are not recorded."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _follow(self, owner: str, module: Any) -> None:
        collection: Collection = "ebc" if isinstance(module, ShardedEmbeddingBagCollection) else "ec"
        lookups = [_unwrap(lookup) for lookup in module._lookups]
        for table, config in module._table_name_to_config.items():
            plan = module.module_sharding_plan[table]
            info = TableInfo(
                fqn=fqn(owner, collection, table),
                owner=owner,
                collection=collection,
                table=table,
                feature_names=tuple(config.feature_names),
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                sharding=plan.sharding_type,
                hosted=False,
            )
            self._admit(info, plan.compute_kernel, config.data_type)
        layouts = [self._layout(owner, collection, lookup) for lookup in lookups]
        self._listen(owner, module, layouts)

    def _admit(self, info: TableInfo, kernel: str, data_type: DataType) -> None:
        if info.sharding not in SHARDINGS:
            raise TrackerError(
                f"table {info.fqn!r} is sharded {info.sharding}; only {', '.join(SHARDINGS)} can be followed row by row"
            )
        if kernel not in KERNELS or data_type not in (DataType.FP32, DataType.FP16):
            raise TrackerError(
                f"table {info.fqn!r} holds {data_type} in kernel {kernel}; only in-memory float tables work"
            )
        if info.fqn in self._tables:
            raise TrackerError(f"two tables have the name {info.fqn!r}; rename one or move it under another module")
        self._tables[info.fqn] = info
        self._records[info.fqn] = _Record()

    def _layout(self, owner: str, collection: Collection, lookup: Any) -> list[tuple[str, str]]:
        """(feature, table key) for each position of the features one lookup gets; notes where local rows live."""
        layout = []
        for group, kernel in zip(lookup.grouped_configs, lookup._emb_modules, strict=True):
            for index, table in enumerate(group.embedding_tables):
                key = fqn(owner, collection, table.name)
                layout += [(feature, key) for feature in table.feature_names]
                offsets = table.local_metadata.shard_offsets if table.local_metadata is not None else [0]
                self._shards[key] = _Shard(kernel=kernel, index=index, first_row=offsets[0], rows=table.local_rows)
                self._tables[key] = msgspec.structs.replace(self._tables[key], hosted=True)
        return layout

    def _listen(self, owner: str, module: Any, layouts: list[list[tuple[str, str]]]) -> None:
        """Register with TorchRec. A module calls back once per lookup, in the order of its lookups."""
        turn, earlier = [0], module.post_lookup_tracker_fn  # TorchRec keeps one tracker per module: pass lookups on

        def begin(*_: Any) -> None:
            turn[0] = 0  # a forward that raised half-way must not shift the next one

        def looked_up(features: Any, *more: Any) -> None:
            if earlier is not None:
                earlier(features, *more)
            layout = layouts[turn[0] % len(layouts)]
            turn[0] += 1
            self._record(owner, layout, features)

        module.register_forward_pre_hook(begin)
        module.register_post_lookup_tracker_fn(looked_up)
        self._hooks.append((module, looked_up))

    def _record(self, owner: str, layout: list[tuple[str, str]], features: Any) -> None:
        """Note the ids of one lookup. Features are matched by position: one feature may feed two tables."""
        if self._paused:
            return
        if features.keys() != [feature for feature, _ in layout]:
            raise TrackerError(f"{owner!r} looked up {features.keys()}, expected {[name for name, _ in layout]}")
        values, ends = features.values(), features.offset_per_key()
        with self._lock:
            for position, (_, key) in enumerate(layout):
                if ends[position + 1] > ends[position]:
                    self._entry(key).add(values[ends[position] : ends[position + 1]])

    def _entry(self, key: str) -> _Record:
        """Ids of one table. The key is its FQN: a bare table name would merge the tables of two owners."""
        return self._records[key]

    def _shard(self, key: str) -> _Shard:
        if key not in self._shards:
            raise TrackerError(f"table {key!r} has no rows on this rank")
        return self._shards[key]

    def _first_row(self, key: str) -> int:
        """Where this rank's rows begin in the whole table: local ids are global keys less this."""
        return self._shard(key).first_row

    def _weights(self, key: str) -> torch.Tensor:
        """This rank's rows of a table, through a handle made now: a restore or a growth may have replaced storage."""
        shard = self._shard(key)
        shard.kernel.flush()
        weights: torch.Tensor = shard.kernel.split_embedding_weights()[shard.index]
        return weights

    def _global_keys(self, key: str, local: Keys) -> Keys:
        """Local ids plus the shard's offset."""
        shard, first_row = self._shard(key), self._first_row(key)
        outside = local[(local < 0) | (local >= shard.rows)]
        if len(outside):
            raise DeltaError(
                f"id outside this rank's {shard.rows} rows from row {first_row}",
                table=key,
                key=int(outside[0]) + first_row,
                step=None,
            )
        return local.astype(np.int64, copy=False) + first_row


def _unwrap(lookup: Any) -> Any:
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    return lookup

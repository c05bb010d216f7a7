"""Which rows TorchRec's sharded embedding modules looked up, and what those rows hold now. The only user of torch.

Ids come from TorchRec's own tracker interface, `register_post_lookup_tracker_fn` of a sharded module (torchrec 1.6 to
1.9 call it with features, embeddings, module and None, earlier ones with less: only the first is used). State is keyed
by table FQN, so equal table names under different owners stay apart. What the callback sees depends on the sharding:
row-wise ids are local to the shard, table-wise ids appear on the owning rank alone, data-parallel ids are those of the
rank's own batch. For a ZCH module TorchRec calls nothing back, so there the module that turns raw ids into rows is
listened to, and rows are published under raw ids (see dynamic.ZchTable).

A row counts as changed when it was looked up since the last dump. Not followed, therefore: rows that a dense optimizer
moves without a lookup (momentum, weight decay on data-parallel tables; those published before are read again at the
end), and pipelines that look up the next batch before the update of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import msgspec
import numpy as np
import torch
import torchrec
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .contract import Collection, fqn, strip_wrappers
from .delta import DeltaError, Keys, Mask, Rows, unique
from .dumper import Pause, TableInfo, merge_keys
from .dynamic import DynamicSource, IdLog, TrackerError, ZchTable

__all__ = ["TorchRecSource", "TrackerError"]

VERSIONS = f"the tracker knows torchrec 1.6 to 1.9, this is {torchrec.__version__}; install one of those"
try:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.modules.embedding_configs import DataType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.mc_modules import MCHManagedCollisionModule
except ImportError as error:
    raise TrackerError(f"{error}; {VERSIONS}") from error

SHARDINGS = ("row_wise", "table_wise", "data_parallel")
KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching")


class _Shard(msgspec.Struct, eq=False):
    """Where one table's local rows live: the i-th weight of an embedding kernel, `first_row` rows into the table."""

    kernel: Any
    index: int
    first_row: int
    rows: int


class TorchRecSource:
    """Table source (dumper.TableSource) of one rank of a sharded TorchRec model.

    Args:
        dynamic: has the rows of the model's dynamic tables (by their FQN in this model), and gets the ids of their
            lookups whenever this source is drained; ask it afterwards: `CombinedSource([TorchRecSource(m, d), d])`.

    Raises:
        TrackerError: a sharding other than row-wise, table-wise and data-parallel, an unsharded embedding module, ids
            that are hashed before they are remapped, or a torchrec with another interface than the supported ones.
    """

    def __init__(self, model: nn.Module, dynamic: DynamicSource | None = None) -> None:
        self._tables: dict[str, TableInfo] = {}
        self._shards: dict[str, _Shard] = {}
        self._records: dict[str, IdLog] = {}
        self._zch: dict[str, ZchTable] = {}
        self._collisions: dict[str, Any] = {}  # FQN of a ZCH table -> the collection that deals out its raw ids
        self._checks: list[Callable[[], None]] = []  # raise when lookups went unseen
        self._undo: list[Callable[[], None]] = []  # take away what was put on the model
        self._pause = Pause()
        self._lock = threading.Lock()  # a pipelined model looks up in one thread while another dumps
        self._dynamic = dynamic
        self._elsewhere = set() if dynamic is None else set(dynamic.tables())
        try:
            self._follow_all(model)
        except BaseException:
            self.release()
            raise

    def _follow_all(self, model: nn.Module) -> None:
        collisions: dict[nn.Module, Any] = {}
        for path, module in model.named_modules():
            if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                raise TrackerError(
                    f"{path!r} is not sharded, so its changes cannot be tracked; give it a sharding plan"
                )
            if (collision := getattr(module, "_managed_collision_collection", None)) is not None:
                _expect(module, "_embedding_module")
                collisions[module._embedding_module] = collision
            if isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
                self._follow(strip_wrappers(path), module, collisions.get(module))
        if not self._tables and not self._elsewhere:
            raise TrackerError("the model has no sharded EmbeddingBagCollection or EmbeddingCollection")

    def tables(self) -> dict[str, TableInfo]:
        return dict(self._tables)

    def drain(self) -> dict[str, Keys]:
        """Global keys touched since the last drain, of a ZCH table raw ids, those for which another row is served among
        them, per FQN (int64, sorted, unique); quiet tables are absent. A drain that raises takes nothing away.

        Raises:
            DeltaError: an id outside this rank's shard. TrackerError: another tracker took this one's place.
        """
        for check in self._checks:
            check()
        shared = {full: self._rows(full, np.array([zch.shared_slot])).tobytes() for full, zch in self._zch.items()}
        with self._lock:
            ids = {full: record.fold().cpu().numpy() for full, record in self._records.items() if record.count}
            found = {full: self._global_keys(full, local) for full, local in ids.items()}
            for record in self._records.values():
                record.clear()
        for full, zch in self._zch.items():
            changed = zch.changed(shared[full])
            found = merge_keys(found, {full: changed} if len(changed) else {})
        for full in self._elsewhere & found.keys():
            assert self._dynamic is not None
            self._dynamic.track(full, found.pop(full))
        return found

    def gather(self, fqn: str, keys: Keys) -> Rows:
        """Rows that the global `keys` hold now, float32 (n, dim), whatever storage the kernel uses by now. For raw ids
        of a ZCH table: the rows that the model serves for them now.
        """
        if (zch := self._zch.get(fqn)) is None:
            return self._rows(fqn, keys)
        zch.published(keys)
        return self._rows(fqn, zch.slots(keys))

    def hosts(self, fqn: str, keys: Keys) -> Mask:
        """Which global keys lie in this rank's shard of the table, which raw ids are dealt to it; bool (n,)."""
        if fqn in self._collisions:
            return self._dealt_here(fqn, keys)
        if fqn not in self._shards:
            return np.zeros(len(keys), np.bool_)
        row = keys - self._first_row(fqn)
        return (row >= 0) & (row < self._shards[fqn].rows)

    def release(self) -> None:
        """Follow the model no more, so that another source can. What was recorded may still be drained."""
        for undo in self._undo:
            undo()
        self._checks, self._undo = [], []

    def paused(self) -> AbstractContextManager[None]:
        """Lookups inside are not recorded: those of the calling thread."""
        return self._pause()

    def _follow(self, owner: str, module: Any, collision: Any) -> None:
        """Follow a sharded module. `collision`: what turns raw ids into its rows, for a ZCH module."""
        _expect(module, "_lookups", "_table_name_to_config", "module_sharding_plan")
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
                rows=config.num_embeddings if collision is None else None,
                dim=config.embedding_dim,
                sharding=plan.sharding_type,
                hosted=False,
            )
            if info.fqn not in self._elsewhere:
                self._admit(info, plan.compute_kernel, config.data_type)
        layouts = [self._layout(owner, collection, lookup) for lookup in lookups]
        if collision is None:
            self._listen(owner, module, layouts)
        else:
            for table in module._table_name_to_config:
                self._listen_to_remaps(fqn(owner, collection, table), collision, table)

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

    def _layout(self, owner: str, collection: Collection, lookup: Any) -> list[tuple[str, str]]:
        """(feature, table key) for each position of the features one lookup gets; notes where local rows live."""
        _expect(lookup, "grouped_configs", "_emb_modules")
        layout = []
        for group, kernel in zip(lookup.grouped_configs, lookup._emb_modules, strict=True):
            for index, table in enumerate(group.embedding_tables):
                key = fqn(owner, collection, table.name)
                layout += [(feature, key) for feature in table.feature_names]
                self._records[key] = IdLog(partial(_unique, table.local_rows))
                if key in self._elsewhere:
                    continue
                _expect(kernel, "flush", "split_embedding_weights")
                offsets = table.local_metadata.shard_offsets if table.local_metadata is not None else [0]
                self._shards[key] = _Shard(kernel=kernel, index=index, first_row=offsets[0], rows=table.local_rows)
                self._tables[key] = msgspec.structs.replace(self._tables[key], hosted=True)
        return layout

    def _listen(self, owner: str, module: Any, layouts: list[list[tuple[str, str]]]) -> None:
        """Register with TorchRec. A module calls back once per lookup, in the order of its lookups."""
        _expect(module, "register_post_lookup_tracker_fn", "post_lookup_tracker_fn")
        turns, calls, listens = threading.local(), 0, True  # an evaluation in another thread has turns of its own
        earlier = module.post_lookup_tracker_fn  # TorchRec keeps one tracker per module: pass lookups on

        def begin(*_: Any) -> None:
            turns.done = 0  # a forward that raised half-way must not shift the next one

        def looked_up(features: Any, *more: Any) -> None:
            nonlocal calls
            if earlier is not None:
                earlier(features, *more)
            done = getattr(turns, "done", 0)
            turns.done, calls = done + 1, calls + 1
            if listens:
                self._record(owner, layouts[done % len(layouts)], features)

        def check() -> None:
            if module.post_lookup_tracker_fn is not looked_up:
                raise TrackerError(
                    f"another tracker was registered on {owner!r} after this one, so lookups went unseen; make it first"
                )

        def end(*_: Any) -> None:
            nonlocal calls
            check()
            if not calls:
                raise TrackerError(f"{owner!r} looked up without telling its tracker; {VERSIONS}")
            calls = 0

        hooks = module.register_forward_pre_hook(begin), module.register_forward_hook(end)

        def undo() -> None:
            nonlocal listens
            listens = False  # for a later tracker that passes lookups on
            for hook in hooks:
                hook.remove()
            if module.post_lookup_tracker_fn is looked_up:
                module.post_lookup_tracker_fn = earlier

        self._undo.append(undo)
        module.register_post_lookup_tracker_fn(looked_up)
        self._checks.append(check)

    def _listen_to_remaps(self, key: str, collision: Any, table: str) -> None:
        """Hear of the raw ids of one ZCH table: TorchRec calls no tracker for them."""
        _expect(collision, "_managed_collision_modules", "_env")
        module = collision._managed_collision_modules[table]
        if not isinstance(module, MCHManagedCollisionModule):
            raise TrackerError(
                f"table {key!r} remaps ids by {type(module).__name__}; only MCHManagedCollisionModule can be followed"
            )
        _expect(module, "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_output_global_offset", "_zch_size")
        if module._input_hash_func is not None:
            raise TrackerError(
                f"table {key!r} hashes ids before it remaps them (input_hash_func), so its raw ids are not known where "
                "its rows are; hash them before the model, and publish under the hashes"
            )
        remap, log = module.remap.__func__, IdLog(partial(_unique, 0))

        def remapped(self_: Any, features: dict[str, Any], *more: Any, **named: Any) -> Any:
            if self_ is module and not self._pause:  # a copy of the model is another model
                with self._lock:
                    for jagged in features.values():
                        log.add(jagged.values().detach().clone())
            return remap(self_, features, *more, **named)

        def undo() -> None:
            if module.remap.__func__ is remapped:
                module.remap = MethodType(remap, module)

        self._undo.append(undo)
        module.remap = MethodType(remapped, module)
        self._records[key], self._zch[key], self._collisions[key] = log, ZchTable(module), collision

    def _record(self, owner: str, layout: list[tuple[str, str]], features: Any) -> None:
        """Note the ids of one lookup. Features are matched by position: one feature may feed two tables."""
        if self._pause:
            return
        if features.keys() != [feature for feature, _ in layout]:
            raise TrackerError(f"{owner!r} looked up {features.keys()}, expected {[name for name, _ in layout]}")
        values, ends = features.values(), features.offset_per_key()
        with self._lock:
            for position, (_, key) in enumerate(layout):
                if ends[position + 1] > ends[position]:
                    self._entry(key).add(values[ends[position] : ends[position + 1]].detach().clone())

    def _entry(self, key: str) -> IdLog:
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

    def _rows(self, key: str, numbers: Keys) -> Rows:
        """The table's rows of these numbers."""
        local = torch.from_numpy(numbers - self._first_row(key))
        with torch.no_grad():
            weights = self._weights(key)
            rows = weights.index_select(0, local.to(weights.device)).float().cpu()
        return rows.numpy()

    def _global_keys(self, key: str, local: Keys) -> Keys:
        """Local ids (sorted, at least one) plus the shard's offset; raw ids and dynamic tables' keys as they are."""
        if key in self._zch or key in self._elsewhere:
            return local
        shard, first_row = self._shard(key), self._first_row(key)
        if local[0] < 0 or local[-1] >= shard.rows:  # they are sorted
            raise DeltaError(
                f"id outside this rank's {shard.rows} rows from row {first_row}",
                table=key,
                key=int(local[0 if local[0] < 0 else -1]) + first_row,
                step=None,
            )
        return local + first_row if first_row else local

    def _dealt_here(self, key: str, raw_ids: Keys) -> Mask:
        """Which raw ids the model deals to this rank, by the operation that it deals them with itself."""
        environment, module = self._collisions[key]._env, self._zch[key].module
        size = -(-module.input_size() // module.buckets())
        counts, _, _, _, places = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.tensor([len(raw_ids)]),
            torch.tensor(raw_ids),
            bucketize_pos=False,
            sequence=True,
            block_sizes=torch.tensor([size]),
            total_num_blocks=torch.tensor([module.buckets()]),
            my_size=environment.world_size,
        )
        ranks = np.searchsorted(np.cumsum(counts.numpy()), places.numpy(), side="right")
        return np.asarray(ranks == environment.rank)


def _unique(rows: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Unique ids on the device they are on, sorted; `rows` as in delta.unique."""
    ids = torch.cat(parts).long()
    return torch.unique(ids) if ids.is_cuda else torch.from_numpy(unique(ids.numpy(), rows))


def _unwrap(lookup: Any) -> Any:
    while isinstance(lookup, DistributedDataParallel):
        lookup = lookup.module
    return lookup


def _expect(thing: Any, *names: str) -> None:
    """Refuse a torchrec whose objects lack what this module reads: better now than when rows are missing."""
    for name in names:
        if not hasattr(thing, name):
            raise TrackerError(f"{type(thing).__name__} has no {name!r}; {VERSIONS}")

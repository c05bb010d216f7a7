"""One rank with a real sharded model on gloo. Run by path in a forked process (fixture `ranks` of conftest.py).

Leaves what the task returned in `rank<r>.pickle`, or a traceback in `rank<r>.error`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pickle
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from deltaproof.reference import dynamic, tracker
from deltaproof.reference.contract import TableRef, strip_wrappers
from deltaproof.reference.delta import DeltaError
from deltaproof.reference.dynamic import CombinedSource, DynamicSource, DynamicSpec, IdLog
from deltaproof.reference.publisher import Publisher
from deltaproof.reference.settings import Settings
from deltaproof.reference.tracker import TorchRecSource, TrackerError

RANK_DEADLINE_S = 60
ROWS, FEATURES = 51, ("fa", "fb", "fc")
CPU = torch.device("cpu")
EXTREMES = (-(2**63), -(2**63) + 1, 2**63 - 1)  # taking a first row from the least int64 wraps round
RW, TW, DP = (
    row_wise(compute_kernel="fused"),
    lambda rank: table_wise(rank=rank, compute_kernel="fused"),
    data_parallel(),
)

# owner -> table -> (dim, features, sharding)
TABLES: dict[str, dict[str, tuple[int, list[str], Any]]] = {
    "ebc": {
        "a": (8, ["fa"], RW),
        "b": (4, ["fb", "fa"], TW(1)),
        "c": (4, ["fc"], DP),
        "e": (8, ["fa", "fb"], RW),  # fa feeds two row-wise tables and a table-wise one of this owner
        "fp16": (8, ["fc"], TW(0)),
    },
    "deep.ebc": {"a": (8, ["fb"], TW(0))},  # same table name as ebc's, other owner
    "ec": {"a": (8, ["fa"], RW), "d": (8, ["fa"], TW(0))},
}


class Model(nn.Module):
    def __init__(self, tables: dict[str, Any]) -> None:
        super().__init__()
        self.deep = nn.Module()
        self.owners = list(tables)
        for owner, specs in tables.items():
            parent, leaf = (self.deep, "ebc") if owner.startswith("deep.") else (self, owner)
            config: Any = torchrec.EmbeddingConfig if owner == "ec" else torchrec.EmbeddingBagConfig
            configs = [
                config(
                    name=name,
                    embedding_dim=dim,
                    num_embeddings=ROWS,
                    feature_names=features,
                    data_type=DataType.FP16 if name == "fp16" else DataType.FP32,
                )
                for name, (dim, features, _) in specs.items()
            ]
            kind: Any = torchrec.EmbeddingCollection if owner == "ec" else torchrec.EmbeddingBagCollection
            setattr(parent, leaf, kind(tables=configs, device=CPU))

    def forward(self, features: Any) -> Any:
        pooled = sum(self.get_submodule(owner)(features).values().sum() for owner in self.owners if owner != "ec")
        if "ec" not in self.owners:
            return pooled
        return pooled + sum(jagged.values().sum() for jagged in self.get_submodule("ec")(features).values())


def shard(tables: dict[str, Any], world_size: int) -> Any:
    torch.manual_seed(0)
    model = Model(tables)
    fused = [weight for name, weight in model.named_parameters() if not name.endswith(".c.weight")]
    apply_optimizer_in_backward(torch.optim.SGD, fused, {"lr": 0.1})
    sharders: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plan = {
        owner: construct_module_sharding_plan(
            model.get_submodule(owner),
            {name: sharding for name, (_, _, sharding) in specs.items()},
            sharder=sharders[owner == "ec"],
            local_size=1,
            world_size=world_size,
            device_type="cpu",
        )
        for owner, specs in tables.items()
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=CPU, plan=ShardingPlan(plan), sharders=sharders)


def batch(rank: int, step: int, quiet: tuple[str, ...] = ()) -> dict[str, tuple[list[int], list[int]]]:
    """Feature -> (lengths of 3 bags, ids). The parent draws the same ones."""
    rng = np.random.default_rng([rank, step])
    drawn = {}
    for feature in FEATURES:
        lengths = rng.integers(0, 4, 3) * (feature not in quiet)
        drawn[feature] = (lengths.tolist(), rng.integers(0, ROWS, lengths.sum()).tolist())
    return drawn


class Rank:
    """A model of TABLES with its optimizer and a source that follows it."""

    def __init__(self, rank: int, world_size: int, tables: dict[str, Any] = TABLES) -> None:
        self.rank = rank
        self.model = shard(tables, world_size)
        dense = [p for n, p in self.model.named_parameters() if n.endswith(".c.weight")]
        self.dense = torch.optim.SGD(dense or [torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def forward(self, step: int, quiet: tuple[str, ...] = ()) -> Any:
        drawn = batch(self.rank, step, quiet)
        return self.model(
            torchrec.KeyedJaggedTensor(
                keys=list(FEATURES),
                lengths=torch.tensor([n for feature in FEATURES for n in drawn[feature][0]]),
                values=torch.tensor([n for feature in FEATURES for n in drawn[feature][1]], dtype=torch.int64),
            )
        )

    def train(self, step: int, quiet: tuple[str, ...] = ()) -> None:
        self.dense.zero_grad()
        self.forward(step, quiet).backward()
        self.dense.step()

    def weights(self) -> dict[str, tuple[int, np.ndarray]]:
        """FQN -> (first row, rows on this rank), from the state dict: not through the tracker."""
        found = {}
        for name, value in self.model.state_dict().items():
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            if shards is None:
                found[name.removesuffix(".weight")] = (0, value.detach().float().numpy().copy())
            for part in shards or ():
                rows = part.tensor.detach().float().numpy().copy()
                found[name.removesuffix(".weight")] = (part.metadata.shard_offsets[0], rows)
        return found


def follow(rank: int, world_size: int, folder: Path) -> Any:
    """Two intervals of two steps: what was drained, gathered, and what the state dict held then."""
    dynamic.FOLD_AT_IDS = 3  # fold duplicates all the time: what comes out must not change
    run = Rank(rank, world_size)
    source = TorchRecSource(run.model)
    intervals = []
    for steps in ((1, 2), (3, 4)):
        before = run.weights()
        for step in steps:
            run.train(step)
        drained = dict(source.drain())
        rows = {fqn: source.gather(fqn, keys) for fqn, keys in drained.items()}
        intervals.append((drained, rows, before, run.weights()))
    infos = {fqn: (info.sharding, info.hosted, info.dim, info.feature_names) for fqn, info in source.tables().items()}
    asked = np.array([*range(-2, ROWS + 2), *EXTREMES], np.int64)
    hosted = {fqn: asked[source.hosts(fqn, asked)].tolist() for fqn in (*infos, "ec.embeddings.unknown")}
    return infos, intervals, hosted


def live(rank: int, world_size: int, folder: Path) -> Any:
    """Evaluation, a quiet feature, a forward that raises half-way, replaced storage, an id outside the shard."""
    run = Rank(rank, world_size)
    source = TorchRecSource(run.model)
    seen: dict[str, Any] = {}
    try:
        with source.paused():
            with source.paused():
                run.forward(1)
            run.forward(2)
            raise ZeroDivisionError
    except ZeroDivisionError:
        seen["evaluated"] = source.drain()
    run.train(3, quiet=("fb",))
    seen["quiet"] = source.drain()
    ebc = run.model.get_submodule("_dmp_wrapped_module.ebc")
    lookup, broken = ebc._lookups[1], [True]

    def break_once(*_: Any) -> None:
        if broken.pop():
            raise RuntimeError("injected")

    hook = lookup.register_forward_pre_hook(break_once)
    try:
        run.forward(4)
    except RuntimeError as error:
        seen["broke"] = str(error)
    hook.remove()
    source.drain()
    run.train(5)
    seen["after"] = source.drain()
    key = next(iter(seen["after"]["ebc.embedding_bags.e"]))
    keys = np.array([key], np.int64)
    before = source.gather("ebc.embedding_bags.e", keys)
    for module in [module for lookup in ebc._lookups for module in lookup.modules()]:
        for name in ("weights_host", "weights_dev"):
            if isinstance(storage := getattr(module, name, None), torch.Tensor) and storage.numel():
                storage.data = storage.data.clone() + 1  # as a restore or a growing table would
    seen["grown"] = source.gather("ebc.embedding_bags.e", keys) - before
    source._entry("ebc.embedding_bags.a").add(torch.tensor([26]))
    source._entry("ebc.embedding_bags.c").add(torch.tensor([1, 3]))
    for attempt in ("outside", "outside again"):
        try:
            source.drain()
        except DeltaError as error:
            seen[attempt] = f"{type(error).__name__}: {error}"
    source._entry("ebc.embedding_bags.a").clear()
    seen["kept"] = source.drain()
    source._entry("ebc.embedding_bags.a").add(torch.tensor([5, -3]))
    try:
        source.drain()
    except DeltaError as error:
        seen["negative"] = str(error)
    return seen


ZCH_ROWS, RAW_IDS = 12, 30


class ZchModel(nn.Module):
    """Two pooled ZCH tables in one group and a sequence one; more raw ids than rows, of which each shard shares one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        specs = {
            "mc_ebc": (torchrec.EmbeddingBagConfig, torchrec.EmbeddingBagCollection, {"t": ["fa"], "u": ["fb", "fc"]}),
            "mc_ec": (torchrec.EmbeddingConfig, torchrec.EmbeddingCollection, {"t": ["fc"]}),
        }
        for owner, (config, kind, tables) in specs.items():
            configs = [
                config(name=name, embedding_dim=4, num_embeddings=ZCH_ROWS, feature_names=features)
                for name, features in tables.items()
            ]
            options = {"eviction_policy": LFU_EvictionPolicy(), "eviction_interval": 2} | options
            remaps: Any = {name: MCHManagedCollisionModule(ZCH_ROWS, CPU, **options) for name in tables}
            wrapper: Any = (
                ManagedCollisionEmbeddingBagCollection if owner == "mc_ebc" else ManagedCollisionEmbeddingCollection
            )
            setattr(self, owner, wrapper(kind(tables=configs, device=CPU), ManagedCollisionCollection(remaps, configs)))

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Per feature and owner, one row for each id of a batch whose bags hold one id each."""
        pooled, sequence = (self.get_submodule(owner)(features)[0] for owner in ("mc_ebc", "mc_ec"))
        rows = {f"mc_ebc {feature}": value for feature, value in pooled.to_dict().items()}
        return rows | {f"mc_ec {feature}": jagged.values() for feature, jagged in sequence.items()}


def shard_zch(world_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = ZchModel(**options)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    sharders: Any = [ManagedCollisionEmbeddingBagCollectionSharder(), ManagedCollisionEmbeddingCollectionSharder()]
    plan = {
        owner: construct_module_sharding_plan(
            model.get_submodule(owner),
            dict.fromkeys(tables, RW),
            sharder=sharder,
            local_size=1,
            world_size=world_size,
            device_type="cpu",
        )
        for owner, tables, sharder in zip(("mc_ebc", "mc_ec"), (["t", "u"], ["t"]), sharders, strict=True)
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=CPU, plan=ShardingPlan(plan), sharders=sharders)


def raw_ids() -> np.ndarray:
    """All over int64, the ends of it and small ones among them; never -1."""
    spread = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, RAW_IDS - 6)
    return np.array([*spread, 0, 5, -2, -(2**63), 2**63 - 2, 2**63 - 1], np.int64)


def zch(rank: int, world_size: int, folder: Path) -> Any:
    """Intervals of training: what this rank publishes after each, and what the model serves for every raw id then."""
    model = shard_zch(world_size)
    tracker = TorchRecSource(model)
    source = CombinedSource([tracker])
    pool, draw = raw_ids(), np.random.default_rng([3, rank])

    def forward(ids: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        values = torch.from_numpy(np.concatenate([ids[feature] for feature in FEATURES]))
        answer: dict[str, torch.Tensor] = model(
            torchrec.KeyedJaggedTensor(
                keys=list(FEATURES), lengths=torch.ones(len(values), dtype=torch.int32), values=values
            )
        )
        return answer

    found = []
    for interval in range(12):
        few = draw.choice(pool, 8)
        for _ in range(interval % 3):
            sum(row.square().sum() for row in forward({f: draw.choice(few, 6) for f in FEATURES}).values()).backward()  # type: ignore[union-attr]
        with mock.patch.object(tracker, "_weights", side_effect=MemoryError), contextlib.suppress(MemoryError):
            raise AssertionError(f"drained without its rows: {source.drain()}")
        drained = source.drain()  # has all that the attempt which raised would have given
        published = {fqn: (keys, source.gather(fqn, keys)) for fqn, keys in drained.items()}
        model.eval()
        with source.paused(), torch.no_grad():
            served = {key: rows.numpy().copy() for key, rows in forward(dict.fromkeys(FEATURES, pool)).items()}
        model.train()
        found.append((few, published, served))
    copied = copy.deepcopy(model.module.mc_ebc._managed_collision_collection._managed_collision_modules["t"])
    copied.remap({"t": torchrec.JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))})
    hosted = {fqn: source.hosts(fqn, pool) for fqn in (*source.tables(), "unknown")}
    return found, hosted, source.drain(), source.tables()


def elsewhere(rank: int, world_size: int, folder: Path) -> Any:
    """Table `d` is declared dynamic: its ids go to the other source, as they are, and its rows come from there."""
    run = Rank(rank, world_size)
    rows = StoredRows()
    dynamic_source = DynamicSource([DynamicSpec(TableRef("ec", "ec", "d"), rows, ("fa",))])
    source = CombinedSource([TorchRecSource(run.model, dynamic_source), dynamic_source])
    run.train(1)
    with source.paused():
        run.forward(2)
    drained = dict(source.drain())
    again = source.drain()
    read = source.gather("ec.embeddings.d", np.array([7, 8]))
    pair = shard({"ebc": {name: (8, [feature], RW) for name, feature in (("a", "fa"), ("b", "fb"))}}, world_size)
    beside = TorchRecSource(pair, DynamicSource([DynamicSpec(TableRef("ebc", "ebc", "a"), rows, ("fa",))])).tables()
    return drained, again, read, sorted(source.tables()), {fqn: info.hosted for fqn, info in beside.items()}


class StoredRows:
    """A dynamic table that found key 7 alone."""

    dim = 2

    def flush(self) -> None:
        pass

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full((len(keys), 2), 7, np.float32), keys == 7

    def pop_evicted(self) -> np.ndarray:
        return np.empty(0, np.int64)


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def quiet(rank: int, world_size: int, folder: Path) -> Any:
    """Collectives of a training step without a tracker and with one, and of a drain with everything it drained."""
    run = Rank(rank, world_size)
    for step in (1, 2, 3):
        run.train(step)  # DistributedDataParallel arranges its buckets anew after its first steps
    counts = []
    with Collectives() as mode:
        run.train(4)
    counts.append(mode.count)
    source = TorchRecSource(run.model)
    with Collectives() as mode:
        run.train(5)
    counts.append(mode.count)
    with Collectives() as mode:
        for fqn, keys in source.drain().items():
            source.gather(fqn, keys)
            source.hosts(fqn, keys)
    counts.append(mode.count)
    return counts


def again(rank: int, world_size: int, folder: Path) -> Any:
    """What two sources see, each released before the next one, and what is left on the model afterwards."""
    run, model, found = Rank(rank, world_size), shard_zch(world_size), list[Any]()
    ids = torch.from_numpy(raw_ids()[:24])
    features = torchrec.KeyedJaggedTensor(list(FEATURES), ids, lengths=torch.ones(24, dtype=torch.int32))
    for of, step in (run.model, run.train), (model, lambda _: model(features)):
        half = nn.ModuleList([of, Model({"ec": {"x": (4, ["fa"], RW)}})])  # whose second part is not sharded
        for number in (1, 2):
            with contextlib.suppress(TrackerError):
                TorchRecSource(half)
            source = TorchRecSource(of)
            step(number)
            seen = source.drain()
            step(number)
            source.release()
            step(3)
            found.append((seen, source.drain(), source.drain()))
        left = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in of.modules()]
        found.append((sum(left), [m for m in of.modules() if getattr(m, "post_lookup_tracker_fn", None)]))
    return found


def beside(rank: int, world_size: int, folder: Path) -> Any:
    """TorchRec's own tracker alone, made before ours, and made after ours: what each has seen."""
    tables = {"ebc": {"a": (8, ["fa"], RW), "b": (4, ["fb"], TW(1))}, "ec": {"d": (8, ["fc"], TW(0))}}
    found: dict[str, Any] = {}
    for order in ("alone", "before", "after"):
        run = Rank(rank, world_size, tables)
        source = TorchRecSource(run.model) if order == "after" else None
        theirs = ModelDeltaTrackerTrec(run.model)
        source = TorchRecSource(run.model) if order == "before" else source
        ours: Any = None
        try:
            for step in (1, 2):
                run.train(step)
                theirs.step()
            ours = source.drain() if source is not None else None
        except TrackerError as error:
            ours = str(error)
        found[order] = ({strip_wrappers(fqn): ids.tolist() for fqn, ids in theirs.get_unique_ids().items()}, ours)
    return found


class FolderClient:
    """A client, its project and its view in one; the view exists once its file does, so that ranks share it."""

    pk_field, sk_field, embedding_field, embedding_field_type = "embedding_name", "key_id", "embedding", "ARRAY<FLOAT>"

    def __init__(self, folder: Path) -> None:
        self.mark, self.stored, self.pending = folder / "view", {}, list[Any]()  # type: ignore[var-annotated]

    def get_project(self, name: str) -> Any:
        return self

    def get_entity(self, name: str) -> Any:
        return self

    def get_dynamic_embedding_feature_view(self, name: str) -> Any:
        return self if self.mark.exists() else None

    def create_dynamic_embedding_feature_view(self, **how: Any) -> None:
        self.mark.touch()

    def write_features_arrow(self, batch: Any, version: str, write_mode: str, ts: int) -> None:
        self.pending.append(batch)

    def write_flush(self) -> dict[str, Any]:
        batches, self.pending = self.pending, []
        rows = [row for batch in batches for row in batch.to_pylist()]
        self.stored |= {(row["embedding_name"], row["key_id"]): row["embedding"] for row in rows}
        counts = {"total_batches": len(batches), "failed_batches": 0, "total_records": len(rows)}
        return counts | {"success_records": len(rows), "failed_records": 0, "errors": []}


def publish(rank: int, world_size: int, folder: Path) -> Any:
    """The four lines of a training loop, with ranks that take unequal numbers of steps' worth of ids."""
    run = Rank(rank, world_size)
    before = run.weights()
    client = FolderClient(folder)
    settings = Settings(project="p", view="v", version="v1", every_steps=3, batch_size=7)
    with Publisher.for_model(run.model, settings, client) as publisher:
        publisher.start()
        for step in range(1, 6):
            run.train(step)
            publisher.after_step(step)
        publisher.finish(5)
    return client.stored, before, run.weights()


def run_once(model: Any) -> None:
    ones = torch.ones(3, dtype=torch.int32)
    model(torchrec.KeyedJaggedTensor(keys=list(FEATURES), lengths=ones, values=torch.tensor([5, 6, 7])))


def refuse(rank: int, world_size: int, folder: Path) -> Any:
    """Models that cannot be followed, each with the message it gets."""
    one = {"ebc": {"a": (8, ["fa"], RW)}}
    column = {"ebc": {"a": (8, ["fa"], column_wise(ranks=[0]))}}
    twice = nn.ModuleDict({"module": nn.ModuleDict({"x": shard(one, 1)}), "x": shard(one, 1)})
    collision = shard(one, 1)
    collision._managed_collision_collection = nn.Module()
    quantised = shard(one, 1)
    plans = quantised.get_submodule("_dmp_wrapped_module.ebc").module_sharding_plan
    plans["a"].compute_kernel = "key_value"
    models = {
        "column": shard(column, 1),
        "unsharded": Model(one),
        "none": nn.Linear(1, 1),
        "twice": twice,
        "collision": collision,
        "kernel": quantised,
        "unsharded zch": ZchModel(),
        "hashed": shard_zch(1, input_hash_func=lambda ids, _: ids),
        "hash zch": shard_zch(1),
    }
    of_other_kind = models["hash zch"].module.mc_ebc._managed_collision_collection._managed_collision_modules
    of_other_kind["t"] = HashZchManagedCollisionModule(ZCH_ROWS, CPU, total_num_buckets=1)
    messages: dict[str, Any] = {}
    dynamic.FOLD_AT_IDS = 8
    log, counts = IdLog(lambda parts: torch.unique(torch.cat(parts))), []
    for _ in range(50):
        log.add(torch.tensor([1, 2, 3, 2]))
        counts.append(log.count)
    messages["folded"] = (max(counts), log.fold().tolist(), log.count)
    with FakeTensorMode(shape_env=ShapeEnv()):  # a GPU's tensors without a GPU: shape and device alone
        ids = tracker._unique(8, [torch.empty(3, dtype=torch.int32, device="cuda")])
        messages["folded on a GPU"] = (ids.device.type, ids.dtype == torch.int64)
    log.clear()
    messages["cleared"] = log.count
    for name, model in models.items():
        try:
            TorchRecSource(model)
        except TrackerError as error:
            messages[name] = str(error)
    tracked = shard(one, 1)
    source = TorchRecSource(tracked)
    tracked.get_submodule("_dmp_wrapped_module.ebc").register_post_lookup_tracker_fn(print)
    for attempt in (source.drain, lambda: run_once(tracked)):
        try:
            attempt()
        except TrackerError as error:
            messages.setdefault("replaced", []).append(str(error))
    silent = shard(one, 1)
    source = TorchRecSource(silent)
    run_once(silent)
    ebc = silent.get_submodule("_dmp_wrapped_module.ebc")
    ebc.compute_and_output_dist = lambda ctx, features: ebc.output_dist(ctx, ebc.compute(ctx, features))
    try:
        run_once(silent)
    except TrackerError as error:
        messages["silent"] = str(error)
    try:
        source.gather("ebc.embedding_bags.b", np.array([1]))
    except TrackerError as error:
        messages["elsewhere"] = str(error)
    return messages


def without(name: str, part: str = "_dmp_wrapped_module.ebc") -> Any:
    """A sharded model as a torchrec would make it whose class of `part` has no `name`."""
    model = shard({"ebc": {"a": (8, ["fa"], RW)}}, 1)
    ebc: Any = model.get_submodule("_dmp_wrapped_module.ebc")
    thing = {"lookup": ebc._lookups[0], "kernel": ebc._lookups[0]._emb_modules[0]}.get(part, ebc)

    def absent(_: Any) -> Any:
        raise AttributeError(name)

    thing._modules.pop(name, None)
    thing.__class__ = type(type(thing).__name__, (type(thing),), {name: property(absent)})
    return model


def signatures(rank: int, world_size: int, folder: Path) -> Any:
    """How torchrec's releases call a tracker, and interfaces that none of the supported ones has."""
    model = shard({"ebc": {"a": (8, ["fa"], RW)}}, 1)
    source = TorchRecSource(model)
    ebc: Any = model.get_submodule("_dmp_wrapped_module.ebc")
    features = torchrec.KeyedJaggedTensor(
        keys=["fa"], lengths=torch.ones(2, dtype=torch.int32), values=torch.tensor([7, 3])
    )
    more: dict[str, tuple[Any, ...]] = {
        "1.3 and 1.4": (torch.zeros(2),),
        "1.5 to 1.9": (torch.zeros(2), ebc, None),
        "1.6 to 1.9, of managed collision": (torch.zeros(2), None, torch.zeros(2), None),
    }
    seen = {}
    for releases, arguments in more.items():
        ebc.post_lookup_tracker_fn(features, *arguments)
        seen[releases] = source.drain()["ebc.embedding_bags.a"].tolist()
    names = {
        "module": ["_lookups", "_table_name_to_config", "module_sharding_plan"],
        "tracked module": ["register_post_lookup_tracker_fn", "post_lookup_tracker_fn"],
        "lookup": ["grouped_configs", "_emb_modules"],
        "kernel": ["flush", "split_embedding_weights"],
    }
    refused = {}
    for part, absent in names.items():
        for name in absent:
            try:
                TorchRecSource(without(name, part))
            except TrackerError as error:
                refused[name] = str(error)
    return seen, names, refused, torchrec.__version__, threads()


def threads() -> list[str]:
    """An evaluation in another thread between the two lookups of one forward: what is tracked then."""
    model = shard({"ebc": {"a": (8, ["fa"], RW), "b": (4, ["fb"], TW(0))}}, 1)
    source = TorchRecSource(model)
    ebc: Any = model.get_submodule("_dmp_wrapped_module.ebc")
    lookups = [
        torchrec.KeyedJaggedTensor(keys=[key], lengths=torch.ones(1, dtype=torch.int32), values=torch.tensor([7]))
        for key in [lookup.grouped_configs[0].embedding_tables[0].feature_names[0] for lookup in ebc._lookups]
    ]

    def evaluate() -> None:
        with source.paused():
            ebc.post_lookup_tracker_fn(lookups[0])

    ebc.post_lookup_tracker_fn(lookups[0])
    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join(RANK_DEADLINE_S)
    ebc.post_lookup_tracker_fn(lookups[1])
    return sorted(source.drain())


def example(rank: int, world_size: int, folder: Path) -> Any:
    """examples/train.py, with the environment that torchrun would give it."""
    os.environ.update(json.loads((folder / "environment.json").read_text()))
    if reader := sys.modules.get("alibabacloud_credentials.utils.auth_util"):
        importlib.reload(reader)  # it read the environment when the forkserver imported it
    sys.argv = ["train.py", "--steps", "12"]
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train.py"), run_name="__main__")


def run(task: str, rank: int, world_size: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    out = Path(folder) / f"rank{rank}"
    tasks: dict[str, Callable[[int, int, Path], Any]] = {
        "follow": follow,
        "live": live,
        "publish": publish,
        "refuse": refuse,
        "zch": zch,
        "elsewhere": elsewhere,
        "quiet": quiet,
        "again": again,
        "beside": beside,
        "signatures": signatures,
        "example": example,
    }
    try:
        if task != "example":
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        result = tasks[task](rank, world_size, Path(folder))
        out.with_suffix(".pickle").write_bytes(pickle.dumps(result))
        if task != "example":
            dist.destroy_process_group()
    except BaseException:
        out.with_suffix(".error").write_text(traceback.format_exc())
        raise


if __name__ == "rank":
    run(**arguments)  # type: ignore[name-defined]  # noqa: F821 - set by runpy

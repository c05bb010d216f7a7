"""What following a TorchRec model costs: dumps against a bare gather of the same rows, training steps with and without.

Dump: a sharded EmbeddingBagCollection on the CPU looks up random ids, and `Dumper.dump` turns them into an Arrow delta;
on the other side, `tensor.index_select` copies the very same rows. Steps: a model (eight row-wise tables, a small dense
part, SGD) trains each batch with the tracker on it and with the tracker taken off. One process, one thread. The machine
may be shared, so both sides take turns, times are CPU times, and what is compared is medians over rounds of one run.
What a step or a dump sends to a process group is counted by PyTorch's dispatcher.

Goals (issue 4): a dump moves at least 0.50 of the gather's bytes/s; a tracked step takes at most 1.10 of a bare one,
and has no collective more. Exit code 1 when one is missed (`--report-only`, `--quick`: 0).
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from deltaproof.reference.dumper import Dumper
from deltaproof.reference.settings import Settings
from deltaproof.reference.tracker import TorchRecSource

DUMP_GOAL, STEP_GOAL = 0.50, 1.10
#: dim, rows of the table, ids looked up between two dumps
DUMPS = [(16, 1_000_000, 500_000), (16, 10_000_000, 1_000_000), (128, 1_000_000, 300_000)]
TABLES, TABLE_ROWS, DIM, BATCH, IDS_PER_BAG = 8, 200_000, 16, 2048, 4
DUMP_EVERY = 50  # steps
SETTINGS = Settings(project="bench", view="bench", version="v1", every_steps=DUMP_EVERY)
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables `t0`, `t1`, … of one EmbeddingBagCollection, fed by features of the same names, and a dense part."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        configs = [
            torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"t{i}"])
            for i in range(tables)
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=configs, device=CPU)
        self.dense = nn.Sequential(nn.Linear(tables * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.dense(self.ebc(features).values()).square().mean()
        return loss


def shard(tables: int, rows: int, dim: int) -> DistributedModelParallel:
    torch.manual_seed(0)
    model, sharder = Model(tables, rows, dim), EmbeddingBagCollectionSharder()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    plan = construct_module_sharding_plan(
        model.ebc,
        {f"t{i}": row_wise(compute_kernel="fused") for i in range(tables)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    sharders: list[ModuleSharder[nn.Module]] = [sharder]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=sharders)


def batch(draw: np.random.Generator, tables: int, rows: int, bags: int, ids_per_bag: int) -> Any:
    return torchrec.KeyedJaggedTensor(
        keys=[f"t{i}" for i in range(tables)],
        values=torch.from_numpy(draw.integers(0, rows, tables * bags * ids_per_bag)),
        lengths=torch.full((tables * bags,), ids_per_bag, dtype=torch.int32),
    )


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def collectives(work: Callable[[], object]) -> int:
    with Collectives() as counted:
        work()
    return counted.count


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure_dump(dim: int, rows: int, ids: int, rounds: int) -> tuple[float, float, float]:
    """Bytes/s of the dump and of the gather, medians, and the median of the rounds' ratios."""
    model = shard(1, rows, dim)
    source = TorchRecSource(model)
    dumper, draw = Dumper(source, SETTINGS, 0, 1), np.random.default_rng(1)
    (fqn,) = source.tables()
    dumped, gathered = list[float](), list[float]()
    for number in range(rounds + 1):
        features = batch(draw, 1, rows, ids, 1)
        with torch.no_grad():
            model.module.ebc(features).wait()
        keys, weights = torch.unique(features.values()), source._weights(fqn)
        sides: list[tuple[list[float], Callable[[], object]]] = [
            (dumped, partial(dumper.dump, number)),
            (gathered, partial(weights.index_select, 0, keys)),
        ]
        for times, work in sides[:: 1 if number % 2 else -1]:
            taken = seconds(work)
            if number:  # the first round warms up
                times.append(len(keys) * dim * 4 / taken)
    ratios = [ours / theirs for ours, theirs in zip(dumped, gathered, strict=True)]
    return statistics.median(dumped), statistics.median(gathered), statistics.median(ratios)


class Trainer:
    """A model that trains, with its tracker or, for a while, without: the same weights at the same addresses."""

    def __init__(self) -> None:
        self.model = shard(TABLES, TABLE_ROWS, DIM)
        self.optimizer = torch.optim.SGD(self.model.module.dense.parameters(), lr=0.1)
        ebc: Any = self.model.module.ebc
        self._ebc, self._names = ebc, ("post_lookup_tracker_fn", "_forward_pre_hooks", "_forward_hooks")
        bare = [copy.copy(getattr(ebc, name)) for name in self._names]
        self.source = TorchRecSource(self.model)
        self._states = {False: bare, True: [getattr(ebc, name) for name in self._names]}

    def track(self, tracked: bool) -> None:
        for name, value in zip(self._names, self._states[tracked], strict=True):
            setattr(self._ebc, name, value)

    def step(self, features: Any) -> None:
        self.optimizer.zero_grad()
        self.model(features).backward()
        self.optimizer.step()


def measure_steps(steps: int) -> tuple[float, float, float, float]:
    """Milliseconds of a bare and of a tracked step (medians), the median ratio, and the ratio of all steps' time."""
    trainer, draw = Trainer(), np.random.default_rng(2)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(steps + 5):
        features = batch(draw, TABLES, TABLE_ROWS, BATCH, IDS_PER_BAG)
        for tracked in (False, True) if number % 2 else (True, False):
            trainer.track(tracked)
            taken = seconds(partial(trainer.step, features))
            if number >= 5:
                times[tracked].append(1000 * taken)
        trainer.track(True)
        if number % DUMP_EVERY == 0:
            trainer.source.drain()
    bare_ms, tracked_ms = times[False], times[True]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(tracked_ms, bare_ms, strict=True))
    return statistics.median(bare_ms), statistics.median(tracked_ms), ratio, sum(tracked_ms) / sum(bare_ms)


def count_collectives() -> tuple[int, int, int]:
    """Those of a bare step, of a tracked step, of a dump."""
    trainer, draw = Trainer(), np.random.default_rng(3)
    features = batch(draw, TABLES, TABLE_ROWS, BATCH, IDS_PER_BAG)
    for _ in range(3):
        trainer.step(features)
    trainer.track(False)
    bare = collectives(partial(trainer.step, features))
    trainer.track(True)
    tracked = collectives(partial(trainer.step, features))
    dumper = Dumper(trainer.source, SETTINGS, 0, 1)
    return bare, tracked, collectives(partial(dumper.dump, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, small tables: to see that it runs; exit 0")
    parser.add_argument("--rounds", type=int, help="measured dumps, default 21 (--quick: 3)")
    parser.add_argument("--steps", type=int, help="measured training steps, default 300 (--quick: 10)")
    parser.add_argument("--report-only", action="store_true", help="exit 0 even when a goal is missed")
    options = parser.parse_args()
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            print(" dim      rows       ids      dump  index_select  ratio")
            for dim, rows, ids in DUMPS:
                scale = 20 if options.quick else 1
                rounds = options.rounds or (3 if options.quick else 21)
                dumped, gathered, ratio = measure_dump(dim, rows // scale, ids // scale, rounds)
                print(
                    f"{dim:4d}  {rows // scale:8.0e}  {ids // scale:8.0e}  {dumped / 1e9:5.2f} GB/s  "
                    f"{gathered / 1e9:5.2f} GB/s  {ratio:5.2f}{'' if ratio >= DUMP_GOAL else ' !'}",
                    flush=True,
                )
                if ratio < DUMP_GOAL:
                    missed.append(f"dump, dim {dim}, {rows:.0e} rows: {ratio:.2f}, goal at least {DUMP_GOAL:.2f}")
            steps = options.steps or (10 if options.quick else 300)
            bare, tracked, ratio, whole = measure_steps(steps)
            print(f"step: {bare:.2f} ms bare, {tracked:.2f} ms tracked, ratio {ratio:.3f}, of all steps {whole:.3f}")
            for what, value in (("median", ratio), ("all steps", whole)):
                if value > STEP_GOAL:
                    missed.append(f"tracked step ({what}): {value:.3f}, goal at most {STEP_GOAL:.2f}")
            of_bare, of_tracked, of_dump = count_collectives()
            print(f"collectives: {of_bare} in a bare step, {of_tracked} in a tracked one, {of_dump} in a dump")
            if of_tracked != of_bare or of_dump or not of_bare:
                missed.append(f"collectives: {of_bare}, {of_tracked}, {of_dump}; goal: as many, and none in a dump")
        finally:
            dist.destroy_process_group()
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed and not options.quick and not options.report_only else 0


if __name__ == "__main__":
    sys.exit(main())

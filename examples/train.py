"""Train a small sharded model, publish every row it changes, and survive `kill -9`.

Two terminals (`source .venv/bin/activate` in both):

deltaproof serve                                  # prints the address of a fake store

export DELTAPROOF_ENDPOINT=127.0.0.1:PORT         # that address; leave it out for the real service
export ALIBABA_CLOUD_ACCESS_KEY_ID=deltaproof ALIBABA_CLOUD_ACCESS_KEY_SECRET=deltaproof
export FEATUREDB_USERNAME=any FEATUREDB_PASSWORD=any
torchrun --standalone --nproc-per-node 2 examples/train.py --steps 50 --checkpoints DIR

Kill it and start it again, with another number of ranks if you like: it continues from the newest checkpoint in DIR,
and the store ends equal to the model. The publisher's settings are in train.toml (`--config` names another file).
torch's warnings under torchrun are normal. Each rank ends with a line that says which step the store has acknowledged.
"""

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torchrec
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from deltaproof.reference.publisher import Publisher
from deltaproof.reference.settings import Settings

ROWS, DIM, BATCH = 10_000, 16, 64
CPU = torch.device("cpu")


class TwoTowers(torch.nn.Module):
    """Score of a user and an item: the dot product of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"{name}_id"])
            for name in ("user", "item")
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables, device=CPU)

    def forward(self, features: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ebc(features)
        return (rows["user_id"] * rows["item_id"]).sum(dim=1)


def sharded_model() -> DistributedModelParallel:
    """Users split by row over the ranks, items on the last rank; SGD inside the backward pass."""
    model, sharder, world_size = TwoTowers(), EmbeddingBagCollectionSharder(), dist.get_world_size()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    shardings = {"user": row_wise(compute_kernel="fused"), "item": table_wise(world_size - 1, compute_kernel="fused")}
    plan = construct_module_sharding_plan(model.ebc, shardings, sharder, device_type="cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env, CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder])


def batch() -> torchrec.KeyedJaggedTensor:
    """One user and one item per sample; few of them are popular."""
    ids = (ROWS * torch.rand(2 * BATCH) ** 4).long()
    return torchrec.KeyedJaggedTensor(["user_id", "item_id"], ids, lengths=torch.ones(2 * BATCH, dtype=torch.int64))


def save(folder: Path, step: int, model: torch.nn.Module, publisher: Publisher) -> None:
    """A checkpoint of model and publisher, whole or not there: its folder gets its name when all ranks have written."""
    unfinished = folder / f"unfinished-{step:09d}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a job that was killed here; it may have had more ranks
    dist.barrier()
    save_sharded({"model": model.state_dict()}, checkpoint_id=unfinished)
    torch.save(publisher.state_dict(step), unfinished / f"publisher-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step:09d}")
    dist.barrier()


def restore(folder: Path, model: torch.nn.Module, publisher: Publisher) -> int:
    """Load the newest checkpoint; returns the step it was made after, 0 without one."""
    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        publisher.start_over()  # what the version holds, if anything, was published by a job that saved nothing
        return 0
    weights = model.state_dict()
    load_sharded({"model": weights}, checkpoint_id=newest)
    model.load_state_dict(weights)
    states = [torch.load(path, weights_only=True) for path in newest.glob("publisher-*.pt")]
    publisher.load_state_dict(states)  # of all ranks, however many there are now
    return int(newest.name.removeprefix("step-"))


def main() -> None:
    """Entry point of one rank."""
    parser = argparse.ArgumentParser(description="trains and publishes; see the top of this file")
    parser.add_argument("--steps", type=int, default=50, help="last step, counted from the very first start")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("train.toml"), help="TOML settings")
    parser.add_argument("--checkpoints", type=Path, help="folder, the same for all ranks; without it none are made")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    arguments = parser.parse_args()
    if importlib.util.find_spec("feature_store_py") is None:  # Alibaba's SDK; deltaproof brings one with its interface
        from deltaproof.fakes import feature_store_py

        feature_store_py.install()
    settings = Settings.load(arguments.config)
    if endpoint := os.environ.get("DELTAPROOF_ENDPOINT"):
        settings = msgspec.structs.replace(settings, endpoint=endpoint)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model, loss = sharded_model(), torch.nn.BCEWithLogitsLoss()
    with Publisher.for_model(model, settings) as publisher:
        step = restore(arguments.checkpoints, model, publisher) if arguments.checkpoints else 0
        publisher.start()
        while step < arguments.steps:
            step += 1
            loss(model(batch()), (torch.rand(BATCH) < 0.5).float()).backward()
            publisher.after_step(step)
            if arguments.checkpoints and step % arguments.checkpoint_every == 0:
                save(arguments.checkpoints, step, model, publisher)
        publisher.finish(step)
        print(f"rank {dist.get_rank()}: step {publisher.acknowledged} acknowledged, {publisher.uploader.counters}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

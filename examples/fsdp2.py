"""FSDP2 on packs: ranks wait for each other in every layer of every micro-batch, so packs are balanced one by one.

Rank 0 reads documents only, rank 1 pictures only: where one rank runs the vision tower, every rank does.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --steps 4
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from demo.data import ChatExamples
from demo.model import build_model
from demo.processing import encode, make_processor
from demo.tokenizer import train_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig

SAMPLES_PER_STEP = 4  # per rank


def read_samples(processor, rank: int, count: int) -> list[dict]:
    """Return this rank's samples, not padded: text on rank 0, images on rank 1, both on further ranks."""
    examples = map(ChatExamples(0, rank, dist.get_world_size()).__getitem__, itertools.count())
    if rank < 2:
        examples = (example for example in examples if example.sample_id.startswith("document") == (rank == 0))
    return [encode(processor, example) for example in itertools.islice(examples, count)]


def train(model, scheduler: PackingScheduler, device: torch.device) -> None:
    """Run the training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in scheduler:
        total = torch.zeros((), device=device)
        for batch in step:
            batch = batch.to(device)
            with step.sync_on_last(model, batch):  # gradients are reduced once a step
                loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            loss, stats = total.item() / dist.get_world_size(), step.stats
            print(f"step {stats.step + 1}: loss {loss:.4f}, {stats.tokens} tokens, imbalance {stats.imbalance:.3f}", flush=True)


def main() -> None:
    """Set up and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps, num_ranks = parser.parse_args().steps, int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    mesh = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("dp",))
    tokenizer = train_tokenizer()
    model = prepare_model(build_model("qwen2_5_vl", tokenizer, seed=0).to(device)).train()
    for part in (*model.model.visual.blocks, model.model.visual, *model.model.language_model.layers, model):
        fully_shard(part, mesh=mesh)
    samples = read_samples(make_processor("qwen2_5_vl", tokenizer), dist.get_rank(), steps * SAMPLES_PER_STEP)
    config = SchedulerConfig(max_tokens=2048, samples_per_step=SAMPLES_PER_STEP, sync="microbatch")
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config))
    with PackingScheduler(samples, config=config, groups=ProcessGroups.from_mesh(mesh), **parts) as scheduler:
        train(model, scheduler, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

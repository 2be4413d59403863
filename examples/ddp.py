"""Plain PyTorch DDP on packs: rank 0 reads documents only, rank 1 pictures only, and every rank trains on balanced packs.

torchrun --standalone --nproc-per-node 2 examples/ddp.py --steps 4
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
from torch.nn.parallel import DistributedDataParallel

from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig

SAMPLES_PER_STEP = 4  # per rank


def start() -> torch.device:
    """Join the process group; return this rank's device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


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
    steps, device = parser.parse_args().steps, start()
    tokenizer = train_tokenizer()
    model = prepare_model(build_model("qwen2_5_vl", tokenizer, seed=0).to(device)).train()
    samples = read_samples(make_processor("qwen2_5_vl", tokenizer), dist.get_rank(), steps * SAMPLES_PER_STEP)
    config = SchedulerConfig(max_tokens=2048, samples_per_step=SAMPLES_PER_STEP, sync="step")
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config), groups=ProcessGroups.from_world())
    with PackingScheduler(samples, config=config, **parts) as scheduler:
        train(DistributedDataParallel(model), scheduler, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

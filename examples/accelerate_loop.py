"""Accelerate on packs: the model and the optimizer are prepared, the data come from the scheduler.

Rank 0 reads documents only, rank 1 pictures only, and every rank trains on balanced packs.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --steps 4
"""

import argparse
import itertools

import torch
from accelerate import Accelerator
from demo.data import ChatExamples
from demo.model import build_model
from demo.processing import encode, make_processor
from demo.tokenizer import train_tokenizer

from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig

SAMPLES_PER_STEP = 4  # per rank


def read_samples(processor, rank: int, num_ranks: int, count: int) -> list[dict]:
    """Return this rank's samples, not padded: text on rank 0, images on rank 1, both on further ranks."""
    examples = map(ChatExamples(0, rank, num_ranks).__getitem__, itertools.count())
    if rank < 2:
        examples = (example for example in examples if example.sample_id.startswith("document") == (rank == 0))
    return [encode(processor, example) for example in itertools.islice(examples, count)]


def train(accelerator: Accelerator, model, optimizer, scheduler: PackingScheduler) -> None:
    """Run the training loop."""
    for step in scheduler:
        total = torch.zeros((), device=accelerator.device)
        for batch in step:
            batch = batch.to(accelerator.device)
            # In place of accelerator.accumulate: gradients are reduced once a step.
            with step.sync_on_last(model, batch):
                loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
                accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss, stats = accelerator.reduce(total, "mean").item(), step.stats
        accelerator.print(f"step {stats.step + 1}: loss {loss:.4f}, {stats.tokens} tokens, imbalance {stats.imbalance:.3f}")


def main() -> None:
    """Set up and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps, accelerator = parser.parse_args().steps, Accelerator(cpu=not torch.cuda.is_available())
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    tokenizer = train_tokenizer()
    model = prepare_model(build_model("qwen2_5_vl", tokenizer, seed=0).to(accelerator.device)).train()
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config), groups=ProcessGroups.from_world())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    samples = read_samples(make_processor("qwen2_5_vl", tokenizer), rank, num_ranks, steps * SAMPLES_PER_STEP)
    config = SchedulerConfig(max_tokens=2048, samples_per_step=SAMPLES_PER_STEP, sync="step")
    with PackingScheduler(samples, config=config, **parts) as scheduler:
        train(accelerator, model, optimizer, scheduler)
    accelerator.end_training()


if __name__ == "__main__":
    main()

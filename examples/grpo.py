"""Group-relative policy optimisation (GRPO) on packs: the answers to a question share its tokens and pictures.

torchrun --standalone --nproc-per-node 2 examples/grpo.py --steps 4
"""

import argparse

import torch
import torch.distributed as dist
from answers import log_probs, read_groups, start
from demo.model import build_model
from demo.processing import make_processor
from demo.tokenizer import train_tokenizer
from torch.nn.parallel import DistributedDataParallel

from evenpack.core import Field
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

CLIP, ANSWERS = 0.2, 4
FIELDS = [
    Field(name="reward", kind="sample", dtype="float32"),
    Field(name="advantages", kind="token", dtype="float32", default=0.0),
]
CONFIG = SchedulerConfig(max_tokens=1024, samples_per_step=2, groups="prompt", sync="step")


def with_advantages(samples: list[dict]) -> list[dict]:
    """Give each answer's tokens its reward against the mean and spread of its group: all of it is here, on its home rank."""
    for first in range(0, len(samples), ANSWERS):
        rewards = torch.stack([sample["reward"] for sample in samples[first : first + ANSWERS]])
        scores = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for sample, score in zip(samples[first : first + ANSWERS], scores, strict=True):
            sample["advantages"] = score.expand(len(sample["input_ids"])).clone()
    return samples


def old_log_probs(model: torch.nn.Module, step: PackedStep) -> list[torch.Tensor]:
    """Return the log-probabilities of the policy that answered, on the packs that train: a step can be iterated twice."""
    with torch.no_grad():
        return [log_probs(model(**batch.forward_kwargs(model)).logits, batch) for batch in step]


def train_step(model: torch.nn.Module, step: PackedStep, old: list[torch.Tensor]) -> float:
    """Run forward and backward of a step; return this rank's share of the loss: the clipped gain, a mean over all tokens."""
    total = 0.0
    for batch, before in zip(step, old, strict=True):
        with step.sync_on_last(model, batch):
            ratio = (log_probs(model(**batch.forward_kwargs(model)).logits, batch) - before).exp()
            advantages = batch.advantages[0].to(ratio.dtype)
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = -(gain * batch.loss_mask[0]).sum() * step.factor("loss")
            loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    """Set up and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    steps, (rank, num_ranks) = parser.parse_args().steps, start()
    tokenizer = train_tokenizer()
    model = prepare_model(build_model("qwen2_5_vl", tokenizer, seed=0), kernels=False).train()
    samples = list(read_groups(make_processor("qwen2_5_vl", tokenizer), rank, 2 * steps, ANSWERS))
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config), groups=ProcessGroups.from_world())
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-4)
    with PackingScheduler(with_advantages(samples), config=CONFIG, fields=FIELDS, **parts) as scheduler:
        for step in scheduler:
            total = torch.tensor(train_step(wrapped, step, old_log_probs(model, step)))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step.stats.step + 1}: loss {total / num_ranks:.4f}, {step.num_samples} answers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

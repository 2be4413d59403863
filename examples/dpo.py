"""Direct preference optimisation (DPO) on packs: a pair and its pictures stay on one rank, and their question is computed once.

torchrun --standalone --nproc-per-node 2 examples/dpo.py --steps 4
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import log_probs, read_groups, start
from demo.model import build_model
from demo.processing import make_processor
from demo.tokenizer import train_tokenizer
from torch.nn.parallel import DistributedDataParallel

from evenpack.core import Field
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

BETA = 0.1
FIELDS = [Field(name="reward", kind="sample", dtype="float32")]
CONFIG = SchedulerConfig(max_tokens=4096, samples_per_step=4, groups="prompt", sync="step")


def train_step(model: torch.nn.Module, reference: torch.nn.Module, step: PackedStep) -> float:
    """Run forward and backward of all pairs of a step; return this rank's share of the loss.

    The loss is the mean over all pairs of all ranks of -log sigmoid(beta * margin), where the margin is how much more the model
    prefers the chosen answer to the rejected one than the reference does. The chosen one comes first in its group.
    """
    total = 0.0
    for batch in step:
        arguments = batch.forward_kwargs(model)
        with torch.no_grad():
            base = batch.sums(log_probs(reference(**arguments).logits, batch))
        with step.sync_on_last(model, batch):
            gains = batch.sums(log_probs(model(**arguments).logits, batch)) - base
            margins = gains[0::2] - gains[1::2]
            loss = -F.logsigmoid(BETA * margins).sum() * step.factor("groups")
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
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    pairs = list(read_groups(make_processor("qwen2_5_vl", tokenizer), rank, 4 * steps, answers=2))
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config), groups=ProcessGroups.from_world())
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with PackingScheduler(pairs, config=CONFIG, fields=FIELDS, **parts) as scheduler:
        for step in scheduler:
            total = torch.tensor(train_step(wrapped, reference, step))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step.stats.step + 1}: loss {total / num_ranks:.4f}, {step.num_groups} pairs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A reward model on packs: one value per answer, pairs compared within their group, questions and pictures computed once.

torchrun --standalone --nproc-per-node 2 examples/reward.py --steps 4
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import read_groups, start
from demo.model import build_model
from demo.processing import make_processor
from demo.tokenizer import train_tokenizer
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2_5_VLPreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from evenpack.core import Field
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

FIELDS = [Field(name="reward", kind="sample", dtype="float32")]
CONFIG = SchedulerConfig(max_tokens=2048, samples_per_step=4, groups="prompt", sync="step")


class Qwen2_5_VLForSequenceClassification(GenericForSequenceClassification, Qwen2_5_VLPreTrainedModel):
    """Qwen2.5-VL with a head `score`: `prepare_model` makes it give one value per sample of a pack."""

    def forward(self, input_ids, position_ids=None, pixel_values=None, image_grid_thw=None, **kwargs: Any) -> Any:
        """Name what a pack has for this family, so that `forward_kwargs` gives it."""
        media = dict(pixel_values=pixel_values, image_grid_thw=image_grid_thw)
        return super().forward(input_ids=input_ids, position_ids=position_ids, **media, **kwargs)


def build_reward_model(tokenizer: Any, seed: int = 0) -> torch.nn.Module:
    """Return the demo's model with a head of one value in place of that of its vocabulary."""
    base = build_model("qwen2_5_vl", tokenizer, seed)
    base.config.num_labels = 1
    torch.manual_seed(seed)
    model = Qwen2_5_VLForSequenceClassification(base.config)
    model.model.load_state_dict(base.model.state_dict())
    return model


def train_step(model: torch.nn.Module, step: PackedStep) -> float:
    """Run forward and backward; return this rank's share of the loss, the mean over pairs of -log sigmoid(r+ - r-)."""
    total = 0.0
    for batch in step:
        with step.sync_on_last(model, batch):
            rewards = model(**batch.forward_kwargs(model)).logits[:, 0]
            loss = -F.logsigmoid(rewards[0::2] - rewards[1::2]).sum() * step.factor("groups")
            loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    """Set up and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    steps, (rank, num_ranks) = parser.parse_args().steps, start()
    tokenizer = train_tokenizer()
    model = prepare_model(build_reward_model(tokenizer), kernels=False).train()
    pairs = list(read_groups(make_processor("qwen2_5_vl", tokenizer), rank, 4 * steps, answers=2))
    parts = dict(adapter=adapter_for(model.config), cost=CostModel.from_config(model.config), groups=ProcessGroups.from_world())
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-4)
    with PackingScheduler(pairs, config=CONFIG, fields=FIELDS, **parts) as scheduler:
        for step in scheduler:
            total = torch.tensor(train_step(wrapped, step))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step.stats.step + 1}: loss {total / num_ranks:.4f}, {step.num_groups} pairs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

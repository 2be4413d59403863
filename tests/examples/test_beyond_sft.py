"""DPO, GRPO and a reward model on packs with pictures, on two and four ranks, against every answer computed alone."""

import copy

import dpo
import grpo
import msgspec
import pytest
import reward
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import read_groups
from demo.model import build_model
from demo.processing import make_processor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.families.compare import WithoutCasts
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import PackingScheduler, ProcessGroups
from evenpack.scheduler.testing import run_ranks

GROUPS_PER_RANK = 2


def alone(model, sample):
    """Return a stock model's logits of one sample, called as its users call it."""
    names = ("input_ids", "mm_token_type_ids")
    given = {name: sample[name][None] for name in names} | {name: sample[name] for name in ("pixel_values", "image_grid_thw")}
    return model(**given, use_cache=False).logits


def sums(logits, sample):
    """Return the summed log-probability of a sample's answer."""
    return -F.cross_entropy(logits[0, :-1], sample["labels"][1:], ignore_index=-100, reduction="sum")


def gradients(model):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def compare(tokenizer, build, module, num_answers, packed, unpacked, num_ranks):
    """Check that loss and gradients of a step on packs are those of `unpacked(model, samples of all ranks)`."""
    processor = make_processor("qwen2_5_vl", tokenizer)

    def fn(rank, num_ranks):
        with WithoutCasts():
            stock = build().double()
            model = prepare_model(copy.deepcopy(stock))
            everyone = [list(read_groups(processor, r, GROUPS_PER_RANK, num_answers, torch.float64)) for r in range(num_ranks)]
            if module is grpo:
                everyone = [grpo.with_advantages(samples) for samples in everyone]
            wrapped = DistributedDataParallel(model)
            config = msgspec.structs.replace(module.CONFIG, samples_per_step=GROUPS_PER_RANK, max_tokens=256)
            parts = dict(adapter=adapter_for(model.config), groups=ProcessGroups.from_world(), fields=module.FIELDS)
            with PackingScheduler(everyone[rank], config=config, **parts) as scheduler:
                step = next(scheduler)
                assert step.num_groups == GROUPS_PER_RANK * num_ranks and len(step) > 0
                total = torch.tensor(packed(wrapped, step, stock), dtype=torch.float64)
            dist.all_reduce(total)
            expected = unpacked(stock, [sample for samples in everyone for sample in samples])
            expected.backward()
            ours, theirs = gradients(model), gradients(stock)
            return total.item() / num_ranks, expected.item(), ((ours - theirs).norm() / theirs.norm()).item()

    for loss, expected, error in run_ranks(fn, num_ranks, backend="gloo"):
        assert loss == pytest.approx(expected, rel=1e-12) and error < 1e-10


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_dpo(tokenizer, num_ranks):
    def build(seed=0):
        return build_model("qwen2_5_vl", tokenizer, seed)

    def packed(model, step, stock):
        return dpo.train_step(model, prepare_model(build(1).double()), step)

    def unpacked(model, samples):
        reference = build(1).double()
        with torch.no_grad():
            base = torch.stack([sums(alone(reference, sample), sample) for sample in samples])
        gains = torch.stack([sums(alone(model, sample), sample) for sample in samples]) - base
        return -F.logsigmoid(dpo.BETA * (gains[0::2] - gains[1::2])).mean()

    compare(tokenizer, build, dpo, 2, packed, unpacked, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_grpo(tokenizer, num_ranks):
    def build(seed=0):
        return build_model("qwen2_5_vl", tokenizer, seed)

    def packed(model, step, stock):
        return grpo.train_step(model, step, grpo.old_log_probs(prepare_model(build(1).double()), step))

    def unpacked(model, samples):
        policy, gained, count = build(1).double(), [], 0
        for sample in samples:
            each = []
            for one in (model, policy):
                logits = alone(one, sample)[0, :-1]
                each.append(-F.cross_entropy(logits, sample["labels"][1:], ignore_index=-100, reduction="none"))
            ratio, advantage = (each[0] - each[1].detach()).exp(), sample["advantages"][1:].double()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - grpo.CLIP, 1 + grpo.CLIP) * advantage)
            learned = sample["labels"][1:] != -100
            gained.append(gain[learned].sum())
            count += int(learned.sum())
        return -torch.stack(gained).sum() / count

    compare(tokenizer, build, grpo, grpo.ANSWERS, packed, unpacked, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_reward(tokenizer, num_ranks):
    def unpacked(model, samples):
        rewards = torch.cat([alone(model, sample) for sample in samples])[:, 0]
        return -F.logsigmoid(rewards[0::2] - rewards[1::2]).mean()

    def packed(model, step, stock):
        return reward.train_step(model, step)

    compare(tokenizer, lambda: reward.build_reward_model(tokenizer), reward, 2, packed, unpacked, num_ranks)

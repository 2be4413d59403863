"""Families with ordinary positions through the scheduler on two ranks: losses and gradients are those of the samples alone."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.families.compare import alone
from benchmarks.families.tiny import random_sample, tiny_model
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler.testing import run_ranks

from .helpers import open_scheduler

FAMILIES = ("internvl", "gemma3", "mistral3", "smolvlm", "llava_onevision", "llava_next")


def source(adapter, rank, count=6):
    """Rank 0 brings text alone, so that its tower runs on dummies or on what it is given."""
    rng = np.random.default_rng(rank)
    samples = [random_sample(rng, adapter, images=0 if rank == 0 else 1 + index % 2) for index in range(count)]
    return [{**sample, "sample_id": f"{rank}-{index}"} for index, sample in enumerate(samples)]


def trained(model, sync, adapter, rank):
    """Train one step; return the group's loss, and the number of micro-batches."""
    total = torch.zeros((), dtype=torch.float64)
    longest = max(len(sample["input_ids"]) for one in range(dist.get_world_size()) for sample in source(adapter, one))
    settings = {"max_tokens": longest, "samples_per_step": 6, "sync": sync, "prefetch": 0, "tolerance": 0.0}
    with open_scheduler(source(adapter, rank), adapter=adapter, **settings) as scheduler:
        step = next(scheduler)
        for batch in step:
            with step.sync_on_last(model, batch):
                loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
                loss.backward()
            total += loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size(), len(step)


def expected(family, adapter, num_ranks):
    """The stock model on every sample alone; the loss is one mean over all targets."""
    model, losses, count = tiny_model(family), [], 0
    for raw in (raw for rank in range(num_ranks) for raw in source(adapter, rank)):
        labels = raw["input_ids"].masked_fill(raw["mm_token_type_ids"] != 0, -100)[1:]
        losses.append(F.cross_entropy(alone(model, raw)[:-1], labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    loss = sum(losses) / count
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(model, wanted):
    """Return how far a model's gradients are from those wanted, as a share of their norm; parameters without any left out."""
    found = dict(model.named_parameters())
    grads = {name: getattr(found[name].grad, "full_tensor", lambda g=found[name].grad: g)() for name in wanted}
    error = sum(float((grads[name] - grad).square().sum()) for name, grad in wanted.items())
    return (error / sum(float(grad.square().sum()) for grad in wanted.values())) ** 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_ddp_and_fsdp2_train_as_samples_alone(family):
    tiny_model(family)  # imported once, not in every rank

    def fn(rank, num_ranks):
        from torch.distributed.fsdp import fully_shard

        adapter = adapter_for(tiny_model(family).config)
        loss, gradients = expected(family, adapter, num_ranks)
        # Towers have parameters that no feature depends on: the last layer, or a pooling head.
        wrapped = DistributedDataParallel(prepare_model(tiny_model(family)), find_unused_parameters=True)
        found, _ = trained(wrapped, "step", adapter, rank)
        sharded = prepare_model(tiny_model(family))
        fully_shard(sharded)
        again, num_microbatches = trained(sharded, "microbatch", adapter, rank)
        errors = found / loss - 1, again / loss - 1, relative(wrapped.module, gradients), relative(sharded, gradients)
        return num_microbatches, max(map(abs, errors))

    for num_microbatches, error in run_ranks(fn, 2, backend="gloo"):
        assert num_microbatches > 1 and error < 1e-5

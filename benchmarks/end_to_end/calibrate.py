"""Costs from micro-batches timed beforehand, as `PackingScheduler.calibrate` takes them; all planners get the same."""

import random
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from evenpack.collate import PackedBatch, pack_samples
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel
from evenpack.scheduler.cost.model import CostFit, Observation

from .padded import Sample

NUM_PACKS, REPEATS = 20, 2


def measure_costs(make_model: Callable[[], PreTrainedModel], samples: Sequence[Sample], device: torch.device) -> CostFit:
    """Time forward and backward of packs of random samples, and fit the cost model to them."""
    model = prepare_model(make_model().to(device)).train()
    adapter, rng = adapter_for(model.config), random.Random(0)
    observations = []
    for _ in range(NUM_PACKS):
        chosen = rng.sample(samples, rng.randint(1, 10))
        batch = pack_samples(chosen, adapter=adapter).to(device)
        grids = [tuple(grid) for sample in chosen for grid in sample.get("image_grid_thw", torch.zeros(0, 3).long()).tolist()]
        seconds = min(_run(model, batch, device) for _ in range(REPEATS))
        tokens = [len(sample["input_ids"]) for sample in chosen]
        observations.append(Observation(tokens=tokens, grids=grids, seconds=seconds))
    return CostModel.fit(observations)


def _run(model: PreTrainedModel, batch: PackedBatch, device: torch.device) -> float:
    """Return seconds: on the clock of a GPU, of this thread's CPU time without one, which other load hardly changes."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.thread_time
    start = clock()
    model(**batch.forward_kwargs(model)).logits.float().logsumexp(dim=-1).mean().backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    model.zero_grad()
    return seconds

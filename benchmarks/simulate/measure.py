"""Times of micro-batches of a real model on one core, and the cost model that they give."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from evenpack.collate import pack_samples, prepare_sample
from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.scheduler import CostModel
from evenpack.scheduler.cost.model import CostFit, Observation

from ..end_to_end.data import make_model, train_tokenizer

#: Text tokens and patch grids (h, w) of the segments of a pack; every second pack is kept back to test the fit.
Segment = tuple[int, tuple[tuple[int, int], ...]]
REPEATS = 3


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A cost model from measured micro-batches, and how well it foretells others.

    Attributes:
        fit: least squares over the first half.
        errors: measured over foretold time, for each micro-batch of the other half.
        num_tokens: tokens of all micro-batches.
    """

    fit: CostFit
    errors: list[float]
    num_tokens: int

    @property
    def median_error(self) -> float:
        """Median of |measured / foretold - 1| over micro-batches that the fit did not see."""
        return float(np.median(np.abs(np.array(self.errors) - 1)))


def shapes(count: int, seed: int) -> list[list[Segment]]:
    """Draw packs: text alone, pictures, and both, from one short segment to a few thousand tokens."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        target, pack = int(np.exp(rng.uniform(np.log(100), np.log(4000)))), []
        while target > 0:
            words = int(np.clip(np.exp(rng.normal(5.5, 1.0)), 8, max(target, 8)))
            pictures = int(rng.choice(4, p=[0.4, 0.35, 0.15, 0.1]))
            grids = tuple((2 * int(h), 2 * int(w)) for h, w in rng.integers(2, 13, (pictures, 2)))
            pack.append((words, grids))
            target -= words + sum(h * w // 4 for h, w in grids)
        packs.append(pack)
    return packs


def measure(count: int, seed: int = 0) -> Measured:
    """Time forward and backward of `count` packs on this thread, fit half of them, and test the other half."""
    torch.set_num_threads(1)
    model = prepare_model(make_model(train_tokenizer())).train()
    adapter = adapter_for(model.config)
    packs = shapes(count, seed)
    run(model, adapter, packs[0])  # the first pass allocates
    observations = [observe(model, adapter, pack) for pack in packs]
    seen, other = observations[::2], observations[1::2]
    fit = CostModel.fit(seen)
    errors = [observation.seconds / foretell(fit, observation) for observation in other]
    return Measured(fit=fit, errors=errors, num_tokens=sum(sum(each.tokens) for each in observations))


def foretell(fit: CostFit, observation: Observation) -> float:
    """Return the seconds that a fit gives a micro-batch."""
    grids = observation.grids if len(fit.model.phases) == 2 else ()
    units = sum(fit.model.sample_cost(length)[-1] for length in observation.tokens) + fit.microbatch_cost
    if grids:
        units += fit.model.sample_cost(1, grids)[0]
    return units * fit.model.unit


def observe(model: Any, adapter: ModelAdapter, pack: Sequence[Segment]) -> Observation:
    """Return the shortest of a few runs of a pack."""
    seconds = min(run(model, adapter, pack) for _ in range(REPEATS))
    tokens = [words + sum(h * w // 4 + 2 for h, w in grids) for words, grids in pack]
    return Observation(tokens=tokens, grids=[(1, h, w) for _, grids in pack for h, w in grids], seconds=seconds)


def run(model: Any, adapter: ModelAdapter, pack: Sequence[Segment]) -> float:
    """Return the CPU seconds of forward and backward of this thread, which other load hardly changes."""
    batch = pack_samples([sample_of(segment, adapter) for segment in pack], adapter=adapter)
    start = time.thread_time()
    logits = model(**batch.forward_kwargs(model)).logits
    logits.float().logsumexp(dim=-1).mean().backward()
    seconds = time.thread_time() - start
    model.zero_grad()
    return seconds


def sample_of(segment: Segment, adapter: ModelAdapter) -> Any:
    """Build a sample of a segment's shape."""
    words, grids = segment
    ids = [*range(10, 10 + words % 1000), *[7] * (words - words % 1000)]
    for h, w in grids:
        ids += [adapter.vision_start, *[adapter.media_tokens["image"]] * (h * w // 4), adapter.vision_end]
    raw: dict[str, Any] = {"input_ids": torch.tensor(ids)}
    if grids:
        raw["pixel_values"] = torch.zeros(sum(h * w for h, w in grids), 1176)
        raw["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in grids])
    return prepare_sample(raw, adapter=adapter)

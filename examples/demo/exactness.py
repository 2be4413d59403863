"""Check that packing changes nothing: loss and gradients of a step, packed and moved, against every sample alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from evenpack.scheduler import PackedStep

from .processing import IGNORED

#: Largest relative difference in single precision that rounding explains.
TOLERANCE = 1e-5


class Exactness(NamedTuple):
    """Relative differences of a packed step from the same samples run alone."""

    loss: float
    gradients: float
    num_samples: int

    @property
    def holds(self) -> bool:
        """Whether both differences are rounding."""
        return self.loss < TOLERANCE and self.gradients < TOLERANCE


def check_exactness(
    model: DistributedDataParallel, reference: PreTrainedModel, step: PackedStep, samples: Sequence[Mapping[str, Any]]
) -> Exactness:
    """Compare a packed step with its samples run alone; collective, and every rank returns the same.

    Args:
        model: the wrapped model, which gets the packs.
        reference: a model with the same weights and transformers' own attention, which gets one sample at a time and
            computes positions by itself.
        step: the packed step; its samples may have come from other ranks.
        samples: the samples that this rank brought to that step.
    """
    expected_loss, expected = _alone(reference, samples)
    loss, gradients = _packed(model, step)
    return Exactness(
        loss=float((loss - expected_loss).abs() / expected_loss.abs()),
        gradients=float((gradients - expected).norm() / expected.norm()),
        num_samples=step.stats.num_samples,
    )


def _packed(model: DistributedDataParallel, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step's loss over all ranks, and the gradients that the wrapper has averaged."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in step:
        batch = batch.to(device)
        with step.sync_on_last(model, batch):
            loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size(), _take_gradients(model)


def _alone(model: PreTrainedModel, samples: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean loss per target, and its gradients, over the samples of all ranks, each run by itself."""
    sums = torch.zeros(2, dtype=torch.float64, device=model.device)
    for sample in samples:
        inputs = {name: value.to(model.device) for name, value in sample.items() if isinstance(value, torch.Tensor)}
        targets = inputs.pop("labels")[1:]
        row = {name: inputs.pop(name)[None] for name in ("input_ids", "mm_token_type_ids")}
        logits = model(**row, **inputs, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        loss.backward()
        sums += torch.stack([loss.detach().double(), (targets != IGNORED).sum().double()])
    gradients = _take_gradients(model)
    dist.all_reduce(sums)
    dist.all_reduce(gradients)
    return sums[0] / sums[1], gradients / sums[1]


def _take_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return all gradients as one vector, and clear them."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    vector = torch.cat([part.double().flatten() for part in parts])
    model.zero_grad()
    return vector

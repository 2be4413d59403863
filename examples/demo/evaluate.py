"""Accuracy on hand-written digits that the training never shows."""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, ProcessorMixin

from evenpack.collate import PackedBatch, pack_samples
from evenpack.models import ModelAdapter

from .data import held_out_examples
from .processing import IGNORED, encode

CHANCE = 0.1
SAMPLES_PER_PACK = 32


@torch.no_grad()
def held_out_accuracy(model: PreTrainedModel, processor: ProcessorMixin, adapter: ModelAdapter) -> float:
    """Return the share of held-out digits that the model names; every rank reads its part, all return the same.

    Args:
        model: the bare model, without its wrapper.
        processor: its processor.
        adapter: its adapter.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    samples = [encode(processor, example) for example in held_out_examples()[rank::num_ranks]]
    model.eval()
    score = torch.zeros(2, dtype=torch.int64, device=model.device)
    for start in range(0, len(samples), SAMPLES_PER_PACK):
        batch = pack_samples(samples[start : start + SAMPLES_PER_PACK], adapter=adapter).to(model.device)
        score += torch.tensor([_correct(model, batch), batch.num_samples], device=model.device)
    model.train()
    dist.all_reduce(score)
    correct, total = score.tolist()
    return correct / total


def _correct(model: PreTrainedModel, batch: PackedBatch) -> int:
    """Return how many samples of a pack have their first target, the digit, as the likeliest token."""
    guesses = batch.unpack(model(**batch.forward_kwargs(model)).logits.argmax(dim=-1))
    right = 0
    for guess, targets in zip(guesses, batch.unpack(batch.shift_labels), strict=True):
        first = int((targets != IGNORED).nonzero()[0])
        right += int(guess[first] == targets[first])
    return right

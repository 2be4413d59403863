"""Padded batches, as a loop without packing has them: right padded, positions left to the model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
FILLS = {"input_ids": 0, "labels": IGNORED, "mm_token_type_ids": 0}
Sample = dict[str, Any]


def split(lengths: Sequence[int], capacity: int, by_length: bool) -> list[list[int]]:
    """Cut samples into batches whose padded tokens (rows times the longest row) stay within the capacity.

    Args:
        lengths: tokens of each sample.
        capacity: most padded tokens of a batch.
        by_length: longest samples first, so that those of a batch are alike; otherwise in order of arrival.

    Raises:
        ValueError: a sample longer than the capacity.
    """
    if max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit {capacity} padded tokens")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if by_length else range(len(lengths))
    batches: list[list[int]] = [[]]
    longest = 0
    for index in order:
        if batches[-1] and (len(batches[-1]) + 1) * max(longest, lengths[index]) > capacity:
            batches.append([])
            longest = 0
        batches[-1].append(index)
        longest = max(longest, lengths[index])
    return batches


def pictures_last(batches: list[list[int]], has_picture: Sequence[bool]) -> list[list[int]]:
    """Move a batch with a picture to the end: DDP reduces in the last one, where the vision tower must run.

    Raises:
        ValueError: no sample has a picture.
    """
    for position, batch in enumerate(batches):
        if any(has_picture[index] for index in batch):
            return [*batches[:position], *batches[position + 1 :], batch]
    raise ValueError(f"none of the {len(has_picture)} samples of a rank's step has a picture, and the tower must run once")


def collate(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Pad samples to the longest and join their pictures, as a Hugging Face processor does."""
    batch = {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill) for name, fill in FILLS.items()
    }
    batch["attention_mask"] = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    for name in ("pixel_values", "image_grid_thw"):
        parts = [row[name] for row in rows if name in row]
        if parts:
            batch[name] = torch.cat(parts)
    return batch


class PaddedStep(NamedTuple):
    """One rank's batches of an optimizer step, each padded when its turn comes."""

    samples: Sequence[Sample]
    batches: list[list[int]]
    divisor: float
    num_ranks: int

    @classmethod
    def of(cls, samples: Sequence[Sample], capacity: int, by_length: bool, device: torch.device) -> "PaddedStep":
        """Cut a rank's samples, and add up the targets of all ranks; collective."""
        batches = split([len(sample["input_ids"]) for sample in samples], capacity, by_length)
        batches = pictures_last(batches, ["pixel_values" in sample for sample in samples])
        targets = sum(int((sample["labels"][1:] != IGNORED).sum()) for sample in samples)
        total = torch.tensor([targets], device=device)
        dist.all_reduce(total)
        return cls(samples, batches, float(total), dist.get_world_size())

    @property
    def computed_tokens(self) -> int:
        """Tokens that the decoder runs on this rank, padding included."""
        return sum(len(batch) * max(len(self.samples[i]["input_ids"]) for i in batch) for batch in self.batches)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a batch's share of the mean over all targets of all ranks, times the ranks, over which DDP averages."""
        flat = logits[:, :-1].float().flatten(0, 1)
        total = F.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
        return total * self.num_ranks / self.divisor

"""Evaluation on packs: every sample once, on whichever rank, and predictions in the dataset's order."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...collate import PackedBatch
from ...core import IGNORED
from ...scheduler import PackedStep

#: From logits `[1, L, V]` and labels `[1, L]` (not shifted) of one sample to what a metric needs: a tensor `[1, ...]`.
Reduce = Callable[[torch.Tensor, torch.Tensor], Any]


class Totals:
    """Loss and predictions of this rank, step by step.

    Args:
        reduce: `preprocess_logits_for_metrics` of the Trainer.
        keeps: whether predictions and labels are kept.
        device: where the loss is added up.
    """

    def __init__(self, *, reduce: Reduce | None, keeps: bool, device: torch.device) -> None:
        self._reduce, self._keeps = reduce, keeps
        self._loss = torch.zeros((), device=device)
        self._divisor = 0.0
        self.num_samples = 0
        self.predictions: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []

    def add(self, step: PackedStep, logits_of: Callable[[PackedBatch], torch.Tensor], device: torch.device) -> None:
        """Compute a step and add it."""
        predictions, labels = [], []
        for batch in step:
            batch = batch.to(device)
            logits = logits_of(batch)
            self._loss += step.loss(logits, batch, reduce="sum") * step.loss_divisor
            if self._keeps:
                targets = batch.unpack(_unshifted(batch.labels))
                rows = zip(batch.unpack(logits, axis=1), targets, strict=True)
                predictions.append([reduced(row, target, self._reduce) for row, target in rows])
                labels.append([target.flatten() for target in targets])
        self._divisor += step.loss_divisor
        self.num_samples += step.stats.num_samples
        if self._keeps:
            self.predictions += [to_numpy(value) for value in step.return_home(predictions)]
            self.labels += [to_numpy(value) for value in step.return_home(labels)]

    def loss(self) -> float:
        """Return the loss over every rank's samples, nan where no label counts; collective."""
        total = self._loss.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) / self._divisor if self._divisor else math.nan


def _unshifted(labels: torch.Tensor) -> torch.Tensor:
    """Return labels that stand at their own tokens.

    Args:
        labels: `[1, T]` next-token targets; the last slot of every segment is -100, so that a roll crosses no boundary.
    """
    return labels.roll(1, dims=1)


def reduced(logits: torch.Tensor, labels: torch.Tensor, reduce: Reduce | None) -> torch.Tensor:
    """Return one sample's logits `[L, V]`, or what `reduce` makes of them.

    Raises:
        TypeError: `reduce` returned something else than one tensor.
    """
    logits, labels = logits.reshape(1, -1, logits.shape[-1]), labels.reshape(1, -1)
    value = logits if reduce is None else reduce(logits, labels)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"preprocess_logits_for_metrics must return one tensor, got {type(value).__name__}")
    return value[0]


def to_numpy(value: torch.Tensor | None) -> np.ndarray:
    """Return a value on the host; numpy has no bfloat16."""
    assert value is not None, "an evaluation drops no sample"
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def from_all_ranks(values: list[np.ndarray], num_ranks: int) -> list[np.ndarray]:
    """Return the values of all ranks, in the order of a dataset that they took in turn; collective."""
    if num_ranks == 1:
        return values
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, values)
    longest = max(len(part) for part in gathered)
    return [part[index] for index in range(longest) for part in gathered if index < len(part)]


def padded(values: Iterable[np.ndarray]) -> np.ndarray | None:
    """Return values of unequal length as one array, filled up with -100, None where there are none.

    Example:
        >>> padded([np.array([1, 2]), np.array([3])]).tolist()
        [[1, 2], [3, -100]]
    """
    rows = list(values)
    if not rows:
        return None
    if rows[0].ndim == 0:
        return np.stack(rows)
    shape = (len(rows), max(len(row) for row in rows), *rows[0].shape[1:])
    joined = np.full(shape, IGNORED, dtype=rows[0].dtype)
    for target, row in zip(joined, rows, strict=True):
        target[: len(row)] = row
    return joined

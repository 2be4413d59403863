"""The loss of a micro-batch, as a share of the whole step's."""

from typing import Literal

import torch
import torch.nn.functional as F

from ..collate import PackedBatch
from .plan.settings import check_literal

Reduce = Literal["mean", "sum"]
Divisor = Literal["loss", "samples", "groups"]


def packed_loss(
    logits: torch.Tensor, batch: PackedBatch, *, divisor: float, num_replicas: int, reduce: Reduce = "mean"
) -> torch.Tensor:
    """Return the weighted cross entropy of a pack, over the divisor of its step.

    The sum of it over all packs of all ranks is the step's loss: the weighted mean over the targets of the whole group,
    whatever pack they lie in. Where a wrapper averages gradients over replicas ("mean"), their number is multiplied in.

    Args:
        logits: `[1, T, V]`, row t predicting the target at t; of a context-parallel shard, this rank's slots. Computed in
            fp32, in fp64 where they are fp64.
        batch: the pack, on the logits' device.
        divisor: `loss_divisor` of the step; 0 gives loss 0.
        num_replicas: ranks over which the wrapper averages gradients.
        reduce: "mean" where the wrapper averages gradients (DDP, FSDP), "sum" where it adds them up.

    Returns:
        Scalar, with finite gradients where the pack has no target.

    Raises:
        ValueError: logits of another length than the pack.
    """
    check_literal("reduce", reduce, ("mean", "sum"))
    labels, weights = batch.labels, batch.loss_mask
    if logits.ndim == 3 and logits.shape[1] != labels.shape[1]:
        # The model cut the row itself: its logits are this rank's slots, the shard still holds the whole row.
        labels, weights = batch.local(labels), batch.local(weights)
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(f"logits must be [1, {labels.shape[1]}, vocabulary], got {list(logits.shape)}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    scale = (num_replicas if reduce == "mean" else 1) / divisor if divisor else 0.0
    return (each * weights.flatten().to(each.dtype)).sum() * scale

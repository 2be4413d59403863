"""Next-token targets of a sample: which token each position learns, and with what weight."""

import numpy as np
import torch

from ...core import Sample

IGNORED = -100


def shift_targets(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each position of a sample learns.

    Position i learns token i + 1, with the weight of that token, and the last position learns nothing: a target never
    crosses into the next segment of a pack. A sample that came shifted passes unchanged, its last target kept. Weights
    are 0 where the target is -100.

    Args:
        sample: a prepared sample of L tokens.

    Returns:
        targets int64 [L] and weights float32 [L].

    Example:
        >>> from evenpack.collate import prepare_sample
        >>> from evenpack.models import adapter_for
        >>> sample = prepare_sample({"input_ids": [1, 2, 3]}, adapter=adapter_for("text"))
        >>> shift_targets(sample)[0].tolist()
        [2, 3, -100]
    """
    targets, weights = target_views(sample)
    if not sample.shifted:
        targets = torch.cat((targets, targets.new_full((1,), IGNORED)))
        weights = torch.cat((weights, weights.new_zeros(1)))
    return targets, weights.masked_fill(targets == IGNORED, 0.0)


def target_views(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the labels and weights that positions 0, 1, ... learn: all L of a shifted sample, L - 1 otherwise."""
    targets, weights = sample.tensor("labels"), sample.tensor("loss_weights")
    return (targets, weights) if sample.shifted else (targets[1:], weights[1:])


def target_stats(sample: Sample) -> tuple[int, float]:
    """Return the number of targets that count, and the sum of their weights.

    A target counts if it is not -100 and its weight is not 0. The sum is taken in float64, so that it does not depend on
    the number of threads or on how samples are grouped.

    Example:
        >>> from evenpack.collate import prepare_sample
        >>> from evenpack.models import adapter_for
        >>> raw = {"input_ids": [1, 2, 3], "loss_weights": [1.0, 0.5, 0.0]}
        >>> target_stats(prepare_sample(raw, adapter=adapter_for("text")))
        (1, 0.5)
    """
    # On arrays, whose operations take half as long to start as those on tensors.
    targets, weights = (view.cpu().numpy() for view in target_views(sample))
    counted = weights if targets.min(initial=0) > IGNORED else np.where(targets != IGNORED, weights, 0)
    return int(np.count_nonzero(counted != 0)), float(counted.sum(dtype=np.float64))

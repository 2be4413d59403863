"""Segment boundaries as a transformers model's attention takes them."""

import torch


def attention_boundaries(real: torch.Tensor, padded: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return the boundaries that keep every real token of a row from seeing padding.

    Padding lies at the end of a segment, where a causal token never looks, so padded boundaries do. In an attention that looks
    both ways the padding of a segment is cut off as a segment of its own.

    Args:
        real: int32 [S + 1], cumulative real lengths.
        padded: int32 [S + 1], cumulative padded lengths, which fill the row.
        causal: whether no token sees a later one.

    Returns:
        int32 [S + 1], or [2 S + 1] where padding is cut off; segments may be empty.

    Example:
        >>> real, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
        >>> attention_boundaries(real, padded, causal=False).tolist()
        [0, 3, 4, 6, 8]
    """
    if causal or real is padded:
        return padded
    starts = padded[:-1]
    ends = starts + real.diff()
    return torch.cat([torch.stack([starts, ends], dim=1).flatten(), padded[-1:]])

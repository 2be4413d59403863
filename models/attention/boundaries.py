"""Segment boundaries as a transformers model's attention takes them."""

from typing import Any

import torch

#: Arguments of attention that describe the text row.
ROW_ARGUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "media_blocks",
    "media_block_layers",
    "key_index",
)
_OF_ROW = "_evenpack_of_row"


def attention_boundaries(real: torch.Tensor, padded: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return the boundaries that keep every real token of a row from seeing padding.

    Padding lies at the end of a segment, where a causal token never looks, so padded boundaries do. In an attention that looks
    both ways the padding of a segment is cut off as a segment of its own.

    Args:
        real: int32 [S + 1], cumulative real lengths.
        padded: int32 [S + 1], cumulative padded lengths, which fill the row.
        causal: whether no token sees a later one.

    Returns:
        int32 [S + 1], or [2 S + 1] where padding is cut off; segments may be empty. They are marked as those of the text row.

    Example:
        >>> real, padded = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
        >>> attention_boundaries(real, padded, causal=False).tolist()
        [0, 3, 4, 6, 8]
    """
    if causal or real is padded:
        boundaries = padded
    else:
        starts = padded[:-1]
        ends = starts + real.diff()
        boundaries = torch.cat([torch.stack([starts, ends], dim=1).flatten(), padded[-1:]])
    setattr(boundaries, _OF_ROW, True)
    return boundaries


def without_row(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tower without those of the text row, which some models hand on to their towers.

    A tower that happens to have as many patches as the row has tokens would take them for its own.
    """
    if not hasattr(kwargs.get("cu_seq_lens_q"), _OF_ROW):
        return kwargs
    return {name: value for name, value in kwargs.items() if name not in ROW_ARGUMENTS}

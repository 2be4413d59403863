"""Per-token results back to samples, and shards back to a row."""

from collections.abc import Sequence

import torch

from .boundaries import Boundaries
from .shard import cp_slots


def unpack_tokens(values: torch.Tensor, bounds: Boundaries, num_samples: int, axis: int | None) -> list[torch.Tensor]:
    """Return one view per sample of a tensor with one axis of T entries; see `PackedBatch.unpack`."""
    axis = token_axis(values, bounds.total) if axis is None else axis % values.ndim
    if values.shape[axis] != bounds.total:
        raise ValueError(f"axis {axis} has {values.shape[axis]} entries, the pack has {bounds.total}")
    if axis and values.shape[axis - 1] == 1:
        values, axis = values.squeeze(axis - 1), axis - 1
    starts, lengths = bounds.cu_padded[:num_samples].tolist(), bounds.lengths[:num_samples].tolist()
    return [values.narrow(axis, start, length) for start, length in zip(starts, lengths, strict=True)]


def token_axis(values: torch.Tensor, total: int) -> int:
    """Return the axis of tokens of `[1, T, ...]`, `[..., 1, T]`, `[T, ...]` or `[..., T]`, looked for in that order.

    Raises:
        ValueError: none of the four; a shard's results are shorter than the pack.
    """
    shape = tuple(values.shape)
    if shape[:2] == (1, total):
        return 1
    if shape[-2:] == (1, total):  # positions [3, 1, T], also where T is 3
        return len(shape) - 1
    if shape[:1] == (total,):
        return 0
    if shape[-1:] == (total,):
        return len(shape) - 1
    raise ValueError(f"no axis of {total} tokens in a tensor of shape {list(shape)}; put the results of shards together first")


def unshard_tokens(parts: Sequence[torch.Tensor], bounds: Boundaries, axis: int) -> torch.Tensor:
    """Return the row whose context-parallel shards are given, in rank order.

    Args:
        parts: one per context-parallel rank, T / c entries along `axis`.
        bounds: boundaries of the whole row.
        axis: the axis of tokens.

    Raises:
        ValueError: parts that do not make a row of T entries.
    """
    size = sum(part.shape[axis] for part in parts)
    if size != bounds.total:
        raise ValueError(f"{len(parts)} shards have {size} entries along axis {axis}, the pack has {bounds.total}")
    joined = torch.cat(list(parts), dim=axis)
    slots = [torch.from_numpy(cp_slots(bounds.cu_padded, rank, len(parts))) for rank in range(len(parts))]
    return torch.empty_like(joined).index_copy_(axis, torch.cat(slots).to(joined.device), joined)

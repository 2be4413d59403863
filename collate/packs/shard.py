"""Context parallelism: which slots of a row a rank computes, the pack cut to them, and results put together again."""

import importlib
import importlib.util
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from ...core import TYPE_CODES
from ...models.attention.blocks import check_cp
from .row import AnyRow, Boundaries, Row
from .tree import PackTree


def cp_slots(cu_padded: np.ndarray, cp_rank: int, cp_size: int) -> np.ndarray:
    """Return the slots of a row that a context-parallel rank computes, in the order it holds them.

    Every padded segment is cut into 2 * cp_size equal chunks; rank r takes chunks r and 2 * cp_size - 1 - r, so that with
    causal attention all ranks have equal work. This is the partition of Transformer Engine's THD attention.

    Args:
        cu_padded: padded boundaries, integers [S + 1], each a multiple of 2 * cp_size.
        cp_rank: rank within the context-parallel group.
        cp_size: size of the group.

    Returns:
        int64 [T / cp_size].

    Raises:
        ValueError: a rank outside the group, or a segment that does not divide into equal chunks.

    Example:
        >>> cp_slots(np.array([0, 8, 12]), 0, 2).tolist()
        [0, 1, 6, 7, 8, 11]
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in 0..{cp_size - 1}, got {cp_rank}")
    cu = np.asarray(cu_padded, np.int64)
    if cp_size == 1:
        return np.arange(cu[-1])
    lengths = np.diff(cu)
    uneven = np.flatnonzero(lengths % (2 * cp_size))
    if len(uneven):
        raise ValueError(
            f"segment {uneven[0]} has {lengths[uneven[0]]} slots, no multiple of 2 * cp_size = {2 * cp_size}: "
            f"pack with align={2 * cp_size} (times the tensor-parallel size with sequence parallelism)"
        )
    chunk = lengths // (2 * cp_size)
    starts = np.stack((cu[:-1] + cp_rank * chunk, cu[:-1] + (2 * cp_size - 1 - cp_rank) * chunk), axis=1).ravel()
    sizes = np.repeat(chunk, 2)
    before = np.cumsum(sizes) - sizes
    slots: np.ndarray = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
    return slots


def shard_pack(batch: AnyRow, cp_rank: int, cp_size: int, slicing: str) -> AnyRow:
    """Return the part of a whole pack that a context-parallel rank computes; see `PackedBatch.shard`."""
    if batch.cp_size != 1:
        raise ValueError(f"this is already shard {batch.cp_rank} of {batch.cp_size}")
    check_cp(batch.adapter, cp_size)
    slots = partition(batch, cp_rank, cp_size)
    if cp_size == 1:
        return batch
    marked = msgspec.structs.replace(batch, cp_rank=cp_rank, cp_size=cp_size, cp_indices=slots)
    if slicing == "model":
        return marked
    whole = msgspec.structs.replace(marked, media_feature_index=feature_index(batch))
    cut = {name: tensor.index_select(axis, slots) for name, (tensor, axis) in whole.token_tensors().items()}
    further = {name: cut.pop(name) for name in batch.token_fields}
    return msgspec.structs.replace(whole, token_fields=further, **cut)


def partition(batch: Row, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the rank's slots, int64 [T / cp_size], on the pack's device; from Transformer Engine where it can say."""
    slots = cp_slots(batch.bounds.cu_padded, cp_rank, cp_size)
    device = batch.input_ids.device
    if device.type == "cuda" and cp_size > 1 and importlib.util.find_spec("transformer_engine_torch") is not None:
        return _engine_slots(batch, cp_rank, cp_size)
    return torch.from_numpy(slots).to(device, non_blocking=True)


def _engine_slots(batch: Row, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the rank's slots as Transformer Engine's kernel gives them; it checks nothing, so `cp_slots` goes first."""
    importlib.import_module("transformer_engine")  # loads the library that the extension links to
    tex = importlib.import_module("transformer_engine_torch")
    slots: torch.Tensor = tex.thd_get_partitioned_indices(batch.cu_seqlens_q_padded, batch.bounds.total, cp_size, cp_rank)
    return slots.to(torch.int64)


def feature_index(batch: Row) -> torch.Tensor:
    """Return which feature each anchor of a whole row takes, int64 [1, T], counted within its modality; -1 elsewhere.

    Example:
        An image of 2 features, text, an image of 1 feature: ``[-1, 0, 1, -1, -1, 2]``.
    """
    index = torch.full_like(batch.mm_token_type_ids, -1)
    for name in batch.adapter.media_tokens:
        anchors = batch.media_token_validity_mask & (batch.mm_token_type_ids == TYPE_CODES[name])
        index = torch.where(anchors, anchors.cumsum(dim=1) - 1, index)
    return index


def unpack_tokens(
    values: torch.Tensor, bounds: Boundaries, num_samples: int, axis: int | None, tree: PackTree | None = None
) -> list[torch.Tensor]:
    """Return one view per sample of a tensor with one axis of T entries; see `PackedBatch.unpack`."""
    axis = token_axis(values, bounds.total) if axis is None else axis % values.ndim
    if values.shape[axis] != bounds.total:
        raise ValueError(f"axis {axis} has {values.shape[axis]} entries, the pack has {bounds.total}")
    if axis and values.shape[axis - 1] == 1:
        values, axis = values.squeeze(axis - 1), axis - 1
    starts, lengths = bounds.cu_padded.tolist(), bounds.lengths.tolist()
    parts = [values.narrow(axis, start, length) for start, length in zip(starts, lengths, strict=False)]
    if tree is None:
        return parts[:num_samples]
    pairs = tree.segments[:num_samples].tolist()
    return [parts[own] if prefix < 0 else torch.cat([parts[prefix], parts[own]], dim=axis) for prefix, own in pairs]


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

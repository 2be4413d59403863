"""Core attention for packed rows that runs anywhere, context parallelism included; on GPUs Transformer Engine's is faster."""

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...collate.packs.shard import cp_slots


@functools.cache
def segment_attention() -> type:
    """Return a class to put into a layer specification as `core_attention`: every segment attends to itself, causally.

    Padding attends nowhere and gives 0. It needs packed rows (`packed_seq_params`).

    Example:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        >>> spec.submodules.self_attention.submodules.core_attention = segment_attention()
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    class SegmentAttention(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any):
            super().__init__(config=config)
            self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
            group: Any = getattr(pg_collection, "cp", None)
            if group is None and parallel_state.model_parallel_is_initialized():
                group = parallel_state.get_context_parallel_group()
            self.cp_group = group if group is not None and group.size() > 1 else None

        def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> torch.Tensor:
            if packed_seq_params is None:
                raise ValueError("segment attention needs packed rows: packed_seq_params is None")
            return _attend(query, key, value, packed_seq_params, self.cp_group, self.scale)

    return SegmentAttention


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Any, cp_group: Any, scale: float
) -> torch.Tensor:
    """Return causal attention within segments.

    Args:
        query: `[t, heads, d]`, this rank's slots.
        key: `[t, groups, d]`.
        value: `[t, groups, d]`.
        params: `PackedSeqParams` of the whole row.
        cp_group: context-parallel group, None where a row lies on one rank.
        scale: factor on the scores.

    Returns:
        `[t, heads * d]`.
    """
    padded = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    cu, lengths = padded.cpu().numpy().astype(np.int64), params.cu_seqlens_q.diff().tolist()
    slots = np.arange(cu[-1])
    if cp_group is not None:
        shares = [cp_slots(cu, rank, cp_group.size()) for rank in range(cp_group.size())]
        slots = shares[cp_group.rank()]
        back = torch.from_numpy(np.argsort(np.concatenate(shares))).to(key.device)
        key, value = (_gathered(states, cp_group)[back] for states in (key, value))
    parts, at = [], 0
    for start, stop, length in zip(cu[:-1].tolist(), cu[1:].tolist(), lengths, strict=True):
        # A rank holds its slots segment by segment, an equal share of each.
        size = (stop - start) * len(slots) // int(cu[-1])
        places, own = slots[at : at + size] - start, query[at : at + size]
        parts.append(_one(own, key[start : start + length], value[start : start + length], places, length, scale))
        at += size
    return torch.cat(parts).flatten(1)


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: np.ndarray, length: int, scale: float
) -> torch.Tensor:
    """Return one segment's attention for the queries at the given places; 0 beyond its real length."""
    at = torch.from_numpy(places).to(query.device)
    real = at < length
    if not length or not bool(real.any()):
        return torch.zeros_like(query)
    mask = torch.arange(length, device=query.device) <= at[real][:, None]
    repeats = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(repeats, dim=1).transpose(0, 1) for states in (key, value))
    found = F.scaled_dot_product_attention(query[real].transpose(0, 1), keys, values, attn_mask=mask, scale=scale)
    return torch.zeros_like(query).index_put((real.nonzero().flatten(),), found.transpose(0, 1))


def _gathered(states: torch.Tensor, group: Any) -> torch.Tensor:
    """Return every rank's `states` along the first axis, in rank order; gradients flow back to their ranks."""
    found: torch.Tensor = _Gathered.apply(states, group)  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    """All-gather along the first axis, rank by rank; backward adds up what all ranks need of this rank's share."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(states) for _ in range(group.size())]
        dist.all_gather(parts, states.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad_outputs[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None

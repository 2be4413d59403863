"""Attention written out, for what `scaled_dot_product_attention` does not compute: capped scores, and sinks."""

import torch
import torch.nn.functional as F


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within one segment, [B, H, L, D]; the scores of a segment are held at once.

    Args:
        query: [B, H, L, D].
        key: [B, H_kv, K, D].
        value: [B, H_kv, K, D_v].
        mask: who sees whom, bool, or a number added to each score; broadcasts to [B, H, L, K]. None where all see all.
        scaling: factor of the scores, default 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2).
        sinks: [H], one more score per head, which takes weight and adds nothing (GPT-OSS).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return F.dropout(weights, dropout, training=dropout > 0) @ value

"""Rotary tables that depend on the length of the row, computed per segment.

LongRoPE (Phi-3 and its kin) takes one set of factors for sequences up to the pretraining length and another beyond it, and
`transformers` tells which by the largest position of the whole row: one long sample would change every other sample of its
pack. Dynamic NTK scaling goes by the longest row that the model has seen so far, so not even a sample alone has one result.
"""

from typing import Any

import torch
from torch import nn

from ...core import UnsafeModelError
from ..subclass import subclass


class PerSegmentRope:
    """Mixin of a rotary embedding that computes its tables for each segment of a row alone."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Return cos and sin, each [B, T, D]; a row of several segments is cut where its positions start again."""
        run = super().forward  # type: ignore[misc]
        if position_ids.ndim != 2 or position_ids.shape[0] != 1:
            tables: tuple[torch.Tensor, ...] = run(x, position_ids, *args, **kwargs)
            return tables
        starts = (position_ids[0].diff() <= 0).nonzero().flatten() + 1
        parts = torch.tensor_split(position_ids, starts.cpu(), dim=1)
        found = [run(x, part, *args, **kwargs) for part in parts]
        return tuple(torch.cat(column, dim=1) for column in zip(*found, strict=True))


def _rope_types(module: nn.Module) -> set[str]:
    """Return the kinds of rotary tables that a module computes; one per kind of layer in some models."""
    config = getattr(module, "config", None)
    given = getattr(module, "rope_type", None)
    if given is None and hasattr(module, "rope_init_fn"):
        given = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return {str(one) for one in (given.values() if isinstance(given, dict) else [given])} if given else set()


def isolate_rope(decoder: nn.Module) -> None:
    """Make every rotary embedding whose tables depend on the length compute them per segment."""
    for module in decoder.modules():
        if "longrope" in _rope_types(module):
            subclass(module, PerSegmentRope)


def check_rope(decoder: nn.Module, name: str, advice: str) -> None:
    """Raise `UnsafeModelError` for a decoder whose rotary tables would follow the longest segment of a pack."""
    for module in decoder.modules():
        kinds = _rope_types(module)
        if any("dynamic" in kind for kind in kinds):
            raise UnsafeModelError(
                f"{name} scales its rotary embedding by the longest row seen so far (rope_type 'dynamic'): results depend on "
                "other samples. Set rope_parameters to a fixed rule ('yarn' or 'linear')"
            )
        if "longrope" in kinds and "mrope_section" in str(getattr(getattr(module, "config", None), "rope_parameters", "")):
            raise UnsafeModelError(
                f"{name} combines M-RoPE with rotary factors by length (rope_type 'longrope'), which are not known per sample"
            )
        # Llama 4: layers without rotary positions scale their queries by the place in the row.
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            raise UnsafeModelError(
                f"{name} scales its attention by the place in the row (attn_temperature_tuning), not in the sample. Set "
                "attn_temperature_tuning to False in its config"
            )
        if "longrope" in kinds and not isinstance(module, PerSegmentRope):
            raise UnsafeModelError(
                f"{name} picks rotary factors by the longest segment of a row (rope_type 'longrope'). {advice}."
            )


def rope_threshold(decoder: nn.Module) -> int | None:
    """Return the length beyond which a decoder's rotary tables change, None where they do not."""
    for module in decoder.modules():
        if isinstance(module, PerSegmentRope):
            config: Any = module.config
            parameters = config.rope_parameters
            nested = [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
            found = [one["original_max_position_embeddings"] for one in nested if "original_max_position_embeddings" in one]
            return int(min(found))
    return None

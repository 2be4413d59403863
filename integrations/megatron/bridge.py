"""A micro-batch under the keys that Megatron-Bridge's step for vision-language models keeps."""

from collections.abc import Mapping
from typing import Any

import torch

from ...collate.packs.model_check import MASK, check_spelled

#: Fields that describe pixels, under the names that Bridge's models take.
_VISUAL = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


class VisualInputs:
    """Media tensors as attributes, None where there are none, as Bridge passes them between its functions.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        for name, value in tensors.items():
            setattr(self, name, value)

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Return what there is, as keyword arguments of the model."""
        return {name: value for name, value in vars(self).items() if value is not None}


def to_bridge(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch for Megatron-Bridge's `vlm_step`, whose models cut the row themselves under context parallelism.

    Args:
        microbatch: an item of an iterator of `wrap_data_iterator`.

    Returns:
        `tokens` and `input_ids`, `position_ids` `[1, T]` or `[3, 1, T]`, `labels`, `loss_mask` where the stage has them; the
        boundaries `cu_seqlens_q`, `cu_seqlens_kv`, and their padded ones where something is padded; `max_seqlen_q` and
        `max_seqlen_kv` on the host; `attention_mask` None; `visual_inputs`.

    Raises:
        SpelledMediaTokenError: text spells a media token: Bridge's models place features by ids alone.
    """
    check_spelled(microbatch["num_spelled"], "a model of Megatron-Bridge", MASK)
    real, padded = microbatch["cu_seqlens"], microbatch["cu_seqlens_padded"]
    rows = {name: microbatch[name][None] for name in ("tokens", "labels", "loss_mask") if name in microbatch}
    found: dict[str, Any] = {
        **rows,
        "position_ids": microbatch["position_ids"].unsqueeze(-2),
        "attention_mask": None,
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "max_seqlen_q": microbatch["max_seqlen"],
        "max_seqlen_kv": microbatch["max_seqlen"],
        "visual_inputs": VisualInputs({name: microbatch.get(name) for name in _VISUAL}),
    }
    if "tokens" in rows:
        found["input_ids"] = rows["tokens"]
    if real is not padded:
        found |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return found

"""Where a sample's fields keep the grids of its media items."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..adapter import ModelAdapter

#: Field of an audio clip's length, in mel frames; an audio item is a grid (frames, 1, 1).
AUDIO_LENGTHS = "audio_feature_lengths"
#: Field that marks the real frames of a padded clip.
AUDIO_MASK = "feature_attention_mask"


def media_grids(values: Mapping[str, Any], adapter: ModelAdapter) -> dict[str, np.ndarray]:
    """Return the grids of a sample's items by modality, int64 [n, 3], for `sample_layout`.

    Args:
        values: the sample's fields: `image_grid_thw`, `video_grid_thw`, and `audio_feature_lengths` or
            `feature_attention_mask` in families that hear.
        adapter: the family.

    Example:
        >>> from evenpack.models import adapter_for
        >>> media_grids({"image_grid_thw": [[1, 4, 4]]}, adapter_for("qwen2_vl"))
        {'image': array([[1, 4, 4]])}
    """
    grids = {
        name: np.asarray(values[f"{name}_grid_thw"], np.int64).reshape(-1, 3)
        for name in adapter.media_tokens
        if values.get(f"{name}_grid_thw") is not None
    }
    frames = _audio_frames(values) if "audio" in adapter.media_tokens else None
    if frames is not None:
        grids["audio"] = np.stack([frames, np.ones_like(frames), np.ones_like(frames)], axis=1)
    return grids


def _audio_frames(values: Mapping[str, Any]) -> np.ndarray | None:
    """Return the mel frames of each audio clip, int64 [n]; processors give their mask, and some their number too."""
    if values.get(AUDIO_LENGTHS) is not None:
        return np.asarray(values[AUDIO_LENGTHS], np.int64).reshape(-1)
    if values.get(AUDIO_MASK) is not None:
        frames: np.ndarray = np.asarray(values[AUDIO_MASK], np.int64).sum(axis=1)
        return frames
    return None


def media_seconds(values: Mapping[str, Any], adapter: ModelAdapter) -> Any:
    """Return the seconds per temporal patch of a sample's videos, None where it has none."""
    return values.get(adapter.seconds_field) if adapter.has_seconds else None

"""Where a sample's fields keep the grids of its media items."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core import Field, FieldShapeError, MissingFieldError
from ..adapter import Anchors, ModelAdapter
from .anyres import anyres_grid

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


class MediaItems(NamedTuple):
    """Items of one modality, in families whose processor gives no grids.

    Attributes:
        grids: int64 [n, 3], rows in the tower, and patches of a row (h, w).
        tokens: int64 [n], tokens that anchor each; None where only their sum could be known, and is not.
    """

    grids: np.ndarray
    tokens: np.ndarray | None


def media_items(values: Mapping[str, Any], adapter: ModelAdapter, where: str = "sample") -> dict[str, MediaItems]:
    """Return a sample's items by modality, for families with `adapter.anchors`; pixels are not read, only counted.

    Args:
        values: the sample's fields, tensors.
        adapter: the family.
        where: how errors name the sample.

    Raises:
        MissingFieldError: a field of the modality is absent where another one is there.
        FieldShapeError: sizes that no item can have.
    """
    found: dict[str, MediaItems] = {}
    for modality, rule in adapter.anchors.items():
        mine = [field for field in adapter.fields.of_kind("media") if field.modality == modality]
        if not any(field.name in values for field in mine):
            continue
        absent = [field.name for field in mine if field.name not in values and field.rows != "free"]
        if absent:
            given = [field.name for field in mine if field.name in values]
            raise MissingFieldError(f"{where}: {modality} items need {absent} beside {given}")
        found[modality] = items_by_rule(values, rule, adapter, where)
    return found


def items_by_rule(values: Mapping[str, Any], rule: Anchors, adapter: ModelAdapter, where: str = "sample") -> MediaItems:
    """Return the items of a modality with such anchors, from the fields that the rule names."""
    if rule.rule == "rows":
        counts = {name: values[name].shape[adapter.fields[name].axis] for name in rule.per_row if name in values}
        tokens = np.repeat([rule.per_row[name] for name in counts], list(counts.values())).astype(np.int64)
        return MediaItems(np.tile(np.array([(rule.frames, *rule.tower)], np.int64), (len(tokens), 1)), tokens)
    sizes = values[rule.field]
    if rule.rule == "trust":
        rows = sizes.shape[adapter.fields[rule.field].axis]
        return MediaItems(np.array([(rows, *rule.tower)], np.int64), None)
    sizes = np.asarray(sizes.cpu(), np.int64)
    if rule.rule == "frames":
        lengths = sizes.sum(axis=1)
        return MediaItems(np.column_stack((lengths, np.ones_like(sizes[:, :2]))), (lengths + 1) // 2 // rule.pool)
    if sizes.ndim == 3:  # places of patches, from 0 on
        sizes = sizes.max(axis=1)[:, ::-1] + 1
    if sizes.min(initial=1) < 1:
        raise FieldShapeError(f"{where}: {rule.field!r} must be at least 1, got {sizes.tolist()[:8]}")
    if rule.rule == "sizes":
        grids = np.column_stack((np.ones(len(sizes), np.int64), sizes // rule.patch))
        return MediaItems(grids, (grids[:, 1:] // adapter.merge_size).prod(axis=1))
    alone = len(sizes) == 1 or not rule.max_tiles
    pairs = [anyres_grid(height, width, rule) if alone else (1, rule.side**2 + 1) for height, width in sizes.tolist()]
    grids = np.array([(tiles, *rule.tower) for tiles, _ in pairs], np.int64)
    return MediaItems(grids, np.array([tokens for _, tokens in pairs], np.int64))


def rows_needed(field: Field, items: MediaItems, rule: Anchors) -> int | None:
    """Return how many rows a media field has for some items; None where nothing says."""
    grids = items.grids
    needed = {
        "items": len(grids),
        "tiles": int(grids[:, 0].sum()),
        "patches": rule.rows_per_patch * int(grids.prod(axis=1).sum()),
        "sample": min(1, len(grids)),
    }
    counted = rule.per_row if len(rule.per_row) > 1 else ()
    return None if field.name in counted else needed.get(field.rows)


def flattened(value: torch.Tensor, field: Field, given: Mapping[str, Any], adapter: ModelAdapter) -> torch.Tensor:
    """Return a media field with its rows along one axis, where a processor stacks the tiles of its images.

    Tiles of padding, which an image with fewer tiles than another has, are left out where its size tells their number; behind a
    batch axis, images and their tiles become one axis.
    """
    rule = adapter.anchors.get(field.modality or "")
    if rule is None or field.shape is None:
        return value
    if rule.rule == "anyres" and field.rows == "tiles" and value.ndim == len(field.shape) + 2 and rule.field in given:
        sizes = torch.as_tensor(given[rule.field])
        if sizes.ndim == 2 and len(sizes) == len(value):
            tiles = items_by_rule({rule.field: sizes}, rule, adapter).grids[:, 0].tolist()
            return torch.cat([rows[:count] for rows, count in zip(value, tiles, strict=True)])
    if field.axis == 1 and value.ndim == len(field.shape) + 1 and field.shape[0] == 1 and value.shape[0] > 1:
        return value.reshape(1, math.prod(value.shape[:2]), *value.shape[2:])
    return value


def media_seconds(values: Mapping[str, Any], adapter: ModelAdapter) -> Any:
    """Return the seconds per temporal patch of a sample's videos, None where it has none."""
    return values.get(adapter.seconds_field) if adapter.has_seconds else None

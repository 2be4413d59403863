"""How a family is declared: the constants of its released checkpoint, and where each of them stands in a config."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..core import Field
from .adapter import TEXT_FIELDS, ModelAdapter


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One family: an adapter with the released constants, and how a `transformers` config overrides them.

    Attributes:
        adapter: the family by name: constants of the released checkpoint.
        model_types: values of `config.model_type` that belong to the family.
        paths: adapter attribute to the dotted path of its value in a config. `media_tokens.image` names one entry of a
            mapping. A value that a config does not have, or has as None, keeps the released constant.
        patch: dotted paths of the factors of `patch_dim` in a config; a factor that stands squared is named twice.
        sizes: field to the dotted path of the first size of its rows.
    """

    adapter: ModelAdapter
    model_types: tuple[str, ...]
    paths: Mapping[str, str] = {}
    patch: tuple[str, ...] = ()
    sizes: Mapping[str, str] = {}


#: Where Qwen's configs, and those modelled on them, keep what an adapter needs.
QWEN_PATHS: dict[str, str] = {
    "media_tokens.image": "image_token_id",
    "media_tokens.video": "video_token_id",
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
    "merge_size": "vision_config.spatial_merge_size",
    "pad_token_id": "text_config.pad_token_id",
}

#: A row of `pixel_values` is one patch: channels x frames x height x width.
QWEN_PATCH = (
    "vision_config.in_channels",
    "vision_config.temporal_patch_size",
    "vision_config.patch_size",
    "vision_config.patch_size",
)


def vision_fields(patch_dim: int, *, seconds: bool = False) -> tuple[Field, ...]:
    """Return the fields of a family that sees images and videos, as its processor names them.

    Args:
        patch_dim: size D of one row of `pixel_values`.
        seconds: whether videos come with `second_per_grid_ts`.
    """
    fields = [
        *TEXT_FIELDS,
        Field(name="mm_token_type_ids", kind="token", dtype="int64", to_model=True),
        *patch_fields("image", "pixel_values", "image_grid_thw", (patch_dim,)),
        *patch_fields("video", "pixel_values_videos", "video_grid_thw", (patch_dim,)),
    ]
    if seconds:
        fields.append(Field(name="second_per_grid_ts", kind="media", dtype="float", modality="video", to_model=True))
    return tuple(fields)


def patch_fields(modality: Literal["image", "video"], pixels: str, grid: str, row: tuple[int, ...]) -> tuple[Field, Field]:
    """Return the two fields of a modality whose items are grids of patches: the patches, and the grids."""
    return (
        Field(name=pixels, kind="media", dtype="float", shape=row, modality=modality, rows="patches", to_model=True),
        Field(name=grid, kind="media", dtype="int64", shape=(3,), modality=modality, to_model=True),
    )

"""What the rest of evenpack knows about a model family: one frozen declaration per family."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..core import Field, FieldSet

RopeRule = Literal["1d", "grid", "seconds", "timestamp", "temporal_merge", "omni"]
CpSlicing = Literal["model", "caller"]

#: Fields of every family: text, its targets and their weights, and the sample's name.
TEXT_FIELDS: tuple[Field, ...] = (
    Field(name="input_ids", kind="token", dtype="int64", required=True),
    Field(name="labels", kind="token", dtype="int64", pad=-100),
    Field(name="loss_weights", kind="token", dtype="float32", default=1.0, pad=0.0),
    Field(name="sample_id", kind="sample", dtype="id"),
)


class ModelAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A model family: its fields, media tokens, position rule and the way its forward pass wants to be called.

    Attributes:
        name: family, for example "qwen2_5_vl".
        fields: everything a sample may hold.
        media_tokens: modality to the id that anchors one feature of it.
        vision_start: id written before a media item, None where the family has none.
        vision_end: id written after a media item, None where the family has none.
        rope: position rule (see `models.rope`); "1d" gives `[1, T]`, all others `[3, 1, T]`.
        rule_version: the transformers version whose `get_rope_index` the rule equals.
        merge_size: side of the square of patches that becomes one feature.
        temporal_merge: frames merged into one temporal position ("temporal_merge" rule).
        tokens_per_second: temporal positions per second ("seconds" rule).
        patch_dim: size D of one row of `pixel_values`; 0 without vision.
        cp_slicing: who cuts a row for context parallelism: the model, after it inserted media features, or the caller.
        trained_modalities: modalities whose towers are trained.
        dummy_grids: modality to the grid (t, h, w) of the smallest legal item.
        pad_token_id: id written at padding.
        model_arguments: names of further forward arguments that the family's models take, though no signature names them.
    """

    name: str
    fields: FieldSet
    media_tokens: Mapping[str, int] = {}
    vision_start: int | None = None
    vision_end: int | None = None
    rope: RopeRule = "1d"
    rule_version: str = ""
    merge_size: int = 1
    temporal_merge: int = 1
    tokens_per_second: float = 1.0
    patch_dim: int = 0
    cp_slicing: CpSlicing = "caller"
    trained_modalities: tuple[str, ...] = ()
    dummy_grids: Mapping[str, tuple[int, int, int]] = {}
    pad_token_id: int = 0
    model_arguments: tuple[str, ...] = ()

    def token_count(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Return how many tokens anchor an item of `grid` (t, h, w in patches)."""
        t, h, w = grid
        if modality == "video":
            t //= self.temporal_merge
        return t * (h // self.merge_size) * (w // self.merge_size)

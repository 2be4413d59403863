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
        video_start: id written before a video where it is not `vision_start`.
        video_end: id written after a video where it is not `vision_end`.
        audio_start: id written before an audio clip.
        audio_end: id written after an audio clip.
        rope: position rule (see `models.layout.positions`); "1d" gives `[1, T]`, all others `[3, 1, T]`.
        rule_version: the transformers version whose `get_rope_index` the rule equals.
        merge_size: side of the square of patches that becomes one feature.
        temporal_merge: frames merged into one temporal position ("temporal_merge" rule).
        tokens_per_second: temporal positions per second ("seconds" and "omni" rules).
        seconds_field: field that holds the seconds per temporal patch of each video ("seconds" and "omni" rules).
        position_dtype: dtype of the positions; "float32" where the family's own rule gives fractions of a second.
        stacked_markers: whether the two markers before (and after) a video with its sound share one position.
        audio_window: half the frames that the audio encoder convolves at a time; 0 where it convolves all of them at once.
        patch_dim: size D of one row of `pixel_values`; 0 without vision.
        cp_slicing: who cuts a row for context parallelism: the model, after it inserted media features, or the caller.
        trained_modalities: modalities whose towers are trained.
        shared_towers: groups of modalities that run through one tower, so that any of them gives all its weights a gradient.
        dummy_grids: modality to the grid (t, h, w) of the smallest legal item.
        pad_token_id: id written at padding.
        model_arguments: names of further forward arguments that the family's models take, though no signature names them.
    """

    name: str
    fields: FieldSet
    media_tokens: Mapping[str, int] = {}
    vision_start: int | None = None
    vision_end: int | None = None
    video_start: int | None = None
    video_end: int | None = None
    audio_start: int | None = None
    audio_end: int | None = None
    rope: RopeRule = "1d"
    rule_version: str = ""
    merge_size: int = 1
    temporal_merge: int = 1
    tokens_per_second: float = 1.0
    seconds_field: str = "second_per_grid_ts"
    position_dtype: Literal["int64", "float32"] = "int64"
    stacked_markers: bool = False
    audio_window: int = 0
    patch_dim: int = 0
    cp_slicing: CpSlicing = "caller"
    trained_modalities: tuple[str, ...] = ()
    shared_towers: tuple[tuple[str, ...], ...] = ()
    dummy_grids: Mapping[str, tuple[int, int, int]] = {}
    pad_token_id: int = 0
    model_arguments: tuple[str, ...] = ()

    def token_count(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Return how many tokens anchor an item of `grid` (t, h, w in patches; audio: frames, 1, 1)."""
        t, h, w = grid
        if modality == "audio":
            return _audio_tokens(t, self.audio_window)
        if modality == "video":
            t //= self.temporal_merge
        return t * (h // self.merge_size) * (w // self.merge_size)

    def brackets(self, modality: str) -> tuple[list[int], list[int]]:
        """Return the ids written before and after the smallest item of a modality; empty lists where there are none."""
        before, after = [self.vision_start], [self.vision_end]
        if modality == "audio":
            before, after = [self.audio_start], [self.audio_end]
        elif modality == "video" and self.shares_token:  # its frames are written like images
            before, after = [self.video_start, *before], [*after, self.video_end]
        elif modality == "video" and self.video_start is not None:
            before, after = [self.video_start], [self.video_end]
        return [token for token in before if token is not None], [token for token in after if token is not None]

    @property
    def has_seconds(self) -> bool:
        """Whether videos carry seconds per temporal patch, which their positions depend on."""
        return self.rope in ("seconds", "omni")

    @property
    def shares_token(self) -> bool:
        """Whether images and videos are anchored by one token, told apart by the markers around them alone."""
        tokens = [self.media_tokens.get(name) for name in ("image", "video")]
        return None not in tokens and tokens[0] == tokens[1]


def _audio_tokens(frames: int, window: int) -> int:
    """Return how many tokens anchor an audio clip of mel frames.

    Two strided convolutions (Qwen2.5-Omni: one, then a pooling) over the clip, or three over each window of it (Qwen3-Omni:
    13 tokens per window of 100 frames).
    """
    if not window:
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    whole, rest = divmod(frames, 2 * window)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + whole * 13

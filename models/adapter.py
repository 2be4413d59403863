"""What the rest of evenpack knows about a model family: one frozen declaration per family."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from ..core import Field, FieldSet
from ..core.fields import FLOAT

RopeRule = Literal["1d", "grid", "seconds", "timestamp", "temporal_merge", "omni"]
CpSlicing = Literal["model", "caller"]
AnchorRule = Literal["rows", "sizes", "anyres", "frames", "trust"]
Bidirectional = Literal["image", "sample_images", "prefix"]
#: How blocks of tokens that see each other meet sliding windows; see `ModelAdapter.block_layers`.
BlockLayers = Literal["all", "sliding", "beyond"]

#: Fields of every family: text, its targets and their weights, the names of the sample and of its group.
TEXT_FIELDS: tuple[Field, ...] = (
    Field(name="input_ids", kind="token", dtype="int64", required=True),
    Field(name="labels", kind="token", dtype="int64", pad=-100),
    Field(name="loss_weights", kind="token", dtype="float32", default=1.0, pad=0.0),
    Field(name="sample_id", kind="sample", dtype="id"),
    Field(name="group_id", kind="sample", dtype="id"),
)


class Anchors(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens anchor the items of one modality, in families whose processor gives no grids.

    An item is what the processor gives one row for: an image, a tile of one, a clip. Each gets a grid (t, h, w): its rows in
    the tower, and the patches of one row.

    Attributes:
        rule: "rows": every row of a field is anchored by a fixed number of tokens. "sizes": by the patches of its size, merged
            like those of a grid. "anyres": by the tiles that its size is cut into. "frames": by the frames of a clip. "trust":
            by a number that is not known here: the sample has tokens if and only if it has rows.
        per_row: "rows" rule: media field to the number of tokens that anchor one of its rows.
        field: "sizes" and "anyres" rules: field of the items' sizes, int64 [n, 2] (height, width), or of the places of their
            patches, [n, patches, 2] with negative padding; "frames" rule: field that marks the real frames of each clip;
            "trust" rule: field whose rows are counted.
        patch: "sizes" rule: side of a patch in units of the field.
        pool: "frames" rule: how many positions, each of two frames, become one token.
        frames: frames of a row of sound, where no mask says them.
        tower: (h, w) patches of one row, where sizes do not say them.
        pinpoints: "anyres" rule: (height, width) in pixels of the canvases that an image may be cut into tiles on.
        tile: "anyres" rule: side of a tile in pixels.
        side: "anyres" rule: side of a tile in tokens.
        max_tiles: "anyres" rule: tiles' worth of tokens beyond which a canvas is made smaller; an image that is one of several
            of its sample is one tile. 0: neither.
        rows_per_patch: rows of a field with `rows="patches"` for one patch.
        free_size: what stands for each free size of the smallest item.
        smallest: field to its value for the smallest item, where that is not all ones.
    """

    rule: AnchorRule
    per_row: Mapping[str, int] = {}
    field: str = ""
    patch: int = 1
    pool: int = 1
    frames: int = 1
    tower: tuple[int, int] = (1, 1)
    pinpoints: tuple[tuple[int, int], ...] = ()
    tile: int = 0
    side: int = 0
    max_tiles: int = 0
    rows_per_patch: int = 1
    free_size: int = 1
    smallest: Mapping[str, tuple[Any, ...]] = {}

    def __post_init__(self) -> None:
        if self.rule not in get_args(AnchorRule):
            raise ValueError(f"anchors: rule must be one of {get_args(AnchorRule)}, got {self.rule!r}")
        if self.rule == "rows" and not self.per_row:
            raise ValueError("anchors: the rule 'rows' needs per_row, the tokens of one row of a field")
        if self.rule != "rows" and not self.field:
            raise ValueError(f"anchors: the rule {self.rule!r} needs field, which says or counts the items' sizes")
        wrong = {name: count for name, count in self.per_row.items() if count < 1}
        if wrong:
            raise ValueError(f"anchors: a row must have at least 1 token, got {wrong}")


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
        anchors: modality to the number of tokens of its items, where they come without a grid.
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
        bidirectional: tokens that see each other both ways, where not all attention is causal: "image", each run of image or
            video tokens is a block (Gemma 3); "sample_images", those of a sample are one block (Molmo 2); "prefix", everything
            before the first trained token is (PaliGemma; a token field `token_type_ids`, 0 in the prefix, says otherwise).
        bidirectional_tokens: ids that belong to a block beside the media tokens, such as markers and ends of lines (Molmo 2).
        bidirectional_layers: layers in which they do: "all", or "sliding" for those with a sliding window (Gemma 4).
        frames_as_images: the processor writes each frame of a video as an image, among the image fields (InternVL, SmolVLM).
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
    anchors: Mapping[str, Anchors] = {}
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
    bidirectional: Bidirectional | None = None
    bidirectional_tokens: tuple[int, ...] = ()
    bidirectional_layers: Literal["all", "sliding"] = "all"
    frames_as_images: bool = False
    model_arguments: tuple[str, ...] = ()

    def token_count(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Return how many tokens anchor an item of `grid` (t, h, w in patches; audio: frames, 1, 1)."""
        t, h, w = grid
        if modality == "audio":
            return _audio_tokens(t, self.audio_window)
        if modality == "video":
            t //= self.temporal_merge
        return t * (h // self.merge_size) * (w // self.merge_size)

    def is_pixels(self, field: Field) -> bool:
        """Whether a field holds what a tower computes on, rather than sizes or seconds."""
        return field.rows == "patches" or (field.modality in self.anchors and field.dtype == FLOAT)

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
    def block_layers(self) -> BlockLayers:
        """How blocks meet windows: a window cuts a run of image tokens like any other, and lets one block per sample be."""
        return self.bidirectional_layers if self.bidirectional == "image" else "beyond"

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

"""Families with ordinary positions: LLaVA, InternVL, Idefics, Pixtral, Gemma, ...: one declaration each, read off a config.

A sample of such a family needs no position rule. It needs the rows that its processor makes of an image, how many tokens anchor
a row, and where rows lie in a tensor. `GENERIC` says that, one line a family: the line's function takes the family's config.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

import msgspec

from ...core import Field, FieldSet
from ...core.fields import ANY, FLOAT
from ..adapter import TEXT_FIELDS, Anchors, ModelAdapter
from ..family import patch_fields

_IMAGE: Any = {"kind": "media", "modality": "image", "to_model": True}
_AUDIO: Any = {"kind": "media", "modality": "audio", "to_model": True}
_TYPES = Field(name="mm_token_type_ids", kind="token", dtype="int64", to_model=True)
#: Where configs keep the token that anchors a feature; a dot leads into a config inside.
_TOKENS = {
    "image": ("image_token_id", "image_token_index", "vision_config.image_token_id", "image_patch_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's samples hold beside text.

    Attributes:
        fields: the media fields, as the processor names them.
        anchors: how many tokens anchor them; None for families whose processor gives grids.
        merge_size: side of the square of patches that becomes one feature.
        modality: what the fields hold.
        more: further attributes of the adapter.
    """

    fields: tuple[Field, ...]
    anchors: Anchors | None = None
    merge_size: int = 1
    modality: Literal["image", "audio"] = "image"
    more: Mapping[str, Any] = {}


def generic_adapter(config: Any) -> ModelAdapter:
    """Return the adapter of a family in `GENERIC` from a config of it.

    Raises:
        ValueError: a config that does not say which token anchors the family's media, or how many a row has.
    """
    media = GENERIC[config.model_type](config)
    token = _first(config, *_TOKENS[media.modality])
    if token is None:
        raise ValueError(
            f"the config of {config.model_type!r} names no {media.modality} token: set {_TOKENS[media.modality][0]}"
        )
    return ModelAdapter(
        name=config.model_type,
        fields=FieldSet((*TEXT_FIELDS, _TYPES, *media.fields)),
        media_tokens={media.modality: int(token)},
        anchors={} if media.anchors is None else {media.modality: media.anchors},
        rule_version="5.24",
        merge_size=media.merge_size,
        cp_slicing="model",
        trained_modalities=(media.modality,),
        dummy_grids={media.modality: (1, media.merge_size, media.merge_size)},
        pad_token_id=int(_first(config, "text_config.pad_token_id", "pad_token_id") or 0),
        **media.more,
    )


def tiles(
    config: Any,
    per_row: int,
    *,
    name: str = "pixel_values",
    side: int | None = None,
    axis: Literal[0, 1] = 0,
    free: bool = False,
    mask: str = "",
    twin: Field | None = None,
    frames: bool = False,
) -> Media:
    """Return the media of a family whose images are rows [channels, height, width], each anchored by a fixed number of tokens.

    Args:
        config: the family's config.
        per_row: tokens of a row.
        name: field of the pixels.
        side: height and width of a row; default: what the vision config says.
        axis: 1 where rows lie behind a batch axis.
        free: rows differ in size.
        mask: field that marks the real pixels of a row.
        twin: a second field of the same rows.
        frames: videos are written as images, one for each frame.
    """
    size = _pair(side or _first(config, "vision_config.image_size", "image_size"))
    batch, shape = (1,) * axis, (None, None) if free else size
    fields = [Field(name=name, dtype=FLOAT, shape=(*batch, 3, *shape), axis=axis, rows="items", **_IMAGE)]
    if mask:
        fields.append(Field(name=mask, dtype=ANY, shape=(*batch, *shape), axis=axis, rows="items", **_IMAGE))
    if twin is not None:
        fields.append(twin)
    anchors = Anchors(rule="rows", per_row={name: per_row}, tower=_tower(config), free_size=size[0])
    return Media(fields=tuple(fields), anchors=anchors, more={"frames_as_images": True} if frames else {})


def sized(cell: int, merge: int) -> Media:
    """Return the media of a family whose images keep their shape, filled up to the largest of a call, with `image_sizes`.

    Args:
        cell: side of a patch in pixels.
        merge: side of the square of patches that becomes one feature.
    """
    fields = (
        Field(name="pixel_values", dtype=FLOAT, shape=(3, None, None), rows="items", **_IMAGE),
        Field(name="image_sizes", dtype="int64", shape=(2,), rows="items", **_IMAGE),
    )
    # Mistral 3 cannot run an image of one feature alone.
    smallest = {"image_sizes": ((cell * merge, 2 * cell * merge),)}
    anchors = Anchors(rule="sizes", field="image_sizes", patch=cell, free_size=2 * cell * merge, smallest=smallest)
    return Media(fields=fields, anchors=anchors, merge_size=merge)


def anyres(config: Any, *, shrink: str | None = None, max_tiles: int = 0) -> Media:
    """Return the media of a family that lays an image on one of several canvases and cuts that into tiles.

    Args:
        config: the family's config.
        shrink: factor of a tile's side in tokens, as a fraction.
        max_tiles: see `Anchors`.
    """
    side, tower = _pair(config.vision_config.image_size)[0], _tower(config)
    fields = [
        Field(name="pixel_values", dtype=FLOAT, shape=(3, side, side), rows="tiles", **_IMAGE),
        Field(name="image_sizes", dtype="int64", shape=(2,), rows="items", **_IMAGE),
    ]
    if max_tiles:
        fields.append(Field(name="batch_num_images", dtype="int64", shape=(), rows="sample", **_IMAGE))
    canvases = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
    anchors = Anchors(
        rule="anyres",
        field="image_sizes",
        tower=tower,
        pinpoints=canvases,
        tile=side,
        side=int(tower[0] * Fraction(shrink or 1)),
        max_tiles=max_tiles,
        smallest={"image_sizes": ((side, side),)},
    )
    return Media(fields=tuple(fields), anchors=anchors)


def grids(row: tuple[int, ...], merge: int, *more: Field) -> Media:
    """Return the media of a family whose processor gives rows of patches and their grids.

    Args:
        row: sizes of a patch.
        merge: side of the square of patches that becomes one feature.
        more: further fields.
    """
    return Media(fields=(*patch_fields("image", "pixel_values", "image_grid_thw", row), *more), merge_size=merge)


def sound(mels: int, frames: int, *, mask: str = "", pool: int = 2, per_row: int = 0) -> Media:
    """Return the media of a family that hears clips of one length, filled up with silence.

    Args:
        mels: mel bins.
        frames: length of a clip in mel frames.
        mask: field that marks the real frames, where tokens anchor only those.
        pool: how many positions, each of two frames, become one token.
        per_row: tokens of a clip, where that is one number.
    """
    fields = [Field(name="input_features", dtype=FLOAT, shape=(mels, frames), **_AUDIO)]
    if mask:
        fields.append(Field(name=mask, dtype=ANY, shape=(frames,), **_AUDIO))
        return Media(fields=tuple(fields), anchors=Anchors(rule="frames", field=mask, pool=pool), modality="audio")
    anchors = Anchors(rule="rows", per_row={"input_features": per_row}, frames=frames)
    return Media(fields=tuple(fields), anchors=anchors, modality="audio")


def _lfm2_vl(config: Any) -> Media:
    """Patches of each image, filled up to the largest number of a call, with the image's height and width in patches."""
    merge, patch = config.downsample_factor, config.vision_config.patch_size
    fields = (
        Field(name="pixel_values", dtype=FLOAT, shape=(None, 3 * patch**2), rows="items", **_IMAGE),
        Field(name="pixel_attention_mask", dtype=ANY, shape=(None,), rows="items", **_IMAGE),
        Field(name="spatial_shapes", dtype="int64", shape=(2,), rows="items", **_IMAGE),
    )
    smallest = {"spatial_shapes": ((merge, merge),)}
    anchors = Anchors(rule="sizes", field="spatial_shapes", free_size=merge**2, smallest=smallest)
    return Media(fields=fields, anchors=anchors, merge_size=merge)


def _gemma4(config: Any) -> Media:
    """Patches of each image with their places (x, y), filled up to the largest number of a call."""
    merge, patch = config.vision_config.pooling_kernel_size, config.vision_config.patch_size
    fields = (
        Field(name="pixel_values", dtype=FLOAT, shape=(None, 3 * patch**2), rows="items", **_IMAGE),
        Field(name="image_position_ids", dtype="int64", shape=(None, 2), pad=-1, rows="items", **_IMAGE),
    )
    places = tuple((x, y) for y in range(merge) for x in range(merge))
    smallest = {"image_position_ids": (places,)}
    anchors = Anchors(rule="sizes", field="image_position_ids", free_size=merge**2, smallest=smallest)
    vision = getattr(config.text_config, "use_bidirectional_attention", None) == "vision"
    more = {"bidirectional": "image", "bidirectional_layers": "sliding"} if vision else {}
    return Media(fields=fields, anchors=anchors, merge_size=merge, more=more)


def _gemma3(config: Any) -> Media:
    """Images of one size, pooled; the tokens of an image see each other."""
    return msgspec.structs.replace(tiles(config, config.mm_tokens_per_image), more={"bidirectional": "image"})


def _paligemma(config: Any) -> Media:
    """Images of one size before the text; the prefix, which `token_type_ids` of 0 mark, sees itself both ways."""
    media = tiles(config, _patches(config))
    prefix = Field(name="token_type_ids", kind="token", dtype="int64", pad=1)
    return msgspec.structs.replace(media, fields=(*media.fields, prefix), more={"bidirectional": "prefix"})


def _minicpmv(config: Any) -> Media:
    """Slices of images, their patches side by side along the last axis, with each slice's height and width in patches."""
    patch = _pair(config.vision_config.patch_size)[0]
    merge = 2 * 2**config.merger_times if config.downsample_mode == "16x" else 2**config.merger_times
    fields = (
        Field(name="pixel_values", dtype=FLOAT, shape=(1, 3, patch), axis=3, rows="patches", **_IMAGE),
        Field(name="target_sizes", dtype=ANY, shape=(2,), rows="items", **_IMAGE),
    )
    smallest = {"target_sizes": ((merge, merge),)}
    anchors = Anchors(rule="sizes", field="target_sizes", rows_per_patch=patch, smallest=smallest)
    return Media(fields=fields, anchors=anchors, merge_size=merge)


def _step3p7(config: Any) -> Media:
    """A whole view of each image, and smaller cuts of large ones, with their number per image."""
    side, cut = config.vision_config.image_size, _STEP_CUT * config.vision_config.patch_size
    fields = (
        Field(name="pixel_values", dtype=FLOAT, shape=(3, side, side), rows="items", **_IMAGE),
        Field(name="pixel_values_local", dtype=FLOAT, shape=(3, None, None), rows="free", **_IMAGE),
        Field(name="num_local_patches", dtype="int64", shape=(), rows="free", **_IMAGE),
    )
    counts = {
        name: (one // config.vision_config.patch_size // 4) ** 2
        for name, one in (("pixel_values", side), ("pixel_values_local", cut))
    }
    return Media(fields=fields, anchors=Anchors(rule="rows", per_row=counts, tower=_tower(config), free_size=cut))


_STEP_CUT = 36


def _tower(config: Any) -> tuple[int, int]:
    """Return the (h, w) patches of a row of the vision tower; (1, 1) where the config does not say."""
    size, patch = (_first(config, f"vision_config.{name}", name) for name in ("image_size", "patch_size"))
    if size is None or patch is None:
        return 1, 1
    (height, width), (patch_height, patch_width) = _pair(size), _pair(patch)
    return height // patch_height, width // patch_width


def _patches(config: Any, shrink: float = 1) -> int:
    """Return the patches of a row, each side shrunk by a factor."""
    height, width = _tower(config)
    return int(height * shrink) * int(width * shrink)


def _selected(config: Any) -> int:
    """Return the patches of a row, and the class token where a tower that has one is taken in full."""
    full = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return _patches(config) + int(full and config.vision_config.model_type.startswith("clip"))


def _pair(size: Any) -> tuple[int, int]:
    """Return a size that is one number or two as (height, width)."""
    one, *rest = size if isinstance(size, list | tuple) else (size,)
    return int(one), int(rest[0] if rest else one)


def _first(config: Any, *paths: str) -> Any:
    """Return the first value that a config has under one of some dotted paths, None where it has none."""
    for path in paths:
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            return value
    return None


def _llava(config: Any) -> Media:
    """LLaVA: tiles of one size, or, with Pixtral's tower, images that keep their shape."""
    if config.vision_config.model_type == "pixtral":
        return sized(config.vision_config.patch_size, 1)
    return tiles(config, _selected(config))


def _voxtral(config: Any) -> Media:
    """Clips of 30 s; neighbouring positions of the tower become one token each."""
    audio = config.audio_config
    per_row = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
    return sound(audio.num_mel_bins, 2 * audio.max_source_positions, per_row=per_row)


def _fuyu(config: Any) -> Media:
    """Patches, each anchored by one token; there is no tower."""
    row = 3 * config.patch_size**2
    field = Field(name="pixel_values", dtype=FLOAT, shape=(1, row), axis=1, **_IMAGE)
    return Media(fields=(field,), anchors=Anchors(rule="rows", per_row={"pixel_values": 1}))


_MASK, _HEARD = "pixel_attention_mask", "input_features_mask"
#: VideoLLaMA 3 says for each image how many patches become one feature; its released processors merge squares of 2.
_MERGES = Field(name="image_merge_sizes", dtype="int64", default=2, **_IMAGE)
#: What samples of each family hold, by `config.model_type`.
GENERIC: dict[str, Callable[[Any], Media]] = {
    "llava": _llava,
    "vipllava": lambda c: tiles(c, _patches(c)),
    "video_llava": lambda c: tiles(c, _selected(c), name="pixel_values_images"),
    "mistral3": lambda c: sized(c.vision_config.patch_size, c.spatial_merge_size),
    "lighton_ocr": lambda c: sized(c.vision_config.patch_size, c.spatial_merge_size),
    "llava_next": anyres,
    "llava_next_video": anyres,
    "llava_onevision": lambda c: anyres(c, max_tiles=int(c.vision_aspect_ratio.removeprefix("anyres_max_"))),
    "granite4_vision": lambda c: anyres(c, shrink=c.downsample_rate),
    "internvl": lambda c: tiles(c, _patches(c, c.downsample_ratio), frames=True),
    "qianfan_ocr": lambda c: tiles(c, _patches(c, c.downsample_ratio)),
    "got_ocr2": lambda c: tiles(c, _patches(c, 1 / 4)),
    "smolvlm": lambda c: tiles(c, _patches(c, 1 / c.scale_factor), axis=1, mask=_MASK, frames=True),
    "idefics3": lambda c: tiles(c, _patches(c, 1 / c.scale_factor), axis=1, mask=_MASK),
    "idefics2": lambda c: tiles(c, c.perceiver_config.resampler_n_latents, axis=1, mask=_MASK, free=True),
    "aya_vision": lambda c: tiles(c, _patches(c, 1 / c.downsample_factor)),
    "cohere2_vision": lambda c: tiles(c, _patches(c, 1 / c.downsample_factor)),
    "deepseek_vl": lambda c: tiles(c, _patches(c)),
    "deepseek_vl_hybrid": lambda c: tiles(c, _patches(c), twin=_high_res(c)),
    "janus": lambda c: tiles(c, _patches(c)),
    "ovis2": lambda c: tiles(c, _patches(c, 1 / c.vision_config.hidden_stride)),
    "aria": lambda c: tiles(c, c.projector_patch_to_query_dict[_patches(c)], mask="pixel_mask"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "paligemma": _paligemma,
    "exaone4_5": lambda c: grids((_row(c),), c.vision_config.spatial_merge_size),
    "hyperclovax_vision_v2": lambda c: grids((_row(c),), c.vision_config.spatial_merge_size),
    "muse_glimmer": lambda c: grids((_row(c, c.vision_config.patch_temporal),), c.vision_config.merge_size),
    "minimax_m3_vl": lambda c: grids((_row(c),), c.vision_config.spatial_merge_size),
    "kimi_k25": lambda c: grids((3, *_pair(c.vision_config.patch_size)), c.vision_config.merge_kernel_size[0]),
    "video_llama_3": lambda c: grids((_row(c),), 2, _MERGES),
    "lfm2_vl": _lfm2_vl,
    "minicpmv4_6": _minicpmv,
    "fuyu": _fuyu,
    "qwen2_audio": lambda c: sound(*_heard(c, "max_source_positions"), mask="feature_attention_mask"),
    "audioflamingo3": lambda c: sound(*_heard(c, "max_source_positions"), mask=_HEARD),
    "glmasr": lambda c: sound(*_heard(c, "max_position_embeddings"), mask=_HEARD, pool=4),
    "voxtral": _voxtral,
    "step3p7": _step3p7,
    "chameleon": lambda c: tiles(
        c, (c.vq_config.resolution // 2 ** (len(c.vq_config.channel_multiplier) - 1)) ** 2, side=c.vq_config.resolution
    ),
}


def _row(config: Any, frames: int = 0) -> int:
    """Return how many numbers a patch of the vision tower has."""
    vision = config.vision_config
    channels = _first(vision, "in_channels", "num_channels") or 3
    height, width = _pair(vision.patch_size)
    return int(channels * (frames or _pair(getattr(vision, "temporal_patch_size", 1))[0]) * height * width)


def _heard(config: Any, positions: str) -> tuple[int, int]:
    """Return the mel bins and the frames of a clip, two for each position of the tower."""
    return config.audio_config.num_mel_bins, 2 * getattr(config.audio_config, positions)


def _high_res(config: Any) -> Field:
    """The same images, larger, for the second tower of DeepSeek-VL's hybrid."""
    size = _pair(config.high_res_vision_config.image_size)
    return Field(name="high_res_pixel_values", dtype=FLOAT, shape=(3, *size), rows="items", **_IMAGE)

"""Qwen2.5-Omni and Qwen3-Omni (their thinkers): images, videos and sound; the text after an item goes on from its largest
position.

The sound track of a video may stand between its frames, as the processors write it with `use_audio_in_video`.
"""

import msgspec

from ...core import Field, FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from ..layout.items import AUDIO_LENGTHS, AUDIO_MASK
from .qwen2_vl import QWEN2_VL

_OMNI_PATHS = {
    **QWEN_PATHS,
    "media_tokens.audio": "audio_token_id",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
    "tokens_per_second": "position_id_per_seconds",
}
_OMNI_SIZES = {"input_features": "audio_config.num_mel_bins"}


def _omni_fields(patch_dim: int, mel: int = 128) -> FieldSet:
    """Return the fields of a family that sees and hears; all clips of a pack must be padded to one number of frames."""
    heard = (
        Field(name="video_second_per_grid", kind="media", dtype="float", modality="video", to_model=True),
        Field(name="input_features", kind="media", dtype="float", shape=(mel, None), modality="audio", to_model=True),
        Field(name=AUDIO_MASK, kind="media", dtype="any", shape=(None,), modality="audio", to_model=True),
        Field(name=AUDIO_LENGTHS, kind="media", dtype="int64", modality="audio", to_model=True),
    )
    return FieldSet((*vision_fields(patch_dim), *heard))


QWEN2_5_OMNI = Family(
    adapter=msgspec.structs.replace(
        QWEN2_VL.adapter,
        name="qwen2_5_omni",
        fields=_omni_fields(1176),
        media_tokens={"image": 151655, "video": 151656, "audio": 151646},
        audio_start=151647,
        audio_end=151648,
        rope="omni",
        tokens_per_second=25,
        seconds_field="video_second_per_grid",
        stacked_markers=True,
        trained_modalities=("image", "video", "audio"),
        dummy_grids={"image": (1, 2, 2), "video": (1, 2, 2), "audio": (4, 1, 1)},
    ),
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    paths=_OMNI_PATHS,
    patch=QWEN2_VL.patch,
    sizes=_OMNI_SIZES,
)

QWEN3_OMNI_MOE = Family(
    adapter=msgspec.structs.replace(
        QWEN2_5_OMNI.adapter,
        name="qwen3_omni_moe",
        fields=_omni_fields(1536),
        media_tokens={"image": 151655, "video": 151656, "audio": 151675},
        audio_start=151669,
        audio_end=151670,
        tokens_per_second=13,
        position_dtype="float32",
        stacked_markers=False,
        patch_dim=1536,
        audio_window=50,
        dummy_grids={"image": (1, 2, 2), "video": (1, 2, 2), "audio": (1, 1, 1)},
    ),
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    paths={**_OMNI_PATHS, "audio_window": "audio_config.n_window"},
    patch=QWEN2_VL.patch,
    sizes=_OMNI_SIZES,
)

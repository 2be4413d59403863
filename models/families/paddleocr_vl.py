"""PaddleOCR-VL: Qwen2-VL's rule; the model takes images only, each patch as [channels, height, width]."""

import msgspec

from ...core import Field, FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from .qwen2_vl import QWEN2_VL


def _image_fields() -> tuple[Field, ...]:
    """Return the fields of Qwen2-VL without video, with square patches."""
    fields = (field for field in vision_fields(588) if field.modality != "video")
    return tuple(msgspec.structs.replace(f, shape=(3, 14, 14)) if f.name == "pixel_values" else f for f in fields)


PADDLEOCR_VL = Family(
    adapter=msgspec.structs.replace(
        QWEN2_VL.adapter,
        name="paddleocr_vl",
        fields=FieldSet(_image_fields()),
        media_tokens={"image": 100295},
        vision_start=101305,
        vision_end=101306,
        patch_dim=588,
        trained_modalities=("image",),
        shared_towers=(),
        dummy_grids={"image": (1, 2, 2)},
        pad_token_id=0,
    ),
    model_types=("paddleocr_vl",),
    paths={key: path for key, path in QWEN_PATHS.items() if key != "media_tokens.video"},
    patch=("vision_config.num_channels", "vision_config.patch_size", "vision_config.patch_size"),
)

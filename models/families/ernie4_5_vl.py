"""ERNIE-4.5-VL: pairs of a video's frames share one temporal position, and experts differ for text and media."""

import msgspec

from ...core import Field, FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from .qwen2_vl import QWEN2_VL

#: Type ids for the router: like `mm_token_type_ids`, with the start and end markers counted as media. The processor writes
#: them, and without them every token goes to the text experts, so they are required.
_ROUTING_TYPES = Field(name="moe_mm_token_type_ids", kind="token", dtype="int64", required=True, to_model=True)

ERNIE4_5_VL_MOE = Family(
    adapter=msgspec.structs.replace(
        QWEN2_VL.adapter,
        name="ernie4_5_vl_moe",
        fields=FieldSet((*vision_fields(588), _ROUTING_TYPES)),
        media_tokens={"image": 100295, "video": 103367},
        vision_start=101304,
        vision_end=101305,
        video_start=101306,
        video_end=101307,
        rope="temporal_merge",
        temporal_merge=2,
        patch_dim=588,
        dummy_grids={"image": (1, 2, 2), "video": (2, 2, 2)},
        pad_token_id=0,
    ),
    model_types=("ernie4_5_vl_moe",),
    paths={
        **QWEN_PATHS,
        "vision_start": "image_start_token_id",
        "vision_end": "image_end_token_id",
        "video_start": "video_start_token_id",
        "video_end": "video_end_token_id",
        "temporal_merge": "vision_config.temporal_merge_size",
    },
    patch=("vision_config.in_channels", "vision_config.patch_size", "vision_config.patch_size"),
)

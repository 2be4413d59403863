"""Cohere's vision-language models (North Micro Vision): Qwen3-VL's rule and processing."""

import msgspec

from .qwen3_vl import QWEN3_VL

COHERE_COMPASS = msgspec.structs.replace(
    QWEN3_VL,
    adapter=msgspec.structs.replace(
        QWEN3_VL.adapter,
        name="cohere_compass",
        media_tokens={"image": 255031, "video": 255032},
        vision_start=255028,
        vision_end=255029,
        pad_token_id=0,
    ),
    model_types=("cohere_compass",),
)

"""Qwen3.5, dense and mixture of experts: Qwen3-VL's positions, with Gated DeltaNet in most layers."""

import msgspec

from .qwen3_vl import QWEN3_VL

QWEN3_5 = msgspec.structs.replace(
    QWEN3_VL,
    adapter=msgspec.structs.replace(
        QWEN3_VL.adapter,
        name="qwen3_5",
        media_tokens={"image": 248056, "video": 248057},
        vision_start=248053,
        vision_end=248054,
        pad_token_id=248044,
    ),
    model_types=("qwen3_5",),
)

QWEN3_5_MOE = msgspec.structs.replace(
    QWEN3_5,
    adapter=msgspec.structs.replace(QWEN3_5.adapter, name="qwen3_5_moe"),
    model_types=("qwen3_5_moe",),
)

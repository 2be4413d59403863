"""Qwen3-VL, dense and mixture of experts: a timestamp is written before each frame, so each frame is a run of its own."""

import msgspec

from ...core import FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from .qwen2_vl import QWEN2_VL

QWEN3_VL = Family(
    adapter=msgspec.structs.replace(
        QWEN2_VL.adapter,
        name="qwen3_vl",
        fields=FieldSet(vision_fields(1536)),
        rope="timestamp",
        patch_dim=1536,
    ),
    model_types=("qwen3_vl",),
    paths=QWEN_PATHS,
    patch=QWEN2_VL.patch,
)

QWEN3_VL_MOE = msgspec.structs.replace(
    QWEN3_VL,
    adapter=msgspec.structs.replace(QWEN3_VL.adapter, name="qwen3_vl_moe"),
    model_types=("qwen3_vl_moe",),
)

# Cosmos 3 reasons with Qwen3-VL's towers and tokens.
COSMOS3_OMNI = msgspec.structs.replace(
    QWEN3_VL,
    adapter=msgspec.structs.replace(QWEN3_VL.adapter, name="cosmos3_omni"),
    model_types=("cosmos3_omni",),
)

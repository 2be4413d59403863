"""Qwen2.5-VL: like Qwen2-VL, but a video's temporal axis counts seconds."""

import msgspec

from ...core import FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from .qwen2_vl import QWEN2_VL

# The released checkpoints say 2 tokens per second; the config class defaults to 4.
QWEN2_5_VL = Family(
    adapter=msgspec.structs.replace(
        QWEN2_VL.adapter,
        name="qwen2_5_vl",
        fields=FieldSet(vision_fields(1176, seconds=True)),
        rope="seconds",
        tokens_per_second=2,
    ),
    model_types=("qwen2_5_vl",),
    paths={**QWEN_PATHS, "tokens_per_second": "vision_config.tokens_per_second"},
    patch=QWEN2_VL.patch,
)

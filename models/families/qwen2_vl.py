"""Qwen2-VL: a video is one run of tokens, and its temporal axis counts frames."""

from ...core import FieldSet
from ..adapter import ModelAdapter
from ..family import QWEN_PATCH, QWEN_PATHS, Family, vision_fields

QWEN2_VL = Family(
    adapter=ModelAdapter(
        name="qwen2_vl",
        fields=FieldSet(vision_fields(1176)),
        media_tokens={"image": 151655, "video": 151656},
        vision_start=151652,
        vision_end=151653,
        rope="grid",
        rule_version="5.24",
        merge_size=2,
        patch_dim=1176,
        cp_slicing="model",
        trained_modalities=("image", "video"),
        shared_towers=(("image", "video"),),
        dummy_grids={"image": (1, 2, 2), "video": (1, 2, 2)},
        pad_token_id=151643,
    ),
    model_types=("qwen2_vl",),
    paths=QWEN_PATHS,
    patch=QWEN_PATCH,
)

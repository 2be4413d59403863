"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: a video's frames are written like images, between video markers.

One token anchors images and videos alike, so the markers tell them apart. A stock model cannot take both in one row
("Image features and image tokens do not match"); one that `prepare_model` set up can.
"""

import msgspec

from ...core import FieldSet
from ..family import QWEN_PATHS, Family, vision_fields
from .qwen2_vl import QWEN2_VL

_GLM_PATHS = {
    "media_tokens.image": "image_token_id",
    "media_tokens.video": "image_token_id",
    "vision_start": "image_start_token_id",
    "vision_end": "image_end_token_id",
    "video_start": "video_start_token_id",
    "video_end": "video_end_token_id",
    "merge_size": QWEN_PATHS["merge_size"],
    "pad_token_id": QWEN_PATHS["pad_token_id"],
}


def _glm(name: str, token: int, image: tuple[int, int], video: tuple[int, int], pad: int) -> Family:
    """Return a family of this kind from its ids."""
    return Family(
        adapter=msgspec.structs.replace(
            QWEN2_VL.adapter,
            name=name,
            fields=FieldSet(vision_fields(1176)),
            media_tokens={"image": token, "video": token},
            vision_start=image[0],
            vision_end=image[1],
            video_start=video[0],
            video_end=video[1],
            rope="timestamp",
            pad_token_id=pad,
        ),
        model_types=(name,),
        paths=_GLM_PATHS,
        patch=QWEN2_VL.patch,
    )


GLM4V = _glm("glm4v", 151343, (151339, 151340), (151341, 151342), 151329)
GLM4V_MOE = _glm("glm4v_moe", 151363, (151339, 151340), (151341, 151342), 151329)
GLM46V = _glm("glm46v", 151343, (151339, 151340), (151361, 151362), 151329)
GLM_OCR = _glm("glm_ocr", 59280, (59256, 59257), (59258, 59259), 59246)

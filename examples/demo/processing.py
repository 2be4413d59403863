"""From a chat example to an unpadded sample, through the real Qwen processor."""

from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
)

from .data import ChatExample

#: Value of a label that nothing is learned from.
IGNORED = -100
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
#: Side in pixels of a family's vision patches.
PATCH_SIZE = {"qwen2_5_vl": 14, "qwen3_vl": 16}
#: Bounds of a picture's area after resizing, in tokens (squares of merged patches).
PICTURE_TOKENS = (4, 100)
_PROCESSORS: dict[str, type[ProcessorMixin]] = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
#: Qwen3-VL maps pixels to [-1, 1]; Qwen2.5-VL keeps the statistics of CLIP, the image processor's default.
_NORMALISATION: dict[str, dict[str, list[float]]] = {
    "qwen2_5_vl": {},
    "qwen3_vl": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}


def make_processor(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a family's processor for pictures and text.

    Args:
        family: "qwen2_5_vl" or "qwen3_vl".
        tokenizer: tokenizer with Qwen's special tokens and a chat template.
    """
    square = (PATCH_SIZE[family] * MERGE_SIZE) ** 2
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE[family],
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        merge_size=MERGE_SIZE,
        size={"shortest_edge": PICTURE_TOKENS[0] * square, "longest_edge": PICTURE_TOKENS[1] * square},
        **_NORMALISATION[family],
    )
    # A processor insists on a video processor, and that one needs torchvision, unless its class lists none.
    without_video = {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])}
    processor_class = type("PictureProcessor", (_PROCESSORS[family],), without_video)
    return processor_class(image_processor=image_processor, tokenizer=tokenizer, chat_template=tokenizer.chat_template)


def encode(processor: ProcessorMixin, example: ChatExample) -> dict[str, Any]:
    """Turn a chat example into a sample: unpadded, with the labels of the assistant's turn, not shifted.

    Returns:
        `input_ids`, `labels` and `mm_token_type_ids` int64 [L], `sample_id`, and for pictures `pixel_values` float32 [P, D]
        and `image_grid_thw` int64 [n, 3].
    """
    encoded = processor.apply_chat_template(
        example.messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    input_ids = encoded["input_ids"][0]
    sample = {
        "input_ids": input_ids,
        "labels": input_ids.where(torch.as_tensor(encoded["assistant_masks"][0]).bool(), IGNORED),
        "mm_token_type_ids": torch.as_tensor(encoded["mm_token_type_ids"][0]),
        "sample_id": example.sample_id,
    }
    return sample | {name: encoded[name] for name in ("pixel_values", "image_grid_thw") if name in encoded}

"""Tiny Qwen vision-language models: the real classes of transformers, at 1 to 2 million parameters."""

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from .processing import MERGE_SIZE, PATCH_SIZE, TEMPORAL_PATCH_SIZE
from .tokenizer import END_OF_TURN, IMAGE_TOKEN, PADDING, VIDEO_TOKEN, VISION_END, VISION_START

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
HIDDEN, LAYERS, HEADS, KV_HEADS = 128, 3, 4, 2
HEAD_DIM = HIDDEN // HEADS
VISION_HIDDEN, VISION_LAYERS, VISION_HEADS = 96, 2, 4
#: Rotary pairs of each head that follow time, height and width.
MROPE_SECTION = [4, 6, 6]
#: Side of the grid of learned vision positions of Qwen3-VL.
POSITION_GRID = 16
#: Weights are drawn with this over the square root of their inputs: transformers' fixed 0.02 suits widths of thousands.
INIT_GAIN = 1.0
EMBEDDING_STD = 0.02


def build_model(family: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Build a randomly initialised model, equal on every rank that passes the same seed.

    Args:
        family: "qwen2_5_vl" or "qwen3_vl".
        tokenizer: its size and special tokens go into the configuration.
        seed: seed of the weights.

    Raises:
        ValueError: a family that the demo does not have.
    """
    if family not in FAMILIES:
        raise ValueError(f"model must be one of {', '.join(FAMILIES)}, got {family!r}")
    if family == "qwen2_5_vl":
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**_settings(family, tokenizer)))
    else:
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_settings(family, tokenizer)))
    _initialise(model, seed)
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """Return how many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def _settings(family: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the arguments of a family's configuration class."""
    token = tokenizer.convert_tokens_to_ids
    return {
        "text_config": _text_settings(family, tokenizer),
        "vision_config": _vision_settings(family),
        "image_token_id": token(IMAGE_TOKEN),
        "video_token_id": token(VIDEO_TOKEN),
        "vision_start_token_id": token(VISION_START),
        "vision_end_token_id": token(VISION_END),
        # One matrix for reading and writing tokens keeps most parameters in the layers.
        "tie_word_embeddings": True,
    }


def _text_settings(family: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    token = tokenizer.convert_tokens_to_ids
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": MROPE_SECTION},
        "bos_token_id": None,
        "eos_token_id": token(END_OF_TURN),
        "pad_token_id": token(PADDING),
    }
    if family == "qwen3_vl":
        del settings["bos_token_id"]
        settings["head_dim"] = HEAD_DIM
        settings["rope_parameters"]["mrope_interleaved"] = True
    return settings


def _vision_settings(family: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "depth": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": VISION_HEADS,
        "patch_size": PATCH_SIZE[family],
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "out_hidden_size": HIDDEN,
    }
    if family == "qwen2_5_vl":
        # The first block looks at windows, the last one at the whole picture, as in the released models. The class default of
        # 4 temporal positions a second differs from theirs.
        return settings | {"fullatt_block_indexes": [VISION_LAYERS - 1], "window_size": 112, "tokens_per_second": 2}
    return settings | {"deepstack_visual_indexes": [0], "num_position_embeddings": POSITION_GRID**2}


@torch.no_grad()
def _initialise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue  # Norms start at one and biases at zero, as the classes leave them.
        std = EMBEDDING_STD if "embed" in name and "patch" not in name else INIT_GAIN / parameter[0].numel() ** 0.5
        parameter.normal_(0.0, std, generator=generator)

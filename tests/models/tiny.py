"""Tiny random models of every family, with the real transformers classes, and random samples for them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evenpack.models import ModelAdapter

VOCAB = 320
#: Media ids of the tiny models, all at the end of the vocabulary; text ids lie below `TEXT_IDS`.
TEXT_IDS = 300
IDS = {
    "image_token_id": 301,
    "video_token_id": 302,
    "vision_start_token_id": 303,
    "vision_end_token_id": 304,
}
GLM_IDS = {
    "image_token_id": 301,
    "video_token_id": 302,
    "image_start_token_id": 303,
    "image_end_token_id": 304,
    "video_start_token_id": 305,
    "video_end_token_id": 306,
}
#: Frames to which every clip is padded, as audio processors do.
AUDIO_FRAMES = 240
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PATCH = {"patch_size": 4, "spatial_merge_size": 2}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN3_VISION = {
    **PATCH,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}


def qwen2_vl() -> tuple[str, dict[str, Any]]:
    vision = {**PATCH, "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return "Qwen2VL", {"text_config": DENSE | {"rope_parameters": MROPE}, "vision_config": vision, **IDS}


def qwen2_5_vl() -> tuple[str, dict[str, Any]]:
    vision = {
        **PATCH,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    return "Qwen2_5_VL", {"text_config": DENSE | {"rope_parameters": MROPE}, "vision_config": vision, **IDS}


def qwen3_vl(moe: bool = False) -> tuple[str, dict[str, Any]]:
    text = DENSE | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}} | (EXPERTS if moe else {})
    vision = QWEN3_VISION | {"deepstack_visual_indexes": [0]}
    return "Qwen3VLMoe" if moe else "Qwen3VL", {"text_config": text, "vision_config": vision, **IDS}


def cosmos3_omni() -> tuple[str, dict[str, Any]]:
    return "Cosmos3Omni", qwen3_vl()[1]


def cohere_compass() -> tuple[str, dict[str, Any]]:
    rope = {name: MROPE | {"mrope_interleaved": True} for name in ("full_attention", "sliding_attention")}
    text = DENSE | {
        "rope_parameters": rope,
        "layer_types": list(rope),
        "sliding_window": 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = QWEN3_VISION | {"deepstack_visual_indexes": [0]}
    return "CohereCompass", {"text_config": text, "vision_config": vision, **IDS}


def qwen3_5(moe: bool = False) -> tuple[str, dict[str, Any]]:
    rope = MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    experts = EXPERTS | {"shared_expert_intermediate_size": 16} if moe else {}
    text = DENSE | LINEAR | {"head_dim": 8, "rope_parameters": rope} | experts
    return "Qwen3_5Moe" if moe else "Qwen3_5", {"text_config": text, "vision_config": QWEN3_VISION, **IDS}


def glm4v() -> tuple[str, dict[str, Any]]:
    rope = MROPE | {"partial_rotary_factor": 1.0}
    vision = {
        **PATCH,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "image_size": 32,
    }
    return "Glm4v", {"text_config": DENSE | {"rope_parameters": rope}, "vision_config": vision, **GLM_IDS}


def glm4v_moe() -> tuple[str, dict[str, Any]]:
    _, settings = glm4v()
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    return "Glm4vMoe", settings | {"text_config": settings["text_config"] | experts}


def ernie4_5_vl_moe() -> tuple[str, dict[str, Any]]:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 8], "moe_num_shared_experts": 1}
    vision = {**PATCH, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    return "Ernie4_5_VLMoe", {"text_config": DENSE | {"rope_parameters": MROPE} | experts, "vision_config": vision, **GLM_IDS}


def paddleocr_vl() -> tuple[str, dict[str, Any]]:
    vision = {
        **PATCH,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
    }
    text = DENSE | {"head_dim": 8, "rope_parameters": MROPE}
    return "PaddleOCRVL", {"text_config": text, "vision_config": vision, **IDS}


def omni(name: str, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    ids = IDS | {"audio_token_id": 305, "audio_start_token_id": 306, "audio_end_token_id": 307}
    heard = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
    return name, {"text_config": text, "vision_config": vision, "audio_config": heard | {"output_dim": 32} | audio, **ids}


def qwen2_5_omni() -> tuple[str, dict[str, Any]]:
    vision = {key: value for key, value in qwen2_5_vl()[1]["vision_config"].items() if key != "tokens_per_second"}
    return omni("Qwen2_5OmniThinker", DENSE | {"rope_parameters": MROPE}, vision, {"n_window": 100})


def qwen3_omni_moe() -> tuple[str, dict[str, Any]]:
    settings = qwen3_vl(moe=True)[1]
    audio = {"n_window": 50, "downsample_hidden_size": 16}
    return omni("Qwen3OmniMoeThinker", settings["text_config"], settings["vision_config"], audio)


#: The families whose packs are compared with single samples, logits and gradients, by name.
FAMILIES: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": lambda: qwen3_vl(moe=True),
    "cosmos3_omni": cosmos3_omni,
    "cohere_compass": cohere_compass,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": lambda: qwen3_5(moe=True),
    "glm4v": glm4v,
    "glm4v_moe": glm4v_moe,
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    "paddleocr_vl": paddleocr_vl,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni_moe": qwen3_omni_moe,
}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a random model of a family, under 200,000 parameters, in evaluation mode."""
    import transformers

    name, settings = FAMILIES[family]()
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random biases and norms too: a zero hides what it multiplies
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    return model


def random_sample(
    rng: np.random.Generator,
    adapter: ModelAdapter,
    *,
    media: int | None = None,
    sides: int = 3,
    pixels: bool = False,
) -> dict[str, Any]:
    """Return a raw sample: text and a few media items in the family's own format, its type ids included.

    Args:
        rng: source of everything random.
        adapter: the family; its ids are used.
        media: how many items; None for 0 to 3.
        sides: largest side of an item, in merged patches.
        pixels: whether to add random pixels.
    """
    ids, types = text(rng, 1, 12), []
    types = [0] * len(ids)
    grids: dict[str, list[tuple[int, int, int]]] = {name: [] for name in adapter.media_tokens}
    for _ in range(int(rng.integers(0, 4)) if media is None else media):
        name = str(rng.choice(list(adapter.media_tokens)))
        # Qwen3-Omni's encoder pads the last window of a clip like the longest of its batch, unmasked before convolutions:
        # clips shorter than a window (100 frames) come out differently in any batch, packed or not.
        grid = random_grid(rng, name, adapter, sides, clip=100 if pixels else 4)
        grids[name].append(grid)
        for new, code in item(rng, name, grid, adapter):
            ids, types = ids + new, types + [code] * len(new)
        more = text(rng, 0, 8)
        ids, types = ids + more, types + [0] * len(more)
    raw: dict[str, Any] = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types)}
    if "moe_mm_token_type_ids" in adapter.fields:
        raw["moe_mm_token_type_ids"] = routing_types(raw["input_ids"], raw["mm_token_type_ids"], adapter)
    return raw | media_fields(rng, grids, adapter, pixels)


def routing_types(ids: torch.Tensor, types: torch.Tensor, adapter: ModelAdapter) -> torch.Tensor:
    """Return ERNIE's type ids for the router: markers count as media."""
    routed = types.clone()
    for code, name in ((1, "image"), (2, "video")):
        before, after = adapter.brackets(name)
        routed[torch.isin(ids, torch.tensor([*before, *after]))] = code
    return routed


def text(rng: np.random.Generator, least: int, most: int) -> list[int]:
    """Return random text ids."""
    return rng.integers(1, TEXT_IDS, int(rng.integers(least, most))).tolist()


def random_grid(rng: np.random.Generator, name: str, adapter: ModelAdapter, sides: int, clip: int) -> tuple[int, int, int]:
    """Return a random legal grid; a clip has at least `clip` frames."""
    if name == "audio":
        return int(rng.integers(clip, AUDIO_FRAMES)), 1, 1
    h, w = (adapter.merge_size * int(side) for side in rng.integers(1, sides + 1, 2))
    return adapter.temporal_merge * int(rng.integers(1, 4)) if name == "video" else 1, h, w


def item(rng: np.random.Generator, name: str, grid: tuple[int, int, int], adapter: ModelAdapter) -> list[tuple[list[int], int]]:
    """Return an item's tokens as (ids, type code) pieces: markers, anchors, and timestamps where frames have them."""
    code, token = {"image": 1, "video": 2, "audio": 3}[name], adapter.media_tokens[name]
    before, after = adapter.brackets(name)
    if name == "video" and adapter.rope == "timestamp":
        outer = ([before[0]], [after[-1]]) if adapter.shares_token else ([], [])
        frame = adapter.token_count("image", (1, *grid[1:]))
        pieces: list[tuple[list[int], int]] = [(outer[0], 0)]
        for _ in range(grid[0]):
            pieces += [(text(rng, 1, 4) + before[-1:], 0), ([token] * frame, code), (after[:1], 0)]
        return [*pieces, (outer[1], 0)]
    return [(before, 0), ([token] * adapter.token_count(name, grid), code), (after, 0)]


def media_fields(
    rng: np.random.Generator, grids: dict[str, list[tuple[int, int, int]]], adapter: ModelAdapter, pixels: bool
) -> dict[str, torch.Tensor]:
    """Return the media fields of a sample."""
    values: dict[str, torch.Tensor] = {}
    for name, items in grids.items():
        if items and name == "audio":
            frames = torch.tensor([frames for frames, _, _ in items])
            values["audio_feature_lengths"] = frames
            if pixels:
                mel = adapter.fields["input_features"].shape[0]
                values["feature_attention_mask"] = (torch.arange(AUDIO_FRAMES) < frames[:, None]).long()
                values["input_features"] = torch.from_numpy(rng.standard_normal((len(items), mel, AUDIO_FRAMES)))
        elif items:
            values[f"{name}_grid_thw"] = torch.tensor(items)
            field = "pixel_values" if name == "image" else "pixel_values_videos"
            if pixels:
                rows = sum(t * h * w for t, h, w in items)
                values[field] = torch.from_numpy(rng.standard_normal((rows, *adapter.fields[field].shape)))
    if grids.get("video") and adapter.has_seconds:
        seconds = rng.choice([0.25, 0.5, 1.0, 1.3, 2.0, 2.55], len(grids["video"]))
        values[adapter.seconds_field] = torch.tensor(seconds, dtype=torch.float32)
    return values

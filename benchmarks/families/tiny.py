"""Tiny random models of families with ordinary positions, with the real transformers classes, and random samples for them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evenpack.models import ModelAdapter
from evenpack.models.layout.items import items_by_rule, rows_needed

VOCAB = 320
#: Text ids lie below the media token; `TWIN` is a text id of the same embedding.
TEXT_IDS, TOKEN, TWIN = 300, 301, 310
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 64}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16]]
GQA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

QWEN_VISION = {
    "patch_size": 4,
    "spatial_merge_size": 2,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
AUDIO = {
    "num_mel_bins": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_source_positions": 16,
}

Settings = dict[str, Any]


def text(model_type: str, **more: Any) -> Settings:
    return {"text_config": {"model_type": model_type, **TEXT, **more}}


def vision(model_type: str | None = None, **more: Any) -> Settings:
    named = {} if model_type is None else {"model_type": model_type}
    return {"vision_config": {**named, **VISION, **more}}


CLIP = vision("clip_vision_model")
SIGLIP = vision("siglip_vision_model", vision_use_head=False)
INDEX = {"image_token_index": TOKEN}
ID = {"image_token_id": TOKEN}
LLAMA = text("llama")

#: Class name without its ending, and settings of its config, by family.
FAMILIES: dict[str, tuple[str, Settings]] = {
    "llava": ("Llava", {**LLAMA, **CLIP, **INDEX}),
    "llava (Pixtral)": (
        "Llava",
        {**LLAMA, "vision_config": PIXTRAL, **INDEX, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": ("Mistral3", {**text("mistral", sliding_window=5), "vision_config": PIXTRAL, **INDEX}),
    "lighton_ocr": ("LightOnOcr", {**text("qwen3"), "vision_config": PIXTRAL, **ID}),
    "vipllava": ("VipLlava", {**LLAMA, **CLIP, **INDEX, "vision_feature_layers": [-1, -2], "vision_feature_layer": [-1, -2]}),
    "video_llava": ("VideoLlava", {**LLAMA, **CLIP, **INDEX, "video_token_index": 302}),
    "llava_next": ("LlavaNext", {**LLAMA, **CLIP, **INDEX, "image_grid_pinpoints": PINPOINTS}),
    "llava_next_video": (
        "LlavaNextVideo",
        {**LLAMA, **CLIP, **INDEX, "video_token_index": 302, "image_grid_pinpoints": PINPOINTS},
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {
            **text("qwen2"),
            **SIGLIP,
            **INDEX,
            "video_token_index": 302,
            "image_grid_pinpoints": PINPOINTS,
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "granite4_vision": (
        "Granite4Vision",
        {
            **text("granite4_vision_text"),
            **vision("clip_vision_model", hidden_size=64),
            **INDEX,
            "image_grid_pinpoints": PINPOINTS,
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [0, 0, 1, 1],
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "cross_attention_frequency": 1,
            },
        },
    ),
    "internvl": ("InternVL", {**text("qwen2"), **vision(image_size=[16, 16], patch_size=[4, 4]), **ID}),
    "qianfan_ocr": ("QianfanOCR", {**text("qwen3"), **vision(image_size=[16, 16], patch_size=[4, 4]), **ID}),
    "got_ocr2": (
        "GotOcr2",
        {
            **text("qwen2"),
            **vision(image_size=32, output_channels=8, window_size=2, global_attn_indexes=[1], mlp_dim=48),
            **INDEX,
        },
    ),
    "smolvlm": ("SmolVLM", {**LLAMA, **vision(), **ID}),
    "idefics3": ("Idefics3", {**LLAMA, **vision(), **ID}),
    "idefics2": (
        "Idefics2",
        {
            **text("mistral"),
            **vision(),
            **ID,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
    ),
    "aya_vision": ("AyaVision", {**text("cohere2", **GQA), **SIGLIP, **INDEX}),
    "cohere2_vision": ("Cohere2Vision", {**text("cohere2", **GQA), **SIGLIP, **ID, "alignment_intermediate_size": 64}),
    "deepseek_vl": ("DeepseekVL", {**LLAMA, **SIGLIP, **ID}),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybrid",
        {
            **LLAMA,
            **SIGLIP,
            **ID,
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                **VISION,
                "image_size": 32,
                "output_channels": 8,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
        },
    ),
    "janus": (
        "Janus",
        {
            **LLAMA,
            **vision(projection_dim=32, mlp_ratio=2),
            **ID,
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 8,
                "image_token_embed_dim": 8,
                "num_hidden_layers": 1,
            },
        },
    ),
    "ovis2": (
        "Ovis2",
        {
            **text("qwen2"),
            **vision(vocab_size=24),
            **ID,
            "visual_indicator_token_ids": [302, 303, 304, 305, 306],
            "vocab_size": VOCAB,
            "hidden_size": 32,
        },
    ),
    "aria": (
        "Aria",
        {
            **text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            **vision("idefics3_vision"),
            **INDEX,
            "projector_patch_to_query_dict": {16: 4},
        },
    ),
    "gemma3": ("Gemma3", {**text("gemma3_text", **GQA, query_pre_attn_scalar=8), **SIGLIP, **ID, "mm_tokens_per_image": 4}),
    "paligemma": ("PaliGemma", {**text("gemma"), **SIGLIP, **ID, "projection_dim": 32}),
    "gemma4": (
        "Gemma4",
        {
            **text(
                "gemma4_text",
                **GQA,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=VOCAB,
                num_kv_shared_layers=0,
                global_head_dim=8,
            ),
            "vision_config": {
                **VISION,
                "head_dim": 16,
                "num_key_value_heads": 2,
                "pooling_kernel_size": 2,
                "position_embedding_size": 32,
            },
            "audio_config": None,
            **ID,
            "video_token_id": 302,
            "audio_token_id": 303,
        },
    ),
    "minicpmv4_6": (
        "MiniCPMV4_6",
        {
            **text(
                "qwen3_5_text",
                linear_num_value_heads=2,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                layer_types=["linear_attention", "full_attention"],
            ),
            **vision(image_size=64),
            "image_size": 64,
            "insert_layer_id": 0,
            **ID,
            "video_token_id": 302,
        },
    ),
    "step3p7": (
        "Step3p7",
        {
            **text(
                "step3p5",
                n_routed_experts=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                share_expert_dim=16,
                layer_types=["full_attention", "sliding_attention"],
                mlp_layer_types=["dense", "sparse"],
                sliding_window=5,
                num_sliding_attention_heads=4,
                swiglu_limits=[None, None],
                swiglu_limits_shared=[None, None],
            ),
            **vision(image_size=32, max_position_embeddings=64),
            **ID,
        },
    ),
    "chameleon": (
        "Chameleon",
        {
            **{k: v for k, v in TEXT.items() if k != "head_dim"},
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "resolution": 8,
            },
            "vocabulary_map": {"<image>": TOKEN, **{f"IMGIMG{chr(65 + k)}Z": 50 + k for k in range(8)}},
        },
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        {
            **text("lfm2", layer_types=["conv", "full_attention"]),
            **vision("siglip2_vision_model", num_patches=64, vision_use_head=False),
            **ID,
            "projector_hidden_size": 32,
        },
    ),
    "exaone4_5": (
        "Exaone4_5_",
        {
            **text("exaone4", **GQA, sliding_window_pattern=2),
            "vision_config": {**QWEN_VISION, "num_key_value_heads": 2},
            **ID,
            "video_token_id": 302,
        },
    ),
    "hyperclovax_vision_v2": (
        "HyperCLOVAXVisionV2",
        {
            **text("hyperclovax"),
            "vision_config": {"model_type": "qwen2_5_vl_vision", **QWEN_VISION},
            **ID,
            "video_token_id": 302,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        {
            "text_config": {**TEXT, **GQA},
            "vision_config": {
                **VISION,
                "merge_size": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "layer_types": ["full_attention"] * 2,
            },
            **ID,
            "video_token_id": 302,
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3SparseForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "dense_intermediate_size": 48,
                "shared_intermediate_size": 16,
                "rotary_dim": 4,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention"] * 2,
            },
            "vision_config": {**VISION},
            **INDEX,
            "video_token_index": 302,
            "projector_hidden_size": 32,
        },
    ),
    "kimi_k25": (
        "Kimi_K25",
        {
            **text(
                "deepseek_v3",
                num_key_value_heads=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
            "vision_config": {**VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            **ID,
            "video_token_id": 302,
            "projection_hidden_size": 32,
        },
    ),
    "video_llama_3": ("VideoLlama3", {**text("qwen2"), "vision_config": VISION, **ID, "video_token_id": 302}),
    "fuyu": ("FuyuForCausalLM", {**text("persimmon"), **ID, "patch_size": 4}),
    "qwen2_audio": (
        "Qwen2Audio",
        {
            **text("qwen2"),
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 8,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "max_source_positions": 16,
            },
            "audio_token_index": TOKEN,
        },
    ),
    "audioflamingo3": (
        "AudioFlamingo3",
        {**text("qwen2"), "audio_config": {**AUDIO, "model_type": "audioflamingo3_encoder"}, "audio_token_id": TOKEN},
    ),
    "voxtral": (
        "Voxtral",
        {
            **LLAMA,
            "audio_config": {**AUDIO, "model_type": "voxtral_encoder", "intermediate_size": 128},
            "audio_token_id": TOKEN,
        },
    ),
    "glmasr": (
        "GlmAsr",
        {
            **LLAMA,
            "audio_config": {**AUDIO, "model_type": "glmasr_encoder", "max_position_embeddings": 16, "intermediate_size": 128},
            "audio_token_id": TOKEN,
        },
    ),
}


FAMILIES["gemma4 (image blocks)"] = (
    "Gemma4",
    {**FAMILIES["gemma4"][1], "text_config": {**FAMILIES["gemma4"][1]["text_config"], "use_bidirectional_attention": "vision"}},
)


def tiny_config(family: str) -> Any:
    """Return the config of a family's tiny model."""
    settings = FAMILIES[family][1]
    return model_class(family).config_class(**settings)


def model_class(family: str) -> Any:
    """Return the class of a family's model."""
    import transformers

    name = FAMILIES[family][0]
    return getattr(transformers, name if "For" in name else f"{name}ForConditionalGeneration")


def tiny_model(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a random model of a family in evaluation mode."""
    torch.manual_seed(seed)
    model = model_class(family)(tiny_config(family)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random biases and norms too: a zero hides what it multiplies
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            if parameter.ndim == 2 and len(parameter) == VOCAB:
                parameter[TWIN] = parameter[TOKEN]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    return model


def random_sample(rng: np.random.Generator, adapter: ModelAdapter, images: int, *, sides: int = 3) -> dict[str, Any]:
    """Return a raw sample of text and some images of different sizes, with the fields and the padding that a processor gives.

    Args:
        rng: source of everything random.
        adapter: the family.
        images: how many.
        sides: largest side of an image, in merged patches or tiles.
    """
    (modality,) = adapter.media_tokens
    token, code = adapter.media_tokens[modality], {"image": 1, "audio": 3}[modality]
    ids, types = words(rng, 3), [0] * 3
    values, runs = media_values(rng, adapter, images, sides) if images else ({}, [])
    for length in runs:
        more = words(rng, int(rng.integers(1, 4)))
        ids += [token] * length + more
        types += [code] * length + [0] * len(more)
    raw = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types), **values}
    return with_prefix(raw) if "token_type_ids" in adapter.fields else raw


def with_prefix(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with its last two tokens as suffix: only they are trained, and all others see each other."""
    ids = raw["input_ids"]
    is_suffix = torch.arange(len(ids)) >= len(ids) - 2
    return {**raw, "token_type_ids": is_suffix.long(), "labels": torch.where(is_suffix, ids, -100)}


def words(rng: np.random.Generator, count: int) -> list[int]:
    """Return random text ids."""
    found: list[int] = rng.integers(3, TEXT_IDS, count).tolist()
    return found


def media_values(
    rng: np.random.Generator, adapter: ModelAdapter, images: int, sides: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the media fields of some images, and the lengths of the runs that anchor them: one image may have several."""
    (modality,) = adapter.media_tokens
    mine = adapter.fields.of_kind("media")
    if modality not in adapter.anchors:
        return _grids(rng, adapter, images, sides)
    rule = adapter.anchors[modality]
    values: dict[str, torch.Tensor] = {}
    counts = {field.name: images + (images > 1) for field in mine}  # of two images, one has two tiles
    if rule.rule != "rows":
        sides_of = torch.from_numpy(rng.integers(1, sides + 1, (images, 2))) + torch.tensor([0, 1])
        values = SIZES.get(rule.field, _in_pixels)(sides_of, adapter)
        counts = {field.name: rows_needed(field, items_by_rule(values, rule, adapter), rule) or images for field in mine}
    largest = [rule.free_size] * 2 if rule.rule == "rows" else _largest(values[rule.field], rule.field)
    for field in mine:
        if field.name not in values:
            free = iter(largest)
            sizes = [next(free) if size is None else size for size in field.shape or ()]
            sizes.insert(field.axis, images if field.rows == "sample" and not sizes else counts[field.name])
            if field.rows == "sample":
                values[field.name] = torch.tensor([images])
            elif adapter.is_pixels(field):
                values[field.name] = torch.from_numpy(rng.standard_normal(sizes))
            else:
                values[field.name] = torch.ones(sizes, dtype=torch.int64)
    _hide_padding(values, rule.field)
    tokens = items_by_rule(values, rule, adapter).tokens
    assert tokens is not None
    return values, _split(rng, tokens.tolist())


def _in_pixels(sides: torch.Tensor, adapter: ModelAdapter) -> dict[str, torch.Tensor]:
    """Return sizes in pixels: whole patches, or, where an image is cut into tiles, any size."""
    (rule,) = adapter.anchors.values()
    unit = rule.patch * adapter.merge_size if rule.rule == "sizes" else rule.tile - 3
    return {rule.field: sides * unit}


def _in_patches(sides: torch.Tensor, adapter: ModelAdapter) -> dict[str, torch.Tensor]:
    """Return sizes in patches."""
    (rule,) = adapter.anchors.values()
    return {rule.field: sides * adapter.merge_size}


def _places(sides: torch.Tensor, adapter: ModelAdapter) -> dict[str, torch.Tensor]:
    """Return the place (x, y) of each patch of each image, -1 at padding."""
    (rule,) = adapter.anchors.values()
    sizes = (sides * adapter.merge_size).tolist()
    places = torch.full((len(sizes), max(h * w for h, w in sizes), 2), -1)
    for image, (h, w) in enumerate(sizes):
        places[image, : h * w] = torch.tensor([(x, y) for y in range(h) for x in range(w)])
    return {rule.field: places}


def _heard(sides: torch.Tensor, adapter: ModelAdapter) -> dict[str, torch.Tensor]:
    """Return the masks of clips of different lengths."""
    (rule,) = adapter.anchors.values()
    frames = (adapter.fields[rule.field].shape or (0,))[0] or 0
    return {rule.field: (torch.arange(frames) < 8 * sides[:, 1:]).long()}


def _grids(
    rng: np.random.Generator, adapter: ModelAdapter, images: int, sides: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return patches and grids of images, and the lengths of the runs that anchor them."""
    sizes = (rng.integers(1, sides + 1, (images, 2)) * adapter.merge_size).tolist()
    grids = [(1, h, w) for h, w in sizes]
    rows = sum(h * w for h, w in sizes)
    pixels = torch.from_numpy(rng.standard_normal((rows, *(adapter.fields["pixel_values"].shape or ()))))
    values = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    if "image_merge_sizes" in adapter.fields:
        values["image_merge_sizes"] = torch.full((images,), adapter.merge_size)
    return values, [adapter.token_count("image", grid) for grid in grids]


#: How sizes of images are told, by field.
SIZES: dict[str, Callable[[torch.Tensor, ModelAdapter], dict[str, torch.Tensor]]] = {
    "spatial_shapes": _in_patches,
    "target_sizes": _in_patches,
    "image_position_ids": _places,
    "feature_attention_mask": _heard,
    "input_features_mask": _heard,
}


def _largest(sizes: torch.Tensor, name: str) -> list[int]:
    """Return the free sizes of pixels that hold images of some sizes."""
    if sizes.ndim == 3:
        return [sizes.shape[1]]
    if name == "spatial_shapes":
        return [int(sizes.prod(dim=1).max())]
    return sizes.max(dim=0).values.tolist()


def _hide_padding(values: dict[str, torch.Tensor], sized_by: str) -> None:
    """Set what lies beyond each image's size to 0, in place, as processors do."""
    pixels, sizes = values.get("pixel_values"), values.get(sized_by)
    if sized_by == "image_sizes" and pixels is not None and pixels.ndim == 4 and len(pixels) == len(sizes):
        for image, (height, width) in zip(pixels, sizes.tolist(), strict=True):
            image[:, height:], image[:, :, width:] = 0, 0
    if sized_by == "spatial_shapes" and pixels is not None:
        mask = torch.arange(pixels.shape[1]) < sizes.prod(dim=1, keepdim=True)
        values["pixel_values"], values["pixel_attention_mask"] = pixels * mask[..., None], mask.long()


def _split(rng: np.random.Generator, counts: list[int]) -> list[int]:
    """Return the lengths of runs of anchors: some items are written in two runs, some runs hold two items."""
    runs: list[int] = []
    for at, count in enumerate(counts):
        if runs and at % 3 == 2:
            runs[-1] += count
        elif count > 2 and rng.random() < 0.5:
            first = int(rng.integers(1, count))
            runs += [first, count - first]
        else:
            runs.append(count)
    return runs

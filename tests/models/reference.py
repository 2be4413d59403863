"""The installed transformers' own positions, per sample: what every rule here must equal, integer by integer."""

import importlib
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from evenpack.models import ModelAdapter
from evenpack.models.layout.items import media_grids, media_seconds

#: Family to the class that has its `get_rope_index`.
CLASSES = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "cosmos3_omni": "Cosmos3OmniModel",
    "cohere_compass": "CohereCompassModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm46v": "Glm46VModel",
    "glm_ocr": "GlmOcrModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel",
    "paddleocr_vl": "PaddleOCRVLModel",
    "qwen2_5_omni": "Qwen2_5OmniPreTrainedModelForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
}
METHODS = ("get_rope_index", "get_vision_position_ids", "get_llm_pos_ids_for_vision", "get_chunked_index")


def rope_stub(adapter: ModelAdapter) -> Any:
    """Return an object with a family's own `get_rope_index` and the values of its config it reads; it needs no weights."""
    module = importlib.import_module(f"transformers.models.{adapter.name}.modeling_{adapter.name}")
    config = SimpleNamespace(
        vision_config=SimpleNamespace(
            spatial_merge_size=adapter.merge_size,
            temporal_merge_size=adapter.temporal_merge,
            tokens_per_second=adapter.tokens_per_second,
        ),
        audio_config=SimpleNamespace(n_window=adapter.audio_window),
        position_id_per_seconds=adapter.tokens_per_second,
        seconds_per_chunk=2,
        vision_start_token_id=adapter.vision_start,
        audio_start_token_id=adapter.audio_start,
        **{f"{name}_token_id": token for name, token in adapter.media_tokens.items()},
    )
    stub = SimpleNamespace(config=config, spatial_merge_size=adapter.merge_size)
    cls = getattr(module, CLASSES[adapter.name])
    for name in METHODS:
        if hasattr(cls, name):
            setattr(stub, name, MethodType(getattr(cls, name), stub))
    return stub


def own_positions(stub: Any, raw: dict[str, Any], adapter: ModelAdapter, more: int = 0) -> np.ndarray:
    """Return the positions [3, L + more] that the family's own function gives a sample followed by `more` text tokens."""
    ids = torch.cat([raw["input_ids"], torch.ones(more, dtype=torch.int64)])[None]
    types = torch.cat([raw["mm_token_type_ids"], torch.zeros(more, dtype=torch.int64)])[None]
    grids = {f"{name}_grid_thw": raw.get(f"{name}_grid_thw") for name in ("image", "video")}
    seconds = media_seconds(raw, adapter)
    if adapter.rope == "omni":
        audio = media_grids(raw, adapter).get("audio")
        further = {
            "attention_mask": torch.ones_like(ids),
            "audio_seqlens": None if audio is None else torch.from_numpy(audio[:, 0]),
            "second_per_grids": seconds,
        }
        return stub.get_rope_index(ids, **grids, **further)[0][:, 0].numpy()
    further = {"second_per_grid_ts": seconds} if adapter.rope == "seconds" else {}
    return stub.get_rope_index(ids, types, **grids, **further)[0][:, 0].numpy()

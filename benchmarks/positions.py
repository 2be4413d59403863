"""Positions of a whole pack against transformers' own `get_rope_index`, sample by sample, in one run.

    python -m benchmarks.positions
    python -m benchmarks.positions --families qwen2_vl qwen3_omni_moe --segments 16

Both sides start from what they get in training: the pack from its samples' layouts (runs and grids, no tensor), transformers
from ids, type ids and grids. Prints medians and spreads over alternating repeats, and how many values differ.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from evenpack.models import ModelAdapter, adapter_for, pack_positions, sample_layout

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel",
    "qwen3_omni_moe": "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
}


def sample(adapter: ModelAdapter, length: int, images: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [length] and image grids [images, 3] of one sample: images spread between text."""
    sides = adapter.merge_size * rng.integers(8, 25, (images, 2))
    grids = np.concatenate([np.ones((images, 1), np.int64), sides], axis=1)
    counts = [adapter.token_count("image", tuple(grid)) for grid in grids.tolist()]
    before, after = adapter.brackets("image")
    text = (length - sum(counts) - images * (len(before) + len(after))) // (images + 1)
    pieces: list[list[int]] = []
    for count in counts:
        pieces += [rng.integers(1, 1000, text).tolist(), before, [adapter.media_tokens["image"]] * count, after]
    ids = [token for piece in pieces for token in piece]
    return np.array(ids + rng.integers(1, 1000, length - len(ids)).tolist()), grids


def own_function(adapter: ModelAdapter) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the family's `get_rope_index` of the installed transformers, on one sample's ids, type ids and grids."""
    module = importlib.import_module(f"transformers.models.{adapter.name}.modeling_{adapter.name}")
    cls = getattr(module, MODELS[adapter.name])
    vision = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2, tokens_per_second=adapter.tokens_per_second)
    config = SimpleNamespace(
        vision_config=vision,
        position_id_per_seconds=adapter.tokens_per_second,
        vision_start_token_id=adapter.vision_start,
        audio_start_token_id=adapter.audio_start,
        **{f"{name}_token_id": token for name, token in adapter.media_tokens.items()},
    )
    stub = SimpleNamespace(config=config, spatial_merge_size=2)
    for name in ("get_rope_index", "get_vision_position_ids", "get_llm_pos_ids_for_vision"):
        if hasattr(cls, name):
            setattr(stub, name, MethodType(getattr(cls, name), stub))

    def positions(ids: torch.Tensor, types: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        if adapter.rope == "omni":
            return stub.get_rope_index(ids, image_grid_thw=grids, attention_mask=torch.ones_like(ids))[0][:, 0]
        return stub.get_rope_index(ids, types, image_grid_thw=grids)[0][:, 0]

    return positions


def measure(run: Callable[[], Any]) -> float:
    """Return the milliseconds of one call."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def bench(family: str, options: argparse.Namespace) -> None:
    """Time one family and print a line."""
    adapter, rng = adapter_for(family), np.random.default_rng(options.seed)
    samples = [sample(adapter, options.length, options.images, rng) for _ in range(options.segments)]
    layouts = [sample_layout(ids, {"image": grids}, adapter=adapter) for ids, grids in samples]
    cu = np.arange(options.segments + 1) * options.length
    own, tensors = own_function(adapter), []
    for (ids, grids), layout in zip(samples, layouts, strict=True):
        tensors.append((torch.from_numpy(ids)[None], torch.from_numpy(layout.type_ids())[None], torch.from_numpy(grids)))

    def ours() -> np.ndarray:
        return pack_positions(layouts, cu, adapter)

    def theirs() -> torch.Tensor:
        return torch.cat([own(*tensor) for tensor in tensors], dim=1)

    differing = int((theirs().numpy() != ours()).sum())
    times = np.array([(measure(theirs), measure(ours)) for _ in range(options.repeats)])
    (low, mid, high), (fast_low, fast, fast_high) = np.percentile(times, [10, 50, 90], axis=0).T
    print(
        f"{family:16s} {options.segments} x {options.length} tokens, {options.images} images each: get_rope_index "
        f"{mid:7.1f} ms ({low:.1f} to {high:.1f}), pack_positions {fast:6.2f} ms ({fast_low:.2f} to {fast_high:.2f}), "
        f"{mid / fast:5.1f} x, {differing} values differ"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--segments", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for family in options.families:
        bench(family, options)


if __name__ == "__main__":
    main()

"""Sources, settings and checks that the scheduler's tests share."""

import random
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from evenpack.models import adapter_for
from evenpack.scheduler import PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

TEXT = adapter_for("text")
IMAGE, VIDEO, START, END, VOCABULARY = 100, 101, 102, 103, 128
#: Qwen2.5-VL with a small vocabulary, so that tiny models stay tiny.
VISION = msgspec.structs.replace(
    adapter_for("qwen2_5_vl"),
    media_tokens={"image": IMAGE, "video": VIDEO},
    vision_start=START,
    vision_end=END,
    pad_token_id=104,
)


def text_sample(length: int, name: Any, **more: Any) -> dict[str, Any]:
    """Return a text sample whose ids say which sample it is."""
    ids = (torch.arange(length) * 7 + zlib.crc32(str(name).encode())) % 97
    return {"input_ids": ids, "sample_id": name, **more}


def image_sample(grids: list[tuple[int, int, int]], name: Any, text: int = 4, seed: int = 0) -> dict[str, Any]:
    """Return a sample of images with random pixels, between text."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 97, text).tolist()
    for t, h, w in grids:
        ids += [START, *[IMAGE] * (t * h * w // 4), END, 7]
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.from_numpy(rng.standard_normal((patches, VISION.patch_dim), dtype=np.float32))
    return {
        "input_ids": torch.tensor(ids),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(grids).reshape(-1, 3),
        "sample_id": name,
    }


def random_source(rank: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return samples of very different lengths, named by rank and number."""
    rng = random.Random(f"{seed}-{rank}")
    return [text_sample(rng.choice([3, 4, 9, 20, 60, 100]), f"{rank}-{index}") for index in range(count)]


def mixed_source(rank: int, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return text and image samples in uneven shares: rank 0 has no image at all."""
    rng = random.Random(f"mixed-{seed}-{rank}")
    samples = []
    for index in range(count):
        name = f"{rank}-{index}"
        if rank == 0 or rng.random() < 0.4:
            samples.append(text_sample(rng.randrange(3, 40), name))
        else:
            grids = [(1, 2 * rng.randrange(1, 4), 2 * rng.randrange(1, 4)) for _ in range(rng.randrange(1, 3))]
            samples.append(image_sample(grids, name, text=rng.randrange(1, 9), seed=rng.randrange(1 << 20)))
    return samples


def open_scheduler(
    source: Any, adapter: Any = TEXT, fields: Any = (), planner: Any = None, **settings: Any
) -> PackingScheduler:
    """Return a scheduler over the world with settings that tests need not repeat."""
    defaults = {"max_tokens": 128, "timeout": 20.0}
    if not {"samples_per_step", "tokens_per_step"} & set(settings) and settings.get("scope") != "microbatch":
        defaults["samples_per_step"] = 4
    more = {} if planner is None else {"planner": planner}
    config = SchedulerConfig(**{**defaults, **settings})
    return PackingScheduler(source, config=config, adapter=adapter, groups=ProcessGroups.from_world(), fields=fields, **more)


def names_of(step: PackedStep) -> list[list[Any]]:
    """Return the sample ids of each pack of this rank, dummies left out."""
    return [[name for name in batch.sample_ids if name is not None] for batch in step]


def drain(scheduler: PackingScheduler) -> list[list[list[Any]]]:
    """Train on nothing until the epoch ends; return the sample ids of every step's packs."""
    with scheduler:
        return [names_of(step) for step in scheduler]


def flat(nested: Any) -> Iterator[Any]:
    """Return the leaves of nested lists."""
    for item in nested:
        if isinstance(item, list):
            yield from flat(item)
        else:
            yield item

"""Samples that `SampleEncoder` makes with a real processor: packed against the stock model, and measured without pixels."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from evenpack.collate import SampleEncoder, pack_samples
from evenpack.collate.encoding.sizes import counts_pixels
from evenpack.collate.samples.prepare import item_grids
from evenpack.core import Sample
from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.models.layout.items import media_items

from .compare import WithoutCasts, gradients, largest
from .processors import fitting_config, fitting_model

ANSWER = "It is 42."
#: Sizes (height, width) of the images of each example.
SIZES: list[list[tuple[int, int]]] = [[], [(40, 60)], [(30, 70), (64, 33)]]
#: Families whose processor takes no text without an image.
WITH_IMAGES_ONLY = ("paligemma",)


def encoder_of(processor: Any, config: Any) -> SampleEncoder:
    """Return an encoder for the family of a config; images keep the processor's own limits."""
    limits = {}
    if counts_pixels(processor.image_processor):
        size = dict(processor.image_processor.size)
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    return SampleEncoder(processor, adapter_for(config), **limits)


def example(rng: np.random.Generator, sizes: Sequence[Any], question: str = "What is the answer?") -> dict[str, Any]:
    """Return a turn with images of some sizes before a question, and its answer."""
    images = [Image.fromarray(rng.integers(1, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}], "images": images}


def encoded_differences(family: str, processor: Any) -> tuple[float, float]:
    """Return how far a pack is off the stock model on each sample alone: logits, and gradients relative to the largest.

    In fp64, casts of the models to single precision switched off.

    Raises:
        AssertionError: ids that are not the processor's own, or other targets than the answer.
    """
    stock, prepared = fitting_model(family, processor), fitting_model(family, processor)
    encoder = encoder_of(processor, stock.config)
    rng = np.random.default_rng(0)
    asked = [example(rng, sizes) for sizes in SIZES if sizes or family not in WITH_IMAGES_ONLY]
    samples = [encoder.encode(one) for one in asked]
    adapter = encoder.adapter
    pixels = {field.name for field in adapter.fields if adapter.is_pixels(field)}
    ready: list[dict[str, Any]] = []
    for sample in samples:
        assert sample is not None
        answer = processor.tokenizer.decode(sample["labels"][sample["labels"] != -100])
        assert answer == f"{ANSWER}<|im_end|>", answer
        ready.append({name: _double(value) if name in pixels else value for name, value in sample.items()})
    batch = pack_samples(ready, adapter=adapter)
    prepare_model(prepared, adapter)
    with WithoutCasts():
        logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
        starts = batch.cu_seqlens_q.tolist()
        packed = [logits[start : start + len(one["input_ids"])] for start, one in zip(starts, ready, strict=False)]
        alone = [
            stock(**_called(processor, stock, one, sample), use_cache=False).logits[0]
            for one, sample in zip(asked, ready, strict=True)
        ]
        expected, actual = gradients(stock, alone), gradients(prepared, packed)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    found = [actual[name] for name in expected]
    return largest(packed, alone), largest(list(expected.values()), found) / scale


def _called(processor: Any, model: Any, asked: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the stock model gets for an example alone: what its processor returns for the rendered text."""
    turns = [{"role": "user", "content": asked["messages"][0]["content"]}]
    turns += [{"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}]
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False)
    taken = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"images": [asked["images"]]} if asked["images"] else {}
    if "mm_token_type_ids" in taken:
        given["return_mm_token_type_ids"] = True
    out = processor(text=[text], return_tensors="pt", **given)
    assert torch.equal(out["input_ids"][0], sample["input_ids"]), "ids are the processor's"
    arguments = {name: _double(value) for name, value in out.items() if name in taken and name != "labels"}
    if model.config.model_type == "paligemma":  # the prefix ends where the answer begins
        first = int((sample["labels"] != -100).nonzero()[0])
        arguments["token_type_ids"] = (torch.arange(len(sample["input_ids"])) >= first).long()[None]
    return arguments


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def measured_differences(family: str, processor: Any, count: int = 50) -> int:
    """Return how many of `count` sizes, and of ten pairs of them, are measured otherwise than encoded."""
    encoder = encoder_of(processor, fitting_config(family, processor))
    rng = np.random.default_rng(1)
    sizes = np.exp(rng.uniform(np.log(24), np.log(200), (count, 2))).astype(int).tolist()
    asked = [example(rng, [size]) for size in sizes] + [example(rng, sizes[at : at + 2]) for at in range(10)]
    wrong = 0
    for one, found in zip(asked, encoder.measure(asked), strict=True):
        sample = encoder.prepare(one)
        assert sample is not None
        wanted = (len(sample.tensor("input_ids")), grids_of(sample, encoder.adapter))
        wrong += isinstance(found, Exception) or (found.tokens, list(found.grids)) != wanted
    return wrong


def grids_of(sample: Sample, adapter: ModelAdapter) -> list[tuple[int, ...]]:
    """Return the grid of each item of a sample, from its own fields."""
    found = item_grids(sample.values, adapter) or {name: one.grids for name, one in media_items(sample.values, adapter).items()}
    return [tuple(grid) for grid in found["image"].tolist()]

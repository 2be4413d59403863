"""Processors of two families that run without torchvision, and examples with images, videos, tools and thinking."""

import io
import random
from typing import ClassVar

import msgspec
import numpy as np
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from evenpack.collate import SampleEncoder
from evenpack.models import adapter_for

from ..masks.chat_formats import tokenizer

#: ChatML with vision blocks, tools, thinking and tool calls; no generation tag.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content is defined %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{%- for p in m.content %}
{%- if p.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif p.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- p.text }}{% endif %}
{%- endfor %}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""
CLASSES = {"qwen2_5_vl": (Qwen2_5_VLProcessor, 14), "qwen3_vl": (Qwen3VLProcessor, 16)}
LIMITS = {"min_pixels": 3136, "max_pixels": 50_000, "video_min_pixels": 784, "video_max_pixels": 100_000}


class Videos:
    """A video processor without torchvision: frames as they come, cut into patches, no resizing."""

    merge_size, temporal_patch_size = 2, 2
    size: ClassVar = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}  # areas, as in the real ones

    def __init__(self, patch_size):
        self.patch_size = patch_size

    def __call__(self, videos, size=None, video_metadata=None, **kwargs):
        grids, patches = [], []
        for video in videos[0]:
            frames, height, width = video.shape[:3]
            grids.append([-(-frames // 2), height // self.patch_size, width // self.patch_size])
            patches.append(np.full((int(np.prod(grids[-1])), 3 * 2 * self.patch_size**2), video.mean() / 255, np.float32))
        data = [VideoMetadata(**given) for given in video_metadata[0]]
        return {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids), "video_metadata": data}


def processor(family="qwen2_5_vl", template=TEMPLATE, videos=False):
    processor_class, patch = CLASSES[family]
    parts = {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])}
    light = type(processor_class.__name__, (processor_class,), parts)
    found = light(image_processor=Qwen2VLImageProcessorPil(patch_size=patch), tokenizer=tokenizer(), chat_template=template)
    if videos:
        found.video_processor = Videos(patch)
    return found


def adapter(family="qwen2_5_vl"):
    """Return the family's adapter with the small vocabulary's ids."""
    ids = tokenizer().convert_tokens_to_ids
    return msgspec.structs.replace(
        adapter_for(family),
        media_tokens={"image": ids("<|image_pad|>"), "video": ids("<|video_pad|>")},
        vision_start=ids("<|vision_start|>"),
        vision_end=ids("<|vision_end|>"),
        pad_token_id=ids("<|endoftext|>"),
    )


def encoder(family="qwen2_5_vl", videos=False, template=TEMPLATE, **settings):
    return SampleEncoder(processor(family, template, videos), adapter(family), **{**LIMITS, **settings})


def picture(rng: random.Random, height=None, width=None) -> Image.Image:
    size = height or rng.randint(30, 90), width or rng.randint(30, 90)
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (*size, 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


def example(rng: random.Random, name: str) -> dict:
    """Return an example: one to three turns, images anywhere in the users' turns, tools and thinking."""
    messages, images = [], []
    for _ in range(rng.randint(1, 3)):
        parts = [{"type": "text", "text": rng.choice(["What is this?", "And this <|image_pad|>?", "Go on."])}]
        for _ in range(rng.randint(0, 2)):
            parts.insert(rng.randint(0, len(parts)), {"type": "image"})
            images.append(png(picture(rng)))
        messages.append({"role": "user", "content": parts})
        answer = {"role": "assistant", "content": rng.choice(["A cat.", "Two\nlines", "42"])}
        if rng.random() < 0.4:
            answer["reasoning_content"] = rng.choice(["", "hm, a cat"])
        if rng.random() < 0.3:
            answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
            messages += [answer, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7"}]
        else:
            messages.append(answer)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if rng.random() < 0.3 else None
    return {"messages": messages, "images": images, "tools": tools, "sample_id": name}


def examples(count: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [example(rng, f"example{index:04d}") for index in range(count)]


def assert_same(left: dict, right: dict):
    """Two samples are the same, field by field."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        if hasattr(value, "dtype"):
            assert value.dtype == other.dtype and value.shape == other.shape, name
            assert bool((value == other).all()), name
        else:
            assert value == other, name

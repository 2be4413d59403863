"""Whether a processor, an adapter and settings fit together, found out before the first example."""

from typing import Any

import msgspec

from ...core import Field, FieldSet
from ...models.adapter import ModelAdapter
from ..masks import MaskPreset, detect_preset, preset_named
from .settings import EncoderConfig

#: Field that says which strategy found a sample's mask.
STRATEGY = Field(name="mask_strategy", kind="sample", dtype="text")


def chat_format(preset: str | MaskPreset, template: str) -> MaskPreset | None:
    """Return the markers of a chat format, told from the template where it is not named; None where it is unknown."""
    if isinstance(preset, MaskPreset):
        return preset
    return detect_preset(template) if preset == "auto" else preset_named(preset)


def check_limits(processor: Any, adapter: ModelAdapter, config: EncoderConfig) -> None:
    """Raise `ValueError` where a family sees images and nobody said how large they may be."""
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is None or "image" not in adapter.media_tokens or config.min_pixels is not None:
        return
    size = dict(getattr(image_processor, "size", None) or {})
    raise ValueError(
        f"give min_pixels and max_pixels: images of {adapter.name} are resized to an area within them "
        f"(the processor's own are {size.get('shortest_edge')} and {size.get('longest_edge')})"
    )


def check_media_tokens(processor: Any, adapter: ModelAdapter) -> None:
    """Raise `ValueError` where the processor writes other media tokens than the adapter looks for."""
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        return
    for modality, token in adapter.media_tokens.items():
        text = getattr(processor, f"{modality}_token", None)
        if isinstance(text, str) and not adapter.shares_token:
            written = tokenizer.convert_tokens_to_ids(text)
            if written != token:
                raise ValueError(
                    f"the processor writes {text!r} as token {written}, the adapter {adapter.name!r} expects {modality} token "
                    f"{token}: use adapter_for(model.config)"
                )


def media_strings(processor: Any) -> list[str]:
    """Return the placeholder strings that a processor expands."""
    found = (getattr(processor, f"{modality}_token", None) for modality in ("image", "video", "audio"))
    return [text for text in found if isinstance(text, str)]


def with_strategy(adapter: ModelAdapter) -> ModelAdapter:
    """Return the adapter with the field that records the mask strategy."""
    if STRATEGY.name in adapter.fields:
        return adapter
    return msgspec.structs.replace(adapter, fields=FieldSet((*adapter.fields, STRATEGY)))

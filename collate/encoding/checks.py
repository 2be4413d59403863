"""Whether a processor, an adapter and settings fit together, found out before the first example."""

from typing import Any

import msgspec

from ...core import Field, FieldSet
from ...models.adapter import ModelAdapter
from ..masks import MaskPreset, detect_preset, preset_named
from .settings import EncoderConfig
from .sizes import counts_pixels

#: Field that says which strategy found a sample's mask.
STRATEGY = Field(name="mask_strategy", kind="sample", dtype="text")


def chat_format(preset: str | MaskPreset, template: str) -> MaskPreset | None:
    """Return the markers of a chat format, told from the template where it is not named; None where it is unknown."""
    if isinstance(preset, MaskPreset):
        return preset
    return detect_preset(template) if preset == "auto" else preset_named(preset)


def check_limits(processor: Any, adapter: ModelAdapter, config: EncoderConfig) -> None:
    """Raise `ValueError` where nobody said how large images may be, or where limits are given that a processor has not."""
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None and "image" in adapter.media_tokens:
        if config.min_pixels is None and counts_pixels(image_processor):
            size = dict(getattr(image_processor, "size", None) or {})
            raise ValueError(
                f"give min_pixels and max_pixels: images of {adapter.name} are resized to an area within them "
                f"(the processor's own are {size.get('shortest_edge')} and {size.get('longest_edge')})"
            )
        _check_area(image_processor, "min_pixels", config.min_pixels)
    video_processor = getattr(processor, "video_processor", None)
    if video_processor is not None:
        _check_area(video_processor, "video_min_pixels", config.video_min_pixels)


def _check_area(processor: Any, name: str, given: int | None) -> None:
    """Raise `ValueError` for limits of the area, given to a processor whose `size` means something else."""
    if given is not None and not counts_pixels(processor):
        raise ValueError(
            f"leave out {name}={given} and {name.replace('min', 'max')}: {type(processor).__name__} limits no area, and "
            f"its own settings decide about sizes (size: {getattr(processor, 'size', None)}); change them at the processor"
        )


def check_media_tokens(processor: Any, adapter: ModelAdapter) -> None:
    """Raise `ValueError` where the processor writes other media tokens than the adapter looks for."""
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        return
    for modality, token in adapter.media_tokens.items():
        text = getattr(processor, f"{modality}_token", None)
        # Gemma 3, Aya and others expand one token into others; each sample's anchors are checked against its rows there.
        if isinstance(text, str) and not adapter.shares_token and modality not in adapter.anchors:
            written = tokenizer.convert_tokens_to_ids(text)
            if written != token:
                raise ValueError(
                    f"the processor writes {text!r} as token {written}, the adapter {adapter.name!r} expects {modality} token "
                    f"{token}: use adapter_for(model.config)"
                )


def media_strings(processor: Any) -> list[str]:
    """Return the placeholder strings that a processor expands."""
    names = [f"{modality}_{kind}" for modality in ("image", "video", "audio") for kind in ("placeholder_token", "token")]
    found = (getattr(processor, name, None) for name in names)
    return [text for text in found if isinstance(text, str)]


def placeholder(processor: Any, modality: str) -> str | None:
    """Return what a text has for one item of a modality before a processor expands it; None where a processor does not say."""
    names = (f"{modality}_placeholder_token", f"{modality}_token")
    return next((text for name in names if isinstance(text := getattr(processor, name, None), str)), None)


def with_strategy(adapter: ModelAdapter) -> ModelAdapter:
    """Return the adapter with the field that records the mask strategy."""
    if STRATEGY.name in adapter.fields:
        return adapter
    return msgspec.structs.replace(adapter, fields=FieldSet((*adapter.fields, STRATEGY)))

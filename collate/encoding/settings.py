"""Settings of an encoder, and the record by which a resumed run is checked."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from ...core import plain
from ..masks import STRATEGIES, MaskPreset, preset_named
from .sizes import counts_pixels

OnEmptyMask = Literal["error", "drop", "keep"]


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `SampleEncoder` is told, besides its processor and adapter.

    Attributes:
        min_pixels: least pixels of an image after resizing; required where the image processor limits the area of images.
        max_pixels: most pixels of an image after resizing; required where the image processor limits the area of images.
        video_min_pixels: least pixels of a video, as the family's video processor counts them; required to encode videos.
        video_max_pixels: most pixels of a video, as the family's video processor counts them; required to encode videos.
        video_fps: frames sampled per second; None leaves frames as they are given.
        source_fps: rate of videos given as frames, in frames per second, where a video does not bring its own; None refuses
            those that need one.
        preset: name of the chat format for masks, or its markers; "auto" tells it from the chat template.
        strategies: mask strategies to try, in order.
        on_empty_mask: what becomes of a sample in which no token trains: an error, dropped, or kept with a zero mask; the
            last two are counted.
        template_arguments: further variables for the chat template, for example `{"enable_thinking": False}`.
        placeholders: string in text content to the modality whose next item it stands for, for example
            `{"<image>": "image"}`; without it, only parts of a message place media.
        ignored: names of columns of an example to leave aside.
        max_length: most tokens of a sample, None for any number; see `on_oversize`.
        on_oversize: a sample above `max_length` is an error, or dropped and counted.
        on_unreadable: an example with a picture or video that cannot be read, or that the processor refuses, is an error, or
            dropped and counted. What is missing for all of them (a package, a limit, a rate) is always an error.
        close_last_turn: write the end marker behind the last turn in formats where the next turn opens with it (GLM).
        record_strategy: note in each sample, as `mask_strategy`, which strategy found its mask.

    Raises:
        ValueError: a setting of the wrong type or range.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_fps: float | None = None
    source_fps: float | None = None
    preset: str | MaskPreset = "auto"
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    on_empty_mask: OnEmptyMask = "error"
    template_arguments: Mapping[str, Any] = {}
    placeholders: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()
    max_length: int | None = None
    on_oversize: Literal["error", "drop"] = "error"
    on_unreadable: Literal["error", "drop"] = "error"
    close_last_turn: bool = False
    record_strategy: bool = True

    def __post_init__(self) -> None:
        for name in ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "max_length"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for least, most in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            low, high = getattr(self, least), getattr(self, most)
            if (low is None) != (high is None):
                raise ValueError(f"give both {least} and {most}, or neither")
            if low is not None and low > high:
                raise ValueError(f"{least}={low} exceeds {most}={high}")
        if self.on_empty_mask not in get_args(OnEmptyMask):
            raise ValueError(f"on_empty_mask must be one of {get_args(OnEmptyMask)}, got {self.on_empty_mask!r}")
        for name in ("on_oversize", "on_unreadable"):
            if getattr(self, name) not in ("error", "drop"):
                raise ValueError(f"{name} must be 'error' or 'drop', got {getattr(self, name)!r}")
        if isinstance(self.preset, str) and self.preset != "auto":
            preset_named(self.preset)
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(f"strategies must be some of {tuple(STRATEGIES)}, got {self.strategies!r}")
        for name in ("video_fps", "source_fps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")


#: Settings that change no sample, only which errors are raised or what is counted.
_WITHOUT_EFFECT = ("ignored", "record_strategy", "on_unreadable")


def settings_record(config: EncoderConfig, processor: Any, template: str | None, adapter_name: str) -> dict[str, Any]:
    """Return what a sample's content depends on, as plain data, for a state or an index."""
    settings = {name: plain(getattr(config, name)) for name in config.__struct_fields__ if name not in _WITHOUT_EFFECT}
    tokenizer = getattr(processor, "tokenizer", processor)
    own = processor_record(processor) if tokenizer is not processor else {}
    return {
        "adapter": adapter_name,
        **settings,
        **({"processor": own} if own else {}),
        "chat_template": digest(template or ""),
        "tokenizer": tokenizer_record(tokenizer),
        "image_processor": media_processor_record(getattr(processor, "image_processor", None)),
        "video_processor": media_processor_record(getattr(processor, "video_processor", None)),
    }


def processor_record(processor: Any) -> dict[str, Any]:
    """Return the settings of a processor beside those of its parts, such as the tokens of a row (`image_seq_length`)."""
    names = [name for name in inspect.signature(type(processor).__init__).parameters if name != "chat_template"]
    found = {name: getattr(processor, name, None) for name in names}
    return {name: plain(value) for name, value in found.items() if isinstance(value, int | float | str | dict)}


def digest(text: str) -> str:
    """Return a short fingerprint of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def tokenizer_record(tokenizer: Any) -> str:
    """Return a fingerprint of a tokenizer: its vocabulary, merges, normaliser and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are set by calls, and mean nothing to unpadded samples.
        content = json.loads(backend.to_str())
        content = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
        return digest(json.dumps(content, sort_keys=True))
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())))


#: What the pixels of a media item depend on, besides the limits.
_PIXELS = ("patch_size", "merge_size", "temporal_patch_size", "do_resize", "do_rescale", "rescale_factor", "do_normalize",
           "min_frames", "max_frames", "num_frames")  # fmt: skip


def media_processor_record(processor: Any) -> dict[str, Any] | None:
    """Return what the pixels of an image or a video depend on, besides the limits; None where there is no processor."""
    if processor is None:
        return None
    found = {name: getattr(processor, name) for name in _PIXELS if getattr(processor, name, None) is not None}
    statistics = {name: [float(one) for one in getattr(processor, name, None) or ()] for name in ("image_mean", "image_std")}
    if not counts_pixels(processor) and hasattr(processor, "to_dict"):  # no limits of ours: its own settings decide
        found = {"settings": digest(json.dumps(processor.to_dict(), sort_keys=True, default=str))}
    # The backend (Pillow or torchvision) decides about interpolation, so its class is part of the record.
    return {"class": type(processor).__name__, **found, **statistics}

"""Text and media through the processor: ids of the expanded text, type of each token, tensors of the media."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from ...core import TYPE_CODES, MediaMismatchError
from ...models.adapter import ModelAdapter
from ..masks.extents import Extents, token_extents
from .checks import placeholder
from .errors import NoMediaReaderError, UnreadableMediaError
from .escaper import Shield
from .settings import EncoderConfig
from .sizes import counts_pixels

#: What a processor returns besides media tensors; none of it is a field of a sample.
WORKING = ("offset_mapping", "text_replacement_offsets", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels")

#: What an image processor need not do where only shapes matter: pixels are picked (0 is PIL's nearest), not averaged.
_SHAPES_ONLY = {"do_rescale": False, "do_normalize": False, "resample": 0}


class Processed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One example's tokens and media.

    Attributes:
        ids: int64 [L], placeholders expanded.
        types: int64 [L]: 0 text, 1 image, 2 video; a token that text merely spells is text.
        media: what else the processor returned, as tensors or lists.
        extents: characters that each token covers; None where the tokenizer cannot say.
        literal: bool [L], tokens that text merely spells; None where unknown.
    """

    ids: np.ndarray
    types: np.ndarray
    media: Mapping[str, Any]
    extents: Extents | None
    literal: np.ndarray | None


class TextProcessor:
    """Calls a processor, or a tokenizer alone, for one example at a time.

    Args:
        processor: a processor, or a tokenizer for text alone.
        adapter: the family.
        config: pixel limits.
        shield: hides control strings that text spells.
    """

    def __init__(self, processor: Any, adapter: ModelAdapter, config: EncoderConfig, shield: Shield) -> None:
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._adapter = adapter
        self._shield = shield
        self._has_offsets = bool(getattr(self._tokenizer, "is_fast", False))
        self._only_tokenizes = only_tokenizes(processor)
        self._limits: dict[str, Any] = {}
        video_processor = getattr(processor, "video_processor", None)
        self._knows_video_limits = config.video_min_pixels is not None or not counts_pixels(video_processor)
        if getattr(processor, "image_processor", None) is not None:
            # Without a tensor type, some image processors return a list with one array per image, others one with all images.
            images: dict[str, Any] = {"return_tensors": "pt"}
            if config.min_pixels is not None:
                images["size"] = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
            self._limits["images_kwargs"] = images
        self._video_fps, self._source_fps = config.video_fps, config.source_fps
        sampling: dict[str, Any] = {"do_sample_frames": config.video_fps is not None}
        if config.video_fps is not None:
            sampling["fps"] = config.video_fps
        if config.video_min_pixels is not None:
            sampling["size"] = {"shortest_edge": config.video_min_pixels, "longest_edge": config.video_max_pixels}
        if video_processor is not None:
            self._limits["videos_kwargs"] = sampling

    @property
    def is_multimodal(self) -> bool:
        """Whether there is a processor around the tokenizer."""
        return self._processor is not self._tokenizer

    def text_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments by which a rendered text is tokenized, as `apply_chat_template` does."""
        bos = getattr(self._tokenizer, "bos_token", None)
        if not self.is_multimodal or (bos is not None and text.startswith(bos)):
            return {"add_special_tokens": False}
        return {}

    def __call__(self, text: str, media: Mapping[str, Sequence[Any]], where: str, *, blank: bool = False) -> Processed:
        """Process one example.

        Args:
            text: the rendering, control strings that text spells hidden.
            media: modality to its items, opened: images, and videos as `open_video` returns them.
            where: how errors name the example.
            blank: images stand for others of their size, so that only shapes matter, and what costs most is left out.

        Raises:
            MediaMismatchError: placeholders and items that differ in number, or items of a modality that the family lacks.
            UnreadableMediaError: an item that the processor refuses, or has no sub-processor for.
            Exception: whatever the processor raises for text alone.
        """
        check_modalities(media, self._adapter, where)
        spelled = self._shield.places(text)
        if not self.is_multimodal:
            self._media_arguments(media, where)  # a tokenizer alone has no part for any item
            return self._tokenized(self._shield.restore(text), text, (), {}, spelled)
        self._check_counts(text, media, where)
        arguments = self._media_arguments(media, where)
        if blank and media.get("image"):
            arguments["images_kwargs"] = {**self._limits["images_kwargs"], **_SHAPES_ONLY}
        if not any(media.values()) and (spelled or self._only_tokenizes):
            return self._tokenized(self._shield.restore(text), text, (), {}, spelled)
        out = self._call(text, arguments, where)
        replaced = next(iter(out.get("text_replacement_offsets") or [[]]))
        fields = {name: value for name, value in out.items() if name not in (*WORKING, "input_ids")}
        if media.get("video") and self._adapter.has_seconds and self._video_fps is None:
            # Processors of the Omni families take the rate of sampling, or a default, for that of frames given as they are.
            fields[self._adapter.seconds_field] = [self._seconds_per_grid(metadata) for _, metadata in media["video"]]
        ids = np.asarray(out["input_ids"][0], np.int64)
        grown = sum(len(one["replacement"]) - (one["span"][1] - one["span"][0]) for one in replaced)
        # Where a processor writes more than its replacements say (Idefics 2, PaliGemma), characters are at other places.
        explained = self._has_offsets and max((end for _, end in out["offset_mapping"][0]), default=0) <= len(text) + grown
        if spelled:
            if any(media.values()) and (not replaced or (self._has_offsets and not explained)):
                raise MediaMismatchError(
                    f"{where}: text spells a media token, and {type(self._processor).__name__} does not say where it puts the "
                    "real ones: write the token in another way"
                )
            return self._tokenized_again(text, replaced, fields, spelled, where)
        extents = self._extents(out["offset_mapping"][0], replaced) if explained else None
        return Processed(
            ids=ids,
            types=self._types(ids, extents, replaced),
            media=fields,
            extents=extents,
            literal=np.zeros(len(ids), bool),
        )

    def as_called(self, text: str, media: Mapping[str, Sequence[Any]], *, types: bool) -> dict[str, Any]:
        """Return what the processor gives anyone who calls it with a text and images: tensors of a batch of one.

        Args:
            text: as for a call of this object.
            media: the same.
            types: whether the model takes `mm_token_type_ids`, which some processors return only when asked.
        """
        arguments: dict[str, Any] = {}
        if media.get("image"):
            size = {name: value for name, value in self._limits["images_kwargs"].items() if name != "return_tensors"}
            arguments = {"images": [list(media["image"])], "images_kwargs": size}
        if types and self.is_multimodal:
            arguments["return_mm_token_type_ids"] = True
        return dict(self._processor(text=[text], return_tensors="pt", **arguments, **self.text_arguments(text)))

    def _call(self, text: str, arguments: dict[str, Any], where: str) -> Mapping[str, Any]:
        try:
            out: Mapping[str, Any] = self._processor(
                text=[text],
                return_offsets_mapping=self._has_offsets,
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=False,
                **{**self._limits, **arguments},
                **self.text_arguments(text),
            )
        except Exception as error:  # whatever the processor, its sub-processors and their libraries raise
            if isinstance(error, MemoryError) or not (arguments.get("images") or arguments.get("videos")):
                raise
            raise UnreadableMediaError(f"{where}: the processor refuses the example: {error}") from error
        return out

    def _media_arguments(self, media: Mapping[str, Sequence[Any]], where: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for modality, (name, part) in {
            "image": ("images", "image_processor"),
            "video": ("videos", "video_processor"),
        }.items():
            if not media.get(modality):
                continue
            if getattr(self._processor, part, None) is None:
                raise NoMediaReaderError(
                    f"{where}: {len(media[modality])} {modality}s, but the processor has no {part} "
                    "(video processors of transformers need torchvision)"
                )
            if modality == "video" and not self._knows_video_limits:
                raise NoMediaReaderError(f"{where}: to encode videos, give video_min_pixels and video_max_pixels")
            if modality == "image":
                arguments[name] = [list(media[modality])]
                continue
            arguments[name] = [[frames for frames, _ in media[modality]]]
            metadata = [self._metadata(one, f"{where}, video {at}") for at, (_, one) in enumerate(media[modality])]
            arguments["videos_kwargs"] = {**self._limits["videos_kwargs"], "video_metadata": [metadata]}
            if self._adapter.frames_as_images:
                # These processors lay frames beside images, which takes tensors; of an array they lose a lone frame's axis.
                arguments[name] = [[torch.as_tensor(frames) for frames, _ in media[modality]]]
                arguments["videos_kwargs"]["return_tensors"] = "pt"
        return arguments

    def _metadata(self, metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a video's metadata with its rate, which the frames' timestamps, positions and sampling follow from."""
        fps = metadata.get("fps", self._source_fps)
        if fps is None and (self._video_fps is not None or self._adapter.rope != "grid"):
            why = "positions or timestamps" if self._video_fps is None else f"sampling at video_fps={self._video_fps:g}"
            raise NoMediaReaderError(
                f"{where}: the frames have no rate, and {why} of {self._adapter.name} need one: give the video as "
                "{'frames': ..., 'fps': ...}, or set source_fps"
            )
        sampled = len(metadata["frames_indices"])
        if self._video_fps is not None and sampled != metadata["total_num_frames"]:
            raise UnreadableMediaError(
                f"{where}: {sampled} of {metadata['total_num_frames']} frames are given, so they are sampled already: "
                f"leave video_fps={self._video_fps:g} out"
            )
        return {**metadata, "fps": fps} if fps is not None else dict(metadata)

    def _seconds_per_grid(self, metadata: Mapping[str, Any]) -> float:
        """Return the seconds that one temporal patch of a video covers."""
        share = len(metadata["frames_indices"]) / metadata["total_num_frames"]
        rate = share * metadata.get("fps", self._source_fps)
        return float(self._processor.video_processor.temporal_patch_size / rate)

    def _check_counts(self, text: str, media: Mapping[str, Sequence[Any]], where: str) -> None:
        for modality, items in media.items():
            token = placeholder(self._processor, modality)
            placed = text.count(token) if token is not None else len(items)
            if placed != len(items):
                raise MediaMismatchError(f"{where}: {len(items)} {modality}s, but the text has {placed} placeholders for them")

    def _extents(self, offsets: Any, replaced: Sequence[Mapping[str, Any]]) -> Extents:
        return token_extents(offsets, [(*one["span"], len(one["replacement"])) for one in replaced])

    def _types(self, ids: np.ndarray, extents: Extents | None, replaced: Sequence[Mapping[str, Any]]) -> np.ndarray:
        types = np.zeros(len(ids), np.int64)
        for modality, token in self._adapter.media_tokens.items():
            # Without offsets a spelled token can't be told apart; the layout check that follows refuses a wrong count.
            if extents is None:
                types[ids == token] = TYPE_CODES[modality]
                continue
            written = {modality, "video"} if modality == "image" and self._adapter.frames_as_images else {modality}
            for one in replaced:
                if one["type"] in written:
                    span = extents.overlapping(*one["new_span"])
                    types[span][ids[span] == token] = TYPE_CODES[modality]
        return types

    def _tokenized_again(
        self, text: str, replaced: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], spelled: Any, where: str
    ) -> Processed:
        """Return the tokens of a text that spells control strings: expanded first, then put back."""
        known = {field.name for field in self._adapter.fields.of_kind("token")}
        derived = sorted(known & set(fields))
        if derived:
            raise MediaMismatchError(f"{where}: text spells a media token, and {derived[0]!r} can't be told it is text")
        pieces, last = [], 0
        for one in replaced:
            pieces += [text[last : one["span"][0]], one["replacement"]]
            last = one["span"][1]
        hidden = "".join([*pieces, text[last:]])
        return self._tokenized(self._shield.restore(hidden), hidden, replaced, fields, self._shield.places(hidden))

    def _tokenized(
        self, text: str, hidden: str, replaced: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], spelled: Any
    ) -> Processed:
        """Return the tokens of an expanded text; `spelled` are places in it."""
        out = self._tokenizer(text, return_offsets_mapping=self._has_offsets, **self.text_arguments(hidden))
        ids = np.asarray(out["input_ids"], np.int64)
        extents = self._extents(out["offset_mapping"], replaced) if self._has_offsets else None
        literal = None if extents is None and spelled else np.zeros(len(ids), bool)
        if extents is not None and literal is not None:
            for span in spelled:
                literal[extents.overlapping(*span)] = True
        return Processed(ids=ids, types=self._types(ids, extents, replaced), media=fields, extents=extents, literal=literal)


def check_modalities(media: Mapping[str, Sequence[Any]], adapter: ModelAdapter, where: str) -> None:
    """Refuse media that the family has no token for: nobody knows how many tokens they are.

    Raises:
        MediaMismatchError: such items; their number and the family are named.
    """
    for modality, items in media.items():
        if items and modality not in adapter.media_tokens and not (modality == "video" and adapter.frames_as_images):
            raise MediaMismatchError(
                f"{where}: {len(items)} {modality} items, but the family {adapter.name!r} has no {modality}: say how they "
                "count by the model's adapter (adapter_for(model.config); --model or --adapter of the commands)"
            )


def only_tokenizes(processor: Any) -> bool:
    """Whether a processor gives text without media to its tokenizer as it is: its class does not override the call."""
    return getattr(type(processor).__call__, "__qualname__", "") == "ProcessorMixin.__call__"

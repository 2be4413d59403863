"""How long samples will be, from the processor's arithmetic alone: no pixel is decoded, no tower runs.

Images go through a rule per image processor, many examples at a time. Images of other processors, and videos, go through the
processor itself, one example at a time, with blank images of the same size, and with tensors of the video's shape that hold no
pixels: it decides how images are cut and what is written around them, which frames are taken and which timestamps written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from ...core import MediaMismatchError, SampleError
from ...models.adapter import ModelAdapter
from ...models.layout.items import media_grids, media_items
from .checks import placeholder
from .conversation import Conversation
from .errors import UnreadableMediaError, naming_example
from .escaper import Shield
from .media import check_range, image_size, open_image, open_video
from .process import TextProcessor, check_modalities
from .rendered import Written
from .sample import media_fields
from .settings import EncoderConfig
from .sizes import Grid, ImageRule, grid_of, has_rule, image_rule


class Measured(msgspec.Struct, frozen=True):
    """The size of a sample.

    Attributes:
        tokens: length L, media tokens included.
        grids: (t, h, w) in patches of each image, then of each video, in order; in families without grids, of what the tower
            sees: of each tile of an image, or (tiles, h, w).
    """

    tokens: int
    grids: tuple[Grid, ...]


class Writer(Protocol):
    """What measuring needs of an encoder."""

    adapter: ModelAdapter
    config: EncoderConfig
    processor: Any
    tokenizer: Any

    def write(self, example: Mapping[str, Any], where: str) -> Written:
        """Read and render an example."""
        ...

    def check_fields(self, conversation: Conversation, where: str) -> None:
        """Refuse columns that are not declared."""
        ...


class Measure:
    """Measures examples, many at a time: their texts are tokenized in one call.

    Args:
        encoder: renders examples.
        shield: puts control strings back that text spells.
        process: knows how a text is tokenized.
        folder: folder that relative paths of images are relative to.
    """

    def __init__(self, encoder: Writer, shield: Shield, process: TextProcessor, folder: Path | None) -> None:
        self._encoder = encoder
        self._shield = shield
        self._process = process
        self._folder = folder
        self._rule: ImageRule | None = None

    def __call__(self, examples: Sequence[Mapping[str, Any]], first: int) -> list[Measured | SampleError]:
        """See `SampleEncoder.measure`."""
        out: list[Measured | SampleError | None] = []
        texts: list[str] = []
        grids: list[tuple[Grid, ...]] = []
        for number, example in enumerate(examples, first):
            try:
                with naming_example(example, number) as where:
                    written = self._encoder.write(example, where)
                    self._encoder.check_fields(written.conversation, where)
                    check_modalities(written.conversation.media, self._encoder.adapter, where)
                    if self._needs_processor(written.conversation.media):
                        out.append(self._measured_by_processor(written, where))
                        continue
                    sizes = self._grids(written, where)
            except SampleError as error:
                out.append(error)
                continue
            grids.append(sizes)
            out.append(None)  # filled in below
            texts.append(written.text)
        lengths = iter(zip(self._lengths(texts), grids, strict=True))
        return [self._measured(*next(lengths)) if one is None else one for one in out]

    def _needs_processor(self, media: Mapping[str, Sequence[Any]]) -> bool:
        """Whether the processor has to be asked: for videos, and for images whose arithmetic is not known here."""
        image_processor = getattr(self._encoder.processor, "image_processor", None)
        return bool(media.get("video")) or (
            bool(media.get("image")) and image_processor is not None and not has_rule(image_processor)
        )

    def _measured_by_processor(self, written: Written, where: str) -> Measured:
        from PIL import Image

        media = written.conversation.media
        videos = [
            open_video(item, f"{where}, video {at}", self._folder, pixels=False) for at, item in enumerate(media["video"])
        ]
        sizes = [self._size(item, f"{where}, image {at}") for at, item in enumerate(media.get("image", []))]
        blank = [Image.new("RGB", (width, height)) for height, width in sizes]
        if blank and self._encoder.adapter.frames_as_images:  # they meet in one tensor: one byte stands for all pixels
            videos = [(torch.zeros((), dtype=torch.uint8).expand(frames.shape), metadata) for frames, metadata in videos]
        try:
            processed = self._process(written.text, {**media, "image": blank, "video": videos}, where, blank=True)
        except UnreadableMediaError as error:
            raise UnreadableMediaError(f"{error} (measured without pixels)") from error
        adapter = self._encoder.adapter
        values = media_fields(processed, adapter)
        items = {name: one.grids for name, one in media_items(values, adapter, where).items()}
        items |= media_grids({name: value for name, value in values.items() if name.endswith("_grid_thw")}, adapter)
        grids = [items[name] for name in ("image", "video") if name in items]
        return Measured(len(processed.ids), tuple((t, h, w) for one in grids for t, h, w in one.tolist()))

    def _measured(self, length: int, grids: tuple[Grid, ...]) -> Measured:
        adapter = self._encoder.adapter
        features = sum(adapter.token_count("image", grid) for grid in grids)
        return Measured(length - len(grids) + features, grids)

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text, an unexpanded placeholder being one."""
        plain = [self._shield.restore(text) for text in texts]
        lengths = [0] * len(texts)
        # Texts that take other arguments are rare: a template writes the beginning of a text, or it does not.
        for arguments in ({}, {"add_special_tokens": False}):
            rows = [row for row, text in enumerate(texts) if self._process.text_arguments(text) == arguments]
            if rows:
                out = self._encoder.tokenizer([plain[row] for row in rows], return_attention_mask=False, **arguments)
                for row, ids in zip(rows, out["input_ids"], strict=True):
                    lengths[row] = len(ids)
        return lengths

    def _grids(self, written: Written, where: str) -> tuple[Grid, ...]:
        images = written.conversation.media.get("image", [])
        token = placeholder(self._encoder.processor, "image")
        if token is not None and written.text.count(token) != len(images):
            placed = written.text.count(token)
            raise MediaMismatchError(f"{where}: {len(images)} images, but the text has {placed} placeholders for them")
        return tuple(self._grid(image, f"{where}, image {at}") for at, image in enumerate(images))

    def _grid(self, item: Any, where: str) -> Grid:
        if self._rule is None:
            image_processor = getattr(self._encoder.processor, "image_processor", None)
            if image_processor is None:
                raise UnreadableMediaError(f"{where}: the processor has no image_processor")
            config = self._encoder.config
            self._rule = image_rule(image_processor, config.min_pixels, config.max_pixels)
        size = self._size(item, where)
        try:
            return grid_of(*size, self._rule)
        except ValueError as error:
            raise UnreadableMediaError(f"{where}: {error}") from error

    def _size(self, item: Any, where: str) -> tuple[int, int]:
        """Return (height, width) of an image, from its header where it is a file."""
        image = open_image(item, where, self._folder)
        try:
            check_range(image, where)
            return image_size(image)
        finally:
            if image is not item and hasattr(image, "close"):
                image.close()

"""Media items as datasets hold them, opened: paths, bytes, rows of a table, images in memory."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UnreadableMediaError


def open_image(item: Any, where: str, folder: Path | None = None) -> Any:
    """Return an image, opened but not yet decoded where it comes from a file.

    Args:
        item: a Pillow image, a path, bytes of a file, a data URL, a mapping with `bytes` or `path` (a row of a Hugging Face
            dataset), or an array.
        where: how errors name the image.
        folder: folder that relative paths are relative to.

    Raises:
        UnreadableMediaError: no such file, or no image.
    """
    from PIL import Image

    if isinstance(item, Image.Image):
        return item
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if item is None:
        raise UnreadableMediaError(f"{where}: the image is missing")
    if hasattr(item, "shape"):
        return item  # an array or a tensor
    try:
        return Image.open(source_of(item, folder))
    except (OSError, ValueError, TypeError, AttributeError, SyntaxError) as error:
        raise UnreadableMediaError(f"{where}: cannot read the image {item!r:.120}: {error}") from error


def source_of(item: Any, folder: Path | None) -> Any:
    """Return what Pillow opens: a path, or bytes in memory."""
    if isinstance(item, bytes | bytearray):
        return io.BytesIO(item)
    if isinstance(item, str) and item.startswith("data:"):
        return io.BytesIO(base64.b64decode(item.partition(",")[2]))
    if isinstance(item, str) and item.startswith(("http://", "https://")):
        raise ValueError("images are read from files, not from the network")
    path = Path(str(item).removeprefix("file://"))
    return path if folder is None or path.is_absolute() else folder / path


def image_size(image: Any) -> tuple[int, int]:
    """Return (height, width) of an opened image, in pixels, without decoding it."""
    if hasattr(image, "size") and isinstance(image.size, tuple):
        return int(image.size[1]), int(image.size[0])
    shape = tuple(image.shape)
    if len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        shape = shape[1:]  # channels first
    return int(shape[0]), int(shape[1])


def decoded(image: Any, where: str) -> Any:
    """Return an opened image with its pixels read, in colour.

    Raises:
        UnreadableMediaError: a file that is cut short or damaged.
    """
    if not hasattr(image, "load"):
        return image
    try:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise UnreadableMediaError(f"{where}: cannot decode the image: {error}") from error

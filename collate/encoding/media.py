"""Media items as datasets hold them, opened: paths, bytes, rows of a table, images and frames in memory."""

import base64
import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np

from .errors import NoMediaReaderError, UnreadableMediaError

#: EXIF tag of the orientation, and its values that swap height and width.
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
#: Modes of 16-bit grey images, which are scaled to 8 bits: Pillow's own conversion would clip them to white.
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
#: Modes without a range that is known: what is black, and what is white?
_NO_RANGE = ("I", "F")


def open_image(item: Any, where: str, folder: Path | None = None) -> Any:
    """Return a Pillow image, opened but not yet decoded where it comes from a file.

    Args:
        item: a Pillow image, a path, a `file://` URL, bytes of a file, a data URL, a mapping with `bytes` or `path` (a row of
            a Hugging Face dataset), or a uint8 array or tensor `[H, W]`, `[H, W, C]` or `[C, H, W]` with C of 1, 3 or 4.
        where: how errors name the image.
        folder: folder that relative paths are relative to.

    Raises:
        UnreadableMediaError: no such file, no image, or an array of another dtype or shape.
    """
    from PIL import Image

    if isinstance(item, Image.Image):
        return item
    item = item_of(item, "image", where)
    if hasattr(item, "shape"):
        return _image_of_array(item, where)
    try:
        return Image.open(source_of(item, folder))
    except MemoryError:
        raise  # says nothing about the image, which must not be dropped
    except Exception as error:  # every format has a reader with exceptions of its kind
        raise UnreadableMediaError(f"{where}: cannot read the image {item!r:.120}: {error}") from error


def item_of(item: Any, kind: str, where: str) -> Any:
    """Return what a row of a table holds: its bytes, else its path; anything else as it is."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if item is None:
        raise UnreadableMediaError(f"{where}: the {kind} is missing")
    return bytes(item) if isinstance(item, memoryview) else item


def source_of(item: Any, folder: Path | None) -> Any:
    """Return a file that a reader opens: a path, or bytes in memory.

    Raises:
        ValueError: an address on the network.
    """
    if isinstance(item, bytes | bytearray):
        return io.BytesIO(item)
    if isinstance(item, str) and item.startswith("data:"):
        return io.BytesIO(base64.b64decode(item.partition(",")[2]))
    if isinstance(item, str) and item.startswith(("http://", "https://")):
        raise ValueError("media are read from files, not from the network")
    path = Path(unquote(urlparse(item).path) if isinstance(item, str) and item.startswith("file://") else item)
    return path if folder is None or path.is_absolute() else folder / path


def image_size(image: Any) -> tuple[int, int]:
    """Return (height, width) of an opened image as it is shown, in pixels, without decoding it."""
    width, height = image.size
    return (width, height) if _orientation(image) in _TURNED else (height, width)


def decoded(image: Any, where: str) -> Any:
    """Return an opened image with its pixels read, turned as its EXIF orientation says, in 8-bit colour.

    Palettes, grey, CMYK and the like are converted as Pillow does; transparency is left out, as the processors of
    `transformers` do. 16-bit grey is scaled to 8 bits.

    Raises:
        UnreadableMediaError: a file that is cut short or damaged, or pixels whose range is not known (modes I and F).
    """
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableMediaError(f"{where}: cannot decode the image: {error}") from error
    check_range(image, where)
    if image.mode in _SIXTEEN_BITS:
        pixels = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((pixels * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # from a palette with transparency, Pillow goes to RGB with a warning
    return image if image.mode == "RGB" else image.convert("RGB")


def check_range(image: Any, where: str) -> None:
    """Raise `UnreadableMediaError` for an opened image whose mode does not say which value is white (modes I and F)."""
    if image.mode in _NO_RANGE:
        raise UnreadableMediaError(
            f"{where}: the image has mode {image.mode!r}, whose range is not known: convert it to 8 or 16 bits first"
        )


def _orientation(image: Any) -> int:
    """Return the EXIF orientation by which `exif_transpose` will turn an image, from its header where there is one."""
    if image.format == "TIFF":
        return 1  # Pillow turns it while it opens it
    # Metadata of a PNG may lie behind its pixels, and `getexif` decodes them all to find out that there is none.
    if image.format == "PNG" and image.fp is not None and not _png_has_metadata(image.fp):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _png_has_metadata(file: Any) -> bool:
    """Whether a PNG has a chunk that may hold an orientation: eXIf, or a text with EXIF or XMP data."""
    before = file.tell()
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = int.from_bytes(head[:4]), head[4:]
            if kind == b"eXIf":
                return True
            texts = (b"XML:com.adobe.xmp", b"Raw profile type exif")
            name = file.read(min(length, 32)) if kind in (b"iTXt", b"tEXt", b"zTXt") else b""
            if name.startswith(texts):
                return True
            file.seek(length - len(name) + 4, 1)
        return False
    finally:
        file.seek(before)


def _image_of_array(array: Any, where: str) -> Any:
    """Return a uint8 array or tensor as an image."""
    from PIL import Image

    pixels = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    shape = list(pixels.shape)
    if pixels.dtype != np.uint8:
        raise UnreadableMediaError(f"{where}: an image as an array must be uint8 (0 to 255), got {pixels.dtype} {shape}")
    if pixels.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)) or 0 in shape:
        raise UnreadableMediaError(f"{where}: an image as an array must be [H, W], [H, W, C] or [C, H, W], got {shape}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def open_video(item: Any, where: str, folder: Path | None = None, *, pixels: bool = True) -> tuple[Any, dict[str, Any]]:
    """Return a video's frames, and what is known of them.

    Args:
        item: a path, a `file://` URL, bytes of a file, a mapping with `bytes` or `path` (decoded by PyAV), frames (an array or
            tensor uint8 `[T, H, W, 3]` or `[T, 3, H, W]`, or a list of images as `open_image` takes them), or a mapping with
            `frames` and either `fps`, the frames' rate, or `metadata`, fields of `transformers.video_utils.VideoMetadata`.
        where: how errors name the video.
        folder: folder that relative paths are relative to.
        pixels: False for a tensor on the device "meta" in place of the frames, which has their shape and no pixels: of a file
            the header and the packets are read, and nothing is decoded.

    Returns:
        Frames, uint8 `[T, H, W, 3]`, or `[T, 3, H, W]` on the device "meta"; and metadata as `VideoMetadata` names them:
        `total_num_frames`, `frames_indices`, and `fps` and `duration` in seconds where the rate is known.

    Raises:
        UnreadableMediaError: no such file, no video, frames of another dtype or shape, or PyAV is missing.
    """
    given: Mapping[str, Any] = {}
    if isinstance(item, Mapping) and item.get("frames") is not None:
        given, item = item, item["frames"]
    item = item_of(item, "video", where)
    if given and not hasattr(item, "shape") and not isinstance(item, list | tuple):
        raise UnreadableMediaError(
            f"{where}: a file has a rate of its own: fps is that of frames given one by one; video_fps of the encoder samples"
        )
    if hasattr(item, "shape"):
        frames, rate = _frames_of_array(item, where), None
    elif isinstance(item, list | tuple):
        frames, rate = _frames_of_images(item, where, folder), None
    else:
        frames, rate = (_frames_of_file if pixels else _shape_of_file)(item, where, folder)
    if not pixels:
        frames = _without_pixels(frames)
    metadata: dict[str, Any] = {"total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
    if rate is not None:
        metadata["fps"] = rate
    fields = given.get("metadata") or {}
    metadata.update({name: fields[name] for name in fields if fields[name] is not None})  # None: not known
    if given.get("fps") is not None:
        metadata["fps"] = given["fps"]
    fps = metadata.pop("fps", None)
    if fps is not None:
        if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < float(fps) < float("inf"):
            raise UnreadableMediaError(f"{where}: fps must be a number above 0, got {fps!r}")
        metadata["fps"] = float(fps)
        metadata.setdefault("duration", metadata["total_num_frames"] / float(fps))
    if len(metadata["frames_indices"]) != len(frames):
        raise UnreadableMediaError(
            f"{where}: {len(frames)} frames, but the metadata name {len(metadata['frames_indices'])} in frames_indices"
        )
    return frames, metadata


def _frames_of_array(array: Any, where: str) -> np.ndarray:
    frames = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    if frames.ndim == 4 and frames.shape[1] == 3 and frames.shape[3] != 3:
        frames = frames.transpose(0, 2, 3, 1)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise UnreadableMediaError(
            f"{where}: frames as an array must be uint8 [T, H, W, 3] or [T, 3, H, W], got {frames.dtype} {list(frames.shape)}"
        )
    return frames


def _frames_of_images(items: Iterable[Any], where: str, folder: Path | None) -> np.ndarray:
    names = [f"{where}, frame {at}" for at in range(len(list(items)))]
    frames = [np.asarray(decoded(open_image(item, name, folder), name)) for item, name in zip(items, names, strict=True)]
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) != 1:
        raise UnreadableMediaError(f"{where}: the frames of a video must be of one size, got {shapes or 'none'}")
    return np.stack(frames)


@contextlib.contextmanager
def _video_stream(item: Any, where: str, folder: Path | None) -> Iterator[tuple[Any, Any, float | None]]:
    """Open a video file; give its container, its first video stream, and its frames' rate, None where it does not say.

    Raises:
        UnreadableMediaError: whatever is wrong with the file, inside the block too.
    """
    try:
        import av
    except ImportError as error:
        raise NoMediaReaderError(f"{where}: videos from files need PyAV: pip install av") from error
    try:
        source = source_of(item, folder)
        with av.open(source if hasattr(source, "read") else str(source)) as container:
            stream = container.streams.video[0]
            rate = stream.average_rate or stream.guessed_rate
            if "matroska" in container.format.name and container.duration:
                _check_complete(container, 1 / float(rate) if rate else 0.0)
            yield container, stream, float(rate) if rate else None
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableMediaError(f"{where}: cannot read the video {item!r:.120}: {type(error).__name__}: {error}") from error


def _check_complete(container: Any, slack: float) -> None:
    """Refuse a Matroska or WebM file that ends before its header says: such a file is decoded without an error.

    Other containers have their index at the end, or no duration in their header.
    """
    ends = [
        float((packet.pts + (packet.duration or 0)) * packet.time_base)
        for packet in container.demux()
        if packet.pts is not None
    ]
    container.seek(0)
    wanted, found = container.duration / 1e6, max(ends, default=0.0)
    if found < wanted - slack - 0.05:
        raise ValueError(f"the file is cut: it ends after {found:.2f} of {wanted:.2f} seconds")


def _frames_of_file(item: Any, where: str, folder: Path | None) -> tuple[np.ndarray, float | None]:
    """Decode a video file."""
    with _video_stream(item, where, folder) as (container, stream, rate):
        # A container may say that its frames are shown turned, counterclockwise, as phones write them.
        frames = [np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in container.decode(stream)]
        return np.stack(frames), rate


def _shape_of_file(item: Any, where: str, folder: Path | None) -> tuple[np.ndarray, float | None]:
    """Return frames that take no memory, of the number and size of a file's, as `_frames_of_file` would return them.

    One packet is one frame. The header's own count is 0 in many containers. The first frame alone is decoded: it says how
    the frames are turned.
    """
    with _video_stream(item, where, folder) as (container, stream, rate):
        first = next(container.decode(stream))
        container.seek(0)
        count = sum(1 for packet in container.demux(stream) if packet.size)
        size = (first.width, first.height) if first.rotation % 180 else (first.height, first.width)
        return np.broadcast_to(np.zeros((), np.uint8), (count, *size, 3)), rate


def _without_pixels(frames: np.ndarray) -> Any:
    """Return a tensor on the device "meta" `[T, 3, H, W]` for frames `[T, H, W, 3]`."""
    import torch

    count, height, width, channels = frames.shape
    return torch.empty((count, channels, height, width), dtype=torch.uint8, device="meta")

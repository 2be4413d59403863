"""From an image's size to its grid of patches, without its pixels: the arithmetic of each family's image processor."""

import math
from typing import Any, Literal

import msgspec

Rounding = Literal["nearest", "enlarged", "framed"]
Grid = tuple[int, int, int]

#: Class of an image processor, without its backend's suffix, to the rule by which it resizes.
RULES: dict[str, Rounding] = {
    "Qwen2VLImageProcessor": "nearest",
    "Ernie4_5_VLMoeImageProcessor": "nearest",
    "CohereCompassImageProcessor": "nearest",
    "PaddleOCRVLImageProcessor": "enlarged",
    "Glm4vImageProcessor": "framed",
    "Glm46VImageProcessor": "framed",
}


#: Sides of images stay far below this number, areas lie above it.
_LONGEST_SIDE = 65_536


class ImageRule(msgspec.Struct, frozen=True, kw_only=True):
    """How an image processor resizes an image and cuts it into patches.

    Attributes:
        rounding: "nearest" rounds both sides to the grid; "enlarged" first scales up a side below one cell; "framed" does so
            for both sides at once and counts the frames of a still image in its area.
        patch_size: side of a patch in pixels.
        merge_size: patches along a side of one token.
        min_pixels: least area after resizing.
        max_pixels: most area after resizing.
        frames: frames that a still image is repeated to ("framed").
    """

    rounding: Rounding
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frames: int = 2

    @property
    def cell(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch_size * self.merge_size


def counts_pixels(image_processor: Any) -> bool:
    """Whether an image processor's `size` limits the area of an image; that of most others gives the length of sides."""
    size = getattr(type(image_processor), "size", None)
    return has_rule(image_processor) or (
        isinstance(size, dict) and "shortest_edge" in size and size.get("longest_edge", 0) > _LONGEST_SIDE
    )


def _class_names(image_processor: Any) -> list[str]:
    """Return the names of an image processor's classes without the suffixes of their backends."""
    return [base.__name__.removesuffix("Pil").removesuffix("Fast") for base in type(image_processor).__mro__]


def has_rule(image_processor: Any) -> bool:
    """Whether the arithmetic of an image processor is known here."""
    return any(name in RULES for name in _class_names(image_processor))


def image_rule(image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> ImageRule:
    """Return the rule of an image processor.

    Args:
        image_processor: the family's image processor, of either backend.
        min_pixels: least area after resizing; None for the processor's own.
        max_pixels: most area after resizing; None for the processor's own.

    Raises:
        ValueError: an image processor whose arithmetic is not known.
    """
    known: Rounding | None = next((RULES[name] for name in _class_names(image_processor) if name in RULES), None)
    if known is None:
        raise ValueError(
            f"the token counts of {type(image_processor).__name__} are not known without pixels; known: {', '.join(RULES)}"
        )
    size = dict(image_processor.size)
    return ImageRule(
        rounding=known,
        patch_size=image_processor.patch_size,
        merge_size=image_processor.merge_size,
        min_pixels=size["shortest_edge"] if min_pixels is None else min_pixels,
        max_pixels=size["longest_edge"] if max_pixels is None else max_pixels,
        frames=getattr(image_processor, "temporal_patch_size", 2),
    )


def grid_of(height: int, width: int, rule: ImageRule) -> Grid:
    """Return the grid (t, h, w), in patches, of an image of `height` x `width` pixels.

    Raises:
        ValueError: an image of no size, or more than 200 times as long as wide, which the processors refuse.

    Example:
        >>> rule = ImageRule(rounding="nearest", patch_size=14, merge_size=2, min_pixels=3136, max_pixels=1003520)
        >>> grid_of(480, 640, rule)
        (1, 34, 46)
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels")
    tall, wide = resized(height, width, rule)
    return 1, tall // rule.patch_size, wide // rule.patch_size


def resized(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return the size in pixels that an image is resized to."""
    cell = rule.cell
    height, width = enlarged(height, width, rule)
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"an image of {height} x {width} pixels is more than 200 times as long as wide")
    tall, wide = round(height / cell) * cell, round(width / cell) * cell
    frames = rule.frames if rule.rounding == "framed" else 1
    if frames * tall * wide > rule.max_pixels:
        shrink = math.sqrt((frames * height * width) / rule.max_pixels)
        return max(cell, math.floor(height / shrink / cell) * cell), max(cell, math.floor(width / shrink / cell) * cell)
    if frames * tall * wide < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (frames * height * width))
        return math.ceil(height * grow / cell) * cell, math.ceil(width * grow / cell) * cell
    return tall, wide


def enlarged(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return the size that the rounding starts from: no side below one cell, in the processors that see to that."""
    cell = rule.cell
    if rule.rounding == "framed" and min(height, width) < cell:
        scale = max(cell / height, cell / width)
        return int(height * scale), int(width * scale)
    if rule.rounding == "enlarged":
        if height < cell:
            height, width = cell, round(width * cell / height)
        if width < cell:
            height, width = round(height * cell / width), cell
    return height, width

"""LLaVA-NeXT's any-resolution images: which canvas an image is cut into tiles on, and how many tokens are left of it."""

import math
from collections.abc import Sequence

from ..adapter import Anchors


def anyres_grid(height: int, width: int, rule: Anchors) -> tuple[int, int]:
    """Return the tiles of an image, the whole in one tile among them, and the tokens that anchor it.

    The image is laid on the canvas that shows most of it, cut into tiles; rows and columns of padding are cut off again, and
    each row of tokens ends in a newline.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        rule: canvases, the side of a tile in pixels and in tokens.

    Example:
        >>> rule = Anchors(rule="anyres", field="image_sizes", pinpoints=((8, 8), (8, 16)), tile=8, side=4)
        >>> anyres_grid(8, 16, rule)
        (3, 52)
    """
    canvas = best_canvas(height, width, rule.pinpoints)
    tiles_high, tiles_wide = math.ceil(canvas[0] / rule.tile), math.ceil(canvas[1] / rule.tile)
    rows, columns = rule.side * (canvas[0] // rule.tile), rule.side * (canvas[1] // rule.tile)
    # The padding is an even number of rows, or columns, of tokens.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if rule.max_tiles:
        ratio = math.sqrt(rows * columns / (rule.max_tiles * rule.side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return 1 + tiles_high * tiles_wide, rule.side**2 + rows * (columns + 1)


def best_canvas(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the canvas (height, width) that keeps most pixels of an image; of several, the one that wastes least.

    Example:
        >>> best_canvas(30, 60, [(10, 10), (10, 20), (20, 10)])
        (10, 20)
    """

    def merit(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(pinpoints, key=merit)

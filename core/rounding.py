"""Rounding up to a multiple, as sizes, segments and packs are padded."""

from typing import TypeVar

import numpy as np

Number = TypeVar("Number", int, np.ndarray)


def round_up(value: Number, multiple: int) -> Number:
    """Return the smallest multiple that is not below an integer, or below each integer of an array.

    Example:
        >>> round_up(17, 16), round_up(np.array([0, 5]), 4).tolist()
        (32, [0, 8])
    """
    return -(-value // multiple) * multiple

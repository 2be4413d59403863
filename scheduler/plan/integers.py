"""Exact integer arithmetic: the same on every machine, whatever its floating point unit does."""

import numpy as np

from .table import Ints


def floor_scale(value: int, part: float) -> int:
    """`value * part`, rounded down: exact, since a float is a quotient of two integers.

    Example:
        >>> floor_scale(1000, 0.01), floor_scale(2**60 + 1, 0.5)
        (10, 576460752303423488)
    """
    numerator, denominator = part.as_integer_ratio()
    return value * numerator // denominator


def descending(values: Ints) -> Ints:
    """Stable order of values that are not negative, largest first.

    Value and position share one integer where they fit: sorting integers is several times faster than a stable argsort.

    Example:
        >>> descending(np.array([3, 9, 3, 5])).tolist()
        [1, 3, 0, 2]
    """
    count = len(values)
    if count == 0 or int(values.max()) >= 2 ** (62 - count.bit_length()):
        return np.argsort(-values, kind="stable")
    bits = count.bit_length()
    keys = ((values.max() - values) << bits) | np.arange(count)
    keys.sort()
    order: Ints = keys & ((1 << bits) - 1)
    return order


def scaled(values: Ints, times: int, over: int) -> Ints:
    """`values * times // over`, exact where the product is beyond int64.

    Example:
        >>> scaled(np.array([2**52]), 2**50, 2**51).tolist()
        [2251799813685248]
    """
    if int(values.max(initial=0)) * times <= np.iinfo(np.int64).max:
        return values * times // over
    exact: Ints = (values.astype(object) * times // over).astype(np.int64)
    return exact


def exact_sum(values: Ints) -> int:
    """Sum in Python integers where int64 might overflow."""
    if values.size == 0:
        return 0
    if int(values.max()) <= np.iinfo(np.int64).max // values.size:
        return int(values.sum())
    return sum(int(value) for value in values.ravel())

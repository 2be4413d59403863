"""A shuffled order of any length that needs no memory: every position is computed on its own."""

import numpy as np
import numpy.typing as npt

from ..plan.table import Ints

Bits = npt.NDArray[np.uint64]
_ROUNDS = 4


class Permutation:
    """A permutation of 0..count-1 that follows from a seed; any part of it costs only that part.

    A Feistel network permutes the numbers of an even number of bits; those that fall outside the range walk on along their
    cycle until they are inside.

    Args:
        count: how many numbers.
        seed: which permutation.
        shuffle: False for the identity.

    Example:
        >>> order = Permutation(5, seed=1)
        >>> sorted(order(0, 5).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        self._count = count
        self._half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
        keys = np.random.Generator(np.random.PCG64(seed)).integers(1, 1 << 62, _ROUNDS, dtype=np.uint64)
        self._keys = list(keys) if shuffle else []

    def __call__(self, start: int, stop: int) -> Ints:
        """Return the numbers at positions `start` to `stop`, int64."""
        values = np.arange(start, stop, dtype=np.uint64)
        if not self._keys:
            return values.astype(np.int64)
        values = self._mixed(values)
        while len(outside := np.flatnonzero(values >= self._count)):
            values[outside] = self._mixed(values[outside])
        return values.astype(np.int64)

    def _mixed(self, values: Bits) -> Bits:
        bits, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_hashed(right ^ key) & mask)
        return left << bits | right


def _hashed(values: Bits) -> Bits:
    """Return 64-bit numbers whose low bits depend on all bits of the given ones."""
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(32))

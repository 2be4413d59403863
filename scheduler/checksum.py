"""Checksum of a block: fast enough to run on every byte that moves."""

import numba
import numpy as np

_PRIME = np.uint64(0x9E3779B185EBCA87)
_SEED = np.uint64(0xC2B2AE3D27D4EB4F)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mix(words: np.ndarray, skip: int, prime: np.uint64, seed: np.uint64) -> np.uint64:
    # Four independent lanes keep the multiplier busy. Each update is a bijection of its lane for a fixed rest, so a change
    # within one word always changes the result.
    a, b, c, d = seed, seed + prime, seed ^ prime, seed * prime
    for i in range(skip):
        a = (a ^ words[i]) * prime
    first = skip + 1
    whole = first + (words.size - first) // 4 * 4
    for i in range(first, whole, 4):
        a = (a ^ words[i]) * prime
        b = (b ^ words[i + 1]) * prime
        c = (c ^ words[i + 2]) * prime
        d = (d ^ words[i + 3]) * prime
    for i in range(whole, words.size):
        a = (a ^ words[i]) * prime
    result = np.uint64(words.size)
    for lane in (a, b, c, d):
        result = (result ^ lane) * prime
        result ^= result >> np.uint64(29)
    return result


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _first_broken(words: np.ndarray, ends: np.ndarray, at: int, prime: np.uint64, seed: np.uint64) -> int:
    start = 0
    for index in range(ends.size):
        if words[start + at] != _mix(words[start : ends[index]], at, prime, seed):
            return index
        start = ends[index]
    return -1


def checksum(block: np.ndarray, *, at: int) -> int:
    """Return the 64-bit checksum of a block, the word that holds it left out.

    Multiply-and-xor over 64-bit words in four lanes. It finds accidents, not attacks.

    Args:
        block: uint8 `[n]`, n a multiple of 8.
        at: number of the word that holds the checksum.

    Example:
        >>> checksum(np.zeros(16, np.uint8), at=0) == checksum(np.zeros(24, np.uint8), at=0)
        False
    """
    assert block.dtype == np.uint8 and block.size % 8 == 0 and block.size >= 8 * (at + 1), (block.dtype, block.size)
    return int(_mix(block.view(np.uint64), at, _PRIME, _SEED))


def seal(block: np.ndarray, *, at: int) -> None:
    """Write a block's checksum into it; arguments as for `checksum`."""
    words = block.view(np.uint64)
    words[at] = _mix(words, at, _PRIME, _SEED)


def first_broken(buffer: np.ndarray, ends: np.ndarray, *, at: int) -> int:
    """Return the number of the first block whose checksum does not fit, -1 if all fit.

    Args:
        buffer: uint8 `[n]`, blocks end to end.
        ends: int64 `[B]`, where each block ends, in words of 8 bytes.
        at: number of the word, within a block, that holds its checksum.
    """
    return int(_first_broken(buffer.view(np.uint64), ends, at, _PRIME, _SEED))


def warm_up() -> None:
    """Compile or load the kernels."""
    data = np.zeros(16, np.uint8)
    seal(data, at=0)
    assert first_broken(data, np.array([2]), at=0) == -1 and checksum(data, at=0)

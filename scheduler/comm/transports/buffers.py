"""Buffers that are used again, step after step."""

import sys

import numpy as np
import torch


class BufferPool:
    """Hands out byte buffers, and takes back those that no view refers to any more.

    A fresh buffer of many megabytes costs a page fault for every 4 KiB that is written to it, which takes about as long as
    the copy. Received samples are views of their buffer and may live for as long as their step does; so a buffer is free
    when the pool holds the only reference to it.

    Args:
        pin: allocate pinned memory, for copies to a GPU.
        most: most buffers kept.
    """

    def __init__(self, *, pin: bool = False, most: int = 4) -> None:
        self._pin = pin
        self._most = most
        self._kept: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers kept."""
        return sum(buffer.size for buffer in self._kept)

    def take(self, size: int) -> np.ndarray:
        """Return uint8 `[size]`, contents undefined."""
        for buffer in self._kept:
            # The list, the loop variable and the argument of getrefcount.
            if buffer.size >= size and sys.getrefcount(buffer) == 3:
                return buffer[:size]
        # Some room, so that the next step, a little larger, need not allocate again.
        buffer = torch.empty(size + size // 8, dtype=torch.uint8, pin_memory=self._pin, device="cpu").numpy()
        if len(self._kept) == self._most:
            self._kept.pop(0)
        self._kept.append(buffer)
        return buffer[:size]

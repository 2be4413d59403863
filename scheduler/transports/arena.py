"""Memory that a rank shares with the other ranks of its node, without a name in any file system.

The memory is an anonymous file of the kernel. Its owner alone writes data to it; a reader opens it through the owner's entry
under `/proc`, and it is gone when the last of them is, however they end. In front of the data lies a header of whole pages: a
token that only this arena has, and one counter per rank, in which that rank says with what it is done.
"""

import mmap
import os
from typing import Any

import numpy as np

_TOKEN_BYTES = 16
_PAGE = 4096


class Arena:
    """A rank's own arena.

    Args:
        num_ranks: ranks that may read from it.

    Attributes:
        token: 16 random bytes, by which a reader knows that it has opened the right memory.
        fd: its file descriptor, -1 once closed.
        done: int64 `[num_ranks]`, number of the last turn whose bytes each rank needs no more; written by the readers.

    Raises:
        OSError: the kernel has no anonymous files, or no memory.
    """

    def __init__(self, num_ranks: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files")
        self.fd = os.memfd_create("evenpack")
        self._header = header_bytes(num_ranks)
        self.token = os.urandom(_TOKEN_BYTES)
        os.posix_fallocate(self.fd, 0, self._header)
        head = _mapped(self.fd, self._header)
        head[:_TOKEN_BYTES] = np.frombuffer(self.token, np.uint8)
        self.done: np.ndarray[Any, Any] = head[_TOKEN_BYTES:].view(np.int64)[:num_ranks]
        self._data = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self._data.size

    def take(self, size: int) -> np.ndarray:
        """Return uint8 `[size]`: the data's first bytes, which nobody may still be reading.

        Raises:
            MemoryError: the kernel cannot give so much.
        """
        if self._data.size < size:
            whole = self._header + size + size // 8  # some room, as the next step may be a little larger
            try:
                os.posix_fallocate(self.fd, 0, whole)  # now, or a write to a page that cannot be had would kill the process
            except OSError as error:
                raise MemoryError(f"no {whole} bytes of shared memory: {error.strerror}") from error
            self._data = _mapped(self.fd, whole)[self._header :]
        return self._data[:size]

    def close(self) -> None:
        """Give the file descriptor back; the memory goes with its last reader."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PeerArena:
    """The arena of another rank of the node.

    Args:
        place: that rank's process id, and the arena's file descriptor there.
        token: its token.
        num_ranks: as it was made with.

    Raises:
        OSError: it cannot be opened from here, or it is something else.
    """

    def __init__(self, place: tuple[int, int], token: bytes, num_ranks: int) -> None:
        path = f"/proc/{place[0]}/fd/{place[1]}"
        # Looked at first: to open whatever another process has under that number might block, or do something.
        if "memfd:evenpack" not in os.readlink(path):
            raise OSError(f"{path} is no arena")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._header = header_bytes(num_ranks)
        try:
            if os.fstat(self._fd).st_size < self._header:
                raise OSError(f"{path} is too small")
            head = _mapped(self._fd, self._header)
            if head[:_TOKEN_BYTES].tobytes() != token:
                raise OSError(f"{path} is the arena of somebody else")
        except BaseException:
            self.close()
            raise
        self.done: np.ndarray[Any, Any] = head[_TOKEN_BYTES:].view(np.int64)[:num_ranks]
        self._data = np.empty(0, np.uint8)

    def read(self, start: int, size: int) -> np.ndarray:
        """Return uint8 `[size]` of the data from `start`, a view of the owner's memory."""
        if self._data.size < start + size:
            self._data = _mapped(self._fd, os.fstat(self._fd).st_size)[self._header :]
        assert start + size <= self._data.size, (start, size, self._data.size)
        return self._data[start : start + size]

    def close(self) -> None:
        """Give the file descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def header_bytes(num_ranks: int) -> int:
    """Return the size of an arena's header: whole pages.

    Example:
        >>> header_bytes(8), header_bytes(1024)
        (4096, 12288)
    """
    return -(-(_TOKEN_BYTES + 8 * num_ranks) // _PAGE) * _PAGE


def _mapped(fd: int, size: int) -> np.ndarray:
    """Return the first bytes of a file as memory that is unmapped once no array looks into it."""
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)

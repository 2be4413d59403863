"""Memory that a rank shares with the other ranks of its node, without a name in any file system.

The memory is an anonymous file of the kernel. Its owner alone writes data to it; a reader opens it through the owner's entry
under `/proc`, and it is gone when the last of them is, however they end. It has several sections, so that one can be written
while others are still in use. At its beginning lies a header: a token that only this arena has, and one counter per
section and rank, in which that rank says with what it is done.
"""

import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

#: One for the step that trains, one for each of two prepared ahead, one to write to, and one that is only copied from.
NUM_SECTIONS = 5
_TOKEN_BYTES = 16
#: Sections lie so far apart that none ever reaches the next; what was not written takes no memory.
_APART = 1 << 40


class _SharedFile:
    """An arena as its owner and its readers hold it.

    Args:
        fd: file descriptor of the memory.

    Attributes:
        fd: the same, -1 once closed.
        done: int64 `[NUM_SECTIONS, num_ranks]`, number of the last turn whose bytes each rank needs no more; written by the
            readers.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)  # also if the owner goes unclosed
        self._closing.atexit = False  # a fork that has closed it already would complain
        self._data = [np.empty(0, np.uint8)] * NUM_SECTIONS

    def close(self) -> None:
        """Give the file descriptor back; the memory goes with its last reader."""
        self._closing()
        self.fd = -1

    def _map_header(self, num_ranks: int) -> np.ndarray:
        """Return the token's bytes, and set `done`."""
        head = _mapped(self.fd, 0, header_bytes(num_ranks))
        self.done: np.ndarray = head[_TOKEN_BYTES:].view(np.int64).reshape(NUM_SECTIONS, num_ranks)
        return head[:_TOKEN_BYTES]


class Arena(_SharedFile):
    """A rank's own arena.

    Args:
        num_ranks: ranks that may read from it.

    Attributes:
        token: 16 random bytes, by which a reader knows that it has opened the right memory.

    Raises:
        OSError: the kernel has no anonymous files, or no memory.
    """

    def __init__(self, num_ranks: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous files")
        super().__init__(os.memfd_create("evenpack"))
        self.token = os.urandom(_TOKEN_BYTES)
        os.posix_fallocate(self.fd, 0, header_bytes(num_ranks))
        for section in range(NUM_SECTIONS):  # a limit on the size of files shows itself now
            os.posix_fallocate(self.fd, _start(section), 1)
        self._map_header(num_ranks)[:] = np.frombuffer(self.token, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(data.size for data in self._data)

    def take(self, section: int, size: int) -> np.ndarray:
        """Return uint8 `[size]`: a section's first bytes; no rank may still be reading them.

        Raises:
            MemoryError: the kernel cannot give so much.
        """
        if self._data[section].size < size:
            room = size + size // 8  # as the next step may be a little larger
            with _needed(room):
                # Now, or a write to a page that cannot be had would kill the process.
                os.posix_fallocate(self.fd, _start(section), room)
                self._data[section] = _mapped(self.fd, _start(section), room)
        return self._data[section][:size]


class PeerArena(_SharedFile):
    """The arena of another rank of the node.

    Args:
        pid: that rank's process id.
        fd: the arena's file descriptor there.
        token: its token.
        num_ranks: as it was made with.

    Raises:
        OSError: it cannot be opened from here, or it is something else.
    """

    def __init__(self, pid: int, fd: int, token: bytes, num_ranks: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        # Looked at first: to open whatever another process has under that number might block, or do something.
        if "memfd:evenpack" not in os.readlink(path):
            raise OSError(f"{path} is no arena")
        super().__init__(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if os.fstat(self.fd).st_size < header_bytes(num_ranks):
            raise OSError(f"{path} is too small")
        if self._map_header(num_ranks).tobytes() != token:
            raise OSError(f"{path} is the arena of another scheduler")

    def read(self, section: int, start: int, size: int) -> np.ndarray:
        """Return uint8 `[size]` of a section from `start`, a view of the owner's memory.

        Raises:
            MemoryError: this process may not map so much, or open so many files.
        """
        end = start + size
        if self._data[section].size < end:
            with _needed(end):
                room = min(end + end // 8, os.fstat(self.fd).st_size - _start(section))
                self._data[section] = _mapped(self.fd, _start(section), room)
        return self._data[section][start:end]


def header_bytes(num_ranks: int) -> int:
    """Return the size of an arena's header.

    Example:
        >>> header_bytes(8)
        336
    """
    return _TOKEN_BYTES + 8 * NUM_SECTIONS * num_ranks


def _start(section: int) -> int:
    return (1 + section) * _APART


@contextmanager
def _needed(size: int) -> Iterator[None]:
    """Name the memory that the system did not give."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"no {size} bytes of shared memory: {error.strerror}") from error


def _mapped(fd: int, start: int, size: int) -> np.ndarray:
    """Return part of a file as memory that is unmapped once no array looks into it."""
    if sys.version_info >= (3, 13):  # earlier ones keep a file descriptor for every mapping
        return np.frombuffer(mmap.mmap(fd, size, offset=start, trackfd=False), np.uint8)
    return np.frombuffer(mmap.mmap(fd, size, offset=start), np.uint8)

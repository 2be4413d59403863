"""What a transport does, and how a wait on one ends."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .buffers import BufferPool

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class TransportError(Exception):
    """The group did not finish a collective: a peer is gone or late. Who it is, the heartbeat tells."""


class Aborted(Exception):
    """The transport was aborted while it waited, because its scheduler closes."""


class Transport(Protocol):
    """Collectives of one scheduler over one data-parallel group; every rank makes the same calls in the same order.

    Attributes:
        rank: this rank within the group.
        num_ranks: size of the group.
    """

    rank: int
    num_ranks: int

    def gather(self, data: np.ndarray) -> np.ndarray:
        """All-gather uint8 `[n]`, the same n on every rank, into uint8 `[num_ranks, n]`."""
        ...

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return room to write what the next exchange sends, so that it need not be copied; as collective as `exchange`.

        Args:
            sizes: bytes for each rank.

        Returns:
            uint8 `[sizes[rank]]` on the host for each rank, contents undefined, valid until the exchange; each starts at a
            multiple of 16 bytes if all sizes are multiples of 16.
        """
        ...

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send bytes to every rank and receive theirs.

        Args:
            parts: uint8 on the host, contiguous, one for each rank: the list that `alloc_send_buffers` returned, unchanged, or
                any others that do not lie in those buffers.
            receive_sizes: bytes from each rank.

        Returns:
            uint8 `[receive_sizes[rank]]` on the host from each rank; aligned as the send buffers.
        """
        ...

    @property
    def buffer_bytes(self) -> int:
        """Memory held between steps for outgoing and received bytes."""
        ...

    def abort(self) -> None:
        """Make every pending and later call of this rank raise `Aborted`; never blocks."""
        ...

    def close(self) -> None:
        """Leave the group, so that a peer which still waits for this rank learns it at once; nothing may be pending."""
        ...


class GroupTransport:
    """What transports over a process group have in common.

    A thread that blocks inside a collective cannot be stopped; one that polls, or waits in slices, can.

    Args:
        group: it belongs to one scheduler alone.
        timeout: seconds that a collective may take.
        pin: keep what is sent in pinned memory, for copies to a GPU.
    """

    def __init__(self, group: Any, timeout: float, *, pin: bool = False) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group: Any = group
        self._timeout = timeout
        self._aborted = False
        self._sent = BufferPool(pin=pin, most=1)
        self._outgoing, self._parts = _NOTHING, list[torch.Tensor]()

    @property
    def buffer_bytes(self) -> int:
        return self._sent.nbytes

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        self._outgoing, self._parts = _NOTHING, []  # first: the memory of what was sent before is used again
        self._outgoing = torch.from_numpy(self._sent.take(sum(sizes)))
        self._parts = list(self._outgoing.split(list(sizes)))
        return self._parts

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._group = None  # its connections close with it
        # At once: who holds a closed scheduler, or does not collect garbage, would hold all this memory.
        self._outgoing, self._parts, self._sent = _NOTHING, [], BufferPool()

    def _run(self, name: str, run: Callable[[], object]) -> None:
        """Run a collective to its end; the errors of a backend (a connection was closed, its own time-out) are the cause.

        Raises:
            Aborted: the transport was aborted.
            TransportError: the collective failed.
        """
        if self._aborted:
            raise Aborted(name)
        try:
            run()
        except RuntimeError as error:
            raise TransportError(f"{name} failed: {error}") from error

    def _wait(self, name: str, done: Callable[[], bool], pause: Callable[[float], object] = time.sleep) -> None:
        """Poll until `done`, with pauses short at first, as most waits are, then long enough to leave the core to training.

        Raises:
            Aborted: the transport was aborted first.
            TransportError: the time-out came first.
        """
        deadline, seconds = time.monotonic() + self._timeout, 0.0
        while not done():
            if self._aborted:
                raise Aborted(name)
            if time.monotonic() > deadline:
                raise TransportError(f"{name} did not finish within {self._timeout:g} s")
            pause(seconds)
            seconds = min(1e-3, seconds + 2e-5)


def gather_bytes(transport: Transport, data: bytes) -> list[bytes]:
    """All-gather byte strings of any length, in two collectives: their sizes, and themselves.

    Example:
        >>> from evenpack.scheduler.comm.transports import MemoryHub
        >>> gather_bytes(MemoryHub(1).transport(0), b"abc")
        [b'abc']
    """
    size = np.array([len(data)], np.int64)
    sizes = transport.gather(size.view(np.uint8)).view(np.int64)[:, 0]
    room = np.zeros(int(sizes.max()), np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    return [row[:length].tobytes() for row, length in zip(transport.gather(room), sizes.tolist(), strict=True)]

"""What a transport does, and how a wait on one ends."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch


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
            parts: uint8 on the host, contiguous, one for each rank: the list that `room` returned, unchanged, or any others
                that do not lie in that room.
            receive_sizes: bytes from each rank.

        Returns:
            uint8 `[receive_sizes[rank]]` on the host from each rank; aligned as those of `room`.
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


def wait_until(done: Callable[[], bool], aborted: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until `done`, so that the waiting thread can always be called back.

    A thread that blocks inside a collective cannot be stopped; one that polls can.

    Raises:
        Aborted: `aborted` became true first.
        TransportError: `timeout` seconds passed first.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0
    while not done():
        if aborted():
            raise Aborted(what)
        if time.monotonic() > deadline:
            raise TransportError(f"{what} did not finish within {timeout:g} s")
        time.sleep(pause)
        # Short first, as most waits are; then long enough to leave the core to the training thread.
        pause = min(1e-3, pause + 2e-5)

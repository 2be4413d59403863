"""Transport over a gloo group: bytes in host memory, between ranks of one node without the network."""

import contextlib
import datetime
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from .base import Aborted, TransportError, wait_until
from .buffers import BufferPool, OwnMemory
from .shared_memory import NOTE_BYTES, meet

#: Most bytes of all rows that a rank copies for the sake of a quick gather.
_AT_ONCE = 1 << 22
_SLICE = datetime.timedelta(milliseconds=50)


class HostTransport:
    """Rows and blocks over a gloo group that belongs to one scheduler alone.

    Args:
        group: from `backends.open_gloo`; it must have no other user, as a worker thread calls it.
        timeout: seconds that a collective may take.
        pin: allocate buffers of received bytes in pinned memory, for copies to a GPU.
        share: hand bytes to ranks of the same node through memory that both can see; collective over the group.

    Attributes:
        near: ranks with which this one shares memory.
    """

    def __init__(self, group: Any, *, timeout: float, pin: bool = False, share: bool = False) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group: Any = group
        self._timeout = timeout
        self._pool = BufferPool(pin=pin)
        self._aborted = False
        self._node = meet(self.gather, self.rank, self.num_ranks) if share else None
        self._memory = OwnMemory()
        self.near: frozenset[int] = self._node.near if self._node else frozenset()
        self._outgoing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sends: list[int] = []
        self._parts: list[torch.Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Memory held for outgoing and for received blocks."""
        return self._memory.nbytes + self._pool.nbytes + (0 if self._node is None else self._node.nbytes)

    def gather(self, data: np.ndarray) -> np.ndarray:
        out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8, device="cpu")
        mine = torch.from_numpy(data)
        if out.numel() <= _AT_ONCE:
            # To all at once: an all-gather hands rows on round a ring, where one rank after the other must wake up.
            copies, each = mine.repeat(self.num_ranks), [data.size] * self.num_ranks
            self._run("gather", lambda: self._group.alltoall_base(out, copies, each, each))
        else:
            self._run("gather", lambda: self._group._allgather_base(out, mine))
        return out.view(self.num_ranks, data.size).numpy()

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self._room(sizes, range(self.num_ranks))

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        if parts is not self._parts:
            self._copy(parts)
        self._parts = []
        node, sends, receives = self._node, self._sends, self._on_wire(receive_sizes)
        outgoing, incoming = self._outgoing, torch.from_numpy(self._pool.take(sum(receives)))
        if node is not None:
            whole = outgoing.split(sends)
            for rank, note in node.notes().items():
                whole[rank].numpy()[:] = note.view(np.uint8)
        self._run("exchange", lambda: self._group.alltoall_base(incoming, outgoing, receives, sends))
        received = list(incoming.split(receives))
        for rank in self._near_of(receive_sizes):
            assert node is not None
            note = received[rank].numpy().view(np.int64)
            received[rank] = torch.from_numpy(node.read(rank, note, receive_sizes[rank], self._pool.take))
        return received

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._group = None  # its connections close with it
        if self._node is not None:
            self._node.close()
        # At once: who holds a closed scheduler, or does not collect garbage, would hold all this memory.
        self._node, self._memory, self._pool = None, OwnMemory(), BufferPool()
        self._outgoing, self._parts = self._outgoing[:0].clone(), []

    def _room(self, sizes: Sequence[int], keys: Sequence[Hashable]) -> list[torch.Tensor]:
        self._sends = self._on_wire(sizes)
        self._outgoing = torch.from_numpy(self._memory.take(sum(self._sends)))
        self._parts = list(self._outgoing.split(self._sends))
        if (node := self._node) is not None:
            wait_until(node.has_room, lambda: self._aborted, self._timeout, "reading of earlier exchanges")
            near = self._near_of(sizes)
            sections = node.alloc({rank: sizes[rank] for rank in near}, {rank: keys[rank] for rank in near})
            for rank, room in sections.items():
                self._parts[rank] = torch.from_numpy(room)
        return self._parts

    def _copy(self, parts: Sequence[torch.Tensor]) -> None:
        """Bring what a caller holds elsewhere into room; one tensor for several near ranks is copied once."""
        room = self._room([part.numel() for part in parts], [(part.data_ptr(), part.numel()) for part in parts])
        pairs = [(mine, part) for mine, part in zip(room, parts, strict=True) if part.numel()]
        for mine, part in {mine.data_ptr(): (mine, part) for mine, part in pairs}.values():
            mine.copy_(part)

    def _near_of(self, sizes: Sequence[int]) -> list[int]:
        return [rank for rank in sorted(self.near) if sizes[rank]]

    def _on_wire(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes that the network carries for each rank: for a near one, a note."""
        return [NOTE_BYTES * (size > 0) if rank in self.near else size for rank, size in enumerate(sizes)]

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if self._aborted:
            raise Aborted(what)
        try:
            self._finish(start(), what)
        except RuntimeError as error:  # gloo: a connection was closed, or its own timeout
            raise TransportError(f"{what} failed: {error}") from error

    def _finish(self, work: Any, what: str) -> None:
        """Wait in slices: a thread that blocks inside a collective could not be called back."""
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            if self._aborted:
                raise Aborted(what)
            if time.monotonic() > deadline:
                raise TransportError(f"{what} did not finish within {self._timeout:g} s")
            with contextlib.suppress(RuntimeError):  # the slice is over, or the work failed: then it is completed
                work.wait(_SLICE)
        work.wait()

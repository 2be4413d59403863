"""Transport over a gloo group: bytes in host memory, between ranks of one node without the network."""

import contextlib
import datetime
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .base import GroupTransport
from .buffers import BufferPool
from .shared_memory import NOTE_BYTES, meet

#: Most bytes of all rows that a rank copies for the sake of a quick gather.
_AT_ONCE = 1 << 22
_SLICE = datetime.timedelta(milliseconds=50)


def open_gloo(store: Any, name: str, rank: int, num_ranks: int, timeout: float) -> Any:
    """Return a gloo group made directly from its backend; collective over its members.

    A group that torch registers is named after its ranks and the number of groups that a process knows, and its name is taken
    again once it is destroyed: ranks with other numbers of groups would wait for each other, and a new group would find the
    addresses of an old one. Ours have names that are given once, and only their members take part.

    Args:
        store: the job's key-value store.
        name: never used before, the same on every member.
        rank: this rank within the group.
        num_ranks: size of the group.
        timeout: seconds that an operation may take.
    """
    span = datetime.timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), rank, num_ranks, timeout=span)


class HostTransport(GroupTransport):
    """Metadata and blocks over a gloo group that belongs to one scheduler alone.

    Args:
        group: from `open_gloo`; it must have no other user, as a worker thread calls it.
        timeout: seconds that a collective may take.
        pin: allocate buffers of received bytes in pinned memory, for copies to a GPU.
        share: hand bytes to ranks of the same node through memory that both can see; collective over the group.

    Attributes:
        near: ranks with which this one shares memory.
    """

    def __init__(self, group: Any, *, timeout: float, pin: bool = False, share: bool = False) -> None:
        super().__init__(group, timeout)
        self._received = BufferPool(pin=pin)
        self._sends: list[int] = []
        self._node = meet(self.gather, self.rank, self.num_ranks) if share else None
        self.near: frozenset[int] = self._node.near if self._node else frozenset()

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._received.nbytes + (0 if self._node is None else self._node.nbytes)

    def gather(self, data: np.ndarray) -> np.ndarray:
        out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8, device="cpu")
        mine = torch.from_numpy(data)
        if out.numel() <= _AT_ONCE:
            # To all at once: an all-gather hands rows on round a ring, where one rank after the other must wake up.
            copies, each = mine.repeat(self.num_ranks), [data.size] * self.num_ranks
            self._collective("gather", lambda: self._group.alltoall_base(out, copies, each, each))
        else:
            self._collective("gather", lambda: self._group._allgather_base(out, mine))
        return out.view(self.num_ranks, data.size).numpy()

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self._alloc(sizes, range(self.num_ranks))

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        if parts is not self._parts:
            self._copy(parts)
        self._parts = []
        node, sends, receives = self._node, self._sends, self._on_wire(receive_sizes)
        outgoing, incoming = self._outgoing, torch.from_numpy(self._received.take(sum(receives)))
        if node is not None:
            whole = outgoing.split(sends)
            for rank, note in node.notes().items():
                whole[rank].numpy()[:] = note.view(np.uint8)
        self._collective("exchange", lambda: self._group.alltoall_base(incoming, outgoing, receives, sends))
        received = list(incoming.split(receives))
        for rank in self._near_of(receive_sizes):
            assert node is not None
            note = received[rank].numpy().view(np.int64)
            received[rank] = torch.from_numpy(node.read(rank, note, receive_sizes[rank], self._received.take))
        return received

    def close(self) -> None:
        super().close()
        if self._node is not None:
            self._node.close()
        self._node, self._received = None, BufferPool()

    def _alloc(self, sizes: Sequence[int], keys: Sequence[Hashable]) -> list[torch.Tensor]:
        self._sends = self._on_wire(sizes)
        super().alloc_send_buffers(self._sends)
        if (node := self._node) is not None:
            self._wait("reading of earlier exchanges", node.has_room)
            near = self._near_of(sizes)
            sections = node.alloc({rank: sizes[rank] for rank in near}, {rank: keys[rank] for rank in near})
            for rank, room in sections.items():
                self._parts[rank] = torch.from_numpy(room)
        return self._parts

    def _copy(self, parts: Sequence[torch.Tensor]) -> None:
        """Bring what a caller holds elsewhere into the send buffers; one tensor for several near ranks is copied once."""
        room = self._alloc([part.numel() for part in parts], [(part.data_ptr(), part.numel()) for part in parts])
        pairs = [(mine, part) for mine, part in zip(room, parts, strict=True) if part.numel()]
        for mine, part in {mine.data_ptr(): (mine, part) for mine, part in pairs}.values():
            mine.copy_(part)

    def _near_of(self, sizes: Sequence[int]) -> list[int]:
        return [rank for rank in sorted(self.near) if sizes[rank]]

    def _on_wire(self, sizes: Sequence[int]) -> list[int]:
        """Return the bytes that the network carries for each rank: for a near one, a note."""
        return [NOTE_BYTES * (size > 0) if rank in self.near else size for rank, size in enumerate(sizes)]

    def _collective(self, name: str, start: Callable[[], Any]) -> None:
        def finish() -> None:
            work = start()

            def pause(_: float) -> None:
                with contextlib.suppress(RuntimeError):  # the slice is over, or the work failed: then it is completed
                    work.wait(_SLICE)

            self._wait(name, work.is_completed, pause)
            work.wait()

        self._run(name, finish)

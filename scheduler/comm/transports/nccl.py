"""Transport over the accelerator's own network: NCCL, on a communicator of our own."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .base import GroupTransport


def open_nccl(store: Any, name: str, rank: int, num_ranks: int, timeout: float) -> Any:
    """Return an NCCL group with a communicator of its own; arguments as for `open_gloo`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(dist.PrefixStore(f"{name}/", store), rank, num_ranks, options)


class DeviceTransport(GroupTransport):
    """Metadata by an all-gather, blocks point to point between fixed peers.

    NCCL keeps the buffers of every pair of ranks that ever talked, so free pairing would fill the device's memory over time.
    Blocks are staged through pinned host memory. On a side stream, so that they do not wait for the computation; all calls
    come from the training thread, in program order.

    Args:
        group: from `open_nccl`; it belongs to one scheduler alone.
        device: device of the group's backend.
        peers: for every rank, the ranks it may send to.
        timeout: seconds that a collective may take.
    """

    def __init__(self, group: Any, *, device: torch.device, peers: list[list[int]], timeout: float) -> None:
        super().__init__(group, timeout, pin=device.type == "cuda")
        self._device = device
        self._peers = set(peers[self.rank])
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        #: Ranks that this one ever exchanged blocks with.
        self.partners: set[int] = set()

    def gather(self, data: np.ndarray) -> np.ndarray:
        with torch.cuda.stream(self._stream):
            mine = self._to_device(torch.from_numpy(data))
            out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8, device=self._device)
            self._collective("gather", lambda: [self._group._allgather_base(out, mine)])
            return self._to_host(out).view(self.num_ranks, data.size).numpy()

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        send_sizes = [part.numel() for part in parts]
        others = {rank for rank in range(self.num_ranks) if rank != self.rank and (send_sizes[rank] or receive_sizes[rank])}
        assert others <= self._peers, f"ranks {sorted(others - self._peers)} are not peers of rank {self.rank}"
        self.partners |= others
        outgoing = self._outgoing if parts is self._parts else torch.cat(list(parts))
        with torch.cuda.stream(self._stream):
            staged = self._to_device(outgoing)
            incoming = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self._device)
            sends, receives = staged.split(send_sizes), incoming.split(list(receive_sizes))
            receives[self.rank].copy_(sends[self.rank])
            self._collective("exchange", lambda: self._point_to_point(sorted(others), sends, receives))
            return list(self._to_host(incoming).split(list(receive_sizes)))

    def _point_to_point(self, others: list[int], sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> list[Any]:
        # NCCL starts the operations of a step together, or two ranks that send first would wait for each other.
        together = self._device.type == "cuda" and bool(others)
        if together:
            self._group._start_coalescing(self._device)
        works = []
        for rank in others:
            if sends[rank].numel():
                works.append(self._group.send([sends[rank]], rank, 0))
            if receives[rank].numel():
                works.append(self._group.recv([receives[rank]], rank, 0))
        return [self._group._end_coalescing(self._device)] if together else works

    def _to_device(self, data: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return data
        return (data if data.is_pinned() else data.pin_memory()).to(self._device, non_blocking=True)

    def _to_host(self, data: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return data
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True, device="cpu")
        host.copy_(data, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        self._wait("copy to the host", copied.query)
        return host

    def _collective(self, name: str, start: Callable[[], list[Any]]) -> None:
        def finish() -> None:
            for work in start():
                if self._device.type == "cuda":
                    self._wait(name, work.is_completed)
                work.wait()  # on the CPU, a point-to-point work never says that it is completed

        self._run(name, finish)


def fixed_peers(num_ranks: int, max_peers: int) -> list[list[int]]:
    """Return, for every rank, the ranks it may send to: those 1, 2, 4, ... places away on a ring.

    Near and far neighbours together let load flow anywhere in few hops, and the relation is symmetric.

    Args:
        num_ranks: R.
        max_peers: most peers of a rank.

    Example:
        >>> fixed_peers(8, 4)[0]
        [1, 2, 6, 7]
    """
    offsets: list[int] = []
    distance = 1
    while distance <= num_ranks // 2:
        pair = [distance] if 2 * distance == num_ranks else [distance, -distance]
        if len(offsets) + len(pair) > max_peers:
            break
        offsets += pair
        distance *= 2
    return [sorted({(rank + offset) % num_ranks for offset in offsets} - {rank}) for rank in range(num_ranks)]

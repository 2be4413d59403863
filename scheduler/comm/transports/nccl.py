"""Transport over the accelerator's own network: NCCL, on a communicator of our own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .base import Aborted, TransportError, wait_until
from .buffers import OwnMemory


class DeviceTransport:
    """Rows by an all-gather, blocks point to point between fixed peers.

    NCCL keeps the buffers of every pair of ranks that ever talked, so free pairing would fill the device's memory over time.
    Blocks are staged through pinned host memory. On a side stream, so that they do not wait for the computation; all calls
    come from the training thread, in program order.

    Args:
        group: from `backends`; it belongs to one scheduler alone.
        device: device of the group's backend.
        peers: for every rank, the ranks it may send to.
        timeout: seconds that a collective may take.
    """

    def __init__(self, group: Any, *, device: torch.device, peers: list[list[int]], timeout: float) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group: Any = group
        self._device = device
        self._peers = set(peers[self.rank])
        self._timeout = timeout
        self._aborted = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = OwnMemory(pin=device.type == "cuda")
        self._outgoing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._parts: list[torch.Tensor] = []
        #: Ranks that this one ever exchanged blocks with.
        self.partners: set[int] = set()

    def gather(self, data: np.ndarray) -> np.ndarray:
        with self._on_stream():
            mine = self._to_device(torch.from_numpy(data))
            out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8, device=self._device)
            self._run("gather", lambda: [self._group._allgather_base(out, mine)])
            return self._to_host(out).view(self.num_ranks, data.size).numpy()

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        self._outgoing = torch.from_numpy(self._memory.take(sum(sizes)))
        self._parts = list(self._outgoing.split(list(sizes)))
        return self._parts

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        send_sizes = [part.numel() for part in parts]
        others = {rank for rank in range(self.num_ranks) if rank != self.rank and (send_sizes[rank] or receive_sizes[rank])}
        assert others <= self._peers, f"ranks {sorted(others - self._peers)} are not peers of rank {self.rank}"
        self.partners |= others
        outgoing = self._outgoing if parts is self._parts else torch.cat(list(parts))
        with self._on_stream():
            staged = self._to_device(outgoing)
            incoming = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self._device)
            sends, receives = staged.split(send_sizes), incoming.split(list(receive_sizes))
            receives[self.rank].copy_(sends[self.rank])
            self._run("exchange", lambda: self._point_to_point(sorted(others), sends, receives))
            return list(self._to_host(incoming).split(list(receive_sizes)))

    @property
    def buffer_bytes(self) -> int:
        return self._memory.nbytes

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._group = None

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

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

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
        self._wait(copied.query, "copy to the host")
        return host

    def _run(self, what: str, start: Callable[[], list[Any]]) -> None:
        if self._aborted:
            raise Aborted(what)
        try:
            for work in start():
                if self._device.type == "cuda":
                    self._wait(work.is_completed, what)
                work.wait()  # on the CPU, a point-to-point work never says that it is completed
        except RuntimeError as error:
            raise TransportError(f"{what} failed: {error}") from error

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        wait_until(done, lambda: self._aborted, self._timeout, what)


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

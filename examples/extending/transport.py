"""A transport: two collectives over the data-parallel group, here as `torch.distributed` has them over gloo."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from evenpack.scheduler import ProcessGroups


class PlainTransport:
    """Gathers and exchanges bytes, and counts those that this rank sends.

    Args:
        groups: process groups; every rank of `groups.dp` opens a transport at the same time.
        timeout: seconds that a collective may take.
    """

    def __init__(self, groups: ProcessGroups, timeout: float) -> None:
        self.rank, self.num_ranks, self.sent_bytes, self.buffer_bytes = groups.rank, groups.num_ranks, 0, 0
        self._group = dist.new_group(dist.get_process_group_ranks(groups.dp), backend="gloo")

    def gather(self, data: np.ndarray) -> np.ndarray:
        """All-gather uint8 `[n]` into uint8 `[R, n]`."""
        rows = [torch.empty(len(data), dtype=torch.uint8) for _ in range(self.num_ranks)]
        dist.all_gather(rows, torch.from_numpy(np.ascontiguousarray(data)), group=self._group)
        return torch.stack(rows).numpy()

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return a buffer for each rank, which the scheduler fills before `exchange`."""
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send a part to every rank, and return what each sent."""
        sizes, received = [len(part) for part in parts], torch.empty(sum(receive_sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.cat(list(parts)), list(receive_sizes), sizes, group=self._group)
        self.sent_bytes += sum(sizes)
        return list(received.split(list(receive_sizes)))

    def abort(self) -> None:
        """Wake a thread that waits: gloo's own time-out does it here."""

    def close(self) -> None:
        """Leave the group."""
        self._group = None

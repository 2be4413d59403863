"""Transport over a gloo group: bytes in host memory."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .base import Aborted, TransportError, wait_until


def all_gather_bytes(out: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Start an all-gather of equal parts into one tensor; return its work."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer releases of torch renamed it
    return call(out, mine, group=group, async_op=True)


def leave_group(group: Any) -> None:
    """Destroy a group of our own; its connections close with it. The job may have ended before."""
    if group is not None and dist.is_initialized():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


class HostTransport:
    """Rows and blocks over a gloo group that belongs to one scheduler alone.

    Args:
        group: gloo process group; nobody else may use it, as a worker thread calls it.
        timeout: seconds that a collective may take.
        pin: allocate buffers in pinned memory, for copies to a GPU.
    """

    def __init__(self, group: Any, *, timeout: float, pin: bool = False) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group = group
        self._timeout = timeout
        self._pin = pin
        self._aborted = False

    @property
    def name(self) -> str:
        """Name of the group: unique in the job, equal on its members."""
        return str(self._group.group_name)

    def gather(self, data: np.ndarray) -> np.ndarray:
        out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8)
        mine = torch.from_numpy(data)
        self._run("gather", lambda: all_gather_bytes(out, mine, self._group))
        return out.view(self.num_ranks, data.size).numpy()

    def exchange(self, outgoing: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        incoming = torch.empty(sum(receive_sizes), dtype=torch.uint8, pin_memory=self._pin)
        self._run(
            "exchange",
            lambda: dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self._group, async_op=True),
        )
        return incoming

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        leave_group(self._group)
        self._group = None

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if self._aborted:
            raise Aborted(what)
        try:
            work = start()
            wait_until(work.is_completed, lambda: self._aborted, self._timeout, what)
            work.wait()
        except RuntimeError as error:  # gloo: a connection was closed, or its own timeout
            raise TransportError(f"{what} failed: {error}") from error

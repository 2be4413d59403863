"""Transport over a gloo group: bytes in host memory."""

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .base import Aborted, TransportError
from .buffers import BufferPool

_SLICE = datetime.timedelta(milliseconds=50)


class HostTransport:
    """Rows and blocks over a gloo group that belongs to one scheduler alone.

    Args:
        group: from `backends.open_gloo`; nobody else may use it, as a worker thread calls it.
        timeout: seconds that a collective may take.
        pin: allocate buffers in pinned memory, for copies to a GPU.
    """

    def __init__(self, group: Any, *, timeout: float, pin: bool = False) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group: Any = group
        self._timeout = timeout
        self._pool = BufferPool(pin=pin)
        self._aborted = False

    @property
    def buffer_bytes(self) -> int:
        """Memory held for received blocks."""
        return self._pool.nbytes

    def gather(self, data: np.ndarray) -> np.ndarray:
        out = torch.empty(self.num_ranks * data.size, dtype=torch.uint8, device="cpu")
        mine = torch.from_numpy(data)
        self._run("gather", lambda: self._group._allgather_base(out, mine))
        return out.view(self.num_ranks, data.size).numpy()

    def exchange(self, outgoing: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        incoming = torch.from_numpy(self._pool.take(sum(receive_sizes)))
        self._run("exchange", lambda: self._group.alltoall_base(incoming, outgoing, receive_sizes, send_sizes))
        return incoming

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        self._group = None  # its connections close with it

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

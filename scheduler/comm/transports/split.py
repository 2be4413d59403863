"""Rows over one transport, blocks over another."""

from collections.abc import Sequence

import numpy as np
import torch

from .base import Transport


class MixedTransport:
    """Gathers over one transport and exchanges over another, of the same ranks.

    Args:
        rows: for the gather.
        blocks: for the exchange.

    Attributes:
        blocks: the second one, for what else the preparing thread gathers without the training thread.
    """

    def __init__(self, rows: Transport, blocks: Transport) -> None:
        assert (rows.rank, rows.num_ranks) == (blocks.rank, blocks.num_ranks)
        self.rank, self.num_ranks = rows.rank, rows.num_ranks
        self._rows, self.blocks = rows, blocks

    @property
    def buffer_bytes(self) -> int:
        return self.blocks.buffer_bytes

    def gather(self, data: np.ndarray) -> np.ndarray:
        return self._rows.gather(data)

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self.blocks.alloc_send_buffers(sizes)

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        return self.blocks.exchange(parts, receive_sizes)

    def abort(self) -> None:
        self._rows.abort()
        self.blocks.abort()

    def close(self) -> None:
        self._rows.close()
        self.blocks.close()

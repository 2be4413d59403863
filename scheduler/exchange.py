"""The exchange of a step: every moved sample is one block, and all blocks travel in one collective."""

from collections.abc import Sequence

import numpy as np
import torch

from ..core import Sample
from .blocks import Block, read_blocks
from .describe import Described
from .plan import SampleTable, StepPlan
from .transports import Transport


class Exchanger:
    """Exchanges the samples of one step after the other.

    Args:
        transport: collectives of the group.
        pin: stage blocks in pinned memory.
    """

    def __init__(self, transport: Transport, *, pin: bool = False) -> None:
        self._transport = transport
        self._pin = pin
        self._outgoing = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def buffer_bytes(self) -> int:
        """Memory held between steps: the largest outgoing buffer so far, and what the transport keeps for received ones."""
        return self._outgoing.numel() + int(getattr(self._transport, "buffer_bytes", 0))

    def __call__(self, table: SampleTable, plan: StepPlan, mine: Sequence[Described]) -> dict[int, Sample]:
        """Send the samples that leave this rank and receive those that come.

        Blocks travel grouped by rank and ascending by row, so both sides know every size from the table and the plan. A step
        in which nothing moves needs no collective, and every rank knows it.

        Args:
            table: the samples of all ranks.
            plan: where they go.
            mine: this rank's samples, in table order.

        Returns:
            Row to sample, for every row that the plan gives to this rank. Received samples are views of one buffer.

        Raises:
            CorruptBlockError: a received block is not what the plan says.
            TransportError: a rank did not come.
        """
        rank, num_ranks, digest = self._transport.rank, self._transport.num_ranks, plan_number(plan)
        own = np.flatnonzero(table.home == rank)
        held = dict(zip(own.tolist(), mine, strict=True))
        kept = {row: held[row].block.sample for row in own[plan.rank[own] == rank].tolist()}
        if plan.moved_bytes == 0:
            return kept
        moves = (plan.rank != table.home) & (plan.rank >= 0)
        outgoing = _grouped(np.flatnonzero(moves & (table.home == rank)), plan.rank)
        incoming = _grouped(np.flatnonzero(moves & (plan.rank == rank)), table.home)
        send_sizes = _sizes(outgoing, plan.rank, table.nbytes, num_ranks)
        receive_sizes = _sizes(incoming, table.home, table.nbytes, num_ranks)
        buffer = self._filled([(row, held[row].block) for row in outgoing.tolist()], sum(send_sizes), digest)
        received = self._transport.exchange(buffer, send_sizes, receive_sizes)
        rows = incoming.tolist()
        kept.update(zip(rows, read_blocks(received, table.nbytes[incoming].tolist(), rows, digest), strict=True))
        return kept

    def _filled(self, blocks: list[tuple[int, Block]], size: int, digest: int) -> torch.Tensor:
        """Return the outgoing blocks, end to end, in a buffer that is used again once they are sent."""
        if self._outgoing.numel() < size:
            self._outgoing = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin, device="cpu")
        buffer = self._outgoing[:size]
        raw, address, at = buffer.numpy(), buffer.data_ptr(), 0
        for row, block in blocks:
            block.write(raw[at : at + block.nbytes], address + at, row=row, digest=digest)
            at += block.nbytes
        return buffer


def plan_number(plan: StepPlan) -> int:
    """Return a plan's digest as an unsigned 64-bit integer."""
    return int.from_bytes(plan.digest, "little")


def _grouped(rows: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rank_of[rows], kind="stable")]


def _sizes(rows: np.ndarray, rank_of: np.ndarray, nbytes: np.ndarray, num_ranks: int) -> list[int]:
    sizes = np.zeros(num_ranks, np.int64)
    np.add.at(sizes, rank_of[rows], nbytes[rows])
    return [int(size) for size in sizes]

"""Exchange: every sample that moves is one block, and all blocks travel in one collective."""

from collections.abc import Sequence

import numpy as np

from ...core import Sample, SampleGroup
from ..comm.transports import Transport
from ..plan import SampleTable, StepPlan
from .blocks import read_blocks, write_blocks
from .describe import Described


class Exchanger:
    """Exchanges the samples of one step after the other.

    Args:
        transport: collectives of the group.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __call__(self, table: SampleTable, plan: StepPlan, mine: Sequence[Described]) -> dict[int, Sample | SampleGroup]:
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
            TransportError: timed out waiting for a rank, or lost it.
        """
        rank, num_ranks, digest = self._transport.rank, self._transport.num_ranks, plan_number(plan)
        own = np.flatnonzero(table.home == rank)
        held = dict(zip(own.tolist(), mine, strict=True))
        kept = {row: held[row].block.sample for row in own[plan.rank[own] == rank].tolist()}
        if plan.moved_bytes == 0:
            return kept
        moves = (plan.rank != table.home) & (plan.rank >= 0)
        outgoing = rows_by_rank(moves & (table.home == rank), plan.rank, num_ranks)
        incoming = rows_by_rank(moves & (plan.rank == rank), table.home, num_ranks)
        parts = self._transport.alloc_send_buffers(_sizes(outgoing, table.nbytes))
        for rows, part in zip(outgoing, parts, strict=True):
            write_blocks(part, [held[row].block for row in rows.tolist()], rows.tolist(), digest)
        received = self._transport.exchange(parts, _sizes(incoming, table.nbytes))
        for rows, part in zip(incoming, received, strict=True):
            if len(rows):
                samples = read_blocks(part, table.nbytes[rows].tolist(), rows.tolist(), digest)
                kept.update(zip(rows.tolist(), samples, strict=True))
        return kept


def rows_by_rank(chosen: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Return the chosen rows of every rank, ascending."""
    rows = np.flatnonzero(chosen)
    order = rows[np.argsort(rank_of[rows], kind="stable")]
    return np.split(order, np.searchsorted(rank_of[order], np.arange(1, num_ranks)))


def plan_number(plan: StepPlan) -> int:
    """Return a plan's digest as an unsigned 64-bit integer."""
    return int.from_bytes(plan.digest, "little")


def _sizes(rows: list[np.ndarray], nbytes: np.ndarray) -> list[int]:
    return [sum(nbytes[each].tolist()) for each in rows]

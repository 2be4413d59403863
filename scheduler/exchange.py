"""The exchange of a step: every moved sample is one block, and all blocks travel in one collective."""

from collections.abc import Sequence

import numpy as np
import torch

from ..core import Sample
from .blocks import read_block
from .describe import Described
from .plan import SampleTable, StepPlan
from .transports import Transport


def exchange(
    transport: Transport, table: SampleTable, plan: StepPlan, mine: Sequence[Described], *, pin: bool = False
) -> dict[int, Sample]:
    """Send the samples that leave this rank and receive those that come.

    Blocks travel grouped by rank and ascending by row, so both sides know every size from the table and the plan. A step
    in which nothing moves needs no collective, and every rank knows it.

    Args:
        transport: collectives of the group.
        table: the samples of all ranks.
        plan: where they go.
        mine: this rank's samples, in table order.
        pin: build the outgoing buffer in pinned memory.

    Returns:
        Row to sample, for every row that the plan gives to this rank. Received samples are views of one buffer.

    Raises:
        CorruptBlockError: a received block is not what the plan says.
        TransportError: a rank did not come.
    """
    rank, digest = transport.rank, plan_number(plan)
    own = np.flatnonzero(table.home == rank)
    held = dict(zip(own.tolist(), mine, strict=True))
    kept = {row: held[row].block.sample for row in own[plan.rank[own] == rank].tolist()}
    if plan.moved_bytes == 0:
        return kept
    moves = (plan.rank != table.home) & (plan.rank >= 0)
    outgoing = _grouped(np.flatnonzero(moves & (table.home == rank)), plan.rank)
    incoming = _grouped(np.flatnonzero(moves & (plan.rank == rank)), table.home)
    send_sizes = _sizes(outgoing, plan.rank, table.nbytes, transport.num_ranks)
    receive_sizes = _sizes(incoming, table.home, table.nbytes, transport.num_ranks)
    buffer = torch.empty(sum(send_sizes), dtype=torch.uint8, pin_memory=pin)
    at, raw = 0, buffer.numpy()
    for row in outgoing.tolist():
        block = held[row].block
        block.write(raw[at : at + block.nbytes], row=row, digest=digest)
        at += block.nbytes
    received = transport.exchange(buffer, send_sizes, receive_sizes)
    at = 0
    for row in incoming.tolist():
        size = int(table.nbytes[row])
        kept[row] = read_block(received[at : at + size], row=row, digest=digest)
        at += size
    return kept


def plan_number(plan: StepPlan) -> int:
    """Return a plan's digest as an unsigned 64-bit integer."""
    return int.from_bytes(plan.digest, "little")


def _grouped(rows: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rank_of[rows], kind="stable")]


def _sizes(rows: np.ndarray, rank_of: np.ndarray, nbytes: np.ndarray, num_ranks: int) -> list[int]:
    sizes = np.zeros(num_ranks, np.int64)
    np.add.at(sizes, rank_of[rows], nbytes[rows])
    return [int(size) for size in sizes]

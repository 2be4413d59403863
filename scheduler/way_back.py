"""Per-sample results back to the ranks that brought the samples."""

from collections.abc import Sequence

import numpy as np
import torch

from ..core import PeerFailedError, Sample, SampleLayout
from ..core.fields import TENSOR_DTYPES, dtype_name
from .blocks import Block, read_block
from .exchange import plan_number
from .plan import SampleTable, StepPlan
from .transports import Transport, gather_bytes


def return_home(
    transport: Transport,
    table: SampleTable,
    plan: StepPlan,
    rows: Sequence[Sequence[int]],
    values: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor | None]:
    """Exchange results along the plan, backwards: first their sizes, then their blocks.

    Args:
        transport: collectives of the group, not used by another thread.
        table: the samples of all ranks.
        plan: where they were computed.
        rows: rows of each of this rank's packs.
        values: one tensor for each of them.

    Returns:
        One tensor per sample that this rank brought, in source order; None where it was dropped.

    Raises:
        ValueError: numbers of rows and values that differ, or values that are no tensors.
        PeerFailedError: that happened on another rank.
    """
    problem = _problem(rows, values)
    bad = [rank for rank, text in enumerate(gather_bytes(transport, problem.encode())) if text]
    if problem:
        raise ValueError(problem)
    if bad:
        raise PeerFailedError(f"rank {bad[0]} called return_home with other values than its packs have samples")
    rank, digest = transport.rank, plan_number(plan)
    blocks = {
        row: Block.of(Sample(values={"value": value}, layout=SampleLayout.text(0)))
        for pack, given in zip(rows, values, strict=True)
        for row, value in zip(pack, given, strict=True)
    }
    # Also what stays goes through a block, so that a caller may change its tensors afterwards.
    computed = np.flatnonzero(plan.rank == rank)
    outgoing = computed[np.argsort(table.home[computed], kind="stable")]
    own = np.flatnonzero((table.home == rank) & (plan.rank >= 0))
    incoming = own[np.argsort(plan.rank[own], kind="stable")]
    send_counts = np.bincount(table.home[outgoing], minlength=transport.num_ranks)
    receive_counts = np.bincount(plan.rank[incoming], minlength=transport.num_ranks)
    sizes = np.array([blocks[row].nbytes for row in outgoing.tolist()], np.int64)
    got = transport.exchange(torch.from_numpy(sizes.view(np.uint8)), _bytes(send_counts), _bytes(receive_counts))
    received_sizes = got.numpy().view(np.int64)
    buffer = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    ends = np.cumsum(sizes)
    for row, end, size in zip(outgoing.tolist(), ends.tolist(), sizes.tolist(), strict=True):
        blocks[row].write(buffer.numpy()[end - size : end], row=row, digest=digest)
    received = transport.exchange(
        buffer, _totals(table.home[outgoing], sizes, transport.num_ranks),
        _totals(plan.rank[incoming], received_sizes, transport.num_ranks),
    )  # fmt: skip
    found: dict[int, torch.Tensor] = {}
    for row, end, size in zip(incoming.tolist(), np.cumsum(received_sizes).tolist(), received_sizes.tolist(), strict=True):
        found[row] = read_block(received[end - size : end], row=row, digest=digest).tensor("value")
    return [found.get(row) for row in np.flatnonzero(table.home == rank).tolist()]


def _problem(rows: Sequence[Sequence[int]], values: Sequence[Sequence[torch.Tensor]]) -> str:
    """Return what is wrong with the values; every rank must hear of it before it waits for them."""
    wanted, got = [len(pack) for pack in rows], [len(pack) for pack in values]
    if wanted != got:
        return f"return_home needs one value per sample: packs hold {wanted} samples, got {got} values"
    for pack in values:
        for value in pack:
            if not isinstance(value, torch.Tensor) or dtype_name(value.dtype) not in TENSOR_DTYPES:
                return f"return_home needs tensors, got {type(value).__name__} {getattr(value, 'dtype', '')}".rstrip()
    return ""


def _bytes(counts: np.ndarray) -> list[int]:
    return [8 * int(count) for count in counts]


def _totals(ranks: np.ndarray, sizes: np.ndarray, num_ranks: int) -> list[int]:
    totals = np.zeros(num_ranks, np.int64)
    np.add.at(totals, ranks, sizes)
    return [int(total) for total in totals]

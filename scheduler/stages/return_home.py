"""Per-sample results back to the ranks that brought the samples."""

from collections.abc import Sequence

import numpy as np
import torch

from ...core import PeerFailedError, Sample, SampleLayout, members_of
from ...core.fields import TENSOR_DTYPES, dtype_name
from ..comm.transports import Transport, gather_bytes
from ..plan import SampleTable, StepPlan
from .blocks import Block, read_blocks, write_blocks
from .exchange import plan_number, rows_by_rank


def return_home(
    transport: Transport,
    table: SampleTable,
    plan: StepPlan,
    rows: Sequence[Sequence[int]],
    values: Sequence[Sequence[torch.Tensor]],
    counts: Sequence[Sequence[int]],
) -> list[list[torch.Tensor] | None]:
    """Exchange results along the plan, backwards: first their sizes, then their blocks.

    Args:
        transport: collectives of the group, not used by another thread.
        table: the samples of all ranks.
        plan: where they were computed.
        rows: rows of each of this rank's packs.
        values: one tensor for each of their samples.
        counts: number of samples of each of the rows.

    Returns:
        For each row that this rank brought, in source order, the tensors of its samples; None where it was dropped.

    Raises:
        ValueError: numbers of rows and values that differ, or values that are no tensors.
        PeerFailedError: that happened on another rank.
    """
    problem = _problem([sum(each) for each in counts], values)
    bad = [rank for rank, text in enumerate(gather_bytes(transport, problem.encode())) if text]
    if problem:
        raise ValueError(problem)
    if bad:
        raise PeerFailedError(f"rank {bad[0]} called return_home with other values than its packs have samples")
    rank, digest = transport.rank, plan_number(plan)
    blocks: dict[int, Block] = {}
    for pack, numbers, given in zip(rows, counts, values, strict=True):
        remaining = iter(given)
        for row, count in zip(pack, numbers, strict=True):
            named = {str(at): next(remaining) for at in range(count)}
            blocks[row] = Block.of(Sample(values=named, layout=SampleLayout.text(0)))
    # Also what stays goes through a block, so that a caller may change its tensors afterwards.
    outgoing = rows_by_rank(plan.rank == rank, table.home, transport.num_ranks)
    incoming = rows_by_rank((table.home == rank) & (plan.rank >= 0), plan.rank, transport.num_ranks)
    sizes = [np.array([blocks[row].nbytes for row in group.tolist()], np.int64) for group in outgoing]
    received_bytes = transport.exchange(
        [torch.from_numpy(each.view(np.uint8)) for each in sizes], [8 * len(group) for group in incoming]
    )
    received_sizes = [each.numpy().view(np.int64).tolist() for each in received_bytes]
    parts = transport.alloc_send_buffers([int(each.sum()) for each in sizes])
    for group, part in zip(outgoing, parts, strict=True):
        write_blocks(part, [blocks[row] for row in group.tolist()], group.tolist(), digest)
    found: dict[int, list[torch.Tensor]] = {}
    received = transport.exchange(parts, [sum(each) for each in received_sizes])
    for group, part, sizes_of in zip(incoming, received, received_sizes, strict=True):
        samples = read_blocks(part, sizes_of, group.tolist(), digest)
        tensors = [[member.tensor(name) for member in members_of(sample) for name in member.values] for sample in samples]
        found.update(zip(group.tolist(), tensors, strict=True))
    return [found.get(row) for row in np.flatnonzero(table.home == rank).tolist()]


def _problem(wanted: list[int], values: Sequence[Sequence[torch.Tensor]]) -> str:
    """Return what is wrong with the values; every rank must hear of it before it waits for them."""
    got = [len(pack) for pack in values]
    if wanted != got:
        return f"return_home needs one value per sample: packs hold {wanted} samples, got {got} values"
    for pack in values:
        for value in pack:
            if not isinstance(value, torch.Tensor) or dtype_name(value.dtype) not in TENSOR_DTYPES:
                return f"return_home needs tensors, got {type(value).__name__} {getattr(value, 'dtype', '')}".rstrip()
    return ""

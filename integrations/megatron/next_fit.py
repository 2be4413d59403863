"""The packing rule of Megatron-Core's `dp_balanced` scheduler as a planner, to compare with, or to migrate in two steps."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...core import InfeasiblePlanError, OversizeSampleError
from ...scheduler import PlanConfig, SampleTable, StepPlan
from ...scheduler.plan import MediaTowers, plan_fixed
from ...scheduler.plan.settings import NO_TOWERS


def next_fit_planner(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
) -> StepPlan:
    """Fill packs in sample order, closing each as soon as the next sample does not fit; a planner for the scheduler.

    Where their number is no multiple of `num_ranks * microbatch_multiple`, the last samples of the last packs move into packs
    of their own. Pack k * num_ranks + r is micro-batch k of rank r. Costs are ignored.

    Args:
        table: the samples.
        num_ranks: R.
        config: settings.
        towers: media towers, for the dummies that packs need.
        cp_size: context-parallel size.
        node_of_rank: not looked at.
        peers: not supported, as packs go to ranks in turn.

    Raises:
        OversizeSampleError: a sample above the capacity.
        InfeasiblePlanError: fewer samples than packs.

    Example:
        >>> table = SampleTable.from_lengths([6, 4, 3], home=[0, 0, 1])
        >>> plan = next_fit_planner(table, num_ranks=2, config=PlanConfig(max_tokens=10))
        >>> plan.ids(0, 0).tolist(), plan.ids(1, 0).tolist()
        ([0, 1], [2])
    """
    if peers is not None:
        raise ValueError("next fit deals packs out to all ranks in turn: it takes no fixed peers")
    packs = _packs(table.padded.tolist(), config.max_tokens * cp_size, config.max_segments)
    multiple = num_ranks * config.microbatch_multiple
    _split(packs, -len(packs) % multiple)
    rank, microbatch = np.zeros(len(table.tokens), np.int64), np.zeros(len(table.tokens), np.int64)
    for index, pack in enumerate(packs):
        microbatch[pack], rank[pack] = divmod(index, num_ranks)
    fixed = msgspec.structs.replace(config, num_microbatches=len(packs) // num_ranks)
    return plan_fixed(table, rank, microbatch, num_ranks=num_ranks, config=fixed, towers=towers, cp_size=cp_size)


def _packs(padded: list[int], capacity: int, max_segments: int | None) -> list[list[int]]:
    packs: list[list[int]] = []
    room = 0
    for row, size in enumerate(padded):
        if size > capacity:
            raise OversizeSampleError(f"sample {row} has {size} padded tokens, a pack holds {capacity}")
        if not packs or size > room or len(packs[-1]) == max_segments:
            packs.append([])
            room = capacity
        packs[-1].append(row)
        room -= size
    return packs


def _split(packs: list[list[int]], missing: int) -> None:
    last = len(packs) - 1
    while missing:
        if last < 0:
            raise InfeasiblePlanError(f"{missing} more packs are needed, and every pack holds a single sample")
        if len(packs[last]) == 1:
            last -= 1
        else:
            packs.append([packs[last].pop()])
            missing -= 1

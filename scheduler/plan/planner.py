"""`plan_step`: one global assignment of a step's samples, the same on every rank."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from . import bounds
from .certificate import certify
from .config import NO_TOWERS, MediaTowers, Movement, PlanConfig, Sync
from .problem import build_problem
from .result import StepPlan
from .search import solve
from .table import SampleTable


def plan_step(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
) -> StepPlan:
    """Assign every sample of a step to a rank and a micro-batch.

    A pure function in integers: the same input gives the same plan, bit for bit, on every rank and machine.

    Args:
        table: the samples of all ranks.
        num_ranks: R, data-parallel ranks.
        config: what to respect and what to optimise.
        towers: what the plan must know of the media towers; it follows from the adapter.
        cp_size: context-parallel size; a pack holds `max_tokens * cp_size` padded tokens.
        node_of_rank: `[R]`, node of each rank; moves inside a node come first.
        peers: ranks that each rank may send samples to (sequence or mapping of ranks, or `[R, R]` bool); None for all.

    Returns:
        The plan, with its certificate.

    Raises:
        ValueError: arguments that make no sense.
        PlanError: values of the table out of range, or a dummy media item that `towers` does not describe.
        OversizeSampleError: a sample above the capacity, unless the policy is "drop".
        InfeasiblePlanError: constraints that no assignment was found for.

    Example:
        >>> table = SampleTable.from_lengths([8, 8, 8, 8, 1, 1, 1, 1], home=[0, 0, 0, 0, 1, 1, 1, 1])
        >>> plan = plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=10, sync="microbatch"))
        >>> plan.num_microbatches, plan.value, plan.padded.tolist()
        (2, 18, [[9, 9], [9, 9]])
    """
    problem = build_problem(
        table,
        num_ranks=num_ranks,
        config=config,
        towers=towers,
        cp_size=cp_size,
        node_of_rank=node_of_rank,
        peers=peers,
    )
    bound = bounds.objective(problem)
    return certify(table, problem, solve(problem, bound), bound)


def warm_up() -> None:
    """Compile or load every kernel, so that the first step pays nothing."""
    lengths = np.arange(1, 41) * 37 % 61 + 1
    homes = np.sort(np.arange(40) % 3)
    for cost in (lengths, np.stack([lengths[::-1], lengths], axis=1)):
        table = SampleTable.from_lengths(lengths, home=homes, cost=cost)
        for sync in get_args(Sync):
            for movement in get_args(Movement):
                config = PlanConfig(max_tokens=150, sync=sync, movement=movement, tolerance=0.0)
                for peers in (None, [[1], [2], [0]]):
                    plan_step(table, num_ranks=3, config=config, peers=peers)
        # All at one rank that may send to one other: samples that find no room at home.
        table = SampleTable.from_lengths(lengths, home=homes * 0, cost=cost)
        plan_step(table, num_ranks=3, config=PlanConfig(max_tokens=150), peers=[[1], [2], [0]])

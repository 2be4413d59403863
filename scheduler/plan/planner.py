"""`plan_step`: one global assignment of a step's samples, the same on every rank."""

from collections.abc import Sequence
from typing import Any

from . import bounds
from .certificate import certify
from .problem import build_problem
from .result import StepPlan
from .search import solve
from .settings import NO_TOWERS, MediaTowers, PlanConfig
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

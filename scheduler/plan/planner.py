"""The planner functions: `plan_step` assigns the samples of a step, `plan_fixed` completes an assignment made elsewhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import InfeasiblePlanError
from . import bounds
from .assignment import assign, needed_dummies, occupied, overfull, pack_sums
from .certificate import certify
from .packs import Packs
from .problem import build_problem
from .result import StepPlan
from .search import solve
from .settings import NO_TOWERS, MediaTowers, PlanConfig
from .table import Ints, SampleTable


def plan_step(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
    speeds: Sequence[int] | None = None,
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
        speeds: `[R]`, speed of each rank, in parts of 1,024: a rank of speed s takes c * 1024 / s for a cost c, and the
            objective is such a time. None for equal speeds; only their ratios count where all are equal.

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
    problem = build_problem(table, num_ranks, config, towers, cp_size, node_of_rank, peers, speeds)
    bound = bounds.objective(problem)
    return certify(table, problem, solve(problem, bounds.aim(problem, bound)), bound)


def plan_fixed(
    table: SampleTable,
    rank: Ints,
    microbatch: Ints,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    speeds: Sequence[int] | None = None,
    enforce: bool = False,
) -> StepPlan:
    """Return the plan of a given assignment, in its own order.

    Args:
        table: the samples.
        rank: `[N]`, rank of each sample.
        microbatch: `[N]`, micro-batch of each sample, below `config.num_microbatches`.
        num_ranks: R.
        config: settings; `num_microbatches` must be set.
        towers: what the plan must know of the media towers; it follows from the adapter.
        cp_size: context-parallel size.
        speeds: as in `plan_step`.
        enforce: refuse packs above the capacity or `max_segments`; without, they are described as they are and `padded`
            shows them.

    Raises:
        InfeasiblePlanError: with `enforce`, a pack above the capacity or the segment limit, dummies counted.

    Example:
        >>> table = SampleTable.from_lengths([6, 4, 3], home=[0, 1, 1])
        >>> config = PlanConfig(max_tokens=10, num_microbatches=1)
        >>> plan = plan_fixed(table, table.home, table.home * 0, num_ranks=2, config=config)
        >>> plan.padded.tolist(), plan.value, plan.moved_bytes
        ([[6], [7]], 7, 0)
    """
    count = config.num_microbatches
    if count is None:
        raise ValueError("plan_fixed needs config.num_microbatches")
    problem = build_problem(table, num_ranks, config, towers, cp_size, speeds=speeds)
    packs = Packs.empty(problem, count, False)
    packs.bin_of[:] = rank[problem.kept] * count + microbatch[problem.kept]
    sums = pack_sums(problem, packs)
    if enforce:
        dummies = needed_dummies(problem, sums.media)
        for r, m in np.argwhere(overfull(problem, sums.size, sums.count, dummies))[:1]:
            padded, segments = occupied(problem, sums.size, sums.count, dummies)
            raise InfeasiblePlanError(
                f"rank {r}, micro-batch {m} holds {padded[r, m]} padded tokens in {segments[r, m]} segments, dummies "
                f"counted: above the capacity of {problem.capacity} or max_segments={config.max_segments}"
            )
    same = np.tile(np.arange(count), (num_ranks, 1))
    return certify(table, problem, assign(problem, packs, sums, same, sort=False), bounds.objective(problem))

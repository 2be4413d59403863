"""A plan that was made elsewhere: completed with dummies, costs and its certificate."""

import numpy as np

from ...core.errors import InfeasiblePlanError
from . import bounds
from .assignment import assign, needed_dummies, occupied, overfull, pack_sums
from .certificate import certify
from .packs import Packs
from .problem import build_problem
from .result import StepPlan
from .settings import NO_TOWERS, MediaTowers, PlanConfig
from .table import Ints, SampleTable


def plan_fixed(
    table: SampleTable,
    rank: Ints,
    microbatch: Ints,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
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
    problem = build_problem(
        table, num_ranks=num_ranks, config=config, towers=towers, cp_size=cp_size, node_of_rank=None, peers=None
    )
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
    found = assign(problem, packs, sums, same, sort=False)
    return certify(table, problem, found, bounds.objective(problem))

"""`scope="microbatch"`: every list that the source yields is one pack, as it comes."""

import numpy as np

from ...core import OversizeSampleError
from ..plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from ..plan.fixed import plan_fixed


def plan_lists(
    table: SampleTable, microbatch: np.ndarray, *, num_ranks: int, config: PlanConfig, towers: MediaTowers, cp_size: int
) -> StepPlan:
    """Return the plan that leaves every sample in the list and on the rank where it came.

    Raises:
        OversizeSampleError: a list above the capacity of a pack.
    """
    plan = plan_fixed(table, table.home, microbatch, num_ranks=num_ranks, config=config, towers=towers, cp_size=cp_size)
    limit = config.max_tokens * cp_size
    over = np.argwhere(plan.padded > limit)
    if len(over):
        rank, index = over[0].tolist()
        raise OversizeSampleError(
            f"rank {rank}, list {index} of the step: {int(plan.padded[rank, index])} padded tokens exceed the capacity of "
            f"{limit} a pack"
        )
    return plan

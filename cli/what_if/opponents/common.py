"""What all opponents share: from lists of packs to a plan."""

from collections.abc import Sequence

import msgspec
import numpy as np

from ....scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan, plan_fixed
from ....scheduler.plan.settings import NO_TOWERS

Pack = list[int]


def weights(table: SampleTable) -> list[int]:
    """Cost of each sample over all phases."""
    cost = table.cost if table.cost.ndim == 1 else table.cost.sum(axis=1)
    return [int(value) for value in cost]


def to_plan(
    table: SampleTable, ranks: Sequence[Sequence[Pack]], *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS
) -> StepPlan:
    """Describe packs `[rank][micro-batch]` as a plan, over capacity where they are."""
    count = max(max((len(packs) for packs in ranks), default=1), 1)
    rank, microbatch = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    for r, packs in enumerate(ranks):
        for m, pack in enumerate(packs):
            rank[pack], microbatch[pack] = r, m
    fixed = msgspec.structs.replace(config, num_microbatches=count)
    return plan_fixed(table, rank, microbatch, num_ranks=num_ranks, config=fixed, towers=towers, enforce=False)

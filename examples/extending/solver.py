"""A planner: a function with `plan_step`'s signature, which says for every sample on which rank and in which pack it goes."""

from typing import Any

import msgspec
import numpy as np

from evenpack.scheduler import PlanConfig, SampleTable, StepPlan, plan_fixed


def heaviest_first(table: SampleTable, *, num_ranks: int, config: PlanConfig, **topology: Any) -> StepPlan:
    """Give each sample, the heaviest first, to the rank with the least work so far; open a pack where the last one is full.

    `plan_fixed` adds what every plan needs: dummies, equal numbers of micro-batches, and the certificate.
    """
    cost = table.cost.reshape(len(table), -1).sum(axis=1)
    load, used = np.zeros(num_ranks, np.int64), [[0] for _ in range(num_ranks)]
    rank, microbatch = np.zeros((2, len(table)), np.int64)
    for row in np.argsort(-cost, kind="stable"):
        least = int(load.argmin())
        if used[least][-1] + table.padded[row] > config.max_tokens:
            used[least].append(0)
        used[least][-1] += int(table.padded[row])
        load[least] += cost[row]
        rank[row], microbatch[row] = least, len(used[least]) - 1
    fixed = msgspec.structs.replace(config, num_microbatches=max(map(len, used)))
    more = {name: topology[name] for name in ("towers", "cp_size") if name in topology}
    return plan_fixed(table, rank, microbatch, num_ranks=num_ranks, config=fixed, enforce=True, **more)

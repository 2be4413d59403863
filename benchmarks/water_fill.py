"""Water-fill: one micro-batch after the other, every rank largest-first up to a common level. A reference, not a product."""

import numpy as np

from evenpack.cli.what_if.opponents.common import Pack, to_plan, weights
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from evenpack.scheduler.plan.settings import NO_TOWERS


def water_fill(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Open a micro-batch with the level max(largest remaining, remaining work over (R times what is left)); fill it."""
    cost, tokens = np.array(weights(table)), table.padded
    count = max(-(-int(tokens.sum()) // (num_ranks * config.max_tokens)), 1)
    best: StepPlan | None = None
    for more in range(3):
        plan = to_plan(
            table,
            _fill(cost, tokens, num_ranks, config.max_tokens, count + more),
            num_ranks=num_ranks,
            config=config,
            towers=towers,
        )
        if best is None or plan.value < best.value:
            best = plan
    assert best is not None
    return best


def _fill(cost: np.ndarray, tokens: np.ndarray, num_ranks: int, capacity: int, count: int) -> list[list[Pack]]:
    rest = np.argsort(-cost, kind="stable").tolist()
    ranks: list[list[Pack]] = [[] for _ in range(num_ranks)]
    step = 0
    while rest:
        work = int(cost[rest].sum())
        level = max(int(cost[rest[0]]), -(-work // (num_ranks * max(count - step, 1))))
        load, length = [0] * num_ranks, [0] * num_ranks
        dealt: list[Pack] = [[] for _ in range(num_ranks)]
        left = []
        order = list(range(num_ranks))
        for index in rest:
            # The least loaded rank that stays below the level and the capacity takes the sample.
            order.sort(key=load.__getitem__)
            for r in order[:8]:
                if load[r] + cost[index] <= level and length[r] + tokens[index] <= capacity:
                    dealt[r].append(index)
                    load[r] += int(cost[index])
                    length[r] += int(tokens[index])
                    break
            else:
                left.append(index)
        for r in range(num_ranks):
            ranks[r].append(dealt[r])
        rest = left
        step += 1
    return ranks

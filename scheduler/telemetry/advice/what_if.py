"""Recent steps, planned again under other settings. Pure: tables in, costs out."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ....core import round_up
from ...config import SchedulerConfig
from ...plan import MediaTowers, SampleTable, StepPlan, plan_step, planner_for
from ...plan.settings import NO_TOWERS
from ...plan.window import WindowBounds, roll
from ...stats import StepStats

#: Name under which a step says that `plan_step` planned it.
PLAN_STEP = f"{plan_step.__module__}.{plan_step.__qualname__}"
#: Steps in view in the simulation of `lookahead`.
LOOKAHEAD = 8


class Steps(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Steps in a row, and the settings they were planned with.

    Attributes:
        tables: of each step.
        plans: of each step, by `plan_step` over the whole group.
        stats: of each step, times among them.
        config, num_ranks, towers, cp_size, node_of_rank, peers: as `plan_step`.
    """

    tables: Sequence[SampleTable]
    plans: Sequence[StepPlan] = ()
    stats: Sequence[StepStats] = ()
    config: SchedulerConfig
    num_ranks: int
    towers: MediaTowers = NO_TOWERS
    cp_size: int = 1
    node_of_rank: Sequence[int] | None = None
    peers: Any = None

    def plan(self, table: SampleTable, config: SchedulerConfig | None = None) -> StepPlan:
        """Plan a table, under other settings where they are given."""
        return planner_for(len(table))(
            table,
            num_ranks=self.num_ranks,
            config=config or self.config,
            towers=self.towers,
            cp_size=self.cp_size,
            node_of_rank=self.node_of_rank,
            peers=self.peers,
        )


def time_per_work(steps: Steps, config: SchedulerConfig | None = None) -> float:
    """Return the steps' objectives, added up, per unit of work that they compute.

    Example:
        >>> table = SampleTable.from_lengths([6, 2, 2, 2], home=[0, 0, 1, 1])
        >>> time_per_work(Steps(tables=[table], config=SchedulerConfig(max_tokens=8, samples_per_step=2), num_ranks=2))
        0.5
    """
    return cost_per_work([(table, steps.plan(table, config)) for table in steps.tables])


def merged(steps: Steps, factor: int) -> Steps | None:
    """Return the steps with `factor` of them as one; None where there are too few."""
    count = len(steps.tables) // factor
    if not count:
        return None
    tables = [SampleTable.concatenate(steps.tables[at * factor : (at + 1) * factor]) for at in range(count)]
    return msgspec.structs.replace(steps, tables=tables)


def with_context_parallelism(steps: Steps) -> float | None:
    """Return the time per work with context parallelism of twice the size on the same GPUs; None for an odd number of ranks.

    Two ranks share their samples and halve each one's time; what they send each other in attention is not counted.
    """
    if steps.num_ranks % 2:
        return None
    cp_size = 2 * steps.cp_size
    align = None if steps.config.align is None else 2 * steps.config.align
    config = msgspec.structs.replace(steps.config, align=align, pack_align=None)
    align = config.segment_align(cp_size)
    pairs = []
    for table in steps.tables:
        halved = msgspec.structs.replace(table, home=table.home // 2, padded=round_up(table.tokens, align))
        plan = plan_step(halved, num_ranks=steps.num_ranks // 2, config=config, towers=steps.towers, cp_size=cp_size)
        pairs.append((halved, plan))
    return cost_per_work(pairs) / 2


def with_lookahead(steps: Steps, lookahead: int = LOOKAHEAD) -> float:
    """Return the time per work where so many steps are in view of each."""
    config = steps.config
    bounds = WindowBounds(lookahead=lookahead, tokens=config.step_tokens_tolerance, samples=config.step_samples_tolerance)
    capacity = config.capacity(steps.cp_size)
    rolled = roll(steps.tables, num_ranks=steps.num_ranks, config=config, capacity=capacity, bounds=bounds)
    return cost_per_work([(table, steps.plan(table)) for table, _ in rolled])


def cost_per_work(pairs: Sequence[tuple[SampleTable, StepPlan]]) -> float:
    """Return the objectives of plans, added up, per unit of work in their tables."""
    work = sum(int(table.cost[plan.rank >= 0].sum()) for table, plan in pairs)
    return sum(plan.value for _, plan in pairs) / max(1, work)

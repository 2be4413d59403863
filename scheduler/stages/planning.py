"""Plan: choose the planner that the settings ask for, and run it on the gathered table."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core import OversizeSampleError
from ..comm.channel import Channel
from ..config import SchedulerConfig
from ..plan import MediaTowers, PlanConfig, SampleTable, StepPlan, Team, plan_fixed, plan_in_pods, plan_step, planner_for
from .gather import Gathered

Planner = Callable[..., StepPlan]


def plan_samples(
    gathered: Gathered,
    *,
    planner: Planner,
    config: SchedulerConfig,
    towers: MediaTowers,
    cp_size: int,
    channel: Channel,
) -> tuple[SampleTable, StepPlan]:
    """Return the table of a step's samples and its plan; the same on every rank.

    Args:
        gathered: the metadata of the step's samples, of all ranks.
        planner: a function with `plan_step`'s signature.
        config: settings.
        towers: the adapter's media towers.
        cp_size: context-parallel size.
        channel: which ranks there are, on which nodes, and to whom each may send.
    """
    num_ranks, table = channel.steps.num_ranks, gathered.table(config.segment_align(cp_size))
    if config.scope == "microbatch":
        list_index = gathered.records["list_index"].astype(np.int64)
        return table, plan_lists(table, list_index, num_ranks=num_ranks, config=config, towers=towers, cp_size=cp_size)
    more: dict[str, Any] = {}
    if planner is plan_step:
        planner = planner_for(len(table))
    if planner is plan_in_pods:
        # Over a device transport alone a gather belongs on the training thread; there peers are fixed, and no pods planned.
        more["team"] = Team(rank=channel.steps.rank, gather=channel.blocks.gather)
    return table, planner(
        table,
        num_ranks=num_ranks,
        config=config,
        towers=towers,
        cp_size=cp_size,
        node_of_rank=channel.node_of_rank,
        peers=[[rank] for rank in range(num_ranks)] if config.scope == "rank" else channel.peers,
        **more,
    )


def heaviest_part(table: SampleTable, num_ranks: int, config: SchedulerConfig) -> int:
    """Return the most that a part of a group may cost in the next step, from the mean load of the ranks in this one.

    One of more than half of it (a quarter where ranks wait in every micro-batch) leaves the planner too little choice.
    """
    return int(table.cost.sum()) // (num_ranks * (2 if config.sync == "step" else 4))


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

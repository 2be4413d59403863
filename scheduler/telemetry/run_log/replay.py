"""Plan a recorded step again: what the prediction says against what the run had."""

from typing import Any

import numpy as np

from ....core import differences
from ...config import SchedulerConfig
from ...plan import CODE_VERSION, StepPlan, planner_for
from ...stages.planning import plan_lists
from ..advice.what_if import PLAN_STEP
from .record import RecordedStep


def replay(recorded: RecordedStep, config: SchedulerConfig | None = None) -> StepPlan:
    """Plan the samples of a recorded step again.

    Args:
        recorded: the step.
        config: other settings; None for those of the run.

    Returns:
        The plan; with the settings of the run and the same version of the planner, the one that the run had.

    Raises:
        ValueError: the run was planned by a custom planner.
    """
    header, table, config = recorded.header, recorded.table, config or recorded.header.config
    same: dict[str, Any] = {name: getattr(header, name) for name in ("num_ranks", "towers", "cp_size")}
    if config.scope == "microbatch":
        return plan_lists(table, recorded.microbatch, config=config, **same)
    if header.planner != PLAN_STEP:
        raise ValueError(f"step {recorded.stats.step} was planned by {header.planner}, which a replay cannot call")
    return planner_for(len(table))(table, config=config, node_of_rank=header.node_of_rank, peers=header.peers, **same)


def replay_differences(recorded: RecordedStep) -> list[str]:
    """Plan a recorded step again and compare; empty where all is equal, bit for bit.

    Raises:
        ValueError: the run was planned by a custom planner.
    """
    plan, stats = replay(recorded), recorded.stats
    names = ("imbalance", "gap", "moved_bytes", "moved_bytes_lower_bound")
    was = {name: getattr(stats, name) for name in names} | {"padded_tokens": stats.padded_tokens}
    was |= {name: getattr(recorded, name) for name in ("num_microbatches", "value", "lower_bound")}
    now = {name: int(plan.padded.sum()) if name == "padded_tokens" else getattr(plan, name) for name in was}
    found = differences(was, now)
    moved = (recorded.rank != plan.rank) | (recorded.microbatch != plan.microbatch)
    if moved.any():
        found.append(f"{np.count_nonzero(moved)} of {len(moved)} samples lie elsewhere")
    if found and recorded.header.code_version != CODE_VERSION:
        found.append(f"recorded with planner {recorded.header.code_version}, this is {CODE_VERSION}")
    return found

"""Plan a recorded step again: what the prediction says against what the run had."""

from collections.abc import Sequence

import numpy as np

from ....core import differences
from ...config import SchedulerConfig
from ...plan import CODE_VERSION, StepPlan, plan_step
from ...stages.planning import plan_lists
from ..advice.what_if import Steps
from .header import RunHeader
from .record import RecordedStep

_PLAN_STEP = f"{plan_step.__module__}.{plan_step.__qualname__}"


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
    header = recorded.header
    config = config or header.config
    if config.scope == "microbatch":
        return plan_lists(
            recorded.table,
            recorded.microbatch,
            num_ranks=header.num_ranks,
            config=config,
            towers=header.towers,
            cp_size=header.cp_size,
        )
    if not is_replayable(header):
        raise ValueError(f"step {recorded.stats.step} was planned by {header.planner}, which a replay cannot call")
    return steps_of([recorded]).plan(recorded.table, config)


def steps_of(recorded: Sequence[RecordedStep]) -> Steps:
    """Return recorded steps of one header as they are planned again."""
    header = recorded[-1].header
    return Steps(
        tables=[step.table for step in recorded],
        config=header.config,
        num_ranks=header.num_ranks,
        towers=header.towers,
        cp_size=header.cp_size,
        node_of_rank=header.node_of_rank,
        peers=header.peers,
    )


def is_replayable(header: RunHeader) -> bool:
    """Return whether a run was planned by `plan_step`, and not by a custom planner."""
    return header.planner == _PLAN_STEP


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

"""Samples of a group of ranks, with the costs of one of two models, and the time of a planned step."""

from collections.abc import Sequence

import msgspec
import numpy as np

from evenpack.scheduler.cost.model import CostFit
from evenpack.scheduler.plan import PlanConfig, SampleTable, StepPlan

from ..workloads import WORKLOADS, Workload, image_text_phases

#: What a step of a large group is made of: name, where ranks wait, whether vision and decoder are phases of their own.
CASES = (
    ("image-text", "step", False),
    ("image-text", "microbatch", False),
    ("image-text", "microbatch", True),
    ("long tail", "step", False),
    ("long tail", "microbatch", False),
)


class Drawn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A workload of the largest group, of which smaller groups take the first samples.

    Attributes:
        workload: its table, with costs of a model of 7 billion parameters.
        measured: `[N, K]` costs of the measured model.
        per_rank: samples of a rank.
    """

    workload: Workload
    measured: np.ndarray
    per_rank: int

    def table(self, num_ranks: int, measured: bool, phases: bool) -> SampleTable:
        """Return the table of a group, with one cost a sample or one per phase."""
        count = num_ranks * self.per_rank
        whole = self.workload.table
        cost = (self.measured if measured else whole.cost)[:count].reshape(count, -1)
        parts = {name: getattr(whole, name)[:count] for name in SampleTable.__struct_fields__}
        parts["cost"] = cost if phases else cost.sum(axis=1)
        if not phases:  # the rule that all ranks run the tower or none is left to the phases
            parts["media"] = np.zeros(count, np.int64)
        return SampleTable(**parts)


def draw(name: str, num_ranks: int, per_rank: int, fit: CostFit) -> Drawn:
    """Draw a workload of a large group."""
    make = image_text_phases if name == "image-text" else WORKLOADS[name]
    workload = make(np.random.default_rng(0), num_ranks, per_rank)
    measured = fit.model.sample_costs(workload.table.tokens, workload.grids)
    return Drawn(workload=workload, measured=measured, per_rank=per_rank)


def config_of(drawn: Drawn, sync: str, microbatch_cost: int) -> PlanConfig:
    """Return the planner's settings of a case."""
    return PlanConfig(max_tokens=drawn.workload.capacity, sync=sync, microbatch_cost=microbatch_cost)  # type: ignore[arg-type]


def with_errors(plan: StepPlan, config: PlanConfig, errors: Sequence[float], seed: int) -> float:
    """Return the objective where every micro-batch takes its cost times an error that was measured."""
    factor = np.random.default_rng(seed).choice(np.asarray(errors), plan.cost.shape[:2])
    times = (plan.cost + 0.0) * factor[:, :, None]
    fixed = config.microbatch_cost * plan.num_microbatches
    if config.sync == "step":
        return float(times.sum(axis=(1, 2)).max()) + fixed
    return float(times.max(axis=0).sum()) + fixed

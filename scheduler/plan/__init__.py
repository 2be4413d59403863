"""The planner: a pure function from a table of samples to a plan (numpy and numba only)."""

from .config import MediaTowers, PlanConfig
from .describe import CODE_VERSION
from .fixed import plan_fixed
from .result import StepPlan
from .step import plan_step, warm_up
from .table import SampleTable
from .two_level import Team, plan_in_pods, planner_for

__all__ = [
    "CODE_VERSION",
    "MediaTowers",
    "PlanConfig",
    "SampleTable",
    "StepPlan",
    "Team",
    "plan_fixed",
    "plan_in_pods",
    "plan_step",
    "planner_for",
    "warm_up",
]

"""The planner: a pure function from a table of samples to a plan (numpy and numba only)."""

from .certificate import CODE_VERSION
from .planner import plan_fixed, plan_step
from .result import StepPlan
from .settings import MediaTowers, PlanConfig
from .table import SampleTable
from .two_level import Team, plan_in_pods, planner_for
from .warmup import warm_up

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

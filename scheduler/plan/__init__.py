"""The planner: a pure function from a table of samples to a plan (numpy and numba only)."""

from .config import PlanConfig
from .result import StepPlan
from .step import CODE_VERSION, plan_step, warm_up
from .table import SampleTable

__all__ = ["CODE_VERSION", "PlanConfig", "SampleTable", "StepPlan", "plan_step", "warm_up"]

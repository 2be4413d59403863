"""The planner: a pure function from a table of samples to a plan (numpy and numba only)."""

from .config import PlanConfig
from .describe import CODE_VERSION
from .fixed import plan_fixed
from .pods import Team
from .result import StepPlan
from .step import plan_step, warm_up
from .table import SampleTable

__all__ = ["CODE_VERSION", "PlanConfig", "SampleTable", "StepPlan", "Team", "plan_fixed", "plan_step", "warm_up"]

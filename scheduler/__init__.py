"""The scheduler: gather, plan, exchange, pack and yield, once per optimizer step."""

if __name__ != "evenpack.scheduler":
    raise ImportError("import this folder as evenpack.scheduler: under its bare name a second copy of every class would appear")

from .callbacks import StepCallback
from .config import SchedulerConfig
from .cost import CostModel
from .groups import ProcessGroups
from .offline import OfflineConfig, OfflineIndex
from .plan import PlanConfig, SampleTable, StepPlan, plan_step
from .run_log import RecordedStep, RunLog, read_run
from .scheduler import PackingScheduler
from .stats import StepStats
from .step import PackedStep
from .summary import Summary

__all__ = [
    "CostModel",
    "OfflineConfig",
    "OfflineIndex",
    "PackedStep",
    "PackingScheduler",
    "PlanConfig",
    "ProcessGroups",
    "RecordedStep",
    "RunLog",
    "SampleTable",
    "SchedulerConfig",
    "StepCallback",
    "StepPlan",
    "StepStats",
    "Summary",
    "plan_step",
    "read_run",
]

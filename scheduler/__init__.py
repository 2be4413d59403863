"""The scheduler: collect, describe, gather, select, plan, exchange, pack and yield, once per optimizer step."""

import sys

if __name__ != "evenpack.scheduler":
    raise ImportError("import this folder as evenpack.scheduler: under its bare name a second copy of every class would appear")

from .comm.groups import ProcessGroups
from .comm.transports import Transport
from .config import SchedulerConfig
from .cost.model import CostModel
from .offline import OfflineConfig, OfflineIndex
from .plan import PlanConfig, SampleTable, StepPlan, plan_fixed, plan_step
from .scheduler import PackingScheduler
from .sources import Source
from .stats import StepStats
from .step import PackedStep
from .telemetry import advice, run_log
from .telemetry.callbacks import StepCallback
from .telemetry.run_log import RecordedStep, RunLog, read_run
from .telemetry.summary import Summary

# Their documented paths are shorter than the tree: `from evenpack.scheduler.run_log import replay`.
sys.modules[f"{__name__}.advice"], sys.modules[f"{__name__}.run_log"] = advice, run_log

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
    "Source",
    "StepCallback",
    "StepPlan",
    "StepStats",
    "Summary",
    "Transport",
    "plan_fixed",
    "plan_step",
    "read_run",
]

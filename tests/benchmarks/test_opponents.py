"""Other frameworks' algorithms as planner functions."""

import numpy as np
import pytest

from benchmarks.opponents import OPPONENTS
from evenpack.cli.what_if.workloads import WORKLOADS
from evenpack.scheduler.plan import PlanConfig


@pytest.mark.parametrize("name", OPPONENTS)
def test_every_opponent_places_every_sample(name):
    workload = WORKLOADS["rl"](np.random.default_rng(2), 4, 10)
    plan = OPPONENTS[name](workload.table, num_ranks=4, config=PlanConfig(max_tokens=workload.capacity))
    placed = np.concatenate([plan.ids(r, m) for r in range(4) for m in range(plan.num_microbatches)])
    assert sorted(placed.tolist()) == list(range(40))

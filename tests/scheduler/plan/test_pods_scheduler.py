"""A scheduler whose ranks share the work of a plan, on simulated ranks and on processes that talk over gloo."""

from functools import partial

import numpy as np
import pytest

from evenpack.models import adapter_for
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.plan import plan_in_pods, plan_step
from evenpack.scheduler.stages import planning
from evenpack.scheduler.testing import run_ranks


def steps_of(rank: int, config: SchedulerConfig) -> list[tuple[bytes, bytes, bool, list[int]]]:
    """Digest of each step's plan, that of one process for the same table, whether it is in pods, and tokens of the packs."""
    rng = np.random.default_rng(rank)
    source = [{"input_ids": [1] * int(length)} for length in rng.integers(2, 60, 24)]
    found = []
    with PackingScheduler(source, config=config, adapter=adapter_for("text"), groups=ProcessGroups.from_world()) as scheduler:
        for step in scheduler:
            settings = {"num_ranks": 4, "config": step.context.config, "node_of_rank": step.context.channel.node_of_rank}
            alone, flat = plan_in_pods(step.table, pods=2, **settings), plan_step(step.table, **settings)
            in_pods = not np.array_equal(step.plan.rank, flat.rank) or not np.array_equal(step.plan.microbatch, flat.microbatch)
            found.append((step.plan.digest, alone.digest, in_pods, [batch.total_tokens for batch in step]))
    return found


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("movement", ["minimal", "free"])
def test_every_rank_gets_the_plan_of_one_process(backend, movement, monkeypatch):
    in_pods = partial(plan_in_pods, pods=2)
    monkeypatch.setattr(planning, "plan_in_pods", in_pods)
    monkeypatch.setattr(planning, "planner_for", lambda num_samples: in_pods)
    config = SchedulerConfig(max_tokens=128, samples_per_step=12, sync="microbatch", movement=movement)
    everyone = run_ranks(lambda rank, _: steps_of(rank, config), 4, backend=backend, timeout=120)
    assert [len(steps) for steps in everyone] == [2] * 4
    for number in range(2):
        digests = {digest for steps in everyone for digest in steps[number][:2]}
        assert len(digests) == 1
        assert everyone[0][number][2]  # it is not the plan in one piece
    lengths = [np.random.default_rng(rank).integers(2, 60, 24).sum() for rank in range(4)]
    assert sum(sum(sum(tokens) for *_, tokens in steps) for steps in everyone) == sum(lengths)

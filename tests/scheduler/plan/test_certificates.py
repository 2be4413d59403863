"""Bounds are never above the exact optimum, and plans are near it."""

import numpy as np
import pytest

from evenpack.scheduler.plan import PlanConfig, SampleTable, bounds, plan_step

from .exact import least_moved_bytes, optimum, small_table

SETTINGS = [
    {"sync": "step"},
    {"sync": "microbatch"},
    {"sync": "step", "pipeline_stages": 3},
    {"sync": "microbatch", "max_segments": 4, "microbatch_cost": 7},
    {"sync": "step", "max_segments": 4, "microbatch_cost": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(str(value) for value in settings.values()))
@pytest.mark.parametrize("speeds", [None, [1024, 870], [700, 1100]], ids=str)
@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_no_bound_is_above_the_optimum(seed, phases, speeds, settings):
    table = small_table(seed, phases=phases)
    gaps = []
    for movement in ("free", "minimal"):
        config = PlanConfig(max_tokens=40, movement=movement, **settings)
        plan = plan_step(table, num_ranks=2, config=config, speeds=speeds)
        best = optimum(table, 2, plan.num_microbatches, config, speeds)
        assert plan.lower_bound <= best <= plan.value
        gaps.append(plan.value / best - 1)
        least = least_moved_bytes(table, 2, plan.num_microbatches, config, plan.value, speeds)
        assert plan.moved_bytes_lower_bound <= least <= plan.moved_bytes or movement == "free"
        assert plan.moved_bytes_lower_bound <= least
    # Nine samples are coarse; the means over larger steps are in the benchmark.
    assert min(gaps) <= 0.25


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("speeds", [None, [1024, 600], [1000, 1024, 512]], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_any_number_of_microbatches(seed, speeds, sync):
    ranks = len(speeds or [0, 0])
    table = small_table(seed, samples=8, ranks=ranks)
    config = PlanConfig(max_tokens=40, sync=sync, movement="free")
    plan = plan_step(table, num_ranks=ranks, config=config, speeds=speeds)
    others = [optimum(table, ranks, count, config, speeds) for count in range(1, plan.num_microbatches + 3)]
    assert plan.lower_bound <= min(value for value in others if value is not None)


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_error_in_a_bound_is_seen(seed, monkeypatch):
    """The check above has teeth: a bound raised by a tenth is above the optimum somewhere."""
    table = small_table(seed)
    honest = bounds.objective
    monkeypatch.setattr(bounds, "objective", lambda problem: honest(problem) * 11 // 10 + 1)
    config = PlanConfig(max_tokens=40, sync="step", movement="free", num_microbatches=3)
    plan = plan_step(table, num_ranks=2, config=config)
    assert plan.lower_bound > optimum(table, 2, 3, config)


def test_the_step_bound_knows_that_samples_share_ranks():
    """Three of three heavy samples on two ranks: one rank has two of them."""
    table = SampleTable.from_lengths([10, 10, 10])
    assert plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=30)).lower_bound == 20


def test_the_staircase_counts_what_fits_beside():
    """Two samples above half the capacity on one rank: two micro-batches, each as costly as its sample."""
    table = SampleTable.from_lengths([6, 6, 1], cost=[60, 50, 1])
    plan = plan_step(table, num_ranks=1, config=PlanConfig(max_tokens=10, sync="microbatch"))
    assert (plan.value, plan.lower_bound) == (111, 111)


def test_fewest_bins_against_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes, capacity = rng.integers(1, 11, rng.integers(1, 8)), 10
        assert bounds.fewest_bins(sizes, capacity) <= _pack(sorted(sizes, reverse=True), [], capacity)


def _pack(sizes, bins, capacity):
    if not sizes:
        return len(bins)
    best = _pack(sizes[1:], [*bins, sizes[0]], capacity)
    for i in range(len(bins)):
        if bins[i] + sizes[0] <= capacity:
            best = min(best, _pack(sizes[1:], [*bins[:i], bins[i] + sizes[0], *bins[i + 1 :]], capacity))
    return best


def test_moved_bytes_take_the_most_cost_per_byte():
    """Rank 0 has 20 too much: the sample of 40 for 10 bytes goes in part, not the 100 bytes of its neighbour."""
    table = SampleTable.from_lengths([10, 10, 10], cost=[40, 40, 20], home=[0, 0, 1], nbytes=[10, 100, 10])
    plan = plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=30, tolerance=0.0))
    assert plan.lower_bound == 60
    assert plan.value == 60 and plan.moved_bytes == 10
    assert 4 <= plan.moved_bytes_lower_bound <= 5  # half of the sample of 40


def test_samples_that_cost_nothing_in_a_phase():
    """Text costs the vision tower nothing: the bound of a phase is that of the samples with a cost."""
    tokens = np.array([9, 8, 7, 6, 5, 4, 3, 2])
    vision = np.array([0, 20, 0, 0, 30, 0, 0, 5])
    config = PlanConfig(max_tokens=40, sync="microbatch", num_microbatches=1)

    def bound(cost):
        table = SampleTable.from_lengths(tokens, cost=cost, home=np.zeros(8, np.int64))
        return plan_step(table, num_ranks=2, config=config).lower_bound

    assert bound(np.stack([vision, tokens], axis=1)) == bound(tokens) + 30

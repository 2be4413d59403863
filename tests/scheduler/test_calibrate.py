"""Online calibration of costs, agreed across ranks."""

import numpy as np
import pytest

from evenpack.scheduler.cost import Observation
from evenpack.scheduler.testing import run_ranks

from .helpers import VISION, open_scheduler, random_source


def measured(rank, count, grids=()):
    """Return micro-batches whose time is 1 ms + 1 us per token + 10 ns per token squared, with some noise."""
    rng = np.random.default_rng(rank)
    lengths = [rng.integers(10, 4000, 4).tolist() for _ in range(count)]
    return [
        Observation(
            tokens=tokens, grids=grids, seconds=1e-3 + sum(1e-6 * n + 1e-8 * n * n for n in tokens) * rng.normal(1, 0.01)
        )
        for tokens in lengths
    ]


def test_every_rank_gets_the_same_fit_and_plans_with_it():
    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 20), prefetch=0) as scheduler:
            before = next(scheduler).table.cost
            found = scheduler.calibrate(measured(rank, 5 * rank))  # rank 0 measured nothing
            after = next(scheduler)
            lengths = after.table.tokens.tolist()
            assert after.table.cost[:, 0].tolist() == [found.model.sample_cost(length)[0] for length in lengths]
            assert before.dtype == after.table.cost.dtype
            return found

    fits = run_ranks(fn, 3)
    assert fits[0] == fits[1] == fits[2]
    assert fits[0].r_squared > 0.99 and fits[0].num_observations == 15
    ratio = fits[0].model.quadratic[0] / fits[0].model.linear[0]
    assert ratio == pytest.approx(0.01, rel=0.2)


def test_what_cannot_be_fitted_is_an_error_on_every_rank():
    def fn(rank, num_ranks):
        with open_scheduler([]) as scheduler, pytest.raises(ValueError, match="2 observations cannot fit 3"):
            scheduler.calibrate(measured(rank, 1))

    run_ranks(fn, 2)


def test_a_fit_without_media_is_refused_for_a_model_with_a_tower():
    with open_scheduler([], adapter=VISION) as scheduler, pytest.raises(ValueError, match="phases"):
        scheduler.calibrate(measured(1, 9))

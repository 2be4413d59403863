"""Online calibration of costs, agreed across ranks."""

import threading

import numpy as np
import pytest

from evenpack.core import FieldMismatchError
from evenpack.models import dummy_sample
from evenpack.scheduler import PackingScheduler, ProcessGroups, RunLog, SchedulerConfig, read_run
from evenpack.scheduler.cost.model import Observation
from evenpack.scheduler.plan.settings import MEDIA_BITS
from evenpack.scheduler.telemetry.run_log import replay_differences
from evenpack.scheduler.testing import run_ranks

from ..helpers import VISION, mixed_source, open_scheduler, random_source


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


GRIDS = [(), ((1, 4, 4),), ((1, 8, 8), (1, 4, 6)), ((1, 2, 2),), (), ((1, 16, 16),)]


def measured_with_media(scale=1.0):
    """Return micro-batches of a model whose tower costs `scale` us a patch, and the decoder 1 us a token."""
    found = []
    for number, grids in enumerate(GRIDS * 2):
        tokens = (10 + 37 * number, 200)
        seconds = 1e-3 + sum(1e-6 * n + 1e-9 * n * n for n in tokens) + scale * 1e-6 * sum(t * h * w for t, h, w in grids)
        found.append(Observation(tokens=tokens, grids=grids, seconds=seconds))
    return found


def open_vision(rank, count=40, **settings):
    return open_scheduler(mixed_source(rank, count), adapter=VISION, sync="microbatch", **settings)


def dummy_costs_of(step):
    """Return what a dummy image costs in every pack that has one, of all ranks."""
    plan, found = step.plan, set()
    for r, m in np.argwhere(plan.dummy_media == MEDIA_BITS["image"]).tolist():
        found.add(tuple((plan.cost[r, m] - step.table.cost[plan.ids(r, m)].sum(axis=0)).tolist()))
    return found


def cost_of_dummy(model):
    sample = dummy_sample("image", VISION)
    return model.sample_cost(sample.num_tokens, sample.grids("image"))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_dummy_media_follow_the_fit_in_the_same_step_on_every_rank(prefetch):
    """Ranks that come one after the other calibrate twice: dummies, samples and settings of a step are all of one model."""
    came = {(rank, number): threading.Event() for rank in range(3) for number in range(20)}

    def fn(rank, num_ranks):
        models, steps = [], []
        with open_vision(rank, prefetch=prefetch, num_microbatches=4, samples_per_step=2) as scheduler:
            for number, step in enumerate(scheduler):
                assert rank == 0 or came[rank - 1, number].wait(60)
                came[rank, number].set()
                steps.append((step.context.towers.dummy_cost, step.plan.digest, dummy_costs_of(step), step.table))
                if number in (4, 9):
                    models.append(scheduler.calibrate(measured_with_media(number) if rank == 1 else []).model)
        return models, steps

    everyone = run_ranks(fn, 3, timeout=120)
    models, steps = everyone[0]
    for others, theirs in everyone[1:]:
        assert others == models and [one[:3] for one in theirs] == [one[:3] for one in steps]
    expected = [steps[0][0]["image"], *map(cost_of_dummy, models)]
    assert len(set(expected)) == 3
    changes = [0, 5 + prefetch, 10 + prefetch]
    seen = set()
    for number, (costs, _, dummies, table) in enumerate(steps):
        which = max(k for k, at in enumerate(changes) if at <= number)
        assert costs["image"] == expected[which] and dummies <= {expected[which]}
        seen |= {which} if dummies else set()
        if which:
            text = table.media == 0
            assert [tuple(row) for row in table.cost[text].tolist()] == [
                models[which - 1].sample_cost(length) for length in table.tokens[text].tolist()
            ]
    assert seen == {0, 1, 2} and len(steps) == 20


@pytest.mark.parametrize("rewinds", [True, False])
@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_resume_around_a_calibration_has_the_plans_of_the_run(at, rewinds):
    """Saved right behind the call, while steps of the old model are in flight, and behind the change."""

    def source():
        return mixed_source(1, 48) if rewinds else iter(mixed_source(1, 48))

    settings = {"adapter": VISION, "sync": "microbatch", "prefetch": 2, "samples_per_step": 3}
    with open_scheduler(source(), **settings) as scheduler:
        digests = []
        for number in range(14):
            step = next(scheduler)
            digests.append((step.plan.digest, step.context.towers.dummy_cost["image"], step.table.cost.tolist()))
            if number in (1, 4):
                scheduler.calibrate(measured_with_media(number))
            if number == at:
                state = scheduler.state_dict()
                rest = iter(mixed_source(1, 48)[3 * (at + 3) :])
        assert len({one[1] for one in digests}) == 3
    with open_scheduler(source() if rewinds else rest, **settings) as scheduler:
        scheduler.load_state_dict(state)
        found = []
        for step in [next(scheduler) for _ in range(13 - at)]:
            found.append((step.plan.digest, step.context.towers.dummy_cost["image"], step.table.cost.tolist()))
    assert found == digests[at + 1 :]


def test_a_calibrated_run_is_recorded_with_the_costs_of_each_step(tmp_path):
    def fn(rank, num_ranks):
        config = SchedulerConfig(max_tokens=128, timeout=20.0, sync="microbatch", samples_per_step=2, num_microbatches=4)
        with PackingScheduler(
            mixed_source(rank, 20), config=config, adapter=VISION, groups=ProcessGroups.from_world(),
            callbacks=[RunLog(tmp_path)],
        ) as scheduler:  # fmt: skip
            for number, step in enumerate(scheduler):
                assert step.stats.step == number
                if number == 3:
                    scheduler.calibrate(measured_with_media() if rank == 0 else [])

    run_ranks(fn, 2)
    recorded = list(read_run(tmp_path))
    assert len({step.header.towers.dummy_cost["image"] for step in recorded}) == 2
    assert not any(map(replay_differences, recorded))


def test_ranks_that_plan_with_different_models_find_out():
    """One rank loads a state that was calibrated, the other one that was not."""

    def fn(rank, num_ranks):
        def state(calibrate):
            with open_vision(rank, prefetch=0) as scheduler:
                next(scheduler)
                if calibrate:
                    scheduler.calibrate(measured_with_media())
                return scheduler.state_dict()

        both = [state(False), state(True)]
        with open_vision(rank) as scheduler:
            scheduler.load_state_dict(both[rank])
            with pytest.raises(FieldMismatchError, match="settings, fields or versions differ between ranks"):
                next(scheduler)

    run_ranks(fn, 2)

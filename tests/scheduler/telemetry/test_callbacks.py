"""Callbacks: each step once, in order; what they raise; the times of the hand-outs."""

import time

import numpy as np
import pytest

from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler import scheduler as scheduler_module
from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_fixed
from evenpack.scheduler.stats import StepClock, step_stats
from evenpack.scheduler.testing import run_ranks

from ..helpers import TEXT, names_of, random_source


class Recorder:
    """Notes the number of every step; raises at one of them."""

    def __init__(self, fails_at=None):
        self.seen, self.fails_at, self.num_closed = [], fails_at, 0

    def __call__(self, step):
        self.seen.append(step.stats.step)
        if step.stats.step == self.fails_at:
            raise LookupError("no such metric")

    def close(self):
        self.num_closed += 1


def scheduler_with(callbacks, source=None, **settings):
    config = SchedulerConfig(max_tokens=128, samples_per_step=2, timeout=20.0, **settings)
    return PackingScheduler(
        source or random_source(0, 8), config=config, adapter=TEXT, groups=ProcessGroups.from_world(), callbacks=callbacks
    )


@pytest.mark.parametrize("prefetch", [0, 1])
def test_every_rank_calls_its_own_for_each_step_in_order(prefetch):
    def fn(rank, num_ranks):
        first, seen = Recorder(), []
        with scheduler_with([first, seen.append], random_source(rank, 8), prefetch=prefetch) as scheduler:
            steps = [step for _ in range(2) for step in scheduler]
            assert seen == steps and first.num_closed == 0
        scheduler.close()
        # What is done between two epochs is nobody's time.
        assert [step.stats.step_seconds is None for step in steps] == [True, False, False, False] * 2
        assert all(step.stats.exposed_seconds > 0 for step in steps)
        return first.seen, first.num_closed, [step.is_writer for step in steps]

    assert run_ranks(fn, 2) == [(list(range(8)), 1, [True] * 8), (list(range(8)), 1, [False] * 8)]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_a_callback_raises_comes_out_and_the_step_is_handed_out_next(prefetch):
    """The callbacks behind the one that raised get the step too, none gets it twice, and a resume does not skip it."""
    before, broken, behind = Recorder(), Recorder(fails_at=1), Recorder()
    with scheduler_with([before, broken, behind], prefetch=prefetch) as scheduler:
        names = [names_of(next(scheduler))]
        with pytest.raises(LookupError, match="no such metric") as caught:
            next(scheduler)
        assert "at step 1; the step is handed out next" in caught.value.__notes__[0]
        assert scheduler.state_dict()["step"] == 1
        assert scheduler.stats.step == 0
        names += [names_of(step) for step in scheduler]
    with scheduler_with([], prefetch=prefetch) as scheduler:
        assert names == [names_of(step) for step in scheduler]
    assert before.seen == broken.seen == behind.seen == [0, 1, 2, 3]


def test_a_stop_iteration_of_a_callback_does_not_end_the_loop():
    ended = iter(())
    with scheduler_with([lambda step: next(ended)]) as scheduler:
        with pytest.raises(RuntimeError, match="raised StopIteration at step 0; the step is handed out next"):
            list(scheduler)
        assert next(scheduler).stats.step == 0


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", [list, iter])
def test_a_state_taken_inside_a_callback_stands_behind_the_step_before(kind, prefetch):
    """In the first step too, whatever was prepared since; an iterator reads on where it stands."""
    with scheduler_with([], prefetch=prefetch) as scheduler:
        expected = [names_of(step) for step in scheduler]
    states = {}

    def save(step):
        states[step.stats.step] = scheduler.state_dict()

    for stop in range(4):
        source = kind(random_source(0, 8))
        with scheduler_with([save], source, prefetch=prefetch) as scheduler:
            for _ in range(stop + 1):
                next(scheduler)
            state = states[stop]
        assert state["step"] == stop
        source = random_source(0, 8) if kind is list else source
        with scheduler_with([], source, prefetch=prefetch) as scheduler:
            scheduler.load_state_dict(state)
            assert [names_of(step) for step in scheduler] == expected[stop:]


def test_every_callback_is_closed_even_where_one_raises():
    class Broken(Recorder):
        def close(self):
            raise OSError("disk gone")

    last = Recorder()
    scheduler = scheduler_with([Broken(), last])
    next(scheduler)
    with pytest.raises(OSError, match="disk gone"):
        scheduler.close()
    assert last.num_closed == 1
    scheduler.close()


def test_the_end_of_the_process_closes_every_scheduler_even_where_one_raises():
    class Broken(Recorder):
        def close(self):
            super().close()
            raise OSError("disk gone")

    recorders = [Broken(), Broken()]
    schedulers = [scheduler_with([recorder]) for recorder in recorders]
    for scheduler in schedulers:
        next(scheduler)
    with pytest.raises(OSError, match="disk gone"):
        scheduler_module._close_all()
    assert [recorder.num_closed for recorder in recorders] == [1, 1]


@pytest.mark.parametrize("callback", [None, "log", Recorder])
def test_what_cannot_be_called_with_a_step_is_refused(callback):
    with pytest.raises(ValueError, match="a callback takes a step"):
        scheduler_with([callback])


def test_times_of_the_hand_outs(monkeypatch):
    """What is exposed is waiting inside `next`; the rate is that of the step before; nothing counts between epochs."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with scheduler_with([]) as scheduler:
        figures = next(scheduler).stats
    clock = StepClock()

    def handed_out(trained, waited, tokens):
        now[0] += trained
        clock.asked()
        now[0] += waited
        stats = clock.handed_out(type(figures)(**{**figures_of(figures), "tokens": tokens}))
        return stats.exposed_seconds, stats.step_seconds, stats.tokens_per_second

    assert handed_out(0, 2, 600) == (2, None, None)
    assert handed_out(9, 1, 50) == (1, 10, 60)
    assert handed_out(4, 1, 70) == (1, 5, 10)
    clock.epoch_ended()
    assert handed_out(1000, 0.5, 80) == (0.5, None, None)
    assert handed_out(7.5, 0.5, 80) == (0.5, 8, 10)


def figures_of(stats):
    return {name: getattr(stats, name) for name in stats.__struct_fields__}


@pytest.mark.parametrize(("sync", "bubble"), [("step", 1 - 12 / 14), ("microbatch", 1 - 12 / 18)])
def test_bubble_is_the_share_that_waits(sync, bubble):
    """By hand. Loads of the ranks 7 and 5: of 14 units, 12 are computed. In micro-batches (5, 1) and (4, 2): of 18."""
    costs, ranks, microbatches = ([5, 2, 1, 4], [0, 0, 1, 1], [0, 1, 0, 1])
    table = SampleTable.from_lengths(costs, home=ranks)
    config = PlanConfig(max_tokens=8, sync=sync, num_microbatches=2)
    plan = plan_fixed(table, np.array(ranks), np.array(microbatches), num_ranks=2, config=config)
    stats = step_stats(table, plan, config=config)
    assert stats.bubble == pytest.approx(bubble)
    assert stats.as_dict()["bubble"] == stats.bubble

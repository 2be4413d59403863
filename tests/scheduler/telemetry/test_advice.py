"""Advice: tables whose gain is known by hand, and a run that is warned off its critical path."""

import re
import threading

import msgspec
import numpy as np
import pytest

from evenpack.scheduler import PackingScheduler, ProcessGroups, SampleTable, SchedulerConfig, StepStats
from evenpack.scheduler.stats import step_stats
from evenpack.scheduler.telemetry.advice import AdviceWarning, Advisor, advise, advisor
from evenpack.scheduler.telemetry.advice.what_if import Steps, time_per_work, with_context_parallelism, with_lookahead
from evenpack.scheduler.testing import run_ranks

from ..helpers import TEXT, text_sample


def situation(lengths, homes, num_steps=4, seconds=None, num_ranks=2, **settings):
    """Return the same step several times, with (exposed, step, prepare) seconds."""
    config = SchedulerConfig(**{"samples_per_step": 16, "max_tokens": 128, **settings})
    table = SampleTable.from_lengths(lengths, home=homes)
    steps = Steps(tables=[table] * num_steps, config=config, num_ranks=num_ranks)
    plan = steps.plan(table)
    stats = step_stats(table, plan, config=config)
    if seconds is not None:
        exposed, step, prepare = seconds
        times = {"exposed_seconds": exposed, "step_seconds": step, "prepare_seconds": prepare, "tokens_per_second": 1.0}
        stats = StepStats(**{name: getattr(stats, name) for name in stats.__struct_fields__} | times)
    return msgspec.structs.replace(steps, plans=[plan] * num_steps, stats=[stats] * num_steps)


EVEN = ([4] * 8, [0] * 4 + [1] * 4)
CASES = [
    # One sample for two ranks: half the group waits, and with two steps as one, none does.
    (([64], [0]), {}, "samples_per_step", 0.5, "leaves packs 25% full and ranks wait 50% of the step: samples_per_step=32"),
    # 8 + 8 tokens and a fixed cost of 8 for each of two micro-batches; one of 16 tokens costs 24 instead of 32.
    (([8] * 4, [0, 0, 1, 1]), {"max_tokens": 8, "microbatch_cost": 8}, "max_tokens", 0.25,
     "makes 2.0 micro-batches a step: max_tokens=16"),
    # Four micro-batches for what fits in one: 16 + 4 x 8 against 16 + 8.
    (EVEN, {"num_microbatches": 4, "microbatch_cost": 8}, "num_microbatches", 0.5,
     "num_microbatches=4 is not"),
    # 100 beside 20 on two ranks: 400 in four steps; in a window the heavy ones run side by side: 260. Or split: 4 x 60.
    (([100, 10, 10], [0, 1, 1]), {}, "heavy samples", 0.4,
     "4 of 4 steps are bound by one sample, of up to 100 tokens and 1.67 times a rank's mean load: lookahead=8 would cut the "
     "step's cost per token by 25%; context parallelism of 2 on the same GPUs by 40%"),
    (EVEN, {"prefetch": 0, "seconds": (0.1, 1.0, 0.1)}, "prefetch", 0.1,
     "waits 10.0% of the step .* prefetch=1 would save up to 10.0%"),
    # Training takes 0.6 s, preparing 0.8: with all of it hidden, a step still takes 0.8 of 1 s.
    (EVEN, {"prefetch": 1, "seconds": (0.4, 1.0, 0.8)}, "source", 0.4,
     "preparing a step takes 0.800 s and training one 0.600 s"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "settings", "kind", "gain", "text"), CASES, ids=[case[2] for case in CASES])
def test_gains_by_hand(tables, settings, kind, gain, text):
    found = {advice.kind: advice for advice in advise(situation(*tables, **settings))}
    assert found[kind].gain == pytest.approx(gain)
    assert re.search(text, found[kind].text), found[kind].text
    assert f"{gain:.0%}" in found[kind].text or kind in ("prefetch", "source")


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_nothing_is_said_of_settings_that_are_good(sync):
    assert advise(situation(*EVEN, sync=sync, seconds=(0.001, 1.0, 0.5))) == []


def test_small_gains_are_not_named():
    tables, exposed = EVEN, (0.1, 1.0, 0.1)
    assert advise(situation(*tables, prefetch=0, seconds=exposed), min_gain=0.11) == []


def test_a_look_ends_when_its_time_is_up():
    """What was planned by then is said; nothing more is planned."""
    found = situation([64], [0])
    assert "samples_per_step" in [advice.kind for advice in advise(found)]
    assert advise(found, deadline=0.0) == []


def test_what_cannot_be_planned_is_left_aside():
    """Half of the pack's room with twice the context parallelism is none that a sample of odd padding needs: no error."""
    assert isinstance(advise(situation([100, 3], [0, 1], max_tokens=100, max_segments=1, num_microbatches=1)), list)


def test_a_window_trains_every_sample_once():
    """The simulated steps hold the samples of the real ones, whatever waits, also at the end."""
    rng = np.random.default_rng(0)
    tables = [
        SampleTable.from_lengths(rng.choice([5, 9, 200], 8), home=np.sort(rng.integers(0, 2, 8)), nbytes=rng.integers(1, 9, 8))
        for _ in range(7)
    ]
    config = SchedulerConfig(max_tokens=256, samples_per_step=4)
    seen = []

    class Noting(Steps):
        def plan(self, table, config=None):
            seen.append(table)
            return super().plan(table, config)

    with_lookahead(Noting(tables=tables, config=config, num_ranks=2))
    assert len(seen) == 7 and [len(table) for table in seen] != [8] * 7
    planned, had = (
        sorted((one.tokens[i], one.home[i], one.nbytes[i]) for one in steps for i in range(len(one)))
        for steps in (seen, tables)
    )
    assert planned == had


def test_context_parallelism_needs_pairs_of_ranks():
    steps = situation([8, 8, 8], [0, 1, 2], num_ranks=3)
    assert with_context_parallelism(steps) is None
    assert time_per_work(steps) == pytest.approx(1 / 3)


def uneven(rank):
    """Two short samples on rank 0, none to speak of elsewhere: packs that are nearly empty."""
    return [text_sample(40 if rank == 0 else 3, f"{rank}-{index}") for index in range(24)]


def train(make, num_ranks=2):
    def fn(rank, num_ranks):
        callback = make(rank)
        config = SchedulerConfig(max_tokens=256, samples_per_step=1, timeout=20.0)
        with PackingScheduler(
            uneven(rank), config=config, adapter=TEXT, groups=ProcessGroups.from_world(), callbacks=[callback]
        ) as scheduler:
            steps = [step.stats.step for step in scheduler]
        return steps, callback

    return run_ranks(fn, num_ranks)


def test_a_run_is_warned_once_for_each_setting_by_its_first_rank():
    with pytest.warns(AdviceWarning) as caught:
        outcomes = train(lambda rank: Advisor(every=3, window=3))
    first, other = (callback for _, callback in outcomes)
    texts = [str(one.message) for one in caught]
    assert sorted(texts) == sorted(advice.text for advice in first.advice.values()) and other.advice == {}
    assert "samples_per_step" in first.advice and first.advice["samples_per_step"].gain > 0.3


def test_training_does_not_wait_for_advice(monkeypatch):
    """A look that takes for ever holds up no step, and no second one begins meanwhile."""
    gate, looks = threading.Event(), []

    def blocked(steps, **settings):
        looks.append(threading.current_thread().name)
        gate.wait(60)
        return []

    monkeypatch.setattr(advisor, "advise", blocked)

    class Opened(Advisor):
        def close(self):
            gate.set()
            super().close()

    # The writer's own end opens the gate: another rank may be done while the writer still has steps to look at.
    outcomes = train(lambda rank: Opened(every=1, window=2) if rank == 0 else Advisor())
    assert [len(steps) for steps, _ in outcomes] == [24, 24]
    assert looks == ["evenpack-advisor"]


def test_a_window_holds_no_more_samples_than_asked(monkeypatch):
    sizes = []
    monkeypatch.setattr(advisor, "advise", lambda steps, **settings: sizes.append([len(t) for t in steps.tables]) or [])
    train(lambda rank: Advisor(every=100, window=8, max_samples=6))
    assert sizes == [[2, 2, 2]]


@pytest.mark.parametrize("name", ["every", "window", "max_samples"])
def test_settings_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        Advisor(**{name: 0})


def test_context_parallelism_is_tried_whatever_rows_are_padded_to():
    """Rows of a multiple of 3 tokens cannot be cut over two ranks; those of the larger layout can."""
    found = {advice.kind: advice.text for advice in advise(situation([100, 10, 10], [0, 1, 1], pack_align=3))}
    assert "context parallelism of 2 on the same GPUs by 40%" in found["heavy samples"]

"""Deferral of outliers: bounded, in order, and nothing is lost."""

import numpy as np
import pytest

from evenpack.scheduler.stages.describe import record_dtype
from evenpack.scheduler.stages.gather import Gathered
from evenpack.scheduler.stages.select import waiting_outliers
from evenpack.scheduler.testing import run_ranks

from ..helpers import flat, names_of, open_scheduler, text_sample


def gathered(rows, exhausted=(False, False)):
    """Return rows of (rank, cost, steps waited)."""
    dtype = record_dtype(1)
    table = np.zeros(len(rows), dtype)
    for index, (_, cost, waited) in enumerate(rows):
        table[index]["cost"], table[index]["steps_waited"] = cost, waited
    return Gathered(table, np.array([home for home, _, _ in rows]), np.array(exhausted), 0)


@pytest.mark.parametrize(
    ("rows", "exhausted", "waits"),
    [
        ([(0, 5, 0), (0, 5, 0), (1, 9, 0)], (False, False), [False, False, False]),  # 9 is below the mean of 9.5
        ([(0, 5, 0), (0, 5, 0), (1, 11, 0)], (False, False), [False, False, True]),
        ([(0, 5, 0), (0, 5, 0), (1, 11, 3)], (False, False), [False, False, False]),  # it has waited long enough
        ([(0, 5, 0), (0, 5, 0), (1, 11, 0)], (True, True), [False, False, False]),  # nobody will join it
        ([(0, 11, 1)], (False, False), [False]),  # alone, it would leave nothing to train on
    ],
)
def test_which_samples_wait(rows, exhausted, waits):
    assert waiting_outliers(gathered(rows), num_ranks=2, limit=3, ending=all(exhausted)).tolist() == waits


def test_the_oldest_go_first_when_enough_are_there():
    rows = [(0, 1, 0), (0, 100, 1), (1, 100, 2), (2, 100, 0), (3, 100, 0)]
    four = gathered(rows, (False,) * 4)
    # More than the mean of 401 / 5 ranks: four outliers on five ranks wait, on four ranks they fill an index.
    assert waiting_outliers(four, num_ranks=5, limit=9, ending=False).tolist() == [False, True, True, True, True]
    rows.append((0, 100, 0))
    assert waiting_outliers(gathered(rows, (False,) * 4), num_ranks=5, limit=9, ending=False).tolist() == [False] * 6


def test_deferred_samples_are_trained_once_and_counted():
    def source(rank):
        samples = [text_sample(10 + index % 3, f"{rank}-{index}") for index in range(40)]
        if rank == 0:
            samples[1] = text_sample(900, "0-1")
        if rank == 1:
            samples[13] = text_sample(901, "1-13")
        return samples

    def fn(rank, num_ranks):
        log = []
        with open_scheduler(source(rank), defer=6, max_tokens=1024) as scheduler:
            for step in scheduler:
                log.append((names_of(step), step.stats.num_deferred, step.stats.longest_wait, step.plan.imbalance))
        return log

    outcomes = run_ranks(fn, 2)
    names = list(flat([names for log in outcomes for names, *_ in log]))
    assert sorted(names) == sorted(f"{rank}-{index}" for rank in range(2) for index in range(40))
    deferred = [(count, wait) for _, count, wait, _ in outcomes[0]]
    assert deferred[:4] == [(1, 1), (1, 2), (1, 3), (0, 0)]  # "0-1" waits for "1-13", which comes in the fourth step
    both = [set(flat(log[3][0])) & {"0-1", "1-13"} for log in outcomes]
    assert [len(found) for found in both] == [1, 1]
    assert outcomes[0][3][3] < 1.05


def test_a_sample_waits_no_longer_than_the_limit():
    def fn(rank, num_ranks):
        samples = [text_sample(10, f"{rank}-{index}") for index in range(40)]
        if rank == 0:
            samples[0] = text_sample(900, "0-0")
        with open_scheduler(samples, defer=2, max_tokens=1024) as scheduler:
            return [(step.stats.num_deferred, "0-0" in flat(names_of(step))) for step in scheduler]

    outcomes = run_ranks(fn, 2)
    assert [count for count, _ in outcomes[0]][:4] == [1, 1, 0, 0]
    assert any(log[2][1] for log in outcomes)


def test_deferred_samples_of_a_state_are_trained_by_a_run_that_defers_none():
    def fn(rank, num_ranks):
        samples = [text_sample(900 if rank == index == 0 else 10, f"{rank}-{index}") for index in range(16)]
        with open_scheduler(samples, defer=5, max_tokens=1024) as scheduler:
            names = list(flat(names_of(next(scheduler))))
            state = scheduler.state_dict()
        with open_scheduler(samples, max_tokens=1024) as scheduler:
            scheduler.load_state_dict(state)
            return len(state["deferred"]), names, [list(flat(names_of(step))) for step in scheduler]

    outcomes = run_ranks(fn, 2)
    assert [count for count, *_ in outcomes] == [1, 0]
    assert any("0-0" in rest[0] for _, _, rest in outcomes)
    found = [name for _, names, rest in outcomes for name in (*names, *flat(rest))]
    assert sorted(found) == sorted(f"{rank}-{index}" for rank in range(2) for index in range(16))

"""Steps counted in items of the source: lists of any number of samples."""

import pytest

from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, flat, names_of, text_sample

#: Names of the samples of each item; an item may be a sample, a list, or an empty list.
ITEMS = ["a", ["b", "c", "d"], [], "e", ["f"], ["g", "h"], "i"]


def scheduler_over(source, **settings):
    config = SchedulerConfig(**{"max_tokens": 16, "samples_per_step": 2, **settings})
    groups = ProcessGroups.from_world()
    return PackingScheduler(source, config=config, adapter=TEXT, groups=groups, count_items=True)


def source_of(rank):
    """Return the items of a rank, as a sequence that can be read again."""
    return [
        text_sample(5, f"{rank}{item}") if isinstance(item, str) else [text_sample(5, f"{rank}{name}") for name in item]
        for item in ITEMS
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("count", "steps"), [(1, ["a", "bcd", "e", "f", "gh", "i"]), (3, ["abcd", "efgh", "i"])])
def test_a_step_takes_as_many_items_however_many_samples_they_hold(count, steps, prefetch):
    def fn(rank, num_ranks):
        with scheduler_over(source_of(rank), samples_per_step=count, prefetch=prefetch) as scheduler:
            return [sorted(flat(names_of(step))) for step in scheduler]

    outcomes = run_ranks(fn, 2)
    for index, names in enumerate(steps):
        assert sorted(name for rank in outcomes for name in rank[index]) == sorted(f"{r}{name}" for r in "01" for name in names)
    assert all(len(rank) == len(steps) for rank in outcomes)


def test_a_resume_goes_on_with_the_next_item():
    with scheduler_over(source_of(0)) as scheduler:
        next(scheduler)
        state = scheduler.state_dict()
        expected = [sorted(flat(names_of(step))) for step in scheduler]
    with scheduler_over(source_of(0)) as scheduler:
        scheduler.load_state_dict(state)
        assert [sorted(flat(names_of(step))) for step in scheduler] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"on_exhausted": "stop"},
        {"samples_per_step": None, "tokens_per_step": 64},
        {"samples_per_step": None, "scope": "microbatch", "num_microbatches": 2},
    ],
)
def test_what_items_cannot_count_is_refused(settings):
    with pytest.raises(ValueError, match="count_items needs samples_per_step and on_exhausted='drain'"):
        scheduler_over(source_of(0), **settings)


def test_an_iterator_has_no_state_while_items_are_in_flight():
    with scheduler_over(iter(source_of(0))) as scheduler:
        next(scheduler)
        with pytest.raises(ValueError, match="with count_items, a source that cannot go back has no state"):
            scheduler.state_dict()

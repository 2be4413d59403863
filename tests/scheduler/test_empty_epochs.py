"""An epoch without a step says why; a source that ends before the place where a state stands is an error."""

import pytest
from torch.utils.data import DataLoader

from evenpack.core import PeerFailedError
from evenpack.scheduler import PackingScheduler
from evenpack.scheduler.testing import run_ranks

from .helpers import open_scheduler, random_source, text_sample


def steps_of_epochs(scheduler: PackingScheduler, epochs: int = 1) -> list[int]:
    """Return the number of steps of each epoch."""
    with scheduler:
        return [sum(1 for _ in scheduler) for _ in range(epochs)]


def told(recwarn) -> list[str]:
    """Return what was warned of."""
    return [str(warning.message) for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize(
    ("make", "settings", "epochs", "steps", "text"),
    [
        (lambda: [], {}, 1, [0], "the source yielded 0 samples; an"),
        (lambda: DataLoader([], batch_size=None), {}, 1, [0], "yielded 0 samples"),
        (lambda: iter(random_source(0, 8)), {}, 2, [2, 0], "an iterator can be read once"),
        (lambda: (sample for sample in random_source(0, 8)), {}, 3, [2, 0, 0], "an iterator can be read once"),
        (
            lambda: [text_sample(200, index) for index in range(3)],
            {"oversize": "drop"},
            1,
            [0],
            "yielded 0 samples that fit: 3 were dropped (too long, or unreadable)",
        ),
        (
            lambda: random_source(0, 3),
            {"on_exhausted": "stop"},
            1,
            [0],
            "no full step, and on_exhausted='stop' leaves",
        ),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_epoch_without_a_step_is_told_of(make, settings, epochs, steps, text, prefetch, recwarn):
    assert steps_of_epochs(open_scheduler(make(), prefetch=prefetch, **settings), epochs) == steps
    messages = told(recwarn)
    assert len(messages) == 1 and text in messages[0], messages  # Python tells the same thing once


def test_one_rank_tells_of_it(recwarn):
    outcomes = run_ranks(lambda rank, num_ranks: steps_of_epochs(open_scheduler([])), 3)
    assert outcomes == [[0]] * 3
    assert len(told(recwarn)) == 1 and "the sources of all 3 ranks" in told(recwarn)[0]


@pytest.mark.parametrize("on_exhausted", ["drain", "stop"])
def test_an_epoch_that_was_over_when_it_was_saved_is_none_without_a_step(on_exhausted, recwarn):
    settings = {"on_exhausted": on_exhausted}
    with open_scheduler(random_source(0, 8), **settings) as scheduler:
        state = [scheduler.state_dict() for _ in scheduler][-1]
    with open_scheduler(random_source(0, 8), **settings) as scheduler:
        scheduler.load_state_dict(state)
        assert [sum(1 for _ in scheduler) for _ in range(2)] == [0, 2]
    assert told(recwarn) == []


def of_loader(items):
    """Return the items in a loader."""
    return DataLoader(items, batch_size=None)


def of_stream(items):
    """Return the items as a streaming dataset that shuffles in a buffer, and so is read again from its start."""
    import datasets

    rows = [{"input_ids": item["input_ids"].tolist(), "sample_id": item["sample_id"]} for item in items]
    return datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(buffer_size=4, seed=0)


@pytest.mark.parametrize("make", [list, of_loader, of_stream])
def test_a_source_that_ends_before_the_state_is_an_error(make):
    with open_scheduler(make(random_source(0, 40)), prefetch=0) as scheduler:
        for _ in range(5):
            next(scheduler)
        state = scheduler.state_dict()
    with open_scheduler(make(random_source(0, 4))) as scheduler:
        scheduler.load_state_dict(state)
        with pytest.raises(
            PeerFailedError, match=r"rank 0 failed .*: the source is shorter than when .* read 4 items, the state needs 20"
        ) as caught:
            next(scheduler)
    assert isinstance(caught.value.__cause__, ValueError)

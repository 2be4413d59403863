"""A resumed scheduler hands out what it would have handed out without the stop (D8)."""

import io
import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from evenpack.core import Field
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, VISION, flat, names_of, open_scheduler, random_source, text_sample

#: Steps of an epoch; a nightly run takes more.
STEPS = int(os.environ.get("EVENPACK_RESUME_STEPS", "5"))
SCORE = Field(name="score", kind="token", dtype="float32")


def fingerprint(step):
    """Return everything that makes a step: packs bit for bit, plan, figures."""
    packs = [
        (
            tuple(batch.sample_ids),
            batch.input_ids.numpy().tobytes(),
            batch.labels.numpy().tobytes(),
            batch.cu_seqlens_q.tolist(),
        )
        for batch in step
    ]
    return packs, step.plan.digest, step.stats.step, step.loss_divisor, step.stats.num_carried, step.stats.mean_delay


def saved(state):
    """Return a state as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def lists_of(source, size=3):
    """Return lists of samples, so that some samples of a list wait for the next step."""
    return [source[index : index + size] for index in range(0, len(source), size)]


def with_outliers(rank):
    """Return samples, one of which is far heavier than all others, on two ranks in turn."""
    samples = random_source(rank, 4 * STEPS)
    for index in range(rank, len(samples), 9):
        samples[index] = text_sample(1000, f"{rank}-{index}")
    return samples


CASES = {
    "samples": (lambda rank: random_source(rank, 4 * STEPS), {}),
    "lists": (lambda rank: lists_of(random_source(rank, 4 * STEPS)), {}),
    "uneven ends": (lambda rank: random_source(rank, 4 * STEPS - 3 * rank), {}),
    "tokens": (lambda rank: random_source(rank, 4 * STEPS), {"tokens_per_step": 500}),
    "window": (with_outliers, {"lookahead": 3, "max_tokens": 1024}),
    "microbatch scope": (
        lambda rank: lists_of(random_source(rank, 3 * STEPS), 1),
        {"scope": "microbatch", "num_microbatches": 3},
    ),
}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_resume_at_every_step(case, prefetch):
    source, settings = CASES[case]

    def fn(rank, num_ranks):
        def fresh():
            return open_scheduler(source(rank), prefetch=prefetch, **settings)

        with fresh() as scheduler:
            states, steps = [saved(scheduler.state_dict())], []
            for _ in range(2):  # two epochs: a state is also saved at the end of one
                for step in scheduler:
                    steps.append(fingerprint(step))
                    states.append(saved(scheduler.state_dict()))
                states.append(saved(scheduler.state_dict()))
                steps.append(None)
        for position in range(len(steps)):
            with fresh() as scheduler:
                scheduler.load_state_dict(states[position])
                scheduler.load_state_dict(saved(scheduler.state_dict()))  # right after a load
                got = [fingerprint(step) for step in scheduler]
                end = steps.index(None, position)
                assert got == steps[position:end], position
        return len(steps)

    counts = run_ranks(fn, 3, timeout=120 + 20 * STEPS)
    assert len(set(counts)) == 1 and counts[0] >= STEPS


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_resumes_with_what_was_read(prefetch):
    """It cannot go back: prepared steps are in the state, and the iterator stands behind them."""

    def fn(rank, num_ranks):
        with open_scheduler(iter(with_outliers(rank)), prefetch=prefetch, lookahead=3, max_tokens=1024) as scheduler:
            expected = [fingerprint(step) for step in scheduler]
        iterator, got = iter(with_outliers(rank)), []
        state = None
        while True:
            with open_scheduler(iterator, prefetch=prefetch, lookahead=3, max_tokens=1024) as scheduler:
                if state is not None:
                    scheduler.load_state_dict(state)
                try:
                    got.append(fingerprint(next(scheduler)))
                except StopIteration:
                    break
                state = saved(scheduler.state_dict())
        assert got == expected

    run_ranks(fn, 2)


class Sharded:
    """A source that can be divided anew: rank r of R reads every R-th sample of what is left."""

    def __init__(self, samples, rank, num_ranks):
        self.samples, self.rank, self.num_ranks = samples, rank, num_ranks
        self.left, self.at = list(range(len(samples)))[rank::num_ranks], 0

    def __iter__(self):
        while self.at < len(self.left):
            self.at += 1
            yield self.samples[self.left[self.at - 1]]
        self.left, self.at = list(range(len(self.samples)))[self.rank :: self.num_ranks], 0

    def state_dict(self):
        return {"left": self.left[self.at :]}

    def load_state_dict(self, state):
        self.left, self.at = state["left"], 0

    def load_state_dicts(self, states):
        left = sorted(index for state in states for index in state["left"])
        self.left, self.at = left[self.rank :: self.num_ranks], 0


@pytest.mark.parametrize("stop", [0, 1, 5])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("settings", [{}, {"tokens_per_step": 500}, {"lookahead": 4}])
def test_resume_on_another_number_of_ranks(before, after, stop, settings):
    everyone = random_source(0, 90)

    def first(rank, num_ranks):
        with open_scheduler(Sharded(everyone, rank, num_ranks), prefetch=2, **settings) as scheduler:
            names = [names_of(next(scheduler)) for _ in range(stop)]
            return names, saved(scheduler.state_dict())

    outcomes = run_ranks(first, before)
    states = [state for _, state in outcomes]

    def second(rank, num_ranks):
        with open_scheduler(Sharded(everyone, rank, num_ranks), prefetch=1, **settings) as scheduler:
            scheduler.load_state_dicts(states)
            return [names_of(step) for step in scheduler]

    names = list(flat([names for names, _ in outcomes])) + list(flat(run_ranks(second, after)))
    assert sorted(names) == sorted(sample["sample_id"] for sample in everyone)


def loaders(samples, rank, num_ranks, kind, **settings):
    """Return the loaders that a script of one's own builds: the same lines on any number of ranks."""
    settings = {"batch_size": None, **settings}
    if kind == "range":
        return DataLoader(samples, sampler=range(rank, len(samples), num_ranks), **settings)
    if kind == "list":
        return DataLoader(samples, sampler=list(range(len(samples)))[rank::num_ranks], **settings)
    sampler = DistributedSampler(samples, num_replicas=num_ranks, rank=rank, shuffle=True, seed=3)
    return DataLoader(samples, sampler=sampler, **settings)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "settings", "before", "after", "stop"),
    [
        ("distributed", {}, 4, 2, 0),
        ("distributed", {}, 4, 2, 1),
        ("distributed", {}, 2, 4, 3),
        ("distributed", {}, 3, 1, 1),
        ("distributed", {"num_workers": 1}, 2, 4, 1),
        ("range", {}, 4, 2, 3),
        ("range", {}, 2, 4, 1),
        ("list", {"batch_size": 3, "collate_fn": list}, 2, 4, 0),
        ("list", {"batch_size": 3, "collate_fn": list}, 4, 2, 1),
    ],
)
def test_a_loader_over_indices_resumes_on_another_number_of_ranks(before, after, stop, kind, settings):
    """Each sample once, also through a second stop in the epoch that was split; the next epoch is whole."""
    everyone = random_source(0, 72)
    expected = sorted(sample["sample_id"] for sample in everyone)

    def opened(rank, num_ranks):
        return open_scheduler(loaders(everyone, rank, num_ranks, kind, **settings), samples_per_step=3, prefetch=1)

    def first(rank, num_ranks):
        with opened(rank, num_ranks) as scheduler:
            names = [names_of(next(scheduler)) for _ in range(stop)]
            return names, saved(scheduler.state_dict())

    outcomes = run_ranks(first, before)
    states = [state for _, state in outcomes]

    def second(rank, num_ranks):
        with opened(rank, num_ranks) as scheduler:
            scheduler.load_state_dicts(states)
            names = [names_of(next(scheduler))]
            state = saved(scheduler.state_dict())
        loader = loaders(everyone, rank, num_ranks, kind, **settings)
        with open_scheduler(loader, samples_per_step=3, prefetch=1) as scheduler:
            scheduler.load_state_dict(state)
            names += [names_of(step) for step in scheduler]
            if kind == "distributed":
                loader.sampler.set_epoch(1)
            return names, [names_of(step) for step in scheduler]

    resumed = run_ranks(second, after)
    names = [*flat([names for names, _ in outcomes]), *flat([names for names, _ in resumed])]
    assert sorted(names) == expected
    assert sorted(flat([following for _, following in resumed])) == expected


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            lambda data, rank: DataLoader(data, batch_size=None, shuffle=True),
            None,
            "is known only of a DataLoader over a map-style",
        ),
        (lambda data, rank: DataLoader(data, batch_size=None), None, "the ranks read the same indices"),
        (
            lambda data, rank: loaders(data, rank, 2, "range"),
            lambda data, rank: loaders(data[:-1], rank, 1, "range"),
            "the dataset has 39 examples, it had 40 when the state was saved",
        ),
    ],
)
def test_loaders_whose_rest_is_not_known_are_refused(before, after, text):
    data = random_source(0, 40)

    def first(rank, num_ranks):
        with open_scheduler(before(data, rank)) as scheduler:
            next(scheduler)
            return scheduler.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks that read the same
        states = run_ranks(first, 2)
    with open_scheduler((after or before)(data, 0)) as scheduler, pytest.raises(ValueError, match=text):
        scheduler.load_state_dicts(states)


def test_an_epoch_that_stopped_early_leaves_nothing_to_split():
    data = random_source(0, 20)

    def opened(rank, num_ranks):
        return open_scheduler(loaders(data, rank, num_ranks, "range"), samples_per_step=3, on_exhausted="stop")

    def first(rank, num_ranks):
        with opened(rank, num_ranks) as scheduler:
            list(scheduler)
            return saved(scheduler.state_dict())

    states = run_ranks(first, 2)
    with opened(0, 1) as scheduler:
        scheduler.load_state_dicts(states)
        assert len(list(flat([names_of(step) for step in scheduler]))) == 18


def test_states_that_do_not_fit_are_refused():
    with open_scheduler(random_source(0, 20)) as scheduler:
        next(scheduler)
        state = scheduler.state_dict()
        with pytest.raises(ValueError, match="before the first step"):
            scheduler.load_state_dict(state)
    for change, text in [
        ({"num_ranks": 4}, "saved on 4 ranks, this job has 1"),
        ({"rank": 1}, "saved by rank 1, this is rank 0"),
        ({"version": 9}, "version 9, this is version 2"),
    ]:
        with open_scheduler(random_source(0, 20)) as scheduler, pytest.raises(ValueError, match=text):
            scheduler.load_state_dict({**state, **change})
    with open_scheduler(random_source(0, 20)) as scheduler, pytest.raises(ValueError, match="it lacks"):
        scheduler.load_state_dict({"rank": 0, "num_ranks": 1})
    with open_scheduler(random_source(0, 20)) as scheduler, pytest.raises(ValueError, match="list has no load_state_dicts"):
        scheduler.load_state_dicts([{**state, "num_ranks": 2}, {**state, "rank": 1, "num_ranks": 2}])
    with open_scheduler(random_source(0, 20)) as scheduler, pytest.raises(ValueError, match="not those of all 3 ranks"):
        scheduler.load_state_dicts([{**state, "num_ranks": 3}, {**state, "rank": 1, "num_ranks": 3}])


@pytest.mark.parametrize("state", [None, {"a": 1}, [1], {"rank": 0, "num_ranks": 1}])
@pytest.mark.parametrize("load", ["load_state_dict", "load_state_dicts"])
def test_what_is_no_state_is_refused(load, state):
    with open_scheduler(random_source(0, 20)) as scheduler:
        text = r"not a state of PackingScheduler.state_dict\(\): it (lacks .*version|is a (NoneType|list))"
        with pytest.raises(ValueError, match=text):
            getattr(scheduler, load)(state if load == "load_state_dict" else [state])


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((TEXT, ()), (VISION, ()), r"adapter is 'text', here 'qwen2_5_vl'; further fields here: .*'image_grid_thw'"),
        ((VISION, ()), (TEXT, ()), r"adapter is 'qwen2_5_vl', here 'text'; fields missing here: .*'pixel_values'"),
        ((TEXT, (SCORE,)), (TEXT, ()), r"^the state is of another scheduler: fields missing here: \['score'\]$"),
        ((TEXT, ()), (TEXT, (SCORE,)), r"^the state is of another scheduler: further fields here: \['score'\]$"),
    ],
)
def test_a_state_of_other_fields_is_refused(before, after, text):
    with open_scheduler([], adapter=before[0], fields=before[1]) as scheduler:
        state = scheduler.state_dict()
    with open_scheduler([], adapter=after[0], fields=after[1]) as scheduler:
        with pytest.raises(ValueError, match=text):
            scheduler.load_state_dict(state)
        old = {key: value for key, value in state.items() if key not in ("adapter", "fields")}
        if before[0] is not after[0]:
            with pytest.raises(ValueError, match=r"dtypes of [03] fields of free dtype, this scheduler has [03]"):
                scheduler.load_state_dict(old)


def test_ranks_that_resume_from_different_steps_are_stopped():
    from evenpack.core import PlanMismatchError

    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 40)) as scheduler:
            for _ in range(2 + rank):
                next(scheduler)
            state = scheduler.state_dict()
            while rank == 0:
                next(scheduler)
                break
        with open_scheduler(random_source(rank, 40)) as scheduler:
            scheduler.load_state_dict(state)
            with pytest.raises(PlanMismatchError, match="different steps: step is 0x2 on rank 0 and 0x3 on rank 1"):
                next(scheduler)

    run_ranks(fn, 2)


@pytest.mark.parametrize("settings", [{}, {"tokens_per_step": 100}, {"lookahead": 3, "max_tokens": 1024}])
def test_an_epoch_that_stopped_early_is_left_behind(settings):
    """`stop` ends an epoch while some sources still have samples: the next one begins at their start, after a resume too."""

    def fn(rank, num_ranks):
        def fresh():
            return open_scheduler(random_source(rank, 24 - 12 * rank), on_exhausted="stop", **settings)

        with fresh() as scheduler:
            list(scheduler)
            state = saved(scheduler.state_dict())
            following = [fingerprint(step)[0] for step in scheduler]
        with fresh() as scheduler:
            scheduler.load_state_dict(state)
            assert [fingerprint(step)[0] for step in scheduler] == following
        return len(following)

    counts = run_ranks(fn, 2)
    assert len(set(counts)) == 1 and counts[0] > 1


def test_a_calibrated_cost_is_part_of_the_state():
    from evenpack.scheduler.cost.model import Observation

    measured = [Observation(tokens=(n,), seconds=1e-3 + 1e-6 * n + 1e-7 * n * n) for n in (10, 500, 900, 2000)]
    with open_scheduler(random_source(0, 40), prefetch=0) as scheduler:
        next(scheduler)
        scheduler.calibrate(measured)
        state = saved(scheduler.state_dict())
        expected = next(scheduler).table.cost.tolist()
    with open_scheduler(random_source(0, 40), prefetch=0) as scheduler:
        scheduler.load_state_dict(state)
        assert next(scheduler).table.cost.tolist() == expected

"""What looks wrong in the data is said once, on the rank that writes logs; nothing is said where nothing is known."""

import contextlib
import os
import signal
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, text_sample


def warned(source_of, num_ranks=2, epochs=1, **settings):
    """Return the texts that each rank was warned of."""
    config = SchedulerConfig(max_tokens=256, timeout=30.0, **{"samples_per_step": 2, **settings})

    def fn(rank, num_ranks):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            groups = ProcessGroups.from_world()
            with PackingScheduler(source_of(rank), config=config, adapter=TEXT, groups=groups) as scheduler:
                for _ in range(epochs):
                    for _ in scheduler:
                        pass
        return [str(one.message) for one in caught if one.category is RuntimeWarning]

    return run_ranks(fn, num_ranks, backend="gloo" if num_ranks > 1 else "threads")


def named(rank, count, **more):
    return [text_sample(9, f"{rank}-{index}", **more) for index in range(count)]


def nameless(rank, count):
    return [{"input_ids": sample["input_ids"]} for sample in named(0, count)]


def masked(rank, count):
    return [{**sample, "labels": torch.full((9,), -100)} for sample in named(rank, count)]


def shifted(sample):
    return {**sample, "labels": torch.cat([sample["input_ids"][1:], torch.tensor([-100])])}


TWICE = [text_sample(9, index // 2) for index in range(8)]
LATE = [*masked(0, 8), *named(0, 4)]
CONSTANT = [{"input_ids": torch.full((9,), 3), "labels": torch.full((9,), 3)} for _ in range(8)]


@pytest.mark.parametrize(
    ("source_of", "text"),
    [
        (
            lambda rank: named(0, 8),
            "sample_id '0-0' twice (2 of 4 samples are repeated): ranks 0 and 1 brought it (samples 0 and 0 of their step)",
        ),
        (
            lambda rank: TWICE if rank else named(0, 8),
            "step 0 holds a sample_id twice (1 of 4 samples are repeated): rank 1 brought it twice (samples 0 and 1 ",
        ),
        (lambda rank: masked(rank, 8), "no label of the first 3 steps trains"),
        (lambda rank: masked(rank, 4), "no label of the whole epoch (2 steps) trains"),
        (lambda rank: [shifted(sample) for sample in named(rank, 8)], "labels look shifted already"),
        (lambda rank: named(rank, 8), None),
        (lambda rank: nameless(rank, 8), None),
        (lambda rank: [*LATE[:2], *LATE[8:]] if rank else named(1, 6), None),
        (lambda rank: CONSTANT, None),
    ],
)
def test_the_writer_is_warned_once(source_of, text):
    first, other = warned(source_of, epochs=2)
    assert other == []
    assert first == [] if text is None else len(first) == 1 and text in first[0], first


def test_samples_that_make_ranks_even_are_no_suspicion():
    """A DistributedSampler repeats up to R - 1 samples, in the last step of an epoch."""
    data = named(0, 10)

    def loader(rank):
        return DataLoader(data, batch_size=None, sampler=DistributedSampler(data, num_replicas=4, rank=rank, shuffle=False))

    assert warned(loader, num_ranks=4, samples_per_step=3) == [[]] * 4
    assert warned(loader, num_ranks=4, samples_per_step=1) == [[]] * 4
    assert warned(loader, num_ranks=4, samples_per_step=1, lookahead=3) == [[]] * 4


@pytest.mark.parametrize("block", [True, False])
def test_ddp_without_sync_on_last_is_told_of_it(block):
    """By the scheduler's block, or, without one, by the model that a pack is handed to."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.unused = torch.nn.Embedding(128, 128), torch.nn.Linear(2, 2)

        def forward(self, input_ids):
            return self.embedding(input_ids)

    def fn(rank, num_ranks):
        model = torch.nn.parallel.DistributedDataParallel(Twice())
        config = SchedulerConfig(max_tokens=16, samples_per_step=4, timeout=30.0)
        groups = ProcessGroups.from_world()
        scheduler = PackingScheduler(named(rank, 8), config=config, adapter=TEXT, groups=groups)
        with scheduler if block else contextlib.closing(scheduler):
            for step in scheduler:
                for batch in step:
                    kwargs = {"input_ids": batch.input_ids} if block else batch.forward_kwargs(model)
                    step.loss(model(**kwargs), batch).backward()

    def notes(rank, num_ranks):
        try:
            fn(rank, num_ranks)
        except RuntimeError as error:
            return error.__notes__

    for found in run_ranks(notes, 2, backend="gloo"):
        assert len(found) == 1 and "with step.sync_on_last(model, batch)" in found[0]


def silence(rank, num_ranks):
    """Stop rank 1's process while the others' training waits; return what they are warned of, and the figures."""
    pids: list[int] = [0] * num_ranks
    torch.distributed.all_gather_object(pids, os.getpid())
    others = torch.distributed.new_group([0, 2])
    config = SchedulerConfig(max_tokens=64, samples_per_step=1, timeout=12.0, prefetch=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = iter(named(rank, 3))
        with PackingScheduler(source, config=config, adapter=TEXT, groups=ProcessGroups.from_world()) as scheduler:
            next(scheduler)
            next(scheduler)
            scheduler.state_dict()  # of an iterator: waits for what is prepared, so that the last step needs no other rank
            torch.distributed.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return [], ()
            deadline = time.monotonic() + 60
            while not caught and time.monotonic() < deadline:
                time.sleep(0.05)
            found = [str(one.message) for one in caught], next(scheduler).stats.silent_ranks
            torch.distributed.barrier(group=others)
            if rank == 0:
                os.kill(pids[1], signal.SIGCONT)
            return found


def test_a_silent_rank_is_named_while_training_waits():
    first, _, third = run_ranks(silence, 3, backend="gloo")
    for texts, silent in (first, third):
        assert silent == (1,) and len(texts) == 1
        assert texts[0].startswith("rank 1 (last: ") and "showed no sign of life for 6 s" in texts[0]

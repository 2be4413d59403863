"""A rank that fails, ends or disappears never leaves the others waiting."""

import os
import threading
import time
import traceback

import pytest
import torch.distributed as dist

from evenpack.core import EvenpackError, FieldShapeError, PeerFailedError, PeerLostError
from evenpack.scheduler.comm.transports.threads import MemoryTransport
from evenpack.scheduler.testing import RankError, run_ranks

from .helpers import drain, flat, open_scheduler, random_source, text_sample


def failing_source(after: int):
    """Yield samples, then raise."""
    for index in range(after):
        yield text_sample(5, index)
    raise OSError("disk on fire")


def steps_until_error(source, **settings):
    """Return the number of steps, and the error that ended them."""
    steps = 0
    with open_scheduler(source, **settings) as scheduler:
        try:
            for _ in scheduler:
                steps += 1
        except EvenpackError as error:
            return steps, type(error).__name__, str(error)
    return steps, None, None


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_source_that_raises_ends_every_rank_in_the_same_step(backend, prefetch, num_ranks):
    def fn(rank, num_ranks):
        source = failing_source(9) if rank == num_ranks - 1 else random_source(rank, 40)
        return steps_until_error(source, prefetch=prefetch)

    outcomes = run_ranks(fn, num_ranks, backend=backend)
    assert len(set(outcomes)) == 1
    steps, name, message = outcomes[0]
    assert (steps, name) == (2, "PeerFailedError")
    assert f"rank {num_ranks - 1} failed at step 2: OSError: disk on fire" in message


def test_the_rank_that_failed_keeps_the_cause():
    with open_scheduler(failing_source(0)) as scheduler, pytest.raises(PeerFailedError) as caught:
        next(scheduler)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("cause", [None, OSError("disk")])
def test_a_message_is_shown_once(cause):
    """What every rank raises is rebuilt from its text: on the rank that failed it would be its own cause."""

    def source():
        yield text_sample(5, 0)
        raise FieldShapeError("no such picture") from cause

    with open_scheduler(source()) as scheduler, pytest.raises(FieldShapeError) as caught:
        next(scheduler)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("no such picture\n") == 1 and "in source\n" in shown  # where it was raised, too
    assert caught.value.__cause__ is cause


def test_a_source_that_cannot_be_opened_is_reported_like_one_that_raises():
    class Closed:
        def __iter__(self):
            raise PermissionError("no entry")

    def fn(rank, num_ranks):
        return steps_until_error(Closed() if rank == 1 else random_source(rank, 8))

    outcomes = run_ranks(fn, 2)
    assert len(set(outcomes)) == 1
    assert outcomes[0][:2] == (0, "PeerFailedError") and "PermissionError: no entry" in outcomes[0][2]


@pytest.mark.parametrize(
    ("bad", "name", "text"),
    [
        ({"input_ids": [1] * 200, "sample_id": "long"}, "OversizeSampleError", "rank 1, sample 'long': 200 tokens"),
        ({"labels": [1]}, "MissingFieldError", "input_ids"),
        ({"input_ids": [1], "extra": 3}, "UndeclaredFieldError", "extra"),
        ({"input_ids": []}, "FieldShapeError", "rank 1, sample 1"),
        (7, "FieldShapeError", "int"),
    ],
)
def test_a_bad_sample_is_one_error_on_every_rank(bad, name, text):
    def fn(rank, num_ranks):
        return steps_until_error([text_sample(3, "good"), bad] if rank == 1 else random_source(rank, 8))

    outcomes = run_ranks(fn, 3)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == name and text in outcomes[0][2]


def test_a_rank_that_leaves_is_named_as_closed():
    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 40), prefetch=0) as scheduler:
            next(scheduler)
            if rank == 0:
                return None
            with pytest.raises(PeerLostError, match=r"rank 0 \(last: closed\)"):
                next(scheduler)

    run_ranks(fn, 2, backend="gloo")


@pytest.mark.parametrize(("absent", "names"), [([1], "rank 1 did"), ([0, 2], "rank 0, rank 2 did")])
def test_ranks_that_open_no_scheduler_are_named(absent, names):
    def fn(rank, num_ranks):
        dist.barrier()
        if rank not in absent:
            with pytest.raises(PeerLostError, match=f"^{names} not open a scheduler$") as caught:
                open_scheduler(random_source(rank, 8), timeout=3.0)
            assert caught.value.__cause__ is not None
        dist.barrier()

    run_ranks(fn, 3, backend="gloo")


def test_a_rank_that_opens_its_scheduler_too_late_learns_who_gave_up():
    def fn(rank, num_ranks):
        if rank == 1:
            dist.barrier()
        text = "^rank 1 did not open a scheduler$" if rank == 0 else r"^rank 0 \(last: closed\) stopped answering at the start"
        with pytest.raises(PeerLostError, match=text):
            open_scheduler([], timeout=1.0)
        if rank == 0:
            dist.barrier()

    run_ranks(fn, 2, backend="gloo")


def test_a_rank_that_leaves_while_settings_are_compared_is_named(monkeypatch):
    from evenpack.scheduler import setup

    def fn(rank, num_ranks):
        if rank == 1:
            monkeypatch.setattr(setup, "agree", lambda *_: os._exit(3))
        with pytest.raises(PeerLostError, match=r"^rank 1 \(last: .*\) stopped answering at the start of the scheduler$"):
            open_scheduler([], timeout=3600.0)

    outcomes = run_ranks(fn, 2, backend="gloo", return_exceptions=True)
    assert isinstance(outcomes[1], RankError) and outcomes[0] is None, outcomes


def test_the_words_of_a_backend_are_the_cause_alone():
    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 40), timeout=3600.0, prefetch=0) as scheduler:
            next(scheduler)
            if rank == 0:
                os._exit(3)
            with pytest.raises(PeerLostError, match=r"^rank 0 \(last: [a-z 0-9]+\) stopped answering at step 1$") as caught:
                next(scheduler)
            assert "failed" in str(caught.value.__cause__)

    outcomes = run_ranks(fn, 2, backend="gloo", return_exceptions=True)
    assert isinstance(outcomes[0], RankError) and outcomes[1] is None, outcomes


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_tokens": 256}, "max_tokens is 256, not 128"),
        ({"sync": "microbatch"}, "sync is 'microbatch', not 'step'"),
    ],
)
def test_ranks_with_other_settings_learn_which(settings, text):
    def fn(rank, num_ranks):
        with pytest.raises(EvenpackError, match="rank 2 differs from rank 0: " + text):
            open_scheduler([], **(settings if rank == 2 else {}))

    run_ranks(fn, 3)


def test_ranks_with_other_dtypes_learn_which():
    import torch

    from .helpers import VISION, image_sample

    def fn(rank, num_ranks):
        sample = image_sample([(1, 2, 2)], rank)
        if rank == 1:
            sample["pixel_values"] = sample["pixel_values"].to(torch.bfloat16)
        return steps_until_error([sample], adapter=VISION)

    outcomes = run_ranks(fn, 2)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == "FieldMismatchError"
    assert "'pixel_values' has several dtypes: rank 0: float32, rank 1: bfloat16" in outcomes[0][2]


def test_close_returns_while_the_worker_waits_for_a_peer(monkeypatch):
    """Rank 0's worker prepares the second step, which rank 1 never asks for."""
    read, waiting, closed = threading.Event(), threading.Event(), threading.Event()

    def source():
        for index in range(8):
            if index == 7:
                read.set()
            yield text_sample(5, index)

    def gather(transport, data, original=MemoryTransport.gather):
        if transport.rank == 0 and read.is_set():
            waiting.set()
        return original(transport, data)

    monkeypatch.setattr(MemoryTransport, "gather", gather)

    def fn(rank, num_ranks):
        scheduler = (
            open_scheduler(source(), timeout=3600.0, prefetch=1)
            if rank == 0
            else open_scheduler(random_source(rank, 8), timeout=3600.0, prefetch=0)
        )
        next(scheduler)
        if rank == 1:
            assert closed.wait(60), "the other rank's close waits for this rank"
            scheduler.close()
            return
        assert waiting.wait(60)
        scheduler.close()
        closed.set()
        with pytest.raises(RuntimeError, match="closed"):
            next(scheduler)

    run_ranks(fn, 2, timeout=120)
    assert closed.is_set()


def test_threads_end_with_the_scheduler():
    before = set(threading.enumerate())
    scheduler = open_scheduler(random_source(0, 40), prefetch=2)
    next(scheduler)
    scheduler.close()
    scheduler.close()
    assert set(threading.enumerate()) <= before


def test_every_sample_once_when_sources_end_early():
    def fn(rank, num_ranks):
        return drain(open_scheduler(random_source(rank, [0, 5, 30][rank])))

    outcomes = run_ranks(fn, 3)
    assert len({len(steps) for steps in outcomes}) == 1
    names = list(flat(outcomes))
    assert sorted(names) == sorted(f"{rank}-{index}" for rank, count in enumerate([0, 5, 30]) for index in range(count))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("cannot read " + os.fsdecode(b"caf\xe9.jpg")), "cannot read caf"),
        (SystemExit(3), "SystemExit: 3"),
        (type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})(), "its message cannot be read"),
        (ValueError("x" * 100_000), "ValueError: xxx"),
    ],
)
def test_any_error_of_a_source_reaches_every_rank(error, text):
    def source():
        yield text_sample(5, 0)
        raise error

    def fn(rank, num_ranks):
        return steps_until_error(source() if rank == 1 else random_source(rank, 40))

    outcomes = run_ranks(fn, 2)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == "PeerFailedError" and text in outcomes[0][2]


def test_a_loop_that_is_left_without_closing_ends_the_process_cleanly():
    import subprocess
    import sys

    code = """
from evenpack.models import adapter_for
from evenpack.scheduler import PackingScheduler, SchedulerConfig
import itertools, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
source = ({"input_ids": [1] * 5} for _ in itertools.count())
scheduler = PackingScheduler(source, config=SchedulerConfig(max_tokens=8, samples_per_step=1), adapter=adapter_for("text"))
for number, step in enumerate(scheduler):
    if number == 3:
        break
print("end")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr[-2000:]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_close_waits_for_one_item_of_a_slow_source_not_for_a_step(num_ranks, recwarn):
    """Forty items make a step; in the second one each takes its time from the moment when the scheduler is closed."""
    closing = [threading.Event() for _ in range(num_ranks)]

    def slow(rank, read):
        for index in range(80):
            if index > 40:
                assert closing[rank].wait(60)
                time.sleep(0.05)
            read.append(index)
            yield text_sample(5, f"{rank}-{index}")

    def fn(rank, num_ranks):
        read = []
        scheduler = open_scheduler(slow(rank, read), samples_per_step=40, prefetch=1)
        next(scheduler)
        closing[rank].set()
        scheduler.close()
        return len(read)

    assert max(run_ranks(fn, num_ranks)) < 80
    assert not [warning for warning in recwarn if "keeps running" in str(warning.message)]

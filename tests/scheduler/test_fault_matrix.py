"""Every stage, every kind of fault, every rank, every transport: each live rank ends with the right error, at once."""

import os
import signal
from functools import partialmethod

import msgspec
import pytest

from evenpack.core import EvenpackError, PeerLostError, PlanMismatchError
from evenpack.scheduler import plan_step
from evenpack.scheduler.comm.transports import DeviceTransport, HostTransport
from evenpack.scheduler.comm.transports.threads import MemoryTransport
from evenpack.scheduler.testing import RankError, run_ranks

from .helpers import open_scheduler, random_source, text_sample

#: No collective ends by its time-out: what did not end at once exceeds the limit of `run_ranks`, and is an error.
TIMEOUT = 3600.0
FAULT_STEP = 2


class Planted(Exception):
    """The fault."""


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise Planted("planted")


def faulty_source(rank, action):
    """Yield samples; act while the faulty step is collected."""
    for index, sample in enumerate(random_source(rank, 60)):
        if index == 4 * FAULT_STEP + 1:
            action()
        yield sample


def bad_sample_source(rank):
    """Yield samples; one of the faulty step cannot be described."""
    for index, sample in enumerate(random_source(rank, 60)):
        yield {**sample, "input_ids": sample["input_ids"].float()} if index == 4 * FAULT_STEP else sample


def faulty_planner(action):
    """Return a planner that acts in the faulty step."""
    calls = []

    def planner(*args, **kwargs):
        calls.append(1)
        if len(calls) == FAULT_STEP + 1:
            action()
        return plan_step(*args, **kwargs)

    return planner


@pytest.fixture
def break_exchange(monkeypatch):
    """Return a function: one rank acts inside the exchange of the faulty step, after the bytes were written."""

    def plant(bad_rank, action):
        calls = []

        def exchange(transport, parts, receive_sizes, original):
            if transport.rank == bad_rank:
                calls.append(1)
                if len(calls) == FAULT_STEP + 1:
                    action(parts)
            return original(transport, parts, receive_sizes)

        for kind in (MemoryTransport, HostTransport, DeviceTransport):
            monkeypatch.setattr(kind, "exchange", partialmethod(exchange, original=kind.exchange))

    return plant


def corrupt(parts):
    for part in parts:
        part.numpy()[::64] ^= 1


def run_with_fault(rank, bad_rank, stage, action, **settings):
    """Train until an error; return the step it came in, its kind and its text."""
    source, planner = random_source(rank, 60), None
    if rank == bad_rank:
        source = {"read": faulty_source(rank, action), "describe": bad_sample_source(rank)}.get(stage, source)
        planner = faulty_planner(action) if stage == "plan" else None
    if settings.pop("outsized", False):
        source = [text_sample(5 + 90 * (rank == 0), f"{rank}-{index}") for index in range(60)]
    steps = 0
    with open_scheduler(source, planner=planner, timeout=TIMEOUT, movement="free", **settings) as scheduler:
        try:
            for _ in scheduler:
                steps += 1
                if rank == bad_rank and stage == "train" and steps == FAULT_STEP:
                    action()
        except (EvenpackError, Planted) as error:
            return steps, type(error).__name__, str(error)
    return steps, None, ""


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("backend", "num_ranks", "transport"), [("threads", 32, "host"), ("gloo", 3, "host"), ("gloo", 3, "device")]
)
@pytest.mark.parametrize("stage", ["read", "describe"])
@pytest.mark.parametrize("bad_rank", [0, -1])
def test_what_a_rank_raises_ends_all_in_the_same_step(stage, bad_rank, backend, num_ranks, transport, prefetch):
    bad = bad_rank % num_ranks

    def fn(rank, num_ranks):
        return run_with_fault(rank, bad, stage, fail, prefetch=prefetch, transport=transport)

    outcomes = run_ranks(fn, num_ranks, backend=backend)
    assert len(set(outcomes)) == 1
    steps, name, text = outcomes[0]
    assert steps == FAULT_STEP and f"rank {bad}" in text
    assert name == ("PeerFailedError" if stage == "read" else "FieldShapeError")


@pytest.mark.parametrize("stage", ["read", "plan", "exchange", "train"])
@pytest.mark.parametrize(
    ("num_ranks", "bad", "transport"),
    [
        (2, 0, "device"),
        (4, 3, "host"),
        pytest.param(2, 0, "host", marks=pytest.mark.full),
        pytest.param(4, 3, "device", marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_is_named_at_once(stage, num_ranks, bad, transport, break_exchange):
    if stage == "exchange":
        break_exchange(bad, lambda parts: kill())

    def fn(rank, num_ranks):
        return run_with_fault(rank, bad, stage, kill, prefetch=0, transport=transport)

    outcomes = run_ranks(fn, num_ranks, backend="gloo", return_exceptions=True)
    for rank, outcome in enumerate(outcomes):
        if rank == bad:
            assert isinstance(outcome, RankError)
        else:
            steps, name, text = outcome
            # Point to point, a rank that has no business with the dead one meets it in the next gather.
            last = FAULT_STEP + (transport == "device" and stage in ("plan", "exchange"))
            assert FAULT_STEP <= steps <= last and name == PeerLostError.__name__, outcome
            assert text.startswith(f"rank {bad} (last: ")


@pytest.mark.parametrize(("backend", "num_ranks"), [("threads", 8), ("gloo", 3)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_planner_that_fails_on_one_rank_ends_all(backend, num_ranks, prefetch):
    def fn(rank, num_ranks):
        return run_with_fault(rank, 1, "plan", fail, prefetch=prefetch)

    for rank, (steps, name, text) in enumerate(run_ranks(fn, num_ranks, backend=backend)):
        assert steps == FAULT_STEP
        assert name == ("Planted" if rank == 1 else PeerLostError.__name__)
        assert rank == 1 or backend == "threads" or "rank 1 (last: closed)" in text


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("backend", "num_ranks", "transport"), [("threads", 4, "host"), ("gloo", 2, "host"), ("gloo", 2, "device")]
)
def test_a_corrupt_block_ends_all(backend, num_ranks, transport, prefetch, break_exchange):
    """The rank that receives it raises at once and tells the others, who are a step ahead."""
    break_exchange(0, corrupt)

    def fn(rank, num_ranks):
        return run_with_fault(rank, 0, "exchange", None, prefetch=prefetch, transport=transport, outsized=True)

    outcomes = run_ranks(fn, num_ranks, backend=backend)
    assert {outcome[1] for outcome in outcomes} == {"CorruptBlockError"}
    assert {outcome[0] for outcome in outcomes} <= {FAULT_STEP, FAULT_STEP + 1}


def test_ranks_that_plan_differently_are_stopped():
    """As on machines of another kind: nothing moves, so that only the digest in the next gather can tell."""

    def fn(rank, num_ranks):
        def planner(table, **kwargs):
            plan = plan_step(table, **kwargs)
            return msgspec.structs.replace(plan, digest=b"elsewise") if rank == 1 else plan

        source = [text_sample(5 + index, f"{rank}-{index}") for index in range(12)]
        with open_scheduler(source, planner=planner, scope="rank", timeout=TIMEOUT, prefetch=0) as scheduler:
            next(scheduler)
            with pytest.raises(PlanMismatchError, match="planned the last step differently"):
                next(scheduler)

    run_ranks(fn, 2)

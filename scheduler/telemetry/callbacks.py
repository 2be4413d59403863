"""What is told about every step as it is handed out, and the clock that times the hand-outs."""

import time
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from ..step import PackedStep
from .stats import StepStats


@runtime_checkable
class StepCallback(Protocol):
    """Is called with every step on the training thread, inside `next(scheduler)`, before the loop gets the step.

    Each rank calls its own; whoever writes for the whole group asks `step.is_writer`. A callback must not take part in
    collectives, and must not keep the step: its samples would stay in memory.

    Where it has a method `close()`, the scheduler's `close()` calls it.
    """

    def __call__(self, step: PackedStep, /) -> None:
        """Take note of a step."""
        ...


class Callbacks:
    """Calls the callbacks of a scheduler, each once for every step.

    What a callback raises comes out of `next(scheduler)` as it is, with a note that names the callback and the step (a
    `StopIteration`, which would end the loop, as a `RuntimeError`). The step is not lost: the next call hands it out, to the
    callbacks that were not called for it yet.

    Args:
        callbacks: in the order in which they are called.

    Raises:
        ValueError: something that cannot be called.
    """

    def __init__(self, callbacks: Iterable[StepCallback]) -> None:
        self._callbacks = list(callbacks)
        self._called = 0
        for callback in self._callbacks:
            if not callable(callback) or isinstance(callback, type):
                raise ValueError(f"a callback takes a step, {callback!r} is no such function or object")

    def begin(self) -> None:
        """Another step is handed out."""
        self._called = 0

    def __call__(self, step: PackedStep) -> None:
        """Call those that were not called since `begin`."""
        while self._called < len(self._callbacks):
            callback = self._callbacks[self._called]
            self._called += 1
            try:
                callback(step)
            except StopIteration as error:  # would end the loop that iterates, without a word
                raise RuntimeError(
                    f"the callback {callback!r} raised StopIteration at step {step.stats.step}; the step is handed out next"
                ) from error
            except BaseException as error:
                error.add_note(f"raised by the callback {callback!r} at step {step.stats.step}; the step is handed out next")
                raise

    def close(self) -> None:
        """Close those that can be closed, all of them even if one raises; the first error is raised then."""
        first: Exception | None = None
        for callback in self._callbacks:
            try:
                getattr(callback, "close", lambda: None)()
            except Exception as error:
                error.add_note(f"raised by close() of the callback {callback!r}")
                first = first or error
        if first is not None:
            raise first


class StepClock:
    """Times the hand-outs of one scheduler.

    The interval that ends with a step's hand-out began with the hand-out before it: it holds the training of the step before,
    and the wait for this one. The first step of an epoch has none, so what is done between epochs counts nowhere.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._asked = 0.0

    def asked(self) -> None:
        """The training thread begins to wait for a step."""
        self._asked = time.monotonic()

    def handed_out(self, stats: StepStats) -> StepStats:
        """Return the figures of a step that came just now, with its times."""
        now = time.monotonic()
        seconds = rate = None
        if self._last is not None:
            before, tokens = self._last
            seconds = max(now - before, 1e-9)
            rate = tokens / seconds
        self._last = (now, stats.tokens)
        return msgspec.structs.replace(stats, exposed_seconds=now - self._asked, step_seconds=seconds, tokens_per_second=rate)

    def epoch_ended(self) -> None:
        """The time until the next step belongs to none."""
        self._last = None

"""Callbacks, each called with every step as it is handed out."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ..step import PackedStep


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

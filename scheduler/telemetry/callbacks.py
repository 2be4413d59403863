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


def check_callbacks(callbacks: Iterable[StepCallback]) -> list[StepCallback]:
    """Return callbacks in the order in which they are called.

    Raises:
        ValueError: something that cannot be called.
    """
    checked = list(callbacks)
    for callback in checked:
        if not callable(callback) or isinstance(callback, type):
            raise ValueError(f"a callback takes a step, {callback!r} is no such function or object")
    return checked


def call(callback: StepCallback, step: PackedStep) -> None:
    """Call one callback.

    What it raises comes out of `next(scheduler)` as it is, with a note that names the callback and the step; a `StopIteration`,
    which would end the loop without a word, as a `RuntimeError`.
    """
    try:
        callback(step)
    except StopIteration as error:
        raise RuntimeError(
            f"the callback {callback!r} raised StopIteration at step {step.stats.step}; the step is handed out next"
        ) from error
    except BaseException as error:
        error.add_note(f"raised by the callback {callback!r} at step {step.stats.step}; the step is handed out next")
        raise


def close_callbacks(callbacks: Iterable[StepCallback]) -> None:
    """Close those that can be closed, all of them even if one raises; the first error is raised then."""
    first: Exception | None = None
    for callback in callbacks:
        try:
            getattr(callback, "close", lambda: None)()
        except Exception as error:
            error.add_note(f"raised by close() of the callback {callback!r}")
            first = first or error
    if first is not None:
        raise first

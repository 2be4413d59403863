"""The protocol of a resumable source."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """An iterable of samples, or of lists of samples, that can say where it stands.

    What a source yielded it must not change or use again: a sample is read until its step is over.

    A source of one's own needs these three methods, and is then used as it is. It may also have
    `load_state_dicts(states)`, which takes the states of another number of ranks and takes up this rank's share of what they
    had not read yet.
    """

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; the first time after `load_state_dict`, go on from the loaded position."""
        ...

    def state_dict(self) -> Any:
        """Return the position after the last item that was yielded; None if the source cannot go back.

        Behind the last item of an epoch it is the beginning of the next.
        """
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go to a position that `state_dict` returned, in this process or in another."""
        ...


def skip(iterator: Iterator[Any], count: int) -> None:
    """Read and discard the items before a loaded position.

    Raises:
        ValueError: the source ends before it.
    """
    found = sum(1 for _ in itertools.islice(iterator, count))
    if found < count:
        raise ValueError(f"the source is shorter than when the state was saved: read {found} items, the state needs {count}")

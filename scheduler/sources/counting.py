"""Sources without a state of their own: read again from the start, or never again."""

from collections.abc import Iterable, Iterator
from typing import Any

from .base import skip


class CountingSource:
    """An iterable that yields the same items whenever it is read: its position is the number of items read.

    Resuming reads and discards that many items, which is exact and takes as long as reading them did.

    Args:
        items: a list, a map-style or deterministic iterable dataset, ...
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._count = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        self._count, self._skip = self._skip, 0
        iterator = iter(self._items)
        if self._count:
            skip(iterator, self._count)
        for item in iterator:
            self._count += 1
            yield item
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int]:
        """Return the number of items read in this epoch."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip as many items when next read."""
        self._count = self._skip = state["count"]


class IteratorSource:
    """An iterator: it cannot go back, so what was read and not yet trained on is saved with the scheduler's state.

    After a resume, the user brings an iterator that stands where the old one stood.

    Args:
        iterator: yields samples or lists of samples, once.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def state_dict(self) -> None:
        """Return None: an iterator cannot go back."""
        return None

    def load_state_dict(self, state: None) -> None:
        """Do nothing: the iterator stands where the user left it."""

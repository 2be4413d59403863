"""Which characters of the rendered text each token covers."""

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np


class Extents(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Characters covered by each token of a text whose media placeholders were expanded.

    Attributes:
        starts: int64 [L], never descending: first character in the expanded text.
        stops: int64 [L], never descending: one past the last character; equal to `starts` for tokens that were added.
        ends: int64 [n], where each expanded placeholder ended in the text before.
        gains: int64 [n + 1], characters gained by expanding the first k placeholders.
    """

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray
    gains: np.ndarray

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """Return the span of tokens that lie wholly inside characters `start` to `stop` of the text before expansion.

        A token that straddles an end of the span is left out: at inference the other part of it would be given.

        Example:
            >>> extents = token_extents([(0, 1), (1, 9), (9, 21)])
            >>> extents.tokens(0, 1), extents.tokens(1, 21), extents.tokens(0, 8)
            ((0, 1), (1, 3), (0, 1))
        """
        start, stop = (int(at + self.gains[np.searchsorted(self.ends, at, "right")]) for at in (start, stop))
        first = int(np.searchsorted(self.starts, start, "left"))
        last = int(np.searchsorted(self.stops, stop, "right"))
        while last > first and self.starts[last - 1] == self.stops[last - 1] == stop:
            last -= 1  # an added token right behind the span covers nothing of it
        return first, max(first, last)

    def overlapping(self, start: int, stop: int) -> slice:
        """Return the tokens that cover any character from `start` to `stop` of the expanded text."""
        first = int(np.searchsorted(self.stops, start, "right"))
        return slice(first, max(first, int(np.searchsorted(self.starts, stop, "left"))))


def token_extents(offsets: Iterable[Sequence[int]], replacements: Iterable[tuple[int, int, int]] = ()) -> Extents:
    """Return the extents of tokens from a tokenizer's offsets.

    Byte-level tokenizers may trim white space from offsets, so that a line break covers nothing. A text leaves no gaps:
    each token is taken to begin where the one before ended.

    Args:
        offsets: (start, stop) of each token in the expanded text; (0, 0) for tokens that were added.
        replacements: per expanded placeholder, in order: start and stop before, and length after.

    Example:
        >>> token_extents([(0, 5), (6, 6), (6, 9)]).starts.tolist()
        [0, 5, 6]
    """
    given = np.fromiter(itertools.chain.from_iterable(offsets), np.int64).reshape(-1, 2)
    stops = np.maximum.accumulate(given[:, 1]) if len(given) else given[:, 1]
    before = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
    added = given[:, 1] == 0
    starts = np.where(added, before, np.minimum(given[:, 0], before))
    starts = np.maximum.accumulate(starts) if len(starts) else starts
    table = np.array(list(replacements), np.int64).reshape(-1, 3)
    gains = np.concatenate([np.zeros(1, np.int64), np.cumsum(table[:, 2] - (table[:, 1] - table[:, 0]))])
    return Extents(starts=starts, stops=stops, ends=table[:, 1], gains=gains)

"""A source: an iterable of samples that can say where it stands."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Striped:
    """Reads every R-th document of a list, in another order in every epoch, and resumes exactly.

    Args:
        documents: token ids of all documents, the same on every rank.
        rank: this rank.
        num_ranks: R.
    """

    def __init__(self, documents: Sequence[Sequence[int]], *, rank: int, num_ranks: int) -> None:
        self._documents, self._rank, self._num_ranks = documents, rank, num_ranks
        self._epoch, self._next = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(len(self._documents), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        mine = order[self._rank :: self._num_ranks]
        while self._next < len(mine):
            number = mine[self._next]
            self._next += 1  # before the sample is handed out: the position is the one after it
            yield {"input_ids": self._documents[number], "sample_id": number}
        self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last sample that was yielded."""
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._epoch, self._next = state["epoch"], state["next"]

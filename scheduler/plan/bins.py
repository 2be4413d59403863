"""The packs while they are being filled."""

from typing import Self

import msgspec
import numpy as np

from .problem import Problem
from .table import Ints


class Bins(msgspec.Struct, kw_only=True, eq=False):
    """R x M packs, bin `rank * M + index`, and what is in them; the kernels update the arrays in place.

    Attributes:
        count: M.
        bin_of: `[N]` bin of each sample, -1 where not placed.
        room, places: `[B]` padded tokens and samples that still fit.
    """

    count: int
    bin_of: Ints
    room: Ints
    places: Ints

    @classmethod
    def empty(cls, problem: Problem, count: int, reserve: bool) -> Self:
        """Empty packs; with `reserve`, they leave room for the dummy media that they may need."""
        num_bins = problem.num_ranks * count
        room = np.full(num_bins, problem.capacity, np.int64)
        places = np.full(num_bins, problem.limit, np.int64)
        if reserve:
            every = problem.config.sync == "microbatch"
            flags = problem.modalities if every else problem.trained
            some = slice(None) if every else slice(count - 1, None, count)
            room[some] -= problem.dummy_size[flags]
            places[some] -= problem.dummy_count[flags]
        return cls(count=count, bin_of=np.full(len(problem.size), -1, np.int64), room=room, places=places)

    def loads(self, problem: Problem) -> Ints:
        """`[B, K]` cost per phase of each pack."""
        # One more bin, for samples that have none; sums below 2**53 are exact in float64.
        bins = np.where(self.bin_of < 0, len(self.room), self.bin_of)
        sums = [np.bincount(bins, problem.cost[:, k], len(self.room) + 1)[:-1] for k in range(problem.num_phases)]
        loads: Ints = np.stack(sums, axis=1).astype(np.int64)
        return loads

    def relabel(self, new: Ints) -> None:
        """Give every bin b the number `new[b]`."""
        placed = self.bin_of >= 0
        self.bin_of[placed] = new[self.bin_of[placed]]
        old = np.empty_like(new)
        old[new] = np.arange(len(new))
        self.room, self.places = self.room[old], self.places[old]

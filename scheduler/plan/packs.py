"""The packs while they are being filled."""

from typing import Self

import msgspec
import numpy as np

from .kernels import scan
from .kernels.jit import Bins, Window
from .problem import Problem
from .table import Ints


class Packs(msgspec.Struct, kw_only=True, eq=False):
    """R x M packs while they are filled, bin `rank * M + index`; kernels update the arrays in place.

    Attributes:
        count: M.
        bin_of: `[N]` bin of each sample, -1 where not placed.
        free_tokens: `[B]` padded tokens that still fit.
        free_slots: `[B]` samples that still fit.
    """

    count: int
    bin_of: Ints
    free_tokens: Ints
    free_slots: Ints

    @classmethod
    def empty(cls, problem: Problem, count: int, reserve: bool) -> Self:
        """Empty packs; with `reserve`, they leave room for the dummy media that they may need."""
        num_bins = problem.num_ranks * count
        free_tokens = np.full(num_bins, problem.capacity, np.int64)
        free_slots = np.full(num_bins, problem.limit, np.int64)
        if reserve:
            # At step sync dummies go into the last micro-batch of a rank only.
            every = problem.config.sync == "microbatch"
            flags = problem.modalities if every else problem.trained
            some = slice(None) if every else slice(count - 1, None, count)
            free_tokens[some] -= problem.dummy_size[flags]
            free_slots[some] -= problem.dummy_count[flags]
        bin_of = np.full(len(problem.size), -1, np.int64)
        return cls(count=count, bin_of=bin_of, free_tokens=free_tokens, free_slots=free_slots)

    @property
    def bins(self) -> Bins:
        """The arrays as kernels take them."""
        return Bins(self.free_tokens, self.free_slots, self.bin_of)

    @property
    def rank_of(self) -> Ints:
        """`[N]` rank of each sample, -1 where not placed."""
        return self.bin_of // self.count

    def window(self, first: int = 0, last: int | None = None) -> Window:
        """Micro-batches [first, last), all from `first` on by default, as kernels take them."""
        return Window(first, self.count if last is None else last, self.count)

    def unplaced(self, order: Ints) -> Ints:
        """Those of the samples `order` that have no pack yet."""
        return order[self.bin_of[order] < 0]

    def loads(self, problem: Problem) -> Ints:
        """`[R, M, K]` cost per phase of each pack."""
        bins = len(self.free_tokens)
        sums = [scan.sums(self.bin_of, problem.cost[:, k], bins) for k in range(problem.num_phases)]
        return np.stack(sums, axis=1).reshape(problem.num_ranks, self.count, -1)

    def order_at_home(self, problem: Problem) -> None:
        """Renumber each rank's packs, costliest first: like meets like at every index."""
        ranks, count = problem.num_ranks, self.count
        order = np.argsort(-self.loads(problem).sum(axis=2), axis=1, kind="stable")
        new = np.empty((ranks, count), np.int64)
        np.put_along_axis(new, order, np.arange(count)[None, :] + np.arange(ranks)[:, None] * count, axis=1)
        self.relabel(new.reshape(-1))

    def relabel(self, new: Ints) -> None:
        """Give every bin b the number `new[b]`."""
        placed = self.bin_of >= 0
        self.bin_of[placed] = new[self.bin_of[placed]]
        # `new` is a permutation, and sorting it inverts it.
        old = np.argsort(new)
        self.free_tokens, self.free_slots = self.free_tokens[old], self.free_slots[old]

"""The plan of a step: where every sample goes, what it costs, and how near that is to the best."""

import msgspec
import numpy as np
import numpy.typing as npt

from .table import Ints


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A planned step of R ranks x M micro-batches; all arrays are read-only.

    Attributes:
        rank: `[N]` int64, rank of each sample, -1 where a policy dropped it.
        microbatch: `[N]` int64, micro-batch of each sample on its rank, -1 where dropped.
        num_microbatches: M, the same on every rank.
        tokens: `[R, M]` int64, real tokens of the samples.
        padded: `[R, M]` int64, padded tokens with tails and dummies: what the pack occupies.
        cost: `[R, M, K]` int64, cost per phase, dummy media included.
        value: the objective, with `microbatch_cost * M` and the pipeline term; a time where ranks differ in speed.
        lower_bound: no plan has a lower objective than this.
        gap: `value / lower_bound - 1`.
        imbalance: `step`: largest over mean of the ranks' sums; `microbatch`: sum of the largest over total / R. Where ranks
            differ in speed: of their times, over that of the whole work in proportion to speed.
        moved_bytes: bytes of the samples that leave their home.
        moved_bytes_lower_bound: bytes that any plan this good, with the same M, must move.
        num_pairs: ordered pairs of different ranks that exchange samples.
        dummy_media: `[R, M]` int64, bit flags of the dummy media items that the pack needs.
        is_dummy: `[R, M]` bool, packs that hold no sample.
        digest: 8 bytes over the assignment and the planner's code version.
    """

    rank: Ints
    microbatch: Ints
    num_microbatches: int
    tokens: Ints
    padded: Ints
    cost: Ints
    value: int
    lower_bound: int
    gap: float
    imbalance: float
    moved_bytes: int
    moved_bytes_lower_bound: int
    num_pairs: int
    dummy_media: Ints
    is_dummy: npt.NDArray[np.bool_]
    digest: bytes
    _order: Ints
    _starts: Ints

    @property
    def num_ranks(self) -> int:
        """R, the number of ranks."""
        return len(self.tokens)

    @property
    def num_dropped(self) -> int:
        """Samples that the policy `oversize` left out of the step."""
        return int(np.count_nonzero(self.rank < 0))

    def ids(self, rank: int, microbatch: int) -> Ints:
        """Samples of one pack, in pack order.

        Args:
            rank: from 0 to R - 1.
            microbatch: from 0 to M - 1.

        Returns:
            `[S]` int64 row numbers, a fresh array that the caller may change.

        Raises:
            IndexError: a rank or micro-batch outside the plan.
        """
        if not (0 <= rank < self.num_ranks and 0 <= microbatch < self.num_microbatches):
            raise IndexError(
                f"the plan has {self.num_ranks} ranks x {self.num_microbatches} micro-batches, "
                f"asked for rank {rank}, micro-batch {microbatch}"
            )
        pack = rank * self.num_microbatches + microbatch
        return self._order[self._starts[pack] : self._starts[pack + 1]].copy()

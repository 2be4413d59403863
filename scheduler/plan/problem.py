"""The integers that the solvers see."""

from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from .config import MEDIA_BITS, MediaTowers, PlanConfig
from .integers import descending
from .table import Ints

#: Costs and tokens of a step add up to less than this, so int64 never overflows and float64 holds every sum exactly. A
#: quotient of two such sums is rounded once, to the nearest float64, by IEEE 754: it is the same on every machine.
LIMIT = 2**53
#: Steps of more samples than this are planned with less care: time counts more than the last thousandth.
LARGE = 40_000
#: Pairs of samples looked at by one call of `kernels.refine`: per sample, and besides.
WORK_PER_SAMPLE, WORK = 500, 5_000_000
#: Number of different sets of modalities, as bit flags.
NUM_SETS = 1 << len(MEDIA_BITS)


class Problem(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The samples to place, without those that the oversize policy dropped.

    `size` is in padded tokens; `weight` is the cost summed over phases; `limit` is the most items of a pack, the tail not
    counted. `trained_towers` holds, for each, bit flags of the media that run it, and the bit of the dummy that does so where
    there is none of them. `dummy_size`, `dummy_cost` and `dummy_count` are indexed by a set of modalities (bit flags).

    What a part of a larger step knows of the rest, it says by overriding `is_large`, `work`, `media_elsewhere`,
    `cost_elsewhere` and `raised` (`two_level.sharing.PodProblem`); here the step is all there is.
    """

    config: PlanConfig
    towers: MediaTowers
    kept: Ints
    size: Ints
    cost: Ints
    weight: Ints
    nbytes: Ints
    home: Ints
    media: Ints
    num_ranks: int
    capacity: int
    limit: int
    align: int
    pack_align: int
    trained_towers: tuple[tuple[int, int], ...]
    dummy_size: Ints
    dummy_cost: Ints
    dummy_count: Ints
    dummy_known: int
    node: Ints
    allowed: npt.NDArray[np.bool_] | None

    @property
    def is_large(self) -> bool:
        """Whether time counts more than the last thousandth."""
        return len(self.size) > LARGE

    @property
    def work(self) -> int:
        """Most pairs of samples that one call of `kernels.refine` looks at: a bound on its time."""
        return WORK_PER_SAMPLE * len(self.size) + WORK

    @property
    def media_elsewhere(self) -> int:
        """Bit flags of the media that ranks outside this problem may carry in any micro-batch."""
        return 0

    def cost_elsewhere(self, index: int) -> Ints | int:
        """Cost per phase that a micro-batch has on ranks outside this problem."""
        return 0

    def raised(self, largest: Ints) -> Ints:
        """`[M, K]` largest costs, raised to what every micro-batch may cost because of ranks outside this problem."""
        return largest

    @property
    def num_phases(self) -> int:
        return int(self.cost.shape[1])

    @property
    def trained(self) -> int:
        """Bit flags of the dummies that a micro-batch without media needs."""
        return sum(dummy for _, dummy in self.trained_towers)

    @property
    def modalities(self) -> int:
        """Bit flags of all media in the step."""
        return int(np.bitwise_or.reduce(self.media, initial=self.media_elsewhere))

    @property
    def allowed_or_any(self) -> npt.NDArray[np.bool_]:
        """`allowed`, or `[0, 0]` where any rank may send to any: the form that kernels take."""
        return self.allowed if self.allowed is not None else np.zeros((0, 0), np.bool_)

    @cached_property
    def sizes(self) -> Ints:
        """`[N]` padded tokens, ascending."""
        return np.sort(self.size)

    @cached_property
    def weights(self) -> Ints:
        """`[N]` costs over all phases, heaviest first."""
        return np.sort(self.weight)[::-1]

    @cached_property
    def by_weight(self) -> Ints:
        """`[N]` samples by their cost over all phases, heaviest first."""
        return descending(self.weight)

    @cached_property
    def by_size(self) -> Ints:
        """`[N]` samples by padded tokens, longest first."""
        return descending(self.size)

    @cached_property
    def by_cost(self) -> list[Ints]:
        """Per phase `[N]` samples by cost, heaviest first."""
        if self.num_phases == 1:
            return [self.by_weight]
        return [descending(self.cost[:, k]) for k in range(self.num_phases)]

    @cached_property
    def by_density(self) -> list[Ints]:
        """Per phase `[N]` samples by cost per padded token, densest first."""
        return [np.argsort(-(self.cost[:, k] / self.size), kind="stable") for k in range(self.num_phases)]

    @cached_property
    def by_share(self) -> Ints:
        """`[N]` samples by their largest cost relative to the phase's sum, heaviest first."""
        if self.num_phases == 1:
            return self.by_weight
        return np.argsort(-self._shares.max(axis=1), kind="stable")

    @cached_property
    def main_phase(self) -> Ints:
        """`[N]` phase in which a sample weighs most, relative to the phase's sum."""
        if self.num_phases == 1:
            return np.zeros(len(self.size), np.int64)
        phases: Ints = np.argmax(self._shares, axis=1).astype(np.int64)
        return phases

    @property
    def _shares(self) -> npt.NDArray[np.float64]:
        shares: npt.NDArray[np.float64] = self.cost / np.maximum(self.cost.sum(axis=0), 1)
        return shares

    def subset(self, index: npt.NDArray[Any]) -> Self:
        """The same problem with some of its samples; `kept` then counts positions in this problem."""
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index
        # A new object: cached orders do not carry over.
        return msgspec.structs.replace(
            self,
            kept=index.astype(np.int64),
            size=self.size[index],
            cost=self.cost[index],
            weight=self.weight[index],
            nbytes=self.nbytes[index],
            home=self.home[index],
            media=self.media[index],
        )

"""How kernels are compiled, and the named tuples that they take.

Numba passes a tuple as fast as its arrays one by one. Inside a loop a use of `tuple.array` counts a reference each time, which
costs more than the rest of a short loop: kernels unpack tuples first.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from ..table import Bools, Ints

#: In place of `[R, R]` bool, which rank may send to which: no rank may send to another, or every rank may, by the kernel.
NO_PAIRS: Bools = np.zeros((0, 0), np.bool_)


def compiled(function: Any) -> Any:
    """Compile without the GIL, and cache on disk where some folder can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)


class Items(NamedTuple):
    """The samples.

    Attributes:
        weight: `[N]` cost over all phases.
        cost: `[N, K]` cost per phase.
        size: `[N]` padded tokens.
        nbytes: `[N]` bytes that move with the sample.
        home: `[N]` rank that brought it.
    """

    weight: Ints
    cost: Ints
    size: Ints
    nbytes: Ints
    home: Ints


class Bins(NamedTuple):
    """What packs still take, and which samples they hold; kernels update all three.

    Attributes:
        free_tokens: `[B]` padded tokens that still fit.
        free_slots: `[B]` samples that still fit.
        bin_of: `[N]` pack of each sample, -1 where it has none.
    """

    free_tokens: Ints
    free_slots: Ints
    bin_of: Ints


class Window(NamedTuple):
    """The micro-batches that may be filled: [first, last) of `num_microbatches`."""

    first: int
    last: int
    num_microbatches: int


class Gifts(NamedTuple):
    """Which samples ranks may give away.

    Attributes:
        by_rank: `[n]` samples, rank after rank as `rank_of` has them at the start.
        starts: `[R + 1]` where each rank's samples start in `by_rank`.
        movable: `[N]`.
        rank_of: `[N]` rank of each sample, updated.
    """

    by_rank: Ints
    starts: Ints
    movable: Bools
    rank_of: Ints


class RankLoads(NamedTuple):
    """What ranks hold, `[R]` each and updated, and what they may hold: `[R]` cost each, and tokens."""

    weight: Ints
    tokens: Ints
    max_weight: Ints
    max_tokens: int


class Units(NamedTuple):
    """Packs, or whole ranks, that exchange samples within groups.

    Attributes:
        groups: `[G, S]` units of each group.
        bins_per_unit: unit u holds the bins from `u * bins_per_unit` on.
        excess: `[U, K]` load minus target of each unit, updated.
        goal: `[G, K]` excess that is good enough.
    """

    groups: Ints
    bins_per_unit: int
    excess: Ints
    goal: Ints


class Effort(NamedTuple):
    """How long exchanges go on.

    Attributes:
        rounds: most rounds of a group.
        pairs: most pairs of samples looked at per pair of units.
        patience: rounds without an exchange, each with other partners, before a group is left as it is.
        choices: partners that a unit looks at before it takes the best, then the cheapest exchange.
        work: most pairs of samples looked at in all.
    """

    rounds: int
    pairs: int
    patience: int
    choices: int
    work: int


class PodLoads(NamedTuple):
    """What pods hold of two quantities, `[P]` each and updated, and the most that they may hold of each."""

    load: Ints
    other: Ints
    max_load: Ints
    max_other: Ints

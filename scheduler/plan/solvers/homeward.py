"""Bring samples home where that costs nothing: packs of one index change ranks, samples of like cost change places.

At micro-batch sync it does not matter which rank computes a pack, so the packs of an index go to the ranks that brought
most of their bytes. Then every sample away from home looks at the packs of its home: it moves there alone, or changes
places with one of their samples. A change must keep every pack within what its index may cost, and keep the media of every
pack. Among those left the one that saves the most bytes wins. Passes over the samples end when one changes nothing.

Complexity: O(A P) for A samples away from home and P samples of a rank, times `MAX_HOMEWARD_PASSES`; R M log(R M) to assign
    packs.
Source: greedy weighted matching, at least half of the best (Avis 1983); exchanges: local search.
"""

from typing import Any

import numpy as np

from ..integers import scaled
from ..kernels import swap
from ..limits import MAX_HOMEWARD_PASSES
from ..packs import Packs
from ..problem import Problem


def packs_to_homes(problem: Problem, packs: Packs) -> None:
    """Assign the packs of every index to ranks again, each to a rank that brought much of it.

    Which rank computes a pack does not matter at micro-batch sync. Greedy, most bytes first, so at least half of what the
    best matching keeps.
    """
    if problem.speed is not None:
        return  # each pack was filled for the speed of its rank
    ranks, count = problem.num_ranks, packs.count
    # One row per (index, pack, home), with the bytes that stay if the pack goes to that home.
    key = packs.bin_of * ranks + problem.home
    pairs, inverse = np.unique(key, return_inverse=True)
    kept = np.bincount(inverse, problem.nbytes)
    rank_of = np.full(ranks * count, -1, np.int64)
    taken = np.zeros((count, ranks), np.bool_)
    for pair in pairs[np.argsort(-kept, kind="stable")].tolist():
        pack, home = divmod(pair, ranks)
        index = pack % count
        if rank_of[pack] < 0 and not taken[index, home]:
            rank_of[pack], taken[index, home] = home, True
    for index in range(count):
        free = np.arange(index, ranks * count, count)
        free = free[rank_of[free] < 0]
        rank_of[free] = np.flatnonzero(~taken[index])
    packs.relabel(rank_of * count + np.arange(ranks * count) % count)


def bring_home(problem: Problem, packs: Packs, limit: int) -> None:
    """Move samples home, or exchange them with others of like cost, as long as the sum of the largest stays within `limit`.

    A sum that lies above the limit already does not grow.
    """
    load = packs.loads(problem)
    largest = problem.times(load).max(axis=0)
    # What the limit leaves is shared out to the indices in proportion to their cost.
    spare = max(limit - int(largest.sum()), 0)
    goals = largest + scaled(largest, spare, max(int(largest.sum()), 1))
    away = np.flatnonzero(packs.rank_of != problem.home)
    heavy_first: Any = away[np.argsort(-problem.nbytes[away], kind="stable")]
    flat, most = (array.reshape(-1, problem.num_phases) for array in (load, problem.within(goals)))
    swap.return_home(heavy_first, problem.items, problem.media, packs.bins, flat, most, packs.count, MAX_HOMEWARD_PASSES)


def moved(problem: Problem, packs: Packs) -> int:
    """Bytes that these packs move."""
    return int(problem.nbytes[packs.rank_of != problem.home].sum())

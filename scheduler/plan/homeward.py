"""Bring samples home where that costs nothing: packs of one index change ranks, samples of like cost change places."""

from typing import Any

import numpy as np

from .bins import Bins
from .homeward_kernels import return_home
from .integers import scaled
from .problem import Problem
from .table import Ints

#: Times that all samples away from home are looked at.
PASSES = 3


def packs_to_homes(problem: Problem, bins: Bins) -> None:
    """Deal the packs of every index out to ranks anew, each to a rank that brought much of it.

    Which rank computes a pack does not matter at micro-batch sync. Greedy, most bytes first, so at least half of what the
    best matching keeps.
    """
    ranks, count = problem.num_ranks, bins.count
    # One row per (index, pack, home), with the bytes that stay if the pack goes to that home.
    key = bins.bin_of * ranks + problem.home
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
        packs = np.arange(index, ranks * count, count)
        packs = packs[rank_of[packs] < 0]
        rank_of[packs] = np.flatnonzero(~taken[index])
    bins.relabel(rank_of * count + np.arange(ranks * count) % count)


def bring_home(problem: Problem, bins: Bins, limit: int) -> None:
    """Move samples home, or exchange them with others of like cost, as long as the sum of the largest stays within `limit`.

    A sum that lies above the limit already does not grow.
    """
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem)
    largest = load.reshape(ranks, count, -1).max(axis=0)
    spare = max(limit - int(largest.sum()), 0)
    goals = largest + scaled(largest, spare, max(int(largest.sum()), 1))
    away = np.flatnonzero(bins.bin_of // count != problem.home)
    heavy_first: Any = away[np.argsort(-problem.nbytes[away], kind="stable")]
    return_home(
        heavy_first, problem.cost, problem.size, problem.nbytes, problem.home, problem.media, load, goals, bins.room,
        bins.places, bins.bin_of, count, PASSES,
    )  # fmt: skip


def moved(problem: Problem, bins: Bins) -> int:
    """Bytes that these packs move."""
    where: Ints = bins.bin_of // bins.count
    return int(problem.nbytes[where != problem.home].sum())

"""Plans in which a sample leaves home only if balance within the tolerance needs it, where ranks wait once a step."""

import numpy as np

from . import kernels
from .balance import balanced
from .bins import Bins
from .free import TRIES, fit, usual_rate
from .problem import Problem
from .refine import even_packs_of_ranks, even_ranks
from .table import Ints
from .tolerance import loosened


def minimal_step(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """Ranks above the tolerance give samples away; everything else stays."""
    limit = loosened(problem, bound)
    rank_of = balanced(problem, limit, count)
    bins = _pack_at_home(problem, rank_of, count, reserve, limit)
    if bins is None:
        return None
    even_ranks(problem, bins, limit, goal=0, price=price(problem, bins))
    if problem.config.pipeline_stages > 1:
        even_packs_of_ranks(problem, bins)
    return bins


def _pack_at_home(problem: Problem, rank_of: Ints, count: int, reserve: bool, limit: int) -> Bins | None:
    """Pack each rank's samples into its own packs; those that find no room go to the ranks with the least load."""
    ranks = problem.num_ranks
    order = problem.by_size
    phase = np.zeros(len(order), np.int64)
    weight = problem.weight[:, None]
    best, fewest = None, len(order) + 1
    for tight in (False, True):
        bins = Bins.empty(problem, count, reserve)
        deficit = np.zeros((ranks * count, 1), np.int64)
        left = kernels.fill_home(
            order, phase, rank_of, weight, problem.size, deficit, bins.room, bins.places, bins.bin_of,
            0, count, count, False, tight,
        )  # fmt: skip
        if left < fewest:
            best, fewest = bins, left
        if left == 0:
            break
    assert best is not None
    if fewest:
        deficit = limit // count - best.loads(problem).sum(axis=1, keepdims=True)
        if place_anywhere(problem, best, order[best.bin_of[order] < 0], deficit, weight, 0):
            return None
    return best


def place_anywhere(problem: Problem, bins: Bins, rest: Ints, deficit: Ints, cost: Ints, first: int) -> int:
    """Give samples that found no pack at home to packs furthest below their targets; returns how many are left."""
    if problem.allowed is not None:
        return int(
            kernels.fill_allowed(
                rest, np.zeros(len(problem.size), np.int64), problem.home, problem.allowed, cost, problem.size, deficit,
                bins.room, bins.places, bins.bin_of, first, bins.count, bins.count,
            )
        )  # fmt: skip
    kernels.fill_deepest(
        rest, problem.weight, cost, problem.size, deficit.sum(axis=1), deficit, bins.room, bins.places, bins.bin_of,
        first, bins.count, bins.count, usual_rate(problem, problem.weight), False, TRIES,
    )  # fmt: skip
    return fit(problem, bins, rest)


def price(problem: Problem, bins: Bins) -> Ints:
    """`[N]` bytes that a sample adds when it moves: none where it is away from home already."""
    return np.where(bins.bin_of // bins.count == problem.home, problem.nbytes, 0)

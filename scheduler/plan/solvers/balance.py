"""Which samples leave the ranks that have too much, for the fewest bytes.

Every sample starts at home, and only ranks above the limit give. The rank with the largest surplus gives to the rank that
can take most, or to its last partner where that has room. It gives the sample that ends its surplus at the least bytes, or
the one with the most cost per byte that does not overshoot, whichever is cheaper. Nodes balance inside first, then all
ranks. Where heavy samples find no rank with enough room, they are spread over the ranks first, or a rank that no other can
relieve gives one by force.

Complexity: O(G (log R + N / R)) for G gifts, N samples and R ranks.
Source: the greedy rule of the fractional knapsack (Dantzig 1957), whose value is also the bound of the bytes to move.
"""

import heapq

import numpy as np

from ..kernels import fill, scan
from ..kernels.jit import Gifts, RankLoads
from ..limits import FULL_SPEED, HEAVY_PER_RANK, MAX_FORCED_RANKS, MAX_FORCED_ROUNDS
from ..problem import Problem
from ..table import Bools, Ints


def balanced(problem: Problem, limit: int, count: int) -> Ints:
    """`[N]` rank of each sample, so that ranks take at most the time `limit` where that was found."""
    found = []
    for part in (False, True):
        rank_of = problem.home.copy()
        if part and not _part_heavy(problem, rank_of, limit):
            break
        _balance_by_force(problem, rank_of, limit, count)
        load = scan.sums(rank_of, problem.weight, problem.num_ranks)
        found.append((int(problem.times(load).max()), rank_of))
        if found[-1][0] <= limit:
            break
    return min(found, key=lambda each: each[0])[1]


def balance(problem: Problem, rank_of: Ints, limit: int, count: int, movable: Bools, some: Ints | None = None) -> int:
    """Bring the time of `some` samples (all) to at most `limit` on every rank; returns how many ranks stay above."""
    ranks = problem.num_ranks
    some = np.arange(len(rank_of)) if some is None else some
    home = rank_of[some]
    order, starts = scan.group(home, ranks)
    # A sample that left home already is another rank's to send: with fixed peers it stays.
    movable = movable if problem.allowed is None else movable & (rank_of == problem.home)
    loads = RankLoads(
        np.bincount(home, problem.weight[some], minlength=ranks).astype(np.int64),
        np.bincount(home, problem.size[some], minlength=ranks).astype(np.int64),
        problem.within(limit),
        count * problem.capacity,
    )
    gifts = Gifts(some[order], starts, movable, rank_of)
    return int(fill.balance(problem.items, gifts, loads, problem.rate, problem.node, problem.allowed_or_any))


def _part_heavy(problem: Problem, rank_of: Ints, limit: int) -> bool:
    """Where a rank has more heavy samples than fit under the limit, send all but the heaviest where the fewest are.

    A rank with a surplus asks for one with as much of a deficit; for heavy samples there may be none, while every rank still
    has all its light ones. False where no rank has too many.
    """
    limits, speeds = problem.within(limit), problem.speeds
    heavy = np.flatnonzero(problem.weight > limits.min() // HEAVY_PER_RANK)
    load = np.bincount(rank_of[heavy], problem.weight[heavy], minlength=problem.num_ranks).astype(np.int64)
    if problem.allowed is not None or not (load > limits).any():
        return False
    # Heaviest first, each at home while it fits; the others go to the ranks with the least of heavy samples.
    load[:] = 0
    parted: list[int] = []
    for index in heavy[np.argsort(-problem.weight[heavy], kind="stable")].tolist():
        home, weight = rank_of[index], problem.weight[index]
        if load[home] == 0 or load[home] + weight <= limits[home]:
            load[home] += weight
        else:
            parted.append(index)
    # The lightest rank first, by heavy samples alone: light ones follow wherever these leave room.
    takers = [(int(total), rank) for rank, total in enumerate(problem.times(load))]
    heapq.heapify(takers)
    for index in parted:
        rank = takers[0][1]
        rank_of[index] = rank
        load[rank] += problem.weight[index]
        heapq.heapreplace(takers, (-(-int(load[rank]) * FULL_SPEED // int(speeds[rank])), rank))
    return True


def _balance_by_force(problem: Problem, rank_of: Ints, limit: int, count: int) -> None:
    """`balance`; a rank that no other can relieve gives a heavy sample to one with little, which then gives in turn."""
    movable, limits = np.ones(len(rank_of), np.bool_), problem.within(limit)
    for _ in range(MAX_FORCED_ROUNDS):
        if not balance(problem, rank_of, limit, count, movable) or problem.allowed is not None:
            return
        excess = scan.sums(rank_of, problem.weight, problem.num_ranks) - limits
        takers = np.argsort(excess, kind="stable")
        for rank, taker in zip(takers[::-1][:MAX_FORCED_RANKS], takers, strict=False):
            # The fewest bytes that end the surplus; the taker may exceed the limit, and gives light samples in the next round.
            surplus = excess[rank]
            if surplus <= 0 or excess[taker] > 0:
                break
            items = np.flatnonzero(
                (rank_of == rank) & movable & (problem.weight >= surplus) & (problem.weight <= limits[taker])
            )
            if len(items):
                index = items[np.argmin(problem.nbytes[items])]
                rank_of[index], movable[index] = taker, False

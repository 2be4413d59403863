"""Lower bounds of the objective and of the bytes to move: the certificate of a plan.

All bounds hold for every plan that meets the constraints, whatever capacity, phases or homes; docs/planner.md proves them.
"""

import math
from fractions import Fraction

import numpy as np

from .integers import floor_scale
from .kernels import scan
from .limits import FULL_SPEED, MAX_BISECTION_SAMPLES, MAX_TURNS, UNEQUAL_PERCENT
from .problem import Problem
from .table import Ints


def fewest_bins(size: Ints, capacity: int, limit: int = 2**31) -> int:
    """Packs that any packing needs at least (Martello and Toth's L2, and the limit on samples per pack).

    L2: for each threshold t <= C/2, samples above C - t stay alone, those in (C/2, C - t] open a pack each, and those in
    [t, C/2] fill what these leave.

    Example:
        >>> fewest_bins(np.array([6, 6, 6, 4, 4]), 10), fewest_bins(np.array([6, 6, 6, 5, 5]), 10)
        (3, 4)
    """
    count = len(size)
    if count == 0:
        return 0
    ordered = np.ascontiguousarray(size) if (size[1:] >= size[:-1]).all() else np.sort(size)
    return max(int(scan.most_packs(ordered, capacity)), -(-count // limit), 1)


def fewest_microbatches(problem: Problem) -> int:
    """Micro-batches that any plan needs at least, before `microbatch_multiple`."""
    return max(-(-fewest_bins(problem.sizes, problem.capacity, problem.limit) // problem.num_ranks), 1)


def makespan(ordered: Ints, num_ranks: int, speed: Ints | None = None) -> int:
    """Lower bound of the largest sum of a rank, or of the longest time where ranks differ in `speed` (`makespan_at`).

    Args:
        ordered: `[N]` costs, largest first.

    The mean; the heaviest sample; some rank holds k + 1 of the k R + 1 heaviest, so at least the k + 1 lightest of these;
    and the least T for which packs of cost T need not be more than R.
    """
    count = len(ordered)
    if count == 0:
        return 0
    if speed is not None:
        return makespan_at(ordered, speed)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    best = max(-(-int(sums[-1]) // num_ranks), int(ordered[0]))
    # All k at once, as differences of prefix sums.
    k = np.arange(1, (count - 1) // num_ranks + 1)
    if len(k):
        best = max(best, int((sums[k * num_ranks + 1] - sums[k * num_ranks - k]).max()))
    # Bisection: T is too low while packs of cost T would have to be more than the ranks.
    if num_ranks < count <= MAX_BISECTION_SAMPLES and fewest_bins(ordered, best) > num_ranks:
        low, high = best, 2 * best
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fewest_bins(ordered, middle) > num_ranks else (low, middle)
        best = high
    return best


def makespan_at(ordered: Ints, speed: Ints) -> int:
    """Lower bound of the longest time of ranks of these speeds.

    The work over the sum of speeds; the k heaviest samples run on at most k ranks, at best the k fastest; and of the n
    heaviest, each of cost w or more, a rank ends its j-th not before j * w / s, so the last of them not before the n-th
    smallest of all these times.

    Example:
        >>> makespan_at(np.array([6, 6, 6]), np.array([1024, 1024])), makespan_at(np.array([6, 6, 6]), np.array([1024, 512]))
        (12, 12)
    """
    fast, sums = np.sort(speed)[::-1], np.cumsum(ordered)
    few = min(len(ordered), len(speed))
    best = max(
        -(-int(sums[-1]) * FULL_SPEED // int(speed.sum())), int((-(-sums[:few] * FULL_SPEED // np.cumsum(fast)[:few])).max())
    )
    turns = np.arange(1, min(MAX_TURNS, len(ordered)) + 1)
    # Quotients of integers this small are all different as floats. A turn beyond the last comes after all that are before
    # the fastest rank's next.
    ends = (turns[:, None] / fast).reshape(-1)
    order = np.argsort(ends, kind="stable")
    order = order[: min(int(np.count_nonzero(ends < (turns[-1] + 1) / fast[0])), len(ordered))]
    turn, rank = np.divmod(order, len(fast))
    return max(best, int((-(-ordered[: len(order)] * (turn + 1) * FULL_SPEED // fast[rank])).max()))


def staircase(problem: Problem, weight: Ints, order: Ints) -> Ints:
    """`[m]` least time of the 1st, 2nd, ... costliest micro-batch, from where the heavy samples must go.

    Args:
        weight: `[N]`.
        order: `[N]` samples, heaviest first.

    The samples of weight t or more fill at least K(t) micro-batches by tokens, by number and since no two above half the
    capacity share a pack; so the K(t)-th costliest micro-batch costs at least t.
    """
    first = scan.stairs(problem.size, order, problem.num_ranks, problem.capacity, problem.limit)
    found: Ints = problem.fastest(weight[order[first]])
    return found


def sum_of_largest(problem: Problem, phase: int) -> int:
    """Lower bound of the sum over micro-batches of the largest cost among ranks, for one phase.

    Any k micro-batches hold k R C tokens, so at most the work V(k R C) of a fractional knapsack; the others share the rest
    evenly at best. The k costliest cost at least the first k stairs.
    """
    weight = np.ascontiguousarray(problem.cost[:, phase])
    if len(weight) == 0 or not weight.any():
        return 0
    stairs = staircase(problem, weight, problem.by_cost[phase])
    room = np.arange(len(stairs) + 1) * problem.num_ranks * problem.capacity
    some = weight > 0  # what costs nothing adds no work, and would be far from all others in density
    worth, size = weight[some], problem.size[some]
    # One unit above the product covers its rounding: the knapsack's value must never be too small.
    value = scan.knapsacks(worth, size, room)
    total = int(weight.sum())
    # Without a costly micro-batch all work is spread.
    rest = np.maximum(total - value, 0)
    rest[0] = total
    sums = np.concatenate([[0], np.cumsum(stairs)])
    whole = makespan(weight[problem.by_cost[phase]], problem.num_ranks, problem.speed)
    return max(int((sums + problem.evenly(rest)).max()), whole)


def objective(problem: Problem) -> int:
    """Lower bound of the objective without `microbatch_cost` and pipeline term, whatever the number of micro-batches."""
    if problem.config.sync == "microbatch" and problem.num_phases == 1:
        return sum_of_largest(problem, 0)
    # Ranks that wait more often take no less time, so what holds for sums holds for both.
    whole = makespan(problem.weights, problem.num_ranks, problem.speed)
    if problem.config.sync == "step":
        return whole
    return max(whole, sum(sum_of_largest(problem, k) for k in range(problem.num_phases)))


def aim(problem: Problem, bound: int) -> int:
    """The objective to which the tolerance is added: the bound, or more where the bound is far from what homes allow.

    Where ranks of unequal speed wait in every micro-batch, the bound has each heavy sample on the fastest rank. To come as
    near to it as at equal speed takes three times the bytes; within nearly another tolerance, about as many.
    """
    config = problem.config
    if problem.speed is None or config.sync == "step" or config.movement == "free":
        return bound
    return bound + floor_scale(bound, config.tolerance) * UNEQUAL_PERCENT // 100


def with_terms(problem: Problem, bound: int, counts: range) -> int:
    """Add `microbatch_cost` and the pipeline term for the best of these numbers of micro-batches.

    The rank with the mean load or more has a micro-batch of at least that over M, and of at least the lightest sample;
    the rank with the heaviest sample runs it P times.
    """
    stages, fixed = problem.stages, problem.config.microbatch_cost
    if stages == 1:
        return bound + fixed * counts[0]
    lightest, heaviest = (int(problem.weight.min()), int(problem.weight.max())) if len(problem.weight) else (0, 0)
    if problem.speed is not None:
        even = Fraction(int(problem.weight.sum()) * FULL_SPEED, int(problem.speed.sum()))
        least = Fraction(lightest * FULL_SPEED, int(problem.speed.max()))
        bound = max(bound, int(problem.fastest(stages * heaviest)))
        terms = ((math.ceil(even + (stages - 1) * max(even / count, least)), count) for count in counts)
        return min(max(bound, time) + fixed * count for time, count in terms)
    mean = -(-int(problem.weight.sum()) // problem.num_ranks)
    largest = {count: max(-(-mean // count), lightest) for count in counts}
    return min(max(bound, mean + (stages - 1) * largest[count], stages * heaviest) + fixed * count for count in counts)


def moved_bytes(problem: Problem, limit: int, count: int) -> int:
    """Bytes that must leave home so that no rank takes longer than `limit`, and its tokens fit `count` packs.

    Per rank a fractional knapsack: the surplus leaves at the least bytes when the samples with the most cost (or tokens)
    per byte go first; the larger of the two counts.
    """
    ranks = problem.num_ranks
    load = scan.sums(problem.home, problem.weight, ranks)
    tokens = scan.sums(problem.home, problem.size, ranks)
    surplus = load - problem.within(limit), tokens - count * problem.capacity
    if max(each.max() for each in surplus) <= 0:
        return 0
    by_home, starts = scan.group(problem.home, ranks)
    cost_bytes = scan.surplus_bytes(by_home, starts, problem.weight, problem.nbytes, surplus[0])
    token_bytes = scan.surplus_bytes(by_home, starts, problem.size, problem.nbytes, surplus[1])
    return int(np.maximum(cost_bytes, token_bytes).sum())

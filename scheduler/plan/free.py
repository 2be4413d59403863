"""Plans that ignore homes: fill towards targets, heaviest first, then exchange samples until loads are even."""

from collections.abc import Callable

import numpy as np

from . import kernels
from .bins import Bins
from .problem import Problem
from .refine import GOOD_ENOUGH, even_columns, even_packs_of_ranks, even_ranks
from .table import Ints

#: Full bins that a sample passes over before it is left to the fallback.
TRIES = 64
PASSES = 3
#: Exchanges of two samples for two that end a plan at step sync, and ranks tried for each.
POLISH, PARTNERS = 200, 4
#: A plan this near its bound is not worth another way to fill or another number of micro-batches.
NEAR = 0.001
#: Capacities tried by the fallback.
MULTIFIT = 8


def free_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """Like cost on all ranks at each index. None where the samples were not made to fit `count` micro-batches."""
    best, least = None, 0
    for build in (pack, pack_in_turn) if problem.num_phases == 1 else (pack,):
        bins = build(problem, count, reserve)
        if bins is None:
            continue
        value = _even_out(problem, bins, bound)
        if best is None or value < least:
            best, least = bins, value
        if least <= bound + int(bound * NEAR) or problem.is_large:
            break
    return best


def _even_out(problem: Problem, bins: Bins, bound: int) -> int:
    """Arrange and exchange until nothing improves; returns the sum of the largest."""
    for _ in range(1 if problem.is_large else PASSES):
        if problem.num_phases == 1:
            columns_by_load(problem, bins)
        if _sum_of_largest(problem, bins) <= bound + 2 * bound // GOOD_ENOUGH:
            break
        even_columns(problem, bins, across=False)
        even_columns(problem, bins, across=True)
    if problem.num_phases == 1:
        columns_by_load(problem, bins)
    return _sum_of_largest(problem, bins)


def _sum_of_largest(problem: Problem, bins: Bins) -> int:
    return int(bins.loads(problem).reshape(problem.num_ranks, bins.count, -1).max(axis=0).sum())


def free_step(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """Equal sums on all ranks. None where the samples were not made to fit `count` micro-batches."""
    ranks = problem.num_ranks
    mean = max(-(-int(problem.weight.sum()) // ranks), bound)
    for tight in (False, True):
        bins = Bins.empty(problem, count, reserve)
        key, deficit = np.full(ranks, mean, np.int64), np.zeros((ranks * count, 1), np.int64)
        left = kernels.fill_ranks(
            problem.by_weight,
            np.zeros(len(problem.size), np.int64),
            problem.weight,
            problem.weight[:, None],
            problem.size,
            key,
            deficit,
            bins.room,
            bins.places,
            bins.bin_of,
            TRIES,
            tight,
        )
        if left == 0:
            _even(problem, bins, mean)
            return bins
    found = pack(problem, count, reserve)
    if found is not None:
        if not reserve:
            spread_over_ranks(problem, found)
        _even(problem, found, mean)
    return found


def _even(problem: Problem, bins: Bins, mean: int) -> None:
    goal = mean // GOOD_ENOUGH if problem.is_large else 0
    even_ranks(problem, bins, mean, goal=goal)
    if not problem.is_large:
        load = bins.loads(problem).sum(axis=1).reshape(problem.num_ranks, bins.count).sum(axis=1)
        kernels.polish(load, mean, problem.weight, problem.size, bins.room, bins.bin_of, bins.count, POLISH, PARTNERS)
    if problem.config.pipeline_stages > 1:
        even_packs_of_ranks(problem, bins)


def pack(problem: Problem, count: int, reserve: bool) -> Bins | None:
    """Fill all packs towards their targets; where that does not fit, by tokens only."""
    bins = Bins.empty(problem, count, reserve)
    _fill(problem, bins)
    by_size = problem.by_size
    if fit(problem, bins, by_size) == 0:
        return bins
    return fit_evenly(problem, count, reserve, by_size)


def pack_in_turn(problem: Problem, count: int, reserve: bool) -> Bins | None:
    """Water-fill: one micro-batch after the other, from the heaviest samples left, up to what the rest would average."""
    bins = Bins.empty(problem, count, reserve)
    ranks = problem.num_ranks
    goal = np.zeros((ranks, count, 1), np.int64)
    rate = usual_rate(problem, problem.weight)
    for index in range(count):
        rest = _unplaced(bins, problem.by_weight)
        if not len(rest):
            break
        goal[:, index] = max(int(problem.weight[rest[0]]), -(-int(problem.weight[rest].sum()) // (ranks * (count - index))))
        deficit = goal.reshape(ranks * count, 1)
        kernels.fill_deepest(
            rest,
            problem.weight,
            problem.cost,
            problem.size,
            deficit[:, 0].copy(),
            deficit,
            bins.room,
            bins.places,
            bins.bin_of,
            index,
            index + 1,
            count,
            rate,
            True,
            TRIES // 8,
        )
    return None if fit(problem, bins, problem.by_size) else bins


def fit_evenly(problem: Problem, count: int, reserve: bool, order: Ints) -> Bins | None:
    """First fit by tokens into packs of the least capacity for which it succeeds (Coffman, Garey and Johnson's MULTIFIT)."""
    low = int(problem.size.sum()) // (problem.num_ranks * count)
    high, best = problem.capacity, None
    tried = high
    for _ in range(MULTIFIT):
        bins = Bins.empty(problem, count, reserve)
        bins.room -= problem.capacity - tried
        if fit(problem, bins, order) == 0:
            bins.room += problem.capacity - tried
            best, high = bins, tried
        elif best is None:
            return None
        else:
            low = tried
        if high - low <= 1:
            break
        tried = (low + high) // 2
    return best


def fill_costly(problem: Problem, bins: Bins, goal: Ints, fill: Callable[..., None]) -> int:
    """Fill the micro-batches that one heavy sample makes costly, one by one, as full as each gets.

    Args:
        goal: `[R, M, K]` output: what each pack may cost, then what it still misses.
        fill: called with (problem, bins, goal, heads, dense, phase, index): the R heaviest samples, the others by cost
            per token, the phase in which they are heavy, the micro-batch.

    Returns:
        How many micro-batches were filled.
    """
    ranks, count = problem.num_ranks, bins.count
    index = 0
    while index < count - 1:
        rest = np.flatnonzero(bins.bin_of < 0)
        if not len(rest):
            break
        level = -(-problem.cost[rest].sum(axis=0) // (ranks * (count - index)))
        floor = problem.cost_elsewhere(index)
        heaviest = np.maximum(problem.cost[rest].max(axis=0), floor)
        over = heaviest / np.maximum(level, 1)
        phase = int(np.argmax(over))
        if over[phase] <= 1:
            break
        heads = _unplaced(bins, problem.by_cost[phase])[:ranks]
        dense = _unplaced(bins, problem.by_density[phase])
        goal[:, index] = np.maximum(level, np.maximum(problem.cost[heads].max(axis=0), floor))
        fill(problem, bins, goal, heads, dense, phase, index)
        index += 1
    return index


def _unplaced(bins: Bins, order: Ints) -> Ints:
    return order[bins.bin_of[order] < 0]


def _fill(problem: Problem, bins: Bins) -> None:
    """Costly micro-batches first, then all others evenly."""
    ranks, count = problem.num_ranks, bins.count
    order = problem.by_share
    goal = np.zeros((ranks, count, problem.num_phases), np.int64)
    first = fill_costly(problem, bins, goal, _fill_anywhere)
    level = -(-problem.cost[bins.bin_of < 0].sum(axis=0) // (ranks * (count - first)))
    goal[:, first:] = level
    flat = goal.reshape(ranks * count, -1)
    if problem.num_phases == 1:
        kernels.fill_deepest(
            order,
            problem.weight,
            problem.cost,
            problem.size,
            flat[:, 0].copy(),
            flat,
            bins.room,
            bins.places,
            bins.bin_of,
            first,
            count,
            count,
            usual_rate(problem, problem.weight),
            False,
            TRIES,
        )
    else:
        kernels.fill_deepest_phases(
            order,
            problem.main_phase,
            problem.cost,
            problem.size,
            np.maximum(level, 1),
            np.ascontiguousarray(flat.T),
            bins.room,
            bins.places,
            bins.bin_of,
            first,
            count,
            count,
            TRIES,
        )


def _fill_anywhere(problem: Problem, bins: Bins, goal: Ints, heads: Ints, dense: Ints, phase: int, index: int) -> None:
    """Fill a costly micro-batch: one of its heaviest samples in every pack, then what costs most per token."""
    ranks, count = problem.num_ranks, bins.count
    weight = np.ascontiguousarray(problem.cost[:, phase])
    deficit = goal.reshape(ranks * count, -1)
    for some in (heads, dense):
        kernels.fill_deepest(
            some,
            weight,
            problem.cost,
            problem.size,
            deficit[:, phase].copy(),
            deficit,
            bins.room,
            bins.places,
            bins.bin_of,
            index,
            index + 1,
            count,
            usual_rate(problem, weight),
            True,
            1,
        )


def usual_rate(problem: Problem, weight: Ints) -> int:
    """Cost of 1,024 tokens, on average."""
    return max(int(weight.sum()) * 1024 // max(int(problem.size.sum()), 1), 1)


def fit(problem: Problem, bins: Bins, order: Ints) -> int:
    """First fit of these samples by tokens; returns how many found no room."""
    spare = np.zeros(len(bins.room), np.int64)
    return int(kernels.fit_first(order, problem.weight, problem.size, spare, bins.room, bins.places, bins.bin_of))


def columns_by_load(problem: Problem, bins: Bins) -> None:
    """Renumber packs: the R costliest become micro-batch 0, the next R micro-batch 1, and so on."""
    ranks, count = problem.num_ranks, bins.count
    order = np.argsort(-bins.loads(problem).sum(axis=1), kind="stable")
    new = np.empty(ranks * count, np.int64)
    new[order] = np.tile(np.arange(ranks) * count, count) + np.repeat(np.arange(count), ranks)
    bins.relabel(new)


def spread_over_ranks(problem: Problem, bins: Bins) -> None:
    """Renumber packs so that ranks get about equal sums: R at a time, the costliest to the rank that has least."""
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem).sum(axis=1)
    order = np.argsort(-load, kind="stable")
    sums, new = np.zeros(ranks, np.int64), np.empty(ranks * count, np.int64)
    for index in range(count):
        chunk = order[index * ranks : (index + 1) * ranks]
        least = np.argsort(sums, kind="stable")
        new[chunk] = least * count + index
        sums[least] += load[chunk]
    bins.relabel(new)

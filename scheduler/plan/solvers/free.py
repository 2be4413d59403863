"""Plans that ignore homes: fill towards targets, heaviest first, then exchange samples until loads are even.

Every pack or rank gets a target, the mean of what is left, and each sample goes, heaviest first, to the one that can still
take most. At micro-batch sync a sample above the mean makes its micro-batch costly on all ranks anyway: such micro-batches
are filled first, up to that cost, with one heavy sample a rank and then the samples of the most cost per token. With one
phase a second way fills the micro-batches one after the other, and the better plan stays. Where samples do not fit that
way, first fit by tokens packs them into the least capacity that holds them. Exchanges between packs, and of two samples for
two between ranks, take what is left.

Complexity: O(N log B) for N samples and B packs to fill, and a bounded number of rounds of exchanges over the packs.
Source: longest processing time first (Graham 1969), MULTIFIT (Coffman, Garey and Johnson 1978); costly micro-batches:
    water-filling.
"""

from collections.abc import Iterator

import numpy as np

from ..kernels import fill, swap
from ..kernels.jit import Items, Window
from ..limits import GOOD_ENOUGH, GOOD_GAP, MAX_CAPACITIES, MAX_EVEN_PASSES, MAX_POLISH, POLISH_PARTNERS, TRIES
from ..packs import Packs
from ..problem import Problem, over_phases, usual_rate
from ..table import Ints
from .refine import even_columns, even_packs_of_ranks, even_ranks


def free_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Packs | None:
    """Like cost on all ranks at each index. None where the samples were not made to fit `count` micro-batches."""
    best, least = None, 0
    # Water-filling knows one target per micro-batch, which several phases do not have.
    for build in (pack, pack_in_turn) if problem.num_phases == 1 else (pack,):
        packs = build(problem, count, reserve)
        if packs is None:
            continue
        value = _even_out(problem, packs, bound)
        if best is None or value < least:
            best, least = packs, value
        if least <= bound + int(bound * GOOD_GAP) or problem.is_large:
            break
    return best


def _even_out(problem: Problem, packs: Packs, bound: int) -> int:
    """Arrange and exchange until nothing improves; returns the sum of the largest."""
    for _ in range(1 if problem.is_large else MAX_EVEN_PASSES):
        if problem.num_phases == 1:
            _columns_by_load(problem, packs)
        if _sum_of_largest(problem, packs) <= bound + 2 * bound // GOOD_ENOUGH:
            break
        even_columns(problem, packs, across=False)
        even_columns(problem, packs, across=True)
    if problem.num_phases == 1:
        _columns_by_load(problem, packs)
    return _sum_of_largest(problem, packs)


def _sum_of_largest(problem: Problem, packs: Packs) -> int:
    return int(problem.times(packs.loads(problem)).max(axis=0).sum())


def free_step(problem: Problem, count: int, reserve: bool, bound: int) -> Packs | None:
    """Equal sums on all ranks. None where the samples were not made to fit `count` micro-batches."""
    ranks = problem.num_ranks
    # Some rank ends at the bound or above, whatever is done: nothing is gained by aiming lower.
    mean = max(problem.evenly(int(problem.weight.sum())), bound)
    for tight in (False, True):
        packs = Packs.empty(problem, count, reserve)
        key, deficit = problem.within(mean), np.zeros((ranks * count, 1), np.int64)
        left = fill.fill_ranks(problem.by_weight, problem.summed_items, packs.bins, key, deficit, TRIES, tight)
        if left == 0:
            _even(problem, packs, mean)
            return packs
    found = pack(problem, count, reserve)
    if found is not None:
        if not reserve:
            _spread_over_ranks(problem, found)
        _even(problem, found, mean)
    return found


def _even(problem: Problem, packs: Packs, mean: int) -> None:
    # Small steps go to the last unit: a rank's whole step waits for the largest sum.
    goal = mean // GOOD_ENOUGH if problem.is_large else 0
    even_ranks(problem, packs, mean, goal=goal)
    if not problem.is_large:
        excess = packs.loads(problem).sum(axis=(1, 2)) - problem.within(mean)
        swap.polish(excess, 0, problem.items, packs.bins, packs.count, MAX_POLISH, POLISH_PARTNERS)
    if problem.config.pipeline_stages > 1:
        even_packs_of_ranks(problem, packs)


def pack(problem: Problem, count: int, reserve: bool) -> Packs | None:
    """Fill all packs towards their targets; where that does not fit, by tokens only."""
    packs = Packs.empty(problem, count, reserve)
    _fill(problem, packs)
    # What the heap passed over too often may still fit somewhere.
    if fit(problem, packs, problem.by_size) == 0:
        return packs
    found = _fit_evenly(problem, count, reserve)
    if found is not None and problem.speed is not None:
        # Tokens alone decided: of like packs the costliest go to the fastest ranks.
        _columns_by_load(problem, found)
    return found


def pack_in_turn(problem: Problem, count: int, reserve: bool) -> Packs | None:
    """Water-fill: one micro-batch after the other, from the heaviest samples left, up to what the rest would average."""
    packs = Packs.empty(problem, count, reserve)
    goal = np.zeros((problem.num_ranks, count, 1), np.int64)
    for index in range(count):
        rest = packs.unplaced(problem.by_weight)
        if not len(rest):
            break
        even = problem.evenly(int(problem.weight[rest].sum()), count - index)
        heads = problem.one_each(problem.weight[rest[: problem.num_ranks], None])
        # The heaviest sample left makes this micro-batch as costly as itself: all other packs may as well be filled that far.
        goal[:, index] = problem.within(np.maximum(heads, even))
        fill_deepest(problem, packs, rest, goal, packs.window(index, index + 1), strict=True, tries=TRIES // 8)
    return None if fit(problem, packs, problem.by_size) else packs


def _fit_evenly(problem: Problem, count: int, reserve: bool) -> Packs | None:
    """First fit by tokens into packs of the least capacity for which it succeeds (Coffman, Garey and Johnson's MULTIFIT)."""
    low = int(problem.size.sum()) // (problem.num_ranks * count)
    high, best = problem.capacity, None
    tried = high
    for _ in range(MAX_CAPACITIES):
        packs = Packs.empty(problem, count, reserve)
        packs.free_tokens -= problem.capacity - tried
        if fit(problem, packs, problem.by_size) == 0:
            packs.free_tokens += problem.capacity - tried
            best, high = packs, tried
        elif best is None:
            return None
        else:
            low = tried
        if high - low <= 1:
            break
        tried = (low + high) // 2
    return best


def costly_microbatches(problem: Problem, packs: Packs, goal: Ints) -> Iterator[tuple[int, int, Ints, Ints]]:
    """Yield the micro-batches that one heavy sample makes costly; the caller fills each, as full as it gets, before the next.

    Args:
        goal: `[R, M, K]` output: what each pack may cost, by its rank's speed; the caller takes off what it fills in.

    Yields:
        The micro-batch, from 0 on; the phase in which it is costly; the R heaviest samples in that phase; all samples by cost
        per token.
    """
    ranks, count = problem.num_ranks, packs.count
    for index in range(count - 1):
        rest = np.flatnonzero(packs.bin_of < 0)
        if not len(rest):
            break
        level = problem.evenly(problem.cost[rest].sum(axis=0), count - index)
        floor = problem.cost_elsewhere(index)
        # Costly: one sample alone weighs more than an even share of all that is left.
        heaviest = np.maximum(problem.fastest(problem.cost[rest].max(axis=0)), floor)
        over = heaviest / np.maximum(level, 1)
        phase = int(np.argmax(over))  # phases differ in unit and size: the largest ratio decides
        if over[phase] <= 1:
            break
        heads = packs.unplaced(problem.by_cost[phase])[:ranks]
        dense = packs.unplaced(problem.by_density[phase])
        goal[:, index] = problem.within(np.maximum(level, np.maximum(problem.one_each(problem.cost[heads]), floor)))
        yield index, phase, heads, dense


def _fill(problem: Problem, packs: Packs) -> None:
    """Costly micro-batches first, then all others evenly."""
    ranks, count = problem.num_ranks, packs.count
    goal = np.zeros((ranks, count, problem.num_phases), np.int64)
    first = 0
    for index, phase, heads, dense in costly_microbatches(problem, packs, goal):
        first = index + 1
        # One of its heaviest samples in every pack, then what costs most per token.
        for some in (heads, dense):
            fill_deepest(problem, packs, some, goal, packs.window(index, first), phase=phase, strict=True, tries=1)
    # What costly micro-batches left is to be even over all the others.
    level = problem.evenly(problem.cost[packs.bin_of < 0].sum(axis=0), count - first)
    goal[:, first:] = problem.within(level)[:, None]
    if problem.num_phases == 1:
        fill_deepest(problem, packs, problem.by_share, goal, packs.window(first))
    else:
        scale, target = np.maximum(level, 1), np.ascontiguousarray(goal.reshape(ranks * count, -1).T)
        fill.fill_deepest_phases(
            problem.by_share, problem.items, packs.bins, problem.main_phase, scale, target, packs.window(first), TRIES
        )  # fmt: skip


def fill_deepest(
    problem: Problem,
    packs: Packs,
    order: Ints,
    goal: Ints,
    window: Window,
    *,
    items: Items | None = None,
    phase: int | None = None,
    strict: bool = False,
    tries: int = TRIES,
) -> None:
    """Call `fill.fill_deepest`: samples, in `order`, go to the packs that can still take most.

    Args:
        goal: `[R, M, K]` what each pack misses, updated.
        items: with their cost in K phases; default `problem.items`.
        phase: the one that decides; None for the sum over phases.
    """
    items = problem.items if items is None else items
    deficit = goal.reshape(-1, goal.shape[-1])
    if phase is None:
        weight, target, rate = problem.weight, over_phases(deficit), problem.rate
    else:
        weight, target = np.ascontiguousarray(problem.cost[:, phase]), deficit[:, phase].copy()
        rate = usual_rate(weight, problem.size)
    fill.fill_deepest(order, items, packs.bins, weight, target, deficit, window, rate, strict, tries)


def fit(problem: Problem, packs: Packs, order: Ints) -> int:
    """First fit of these samples by tokens; returns how many found no room."""
    return int(fill.fit_first(order, problem.size, packs.bins))


def _columns_by_load(problem: Problem, packs: Packs) -> None:
    """Renumber packs: the R that take longest become micro-batch 0, the next R micro-batch 1, and so on.

    Of those in one micro-batch the fastest rank takes the costliest, and so on.
    """
    ranks, count = problem.num_ranks, packs.count
    load = packs.loads(problem).sum(axis=2)
    order = np.argsort(-problem.times(load).reshape(-1), kind="stable")
    if problem.speed is not None:
        order = order.reshape(count, ranks)
        order = np.take_along_axis(order, np.argsort(-load.reshape(-1)[order], axis=1, kind="stable"), axis=1).reshape(-1)
    new = np.empty(ranks * count, np.int64)
    fastest_first = np.argsort(-problem.speeds, kind="stable")
    new[order] = np.tile(fastest_first * count, count) + np.repeat(np.arange(count), ranks)
    packs.relabel(new)


def _spread_over_ranks(problem: Problem, packs: Packs) -> None:
    """Renumber packs so that ranks get about equal sums: R at a time, the costliest to the rank that has least."""
    ranks, count = problem.num_ranks, packs.count
    load = packs.loads(problem).sum(axis=2).reshape(-1)
    order = np.argsort(-load, kind="stable")
    sums, new = np.zeros(ranks, np.int64), np.empty(ranks * count, np.int64)
    for index in range(count):
        chunk = order[index * ranks : (index + 1) * ranks]
        least = np.argsort(problem.times(sums), kind="stable")
        new[chunk] = least * count + index
        sums[least] += load[chunk]
    packs.relabel(new)

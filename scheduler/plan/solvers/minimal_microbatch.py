"""Plans in which a sample leaves home only if balance within the tolerance needs it, where ranks wait in every micro-batch.

Micro-batches that a heavy sample makes costly are filled first: one such sample on a rank, then the rank's own densest
samples. The ranks' sums of the rest are balanced for the fewest bytes, and every rank packs its own samples evenly over its
other packs. Each rank then orders its packs by cost, so that like meets like, and exchanges lower the costliest packs of
every index: inside a rank first, which moves nothing, then between ranks, for the fewest bytes. Samples that ended
elsewhere are exchanged for their like at home. Where packs hold a few samples only, a plan that ignores homes is brought
home instead (`homeward_microbatch`).

Complexity: O(N M) to pack N samples into M packs a rank, and a bounded number of passes of exchanges over R M packs.
Source: devised here, from limits of a free plan and local search.
"""

import copy

import numpy as np

from .. import bounds
from ..integers import scaled
from ..kernels import fill
from ..kernels.jit import NO_PAIRS
from ..limits import (
    FEW_BYTES_BUILDS,
    LEAST_PROGRESS,
    MAX_CHOICES,
    MAX_EVEN_PASSES,
    MAX_INDEX_PASSES,
    MAX_RANK_PASSES,
    MAX_ROUNDS,
    PATIENCE,
)
from ..packs import Packs
from ..problem import Problem, bound_with_tolerance, limit_plus_slack
from ..table import Bools, Ints
from .balance import balance
from .free import costly_microbatches, free_microbatch
from .homeward import bring_home, moved, packs_to_homes
from .minimal_step import place_anywhere, price
from .refine import column_goals, even_columns, exchange


def minimal_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Packs | None:
    """Costly micro-batches first; then ranks even out their sums, pack at home, and exchange what is still too much.

    Two ways to share the heavy samples are tried: only those that fit no other micro-batch, or one for every rank.
    """
    limit = bound_with_tolerance(problem, bound)
    best, least = None, (0, 0)

    def score(packs: Packs) -> tuple[int, int]:
        return max(_sum_of_largest(problem, packs), limit_plus_slack(problem, limit)), moved(problem, packs)

    for every in (True,) if problem.is_large else (False, True):
        packs = _build(problem, count, reserve, limit, every)
        if packs is None:
            continue
        this = score(packs)
        if best is None or this < least:
            best, least = packs, this
        if least[0] <= limit_plus_slack(problem, limit) and least[1] <= FEW_BYTES_BUILDS * bounds.moved_bytes(
            problem, limit, count
        ):
            return best
    if best is not None and problem.allowed is None and not problem.is_large:
        _even_and_return(problem, best, limit)
    return best


def _even_and_return(problem: Problem, packs: Packs, limit: int) -> None:
    """Bring home what can be exchanged for its like; where costs are still uneven, exchange for any bytes in between."""
    bring_home(problem, packs, limit)
    # Evening out regardless of bytes moves samples that `bring_home` then exchanges back: each pass keeps the better balance.
    before = _sum_of_largest(problem, packs)
    for _ in range(MAX_EVEN_PASSES):
        if before <= limit_plus_slack(problem, limit):
            break
        even_columns(problem, packs, across=False)
        even_columns(problem, packs, across=True)
        packs.order_at_home(problem)
        bring_home(problem, packs, limit)
        value = _sum_of_largest(problem, packs)
        if before - value < (before - limit) // LEAST_PROGRESS:
            break
        before = value


def homeward_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Packs | None:
    """A plan that ignores homes, brought home where that is free: where packs of a few samples each leave little choice."""
    packs = free_microbatch(problem, count, reserve, bound)
    if packs is not None:
        packs_to_homes(problem, packs)
        bring_home(problem, packs, bound_with_tolerance(problem, bound))
    return packs


def _sum_of_largest(problem: Problem, packs: Packs) -> int:
    return int(_largest(problem, packs).sum())


def _largest(problem: Problem, packs: Packs) -> Ints:
    """`[M, K]` time of every micro-batch, what other pods take counted."""
    return problem.raised(problem.times(packs.loads(problem)).max(axis=0))


def _build(problem: Problem, count: int, reserve: bool, limit: int, every: bool) -> Packs | None:
    ranks = problem.num_ranks
    packs = Packs.empty(problem, count, reserve)
    rank_of = problem.home.copy()
    goal = np.zeros((ranks, count, problem.num_phases), np.int64)
    first = 0
    for costly in costly_microbatches(problem, packs, goal):
        _fill_at_home(problem, packs, goal, rank_of, every, *costly)
        first += 1
    rest = np.flatnonzero(packs.bin_of < 0)
    spent, left = int(_largest(problem, packs)[:first].sum()), int(problem.weight[rest].sum())
    mean = problem.evenly(left)
    allowed = max(limit - spent, mean + int(mean * problem.config.tolerance))
    # Two of the heavy would overfill a pack, so they are placed one by one before the light ones level everything.
    heavy = problem.weight * 2 > -(-left // ranks) // max(count - first, 1)
    _spread_heavy(problem, packs, goal, rank_of, heavy, first, allowed)
    # A quarter of the way from the mean to what is allowed: sums below it leave packs room to meet it at every index.
    for movable in (~heavy, np.ones(len(heavy), np.bool_)):
        if not balance(problem, rank_of, (3 * mean + allowed) // 4, count - first, movable, rest):
            break
    if not _fill_rest(problem, packs, goal, rank_of, first):
        return None
    if not _improve(problem, packs, limit, ("rank",), MAX_RANK_PASSES):
        return packs
    # Exchanges inside a rank move nothing, so they came first.
    if not every and _sum_of_largest(problem, packs) > bound_with_tolerance(problem, limit):
        return packs  # too far away: the other way to share heavy samples is worth more than exchanges
    _improve(problem, packs, limit, ("all", "index"), MAX_INDEX_PASSES)
    return packs


def _improve(problem: Problem, packs: Packs, limit: int, between: tuple[str, ...], passes: int) -> bool:
    """Exchange and order again while that brings the sum of the largest nearer `limit`; False once it is there."""
    packs.order_at_home(problem)
    before = _sum_of_largest(problem, packs)
    for _ in range(passes):
        for which in between:
            if not _lower(problem, packs, limit, which):
                return False
        packs.order_at_home(problem)
        value = _sum_of_largest(problem, packs)
        if before - value < (before - limit) // LEAST_PROGRESS:
            break
        before = value
    return before > limit


def _fill_at_home(
    problem: Problem, packs: Packs, goal: Ints, rank_of: Ints, every: bool, index: int, phase: int, heads: Ints, dense: Ints
) -> None:
    """Fill a costly micro-batch: one of its heaviest samples on a rank (`every`: on all), then at home the densest."""
    ranks, count = problem.num_ranks, packs.count
    by_bytes = heads[np.argsort(-problem.nbytes[heads], kind="stable")]
    _, first = np.unique(problem.home[by_bytes], return_index=True)
    keep = np.zeros(len(heads), np.bool_)
    keep[first] = True
    without = np.setdiff1d(np.arange(ranks), problem.home[by_bytes[keep]])
    movers = by_bytes[~keep]
    if not every:
        # What is too heavy for the other micro-batches has to share this one; lighter ones may stay where they are.
        level = int(problem.cost[packs.bin_of < 0, phase].sum()) // (ranks * (count - index))
        movers = movers[problem.cost[movers, phase] > level]
    if problem.allowed is None:
        if problem.speed is not None:
            # Each rank may fill its pack by its speed: the heaviest goes to the fastest.
            movers = movers[np.argsort(-problem.cost[movers, phase], kind="stable")]
            without = without[np.argsort(-problem.speed[without], kind="stable")]
        rank_of[movers] = without[: len(movers)]
    deficit = goal.reshape(ranks * count, -1)
    phases = np.full(len(problem.size), phase, np.int64)
    for some in (heads, dense):
        window = packs.window(index, index + 1)
        fill.fill_home(some, problem.items, packs.bins, phases, rank_of, NO_PAIRS, deficit, window, True, False)


def _spread_heavy(problem: Problem, packs: Packs, goal: Ints, rank_of: Ints, heavy: Bools, first: int, allowed: int) -> None:
    """Change `rank_of` so that heavy samples find a pack that they do not overfill."""
    ranks, count = problem.num_ranks, packs.count
    order = packs.unplaced(problem.by_share)
    order = order[heavy[order]]
    if not len(order):
        return
    # A trial: only the ranks that it finds are kept. Where samples lie in them is decided with the light ones.
    trial = copy.deepcopy(packs)
    level = -(-problem.cost[packs.bin_of < 0].sum(axis=0) // (ranks * (count - first)))
    level = scaled(level, allowed, max(int(level.sum()) * (count - first), 1))
    goal[:, first:] = problem.within(np.maximum(level, 1))[:, None]
    spread = goal.copy()
    deficit, window = spread.reshape(ranks * count, -1), trial.window(first)
    phases = problem.main_phase
    if fill.fill_home(order, problem.items, trial.bins, phases, rank_of, NO_PAIRS, deficit, window, True, False):
        rest = trial.unplaced(order)
        place_anywhere(problem, trial, rest, spread, problem.items, first)
        placed = rest[trial.bin_of[rest] >= 0]
        rank_of[placed] = trial.rank_of[placed]


def _fill_rest(problem: Problem, packs: Packs, goal: Ints, rank_of: Ints, first: int) -> bool:
    """Pack what is left into the micro-batches from `first` on, at home where there is room; False if there is none."""
    order = packs.unplaced(problem.by_share)
    load = np.zeros((problem.num_ranks, problem.num_phases), np.int64)
    np.add.at(load, rank_of[order], problem.cost[order])
    # Homes decide the sums by now; each rank's own packs are to be even.
    goal[:, first:] = (load // max(packs.count - first, 1))[:, None, :]
    deficit, window, phases = goal.reshape(-1, problem.num_phases), packs.window(first), problem.main_phase
    if not fill.fill_home(order, problem.items, packs.bins, phases, rank_of, NO_PAIRS, deficit, window, False, False):
        return True
    return place_anywhere(problem, packs, packs.unplaced(order), goal, problem.items, 0) == 0


def _lower(problem: Problem, packs: Packs, limit: int, between: str) -> bool:
    """Exchange samples until the costliest packs of every index come down far enough for the sum to reach `limit`.

    Between packs of one "rank" nothing moves; between packs of one "index", or "all" packs, the least bytes do.
    Returns False where nothing was left to do.
    """
    ranks, count = problem.num_ranks, packs.count
    load = packs.loads(problem)
    largest = problem.raised(problem.times(load).max(axis=0))
    excess = int(largest.sum()) - limit
    if excess <= 0:
        return False
    least = column_goals(problem, packs, load)
    slack = largest - problem.raised(least)
    # Every index comes down by the same part of what it can: no index is pushed below its mean.
    share = min(excess / max(int(slack.sum()), 1), 1.0)
    goals = largest - np.ceil(slack * share).astype(np.int64)
    numbers = np.arange(ranks * count).reshape(ranks, count)
    exchange(
        problem,
        packs,
        groups={"rank": numbers, "index": numbers.T, "all": numbers.reshape(1, -1)}[between],
        bins_per_unit=1,
        excess=load - problem.within(goals),
        items=problem.items,
        price=None if between == "rank" else price(problem, packs),
        rounds=2 * MAX_ROUNDS,
        patience=count if between == "rank" else PATIENCE,
        choices=1 if between == "rank" or problem.num_phases > 1 else MAX_CHOICES,
    )
    return True

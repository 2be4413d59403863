"""Plans in which a sample leaves home only if balance within the tolerance needs it, where ranks wait in every micro-batch."""

from functools import partial

import numpy as np

from . import bounds, kernels
from .balance import Bools, balance
from .bins import Bins
from .free import fill_costly, free_microbatch
from .homeward import bring_home, moved, packs_to_homes
from .integers import scaled
from .minimal_step import place_anywhere, price
from .problem import Problem
from .refine import PATIENCE, ROUNDS, column_goals, even_columns, exchange
from .table import Ints
from .tolerance import almost, loosened

#: A plan that moves at most so many times the bytes that it must is not worth another try.
FEW_BYTES = 2.5
#: Times that costs are evened out without regard to bytes, and samples brought home again.
EVEN_PASSES = 3
#: Partners among which a pack chooses the cheapest exchange.
CHOICES = 16
#: Times that the packs of a rank are ordered and evened out, then those of an index.
RANK_PASSES, INDEX_PASSES = 16, 6
#: Passes go on while each takes at least this part of what is left to gain.
WORTHWHILE = 50


def minimal_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """Costly micro-batches first; then ranks even out their sums, pack at home, and exchange what is still too much.

    Two ways to share the heavy samples are tried: only those that fit no other micro-batch, or one for every rank.
    """
    limit = loosened(problem, bound)
    best, least = None, (0, 0)

    def merit(bins: Bins) -> tuple[int, int]:
        return max(_sum_of_largest(problem, bins), almost(problem, limit)), moved(problem, bins)

    for every in (True,) if problem.is_large else (False, True):
        bins = _build(problem, count, reserve, limit, every)
        if bins is None:
            continue
        this = merit(bins)
        if best is None or this < least:
            best, least = bins, this
        if least[0] <= almost(problem, limit) and least[1] <= FEW_BYTES * bounds.moved_bytes(problem, limit, count):
            return best
    if best is not None and problem.allowed is None and not problem.is_large:
        _even_and_return(problem, best, limit)
    return best


def _even_and_return(problem: Problem, bins: Bins, limit: int) -> None:
    """Bring home what can be exchanged for its like; where costs are still uneven, exchange for any bytes in between."""
    bring_home(problem, bins, limit)
    before = _sum_of_largest(problem, bins)
    for _ in range(EVEN_PASSES):
        if before <= almost(problem, limit):
            break
        even_columns(problem, bins, across=False)
        even_columns(problem, bins, across=True)
        _order_at_home(problem, bins)
        bring_home(problem, bins, limit)
        value = _sum_of_largest(problem, bins)
        if before - value < (before - limit) // WORTHWHILE:
            break
        before = value


def homeward_microbatch(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """A plan that ignores homes, brought home where that is free: where packs of a few samples each leave little choice."""
    bins = free_microbatch(problem, count, reserve, bound)
    if bins is not None:
        packs_to_homes(problem, bins)
        bring_home(problem, bins, loosened(problem, bound))
    return bins


def _sum_of_largest(problem: Problem, bins: Bins) -> int:
    return int(_largest(problem, bins.loads(problem), bins.count).sum())


def _largest(problem: Problem, load: Ints, count: int) -> Ints:
    """`[M, K]` largest cost of each micro-batch, or what it may cost anyway."""
    largest: Ints = load.reshape(problem.num_ranks, count, -1).max(axis=0)
    return problem.raised(largest)


def _build(problem: Problem, count: int, reserve: bool, limit: int, every: bool) -> Bins | None:
    ranks = problem.num_ranks
    bins = Bins.empty(problem, count, reserve)
    rank_of = problem.home.copy()
    goal = np.zeros((ranks, count, problem.num_phases), np.int64)
    first = fill_costly(problem, bins, goal, partial(_fill_at_home, rank_of, every))
    rest = np.flatnonzero(bins.bin_of < 0)
    spent = int(_largest(problem, bins.loads(problem), count)[:first].sum())
    mean = -(-int(problem.weight[rest].sum()) // ranks)
    allowed = max(limit - spent, mean + int(mean * problem.config.tolerance))
    heavy = problem.weight * 2 > mean // max(count - first, 1)
    _spread_heavy(problem, bins, goal, rank_of, heavy, first, allowed)
    for movable in (~heavy, np.ones(len(heavy), np.bool_)):
        if not balance(problem, rank_of, (3 * mean + allowed) // 4, count - first, movable, rest):
            break
    if not _fill_rest(problem, bins, goal, rank_of, first):
        return None
    if not _improve(problem, bins, limit, ("rank",), RANK_PASSES):
        return bins
    if not every and _sum_of_largest(problem, bins) > loosened(problem, limit):
        return bins  # too far away: the other way to share heavy samples is worth more than exchanges
    _improve(problem, bins, limit, ("all", "index"), INDEX_PASSES)
    return bins


def _improve(problem: Problem, bins: Bins, limit: int, between: tuple[str, ...], passes: int) -> bool:
    """Exchange and order again while that brings the sum of the largest nearer `limit`; False once it is there."""
    _order_at_home(problem, bins)
    before = _sum_of_largest(problem, bins)
    for _ in range(passes):
        for which in between:
            if not _lower(problem, bins, limit, which):
                return False
        _order_at_home(problem, bins)
        value = _sum_of_largest(problem, bins)
        if before - value < (before - limit) // WORTHWHILE:
            break
        before = value
    return before > limit


def _fill_at_home(
    rank_of: Ints, every: bool, problem: Problem, bins: Bins, goal: Ints, heads: Ints, dense: Ints, phase: int, index: int
) -> None:
    """Fill a costly micro-batch: one of its heaviest samples on a rank (`every`: on all), then at home the densest."""
    ranks, count = problem.num_ranks, bins.count
    by_bytes = heads[np.argsort(-problem.nbytes[heads], kind="stable")]
    _, first = np.unique(problem.home[by_bytes], return_index=True)
    keep = np.zeros(len(heads), np.bool_)
    keep[first] = True
    without = np.setdiff1d(np.arange(ranks), problem.home[by_bytes[keep]])
    movers = by_bytes[~keep]
    if not every:
        # What is too heavy for the other micro-batches has to share this one; lighter ones may stay where they are.
        level = int(problem.cost[bins.bin_of < 0, phase].sum()) // (ranks * (count - index))
        movers = movers[problem.cost[movers, phase] > level]
    if problem.allowed is None:
        rank_of[movers] = without[: len(movers)]
    deficit = goal.reshape(ranks * count, -1)
    phases = np.full(len(problem.size), phase, np.int64)
    for some in (heads, dense):
        kernels.fill_home(
            some, phases, rank_of, problem.cost, problem.size, deficit, bins.room, bins.places, bins.bin_of,
            index, index + 1, count, True, False,
        )  # fmt: skip


def _spread_heavy(problem: Problem, bins: Bins, goal: Ints, rank_of: Ints, heavy: Bools, first: int, allowed: int) -> None:
    """Change `rank_of` so that heavy samples find a pack that they do not overfill."""
    ranks, count = problem.num_ranks, bins.count
    order = problem.by_share
    order = order[heavy[order] & (bins.bin_of[order] < 0)]
    if not len(order):
        return
    trial = Bins(count=count, bin_of=bins.bin_of.copy(), room=bins.room.copy(), places=bins.places.copy())
    level = -(-problem.cost[bins.bin_of < 0].sum(axis=0) // (ranks * (count - first)))
    level = scaled(level, allowed, max(int(level.sum()) * (count - first), 1))
    goal[:, first:] = np.maximum(level, 1)
    deficit = goal.reshape(ranks * count, -1).copy()
    if kernels.fill_home(
        order, problem.main_phase, rank_of, problem.cost, problem.size, deficit, trial.room, trial.places,
        trial.bin_of, first, count, count, True, False,
    ):  # fmt: skip
        rest = order[trial.bin_of[order] < 0]
        place_anywhere(problem, trial, rest, deficit, problem.cost, first)
        placed = rest[trial.bin_of[rest] >= 0]
        rank_of[placed] = trial.bin_of[placed] // count


def _fill_rest(problem: Problem, bins: Bins, goal: Ints, rank_of: Ints, first: int) -> bool:
    """Pack what is left into the micro-batches from `first` on, at home where there is room; False if there is none."""
    ranks, count = problem.num_ranks, bins.count
    order = problem.by_share
    order = order[bins.bin_of[order] < 0]
    load = np.zeros((ranks, problem.num_phases), np.int64)
    np.add.at(load, rank_of[order], problem.cost[order])
    goal[:, first:] = (load // max(count - first, 1))[:, None, :]
    deficit = goal.reshape(ranks * count, -1)
    left = kernels.fill_home(
        order, problem.main_phase, rank_of, problem.cost, problem.size, deficit, bins.room, bins.places, bins.bin_of,
        first, count, count, False, False,
    )  # fmt: skip
    if not left:
        return True
    return place_anywhere(problem, bins, order[bins.bin_of[order] < 0], deficit, problem.cost, 0) == 0


def _order_at_home(problem: Problem, bins: Bins) -> None:
    """Renumber each rank's packs, costliest first: like meets like at every index."""
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem).sum(axis=1).reshape(ranks, count)
    order = np.argsort(-load, axis=1, kind="stable")
    new = np.empty((ranks, count), np.int64)
    np.put_along_axis(new, order, np.arange(count)[None, :] + np.arange(ranks)[:, None] * count, axis=1)
    bins.relabel(new.reshape(-1))


def _lower(problem: Problem, bins: Bins, limit: int, between: str) -> bool:
    """Exchange samples until the costliest packs of every index come down far enough for the sum to reach `limit`.

    Between packs of one "rank" nothing moves; between packs of one "index", or "all" packs, the least bytes do.
    Returns False where nothing was left to do.
    """
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem)
    largest = _largest(problem, load, count)
    excess = int(largest.sum()) - limit
    if excess <= 0:
        return False
    least = column_goals(problem, bins, load)
    slack = largest - problem.raised(least)
    share = min(excess / max(int(slack.sum()), 1), 1.0)
    goals = largest - np.ceil(slack * share).astype(np.int64)
    packs = np.arange(ranks * count).reshape(ranks, count)
    exchange(
        problem,
        bins,
        groups={"rank": packs, "index": packs.T, "all": packs.reshape(1, -1)}[between],
        bins_per_unit=1,
        excess=load - np.tile(goals, (ranks, 1)),
        cost=problem.cost,
        price=None if between == "rank" else price(problem, bins),
        rounds=2 * ROUNDS,
        patience=count if between == "rank" else PATIENCE,
        choices=1 if between == "rank" or problem.num_phases > 1 else CHOICES,
    )
    return True

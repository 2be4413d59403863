"""Plans in which a sample leaves home only if balance within the tolerance needs it."""

import heapq
from functools import partial

import numpy as np
import numpy.typing as npt

from . import bounds, kernels
from .bins import Bins
from .free import TRIES, fill_costly, fit, free_microbatch, usual_rate
from .homeward import bring_home, moved, packs_to_homes
from .integers import portion, scaled
from .problem import Problem
from .refine import PATIENCE, ROUNDS, column_goals, even_columns, even_packs_of_ranks, even_ranks, exchange
from .table import Ints

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
#: A sample is heavy if fewer than so many of its weight fill a rank.
HEAVY = 4
#: Times that ranks which no other can relieve give by force, and how many of them each time.
FORCED, FORCED_RANKS = 4, 64

Bools = npt.NDArray[np.bool_]


def minimal_step(problem: Problem, count: int, reserve: bool, bound: int) -> Bins | None:
    """Ranks above the tolerance give samples away; everything else stays."""
    limit = loosened(problem, bound)
    rank_of = _balanced(problem, limit, count)
    bins = _pack_at_home(problem, rank_of, count, reserve, limit)
    if bins is None:
        return None
    even_ranks(problem, bins, limit, goal=0, price=_price(problem, bins))
    if problem.config.pipeline_stages > 1:
        even_packs_of_ranks(problem, bins)
    return bins


def _balanced(problem: Problem, limit: int, count: int) -> Ints:
    """`[N]` rank of each sample, so that sums stay within the limit where that was found."""
    found = []
    for part in (False, True):
        rank_of = problem.home.copy()
        if part and not _part_heavy(problem, rank_of, limit):
            break
        _balance_by_force(problem, rank_of, limit, count)
        found.append((int(np.bincount(rank_of, problem.weight, minlength=1).max()), rank_of))
        if found[-1][0] <= limit:
            break
    return min(found, key=lambda each: each[0])[1]


def loosened(problem: Problem, bound: int) -> int:
    """The bound with the tolerance on top."""
    return bound + portion(bound, problem.config.tolerance)


def almost(problem: Problem, limit: int) -> int:
    """The limit with a tenth of the tolerance on top: what is nearer is not worth more bytes."""
    return limit + portion(limit, problem.config.tolerance) // 10


def _balance(problem: Problem, rank_of: Ints, limit: int, count: int, movable: Bools, some: Ints | None = None) -> int:
    """Bring the sums of `some` samples (all) to at most `limit` on every rank; returns how many ranks stay above."""
    ranks = problem.num_ranks
    some = np.arange(len(rank_of)) if some is None else some
    home = rank_of[some]
    order, starts = kernels.group(home, ranks)
    # A sample that left home already is another rank's to send: with fixed peers it stays.
    movable = movable if problem.allowed is None else movable & (rank_of == problem.home)
    return int(
        kernels.balance(
            starts,
            some[order],
            problem.weight,
            problem.size,
            problem.nbytes,
            movable,
            np.bincount(home, problem.weight[some], minlength=ranks).astype(np.int64),
            np.bincount(home, problem.size[some], minlength=ranks).astype(np.int64),
            limit,
            count * problem.capacity,
            usual_rate(problem, problem.weight),
            problem.node,
            problem.allowed_or_any,
            rank_of,
        )
    )


def _part_heavy(problem: Problem, rank_of: Ints, limit: int) -> bool:
    """Where a rank has more heavy samples than fit under the limit, send all but the heaviest where the fewest are.

    A rank with a surplus asks for one with as much of a deficit; for heavy samples there may be none, while every rank still
    has all its light ones. False where no rank has too many.
    """
    heavy = np.flatnonzero(problem.weight > limit // HEAVY)
    load = np.bincount(rank_of[heavy], problem.weight[heavy], minlength=problem.num_ranks).astype(np.int64)
    if problem.allowed is not None or not (load > limit).any():
        return False
    load[:] = 0
    parted: list[int] = []
    for index in heavy[np.argsort(-problem.weight[heavy], kind="stable")].tolist():
        home, weight = rank_of[index], problem.weight[index]
        if load[home] == 0 or load[home] + weight <= limit:
            load[home] += weight
        else:
            parted.append(index)
    takers = [(int(total), rank) for rank, total in enumerate(load)]
    heapq.heapify(takers)
    for index in parted:
        total, rank = takers[0]
        rank_of[index] = rank
        heapq.heapreplace(takers, (total + int(problem.weight[index]), rank))
    return True


def _balance_by_force(problem: Problem, rank_of: Ints, limit: int, count: int) -> None:
    """`_balance`; a rank that no other can relieve gives a heavy sample to one with little, which then gives in turn."""
    movable = np.ones(len(rank_of), np.bool_)
    for _ in range(FORCED):
        if not _balance(problem, rank_of, limit, count, movable) or problem.allowed is not None:
            return
        load = np.bincount(rank_of, problem.weight, minlength=problem.num_ranks).astype(np.int64)
        takers = np.argsort(load, kind="stable")
        for rank, taker in zip(takers[::-1][:FORCED_RANKS], takers, strict=False):
            surplus = load[rank] - limit
            if surplus <= 0 or load[taker] > limit:
                break
            items = np.flatnonzero((rank_of == rank) & movable & (problem.weight >= surplus) & (problem.weight <= limit))
            if len(items):
                index = items[np.argmin(problem.nbytes[items])]
                rank_of[index], movable[index] = taker, False


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
        if _place_anywhere(problem, best, order[best.bin_of[order] < 0], deficit, weight, 0):
            return None
    return best


def _place_anywhere(problem: Problem, bins: Bins, rest: Ints, deficit: Ints, cost: Ints, first: int) -> int:
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
    """`[M, K]` largest cost of each micro-batch, or what it may cost anyway where the others set a level."""
    largest: Ints = load.reshape(problem.num_ranks, count, -1).max(axis=0)
    return largest if problem.level is None else np.maximum(largest, problem.level)


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
        if not _balance(problem, rank_of, (3 * mean + allowed) // 4, count - first, movable, rest):
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
        _place_anywhere(problem, trial, rest, deficit, problem.cost, first)
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
    return _place_anywhere(problem, bins, order[bins.bin_of[order] < 0], deficit, problem.cost, 0) == 0


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
    slack = largest - (least if problem.level is None else np.maximum(least, problem.level))
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
        price=None if between == "rank" else _price(problem, bins),
        rounds=2 * ROUNDS,
        patience=count if between == "rank" else PATIENCE,
        choices=1 if between == "rank" or problem.num_phases > 1 else CHOICES,
    )
    return True


def _price(problem: Problem, bins: Bins) -> Ints:
    """`[N]` bytes that a sample adds when it moves: none where it is away from home already."""
    return np.where(bins.bin_of // bins.count == problem.home, problem.nbytes, 0)

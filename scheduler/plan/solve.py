"""Choose the number of micro-batches, pack, and arrange the packs."""

import msgspec
import numpy as np

from ...core.errors import InfeasiblePlanError
from . import bounds, kernels, media
from .problem import Problem
from .table import Ints


class Assignment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rank and micro-batch of every sample of a problem (-1: left over), and the dummies that its packs need."""

    rank: Ints
    microbatch: Ints
    num_microbatches: int
    dummies: Ints
    lower_bound: int


def solve(problem: Problem) -> Assignment:
    """Find the plan with the lowest objective.

    Raises:
        InfeasiblePlanError: no assignment meets the constraints.
    """
    config = problem.config
    if config.num_microbatches is not None:
        found = attempt(problem, config.num_microbatches)
        if found is None:
            raise InfeasiblePlanError(
                f"{len(problem.size)} samples of {int(problem.size.sum())} padded tokens do not fit "
                f"num_microbatches={config.num_microbatches} on {problem.num_ranks} ranks with a capacity of "
                f"{problem.capacity} tokens each"
            )
        return found
    multiple = config.microbatch_multiple
    fewest = bounds.fewest_bins(problem.size, problem.capacity, problem.limit)
    count = max(-(-fewest // (problem.num_ranks * multiple)), 1) * multiple
    if config.pipeline_stages > 1 and config.sync == "step":
        best = None
        for more in range(count, max(count, 4 * config.pipeline_stages) + 1, multiple):
            found = attempt(problem, more)
            if found is not None and (best is None or _value(problem, found) < _value(problem, best)):
                best = found
        if best is not None:
            return best
    most = count + (len(problem.size) + 8) * multiple
    for tries in range(64):
        found = attempt(problem, count)
        if found is not None:
            return found
        if count > most:
            break
        count += multiple * max(1, 2 ** (tries - 8))
    raise InfeasiblePlanError(
        f"no number of micro-batches up to {most} holds {len(problem.size)} samples with capacity {problem.capacity}, "
        f"max_segments={config.max_segments} and the dummy media that the packs need "
        f"(tokens {problem.dummy_size.tolist()} by bit flags)"
    )


def _value(problem: Problem, found: Assignment) -> int:
    from .step import evaluate

    packs = found.rank * found.num_microbatches + found.microbatch
    shape = (problem.num_ranks, found.num_microbatches)
    cost = np.stack(
        [
            np.bincount(packs, problem.cost[:, k], minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)
            for k in range(problem.num_phases)
        ],
        axis=2,
    )
    return evaluate(problem, cost + problem.dummy_cost[found.dummies])[0]


def attempt(problem: Problem, count: int) -> Assignment | None:
    """A plan with `count` micro-batches, or None where none was found."""
    for reserve in (False, True):
        bins = pack(problem, count, reserve)
        if bins is None:
            continue
        rank, microbatch = arrange(problem, bins, count)
        found = _checked(problem, rank, microbatch, count)
        if found is not None:
            return found
    return segregate(problem, count)


def _checked(problem: Problem, rank: Ints, microbatch: Ints, count: int) -> Assignment | None:
    placed = rank >= 0
    packs = (rank * count + microbatch)[placed]
    shape = (problem.num_ranks, count)
    sums = np.bincount(packs, problem.size[placed], minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)
    counts = np.bincount(packs, minlength=shape[0] * shape[1]).reshape(shape)
    flags = media.carried(problem.subset(placed), rank[placed], microbatch[placed], count)
    dummies = media.needed(problem, flags)
    if len(media.overfull(problem, sums, counts, dummies)):
        return None
    return Assignment(
        rank=rank,
        microbatch=microbatch,
        num_microbatches=count,
        dummies=dummies,
        lower_bound=bounds.objective_bound(problem, count) + problem.config.microbatch_cost * count,
    )


def pack(problem: Problem, count: int, reserve: bool) -> Ints | None:
    """Put samples into `R * count` packs; with `reserve`, leave room for dummies where they may be needed."""
    config = problem.config
    num_bins = problem.num_ranks * count
    room = np.full(num_bins, problem.capacity, np.int64)
    places = np.full(num_bins, problem.limit, np.int64)
    if reserve:
        flags = problem.modalities if config.sync == "microbatch" else problem.trained
        some = slice(None) if config.sync == "microbatch" else slice(0, problem.num_ranks)
        room[some] -= problem.dummy_size[flags]
        places[some] -= problem.dummy_count[flags]
    by_weight = np.argsort(-problem.weight, kind="stable")
    by_size = np.argsort(-problem.size, kind="stable")
    for order, kernel in ((by_weight, kernels.fill_deepest), (by_size, kernels.fit_first)):
        bin_of = np.full(len(problem.size), -1, np.int64)
        arrays = (np.zeros(num_bins, np.int64), room.copy(), places.copy(), bin_of)
        more = (64,) if kernel is kernels.fill_deepest else ()
        left = kernel(order, problem.weight, problem.size, *arrays, *more)
        if left == 0 or (kernel is kernels.fit_first and config.num_microbatches is not None and config.leftover == "drop"):
            return bin_of
    return None


def arrange(problem: Problem, bins: Ints, count: int) -> tuple[Ints, Ints]:
    """Give packs to ranks and micro-batches: like cost at one index, or equal sums per rank."""
    ranks = problem.num_ranks
    num_bins = ranks * count
    placed = np.flatnonzero(bins >= 0)
    load = np.bincount(bins[placed], problem.weight[placed], minlength=num_bins).astype(np.int64)
    flags = np.zeros(num_bins, np.int64)
    np.bitwise_or.at(flags, bins[placed], problem.media[placed])
    if problem.config.sync == "microbatch":
        wanted = -problem.dummy_count[flags]
    else:  # the last micro-batch must hold the trained media or have room for their dummies
        sums = np.bincount(bins[placed], problem.size[placed], minlength=num_bins).astype(np.int64)[None, :]
        missing = problem.trained & ~flags
        broken = media.overfull(problem, sums, np.bincount(bins[placed], minlength=num_bins)[None, :], missing[None, :])
        wanted = problem.dummy_count[missing]
        wanted[broken[:, 1]] = media.NUM_SETS
    order = np.lexsort((-load, wanted))
    rank_of, index_of = np.empty(num_bins, np.int64), np.empty(num_bins, np.int64)
    if problem.config.sync == "microbatch":
        rank_of[order], index_of[order] = np.tile(np.arange(ranks), count), np.repeat(np.arange(count), ranks)
    else:
        sums = np.zeros(ranks, np.int64)
        for index, start in enumerate(range(0, num_bins, ranks)):
            chunk = order[start : start + ranks]
            chunk = chunk[np.argsort(-load[chunk], kind="stable")]
            least = np.argsort(sums, kind="stable")
            rank_of[chunk], index_of[chunk] = least, count - 1 - index
            sums[least] += load[chunk]
    rank, microbatch = np.full(len(bins), -1, np.int64), np.full(len(bins), -1, np.int64)
    rank[placed], microbatch[placed] = rank_of[bins[placed]], index_of[bins[placed]]
    return rank, microbatch


def segregate(problem: Problem, count: int) -> Assignment | None:
    """Micro-batches of one set of media each: dummies only fill packs that are empty. The last resort."""
    if problem.config.sync != "microbatch":
        return None
    sets = np.unique(problem.media)
    rank, microbatch = np.empty(len(problem.size), np.int64), np.empty(len(problem.size), np.int64)
    used = 0
    for flags in sets:
        index = np.flatnonzero(problem.media == flags)
        part = problem.subset(index)
        fewest = max(-(-bounds.fewest_bins(part.size, part.capacity, part.limit) // problem.num_ranks), 1)
        bins = pack(part, fewest, False)
        while bins is None:
            fewest += 1
            bins = pack(part, fewest, False)
        rank[index], microbatch[index] = arrange(part, bins, fewest)
        microbatch[index] += used
        used += fewest
    if used > count:
        return None
    return _checked(problem, rank, microbatch, count)

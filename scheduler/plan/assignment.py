"""From filled packs to an assignment: dummy media, the order of micro-batches, the objective.

Every rank runs a tower in the same micro-batch, or none does: dummies fill in where a pack has no such media.
"""

import msgspec
import numpy as np

from ...core import round_up
from ...core.errors import PlanError
from .kernels import scan
from .limits import FULL_SPEED
from .packs import Packs
from .problem import Problem
from .settings import MEDIA_BITS
from .table import Bools, Ints


class Assignment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where every sample of a problem goes (-1: left over), the dummies that its packs need, and what that costs."""

    rank: Ints
    microbatch: Ints
    num_microbatches: int
    dummies: Ints
    value: int

    @property
    def score(self) -> tuple[int, int]:
        """Smaller is better: the objective, then the number of dummies."""
        return self.value, int(np.count_nonzero(self.dummies))


def evaluate(problem: Problem, cost: Ints) -> tuple[int, float]:
    """Objective and imbalance of packs with these costs `[R, M, K]`."""
    config, count = problem.config, cost.shape[1]
    per_pack = cost.sum(axis=2)
    fixed = config.microbatch_cost * count
    # Every phase of every micro-batch ends when the slowest rank has ended it.
    if config.sync == "microbatch":
        value = slowest = int(problem.times(cost).max(axis=0).sum())
    else:
        sums = per_pack.sum(axis=1)
        value = int(problem.times(sums + (config.pipeline_stages - 1) * per_pack.max(axis=1)).max())
        slowest = int(problem.times(sums).max())
    total, speed = int(per_pack.sum()), int(problem.speeds.sum())
    return value + fixed, slowest * speed / (total * FULL_SPEED) if total else 1.0


def finish(problem: Problem, packs: Packs) -> Assignment | None:
    """Order the packs and add dummies; None where a dummy does not fit.

    The packs of a rank can be renumbered at will at step sync; at micro-batch sync packs of like cost share an index, and
    where that needs dummies, an order that puts packs with the same media together is tried as well.
    """
    sums = pack_sums(problem, packs)
    if problem.config.sync == "step":
        order = _step_order(problem, sums)
        return None if order is None else _assign(problem, packs, sums, order)
    same = np.tile(np.arange(packs.count), (problem.num_ranks, 1))
    found = _assign(problem, packs, sums, same)
    # Packs with the same media at one index need no dummies, if that does not cost more than it saves.
    if found is None or found.dummies.any():
        by_media = np.lexsort((-sums.cost.sum(axis=2), -sums.media), axis=1)
        other = _assign(problem, packs, sums, by_media)
        if other is not None and (found is None or other.score < found.score):
            return other
    return found


class PackSums(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What packs hold: `[R, M, K]` costs, and `[R, M]` padded tokens, samples, and bit flags of the media."""

    cost: Ints
    size: Ints
    count: Ints
    media: Ints


def pack_sums(problem: Problem, packs: Packs) -> PackSums:
    """Sum up every pack."""
    shape, bins = (problem.num_ranks, packs.count), len(packs.free_tokens)
    return PackSums(
        cost=packs.loads(problem),
        size=scan.sums(packs.bin_of, problem.size, bins).reshape(shape),
        count=np.bincount(packs.bin_of + 1, minlength=bins + 1)[1:].reshape(shape),
        media=scan.flags(packs.bin_of, problem.media, bins).reshape(shape),
    )


def _step_order(problem: Problem, sums: PackSums) -> Ints | None:
    """`[R, M]` old index at each new one: by cost, but last a pack that runs, or has room for, all trained towers."""
    load = sums.cost.sum(axis=2)
    ranks, count = load.shape
    order = np.argsort(-load, axis=1, kind="stable")
    # A pipeline fills and drains during its first and last micro-batches: small ones keep that short.
    if problem.config.pipeline_stages > 1:
        order = order[:, small_ends(count)]
    if not problem.trained:
        return order
    missing = missing_towers(problem, sums.media)
    broken = overfull(problem, sums.size, sums.count, missing)
    if broken.all(axis=1).any():
        return None
    # The lightest of those that need the fewest dummies.
    last = np.lexsort((np.arange(count)[None, :].repeat(ranks, 0), load, problem.dummy_count[missing], broken), axis=1)
    last = last[:, :1]
    # Row by row, all but the one that goes last, in the order that they had.
    others = order[order != last].reshape(ranks, count - 1)
    return np.concatenate([others, last], axis=1)


def small_ends(count: int) -> Ints:
    """Positions, in descending order of cost, such that small micro-batches come first and last.

    Example:
        >>> small_ends(5).tolist()
        [4, 2, 0, 1, 3]
    """
    positions = np.arange(count)
    return np.concatenate([positions[::2][::-1], positions[1::2]])


def _assign(problem: Problem, packs: Packs, sums: PackSums, order: Ints) -> Assignment | None:
    """As `assign`; None where a dummy does not fit."""
    sizes, counts, flags = (np.take_along_axis(array, order, axis=1) for array in (sums.size, sums.count, sums.media))
    if overfull(problem, sizes, counts, needed_dummies(problem, flags)).any():
        return None
    return assign(problem, packs, sums, order, sort=problem.config.sync == "microbatch")


def assign(problem: Problem, packs: Packs, sums: PackSums, order: Ints, *, sort: bool) -> Assignment:
    """Put pack `order[r, m]` of rank r at micro-batch m; with `sort`, reorder micro-batches by their cost.

    Args:
        sums: of the packs, in the packs' own numbering.
    """
    ranks, count = order.shape
    dummies = needed_dummies(problem, np.take_along_axis(sums.media, order, axis=1))
    cost = np.take_along_axis(sums.cost, order[:, :, None], axis=1)
    cost = cost + problem.dummy_cost[dummies]
    if sort:
        columns = np.argsort(-problem.times(cost).max(axis=0).sum(axis=1), kind="stable")
        if problem.config.pipeline_stages > 1:
            columns = columns[small_ends(count)]
        order, dummies, cost = order[:, columns], dummies[:, columns], cost[:, columns]
    new = np.empty_like(order)
    np.put_along_axis(new, order, np.arange(count)[None, :].repeat(ranks, 0), axis=1)
    # A sample without a bin, -1, finds the -1 at the end.
    return Assignment(
        rank=np.append(np.repeat(np.arange(ranks), count), -1)[packs.bin_of],
        microbatch=np.append(new, -1)[packs.bin_of],
        num_microbatches=count,
        dummies=dummies,
        value=evaluate(problem, cost)[0],
    )


def needed_dummies(problem: Problem, flags: Ints) -> Ints:
    """`[R, M]` bit flags of the dummies that packs with these media need.

    Micro-batch sync: what any rank carries at an index, all ranks carry there, kind by kind: models run a tower once for
    each kind of media, and FSDP gathers its weights each time. Step sync: the last micro-batch of every rank runs each
    trained tower, since the gradient reduction waits for its parameters.
    """
    if problem.config.sync == "microbatch":
        everywhere: Ints = np.bitwise_or.reduce(flags, axis=0, initial=problem.media_elsewhere)[None, :] & ~flags
        return everywhere
    dummies = np.zeros_like(flags)
    dummies[:, -1] = missing_towers(problem, flags[:, -1])
    return dummies


def missing_towers(problem: Problem, flags: Ints) -> Ints:
    """Bit flags of the dummies that run the trained towers which packs with these media leave out; shaped like `flags`."""
    missing = np.zeros_like(flags)
    for members, dummy in problem.trained_towers:
        missing |= np.where(flags & members, 0, dummy)
    return missing


def check_known(problem: Problem, dummies: Ints) -> None:
    """Raise `PlanError` where a plan needs a dummy item that the settings do not describe."""
    missing = int(np.bitwise_or.reduce(dummies, axis=None)) & ~problem.dummy_known
    for name, bit in MEDIA_BITS.items():
        if missing & bit:
            rank, index = np.argwhere(dummies & bit)[0]
            raise PlanError(
                f"rank {rank}, micro-batch {index} needs a dummy {name}, and dummy_tokens has no entry for {name!r}: "
                f"name the padded tokens of its smallest legal item (known: {sorted(problem.towers.dummy_tokens)})"
            )


def occupied(problem: Problem, sums: Ints, counts: Ints, dummies: Ints) -> tuple[Ints, Ints]:
    """Padded tokens and segments of packs, with dummies and tails.

    Args:
        sums: `[R, M]` padded tokens of the samples.
        counts: `[R, M]` number of samples.
        dummies: `[R, M]` bit flags.

    Returns:
        Two `[R, M]` arrays. A pack with nothing in it still holds one token that is not padding.
    """
    tokens = sums + problem.dummy_size[dummies]
    segments = counts + problem.dummy_count[dummies]
    # A pack without a segment is run all the same, or collectives of the others would wait: it holds one padding segment.
    empty = segments == 0
    tokens = np.where(empty, problem.align, tokens)
    padded = round_up(tokens, problem.pack_align)
    return padded, segments + empty + (padded > tokens)


def overfull(problem: Problem, sums: Ints, counts: Ints, dummies: Ints) -> Bools:
    """`[R, M]` packs above the capacity or the segment limit."""
    padded, segments = occupied(problem, sums, counts, dummies)
    broken: Bools = padded > problem.capacity
    if problem.config.max_segments is not None:
        broken |= segments > problem.config.max_segments
    return broken

"""Plans in which a sample leaves home only if balance within the tolerance needs it, where ranks wait once a step.

`balance` chooses the rank of every sample, so that no rank's sum lies above the bound with the tolerance. Each rank then
packs its own samples, longest first, into the pack with the least cost so far, or, where that leaves samples over, into the
pack with the least room. Samples without a pack at home go wherever there is room. Exchanges between ranks undo what that
cost, for the fewest bytes. With a pipeline, packs of a rank are evened out last: its largest pack counts once per stage.

Complexity: that of `balance`, O(N M) to pack N samples into M packs a rank, and a bounded number of rounds of exchanges.
Source: devised here; packing at home is worst fit decreasing, then best fit decreasing (Johnson 1974).
"""

import numpy as np

from ..kernels import fill
from ..kernels.jit import NO_PAIRS, Items
from ..packs import Packs
from ..problem import Problem, bound_with_tolerance
from ..table import Ints
from .balance import balanced
from .free import fill_deepest, fit
from .refine import even_packs_of_ranks, even_ranks


def minimal_step(problem: Problem, count: int, reserve: bool, bound: int) -> Packs | None:
    """Ranks above the tolerance give samples away; everything else stays."""
    limit = bound_with_tolerance(problem, bound)
    rank_of = balanced(problem, limit, count)
    packs = _pack_at_home(problem, rank_of, count, reserve, limit)
    if packs is None:
        return None
    # Samples that found no pack at home may have lifted a rank above the limit.
    even_ranks(problem, packs, limit, goal=0, price=price(problem, packs))
    if problem.config.pipeline_stages > 1:
        even_packs_of_ranks(problem, packs)
    return packs


def _pack_at_home(problem: Problem, rank_of: Ints, count: int, reserve: bool, limit: int) -> Packs | None:
    """Pack each rank's samples into its own packs; those that find no room go to the ranks with the least load."""
    order, phase = problem.by_size, np.zeros(len(problem.size), np.int64)
    # Emptiest pack first leaves even packs; tightest first fits samples of like size better.
    best, fewest = None, len(order) + 1
    for tight in (False, True):
        packs = Packs.empty(problem, count, reserve)
        deficit = np.zeros((problem.num_ranks * count, 1), np.int64)
        left = fill.fill_home(
            order, problem.summed_items, packs.bins, phase, rank_of, NO_PAIRS, deficit, packs.window(), False, tight
        )
        if left < fewest:
            best, fewest = packs, left
        if left == 0:
            break
    assert best is not None
    if fewest:
        goal = problem.within(limit)[:, None, None] // count - best.loads(problem).sum(axis=2, keepdims=True)
        if place_anywhere(problem, best, best.unplaced(order), goal, problem.summed_items, 0):
            return None
    return best


def place_anywhere(problem: Problem, packs: Packs, rest: Ints, goal: Ints, items: Items, first: int) -> int:
    """Give samples that found no pack at home to packs furthest below their targets; returns how many are left.

    Args:
        goal: `[R, M, K]` what each pack misses, updated.
    """
    window = packs.window(first)
    if problem.allowed is not None:
        phase, deficit = np.zeros(len(problem.size), np.int64), goal.reshape(-1, goal.shape[-1])
        return int(fill.fill_home(rest, items, packs.bins, phase, problem.home, problem.allowed, deficit, window, False, False))
    fill_deepest(problem, packs, rest, goal, window, items=items)
    return fit(problem, packs, rest)


def price(problem: Problem, packs: Packs) -> Ints:
    """`[N]` bytes that a sample adds when it moves: none where it is away from home already."""
    return np.where(packs.rank_of == problem.home, problem.nbytes, 0)

"""Exchange samples between packs or ranks until loads are even: what all plans have in common.

Units are packs or whole ranks, and every unit has a target. In a round the unit furthest above its target meets the one
furthest below, the second meets the second, and so on. A pair makes the exchange, or the move of one sample, that brings
both nearest their targets; of equal ones the exchange with the least bytes. Two packs of few samples are split again in the
best of all ways. A group is done when no unit lies above its goal, or when some rounds with other partners found nothing.

Complexity: at most `MAX_PAIRS` pairs of samples per pair of units, `PAIRS_PER_SAMPLE` N and `PAIRS_PER_CALL` of them in one
    call.
Source: pairwise interchange (Finn and Horowitz 1979); all ways to split few samples in the order of a Gray code.
"""

import numpy as np

from ..kernels import scan, swap
from ..kernels.jit import Effort, Items, Units
from ..limits import FULL_SPEED, GOOD_ENOUGH, MAX_PAIRS, MAX_ROUNDS, PATIENCE
from ..packs import Packs
from ..problem import Problem
from ..table import Ints


def exchange(
    problem: Problem,
    packs: Packs,
    *,
    groups: Ints,
    bins_per_unit: int,
    excess: Ints,
    items: Items,
    goal: Ints | None = None,
    price: Ints | None = None,
    rounds: int = MAX_ROUNDS,
    patience: int = PATIENCE,
    choices: int = 1,
) -> None:
    """Call `swap.refine` where a unit of a group lies above its goal (0), at the least price (nothing)."""
    if not len(problem.size):
        return
    goal = np.zeros((len(groups), items.cost.shape[1]), np.int64) if goal is None else goal
    price = np.zeros(len(problem.size), np.int64) if price is None else price
    # A pair costs more to weigh with several phases.
    pairs = MAX_PAIRS if problem.num_phases == 1 else MAX_PAIRS // 4
    swap.refine(
        Units(np.ascontiguousarray(groups), bins_per_unit, excess.reshape(-1, items.cost.shape[1]), np.ascontiguousarray(goal)),
        items._replace(nbytes=price),
        packs.bins,
        Effort(rounds, pairs, patience, choices, problem.work),
        problem.allowed_or_any,
        packs.count,
    )


def column_goals(problem: Problem, packs: Packs, load: Ints) -> Ints:
    """`[M, K]` time that each micro-batch may take: that of its packs if even, or its heaviest sample's where that is more."""
    even = load.sum(axis=0) * FULL_SPEED // int(problem.speeds.sum())
    goals: Ints = np.maximum(even, problem.fastest(scan.heaviest(problem.cost, packs.bin_of, packs.count)))
    return goals


def even_columns(problem: Problem, packs: Packs, *, across: bool) -> None:
    """Exchange samples between packs of one index, or `across` all packs, until each costs what its index may."""
    ranks, count = problem.num_ranks, packs.count
    load = packs.loads(problem)
    goals = column_goals(problem, packs, load)
    numbers = np.arange(ranks * count)
    # Across all packs one goal holds for every index: that of the lightest.
    close = goals // GOOD_ENOUGH
    exchange(
        problem,
        packs,
        groups=numbers[None, :] if across else numbers.reshape(ranks, count).T,
        bins_per_unit=1,
        excess=load - problem.within(goals),
        goal=close.min(axis=0, keepdims=True) if across else close,
        items=problem.items,
    )


def even_ranks(problem: Problem, packs: Packs, target: int, *, goal: int, price: Ints | None = None) -> None:
    """Exchange samples between ranks until their sums are at most `goal` above what takes the time `target`."""
    ranks = problem.num_ranks
    # A call costs a pass over all samples, and most plans need none.
    excess = packs.loads(problem).sum(axis=(1, 2)) - problem.within(target)
    if excess.max() <= goal:
        return
    exchange(
        problem,
        packs,
        groups=np.arange(ranks)[None, :],
        bins_per_unit=packs.count,
        excess=excess,
        goal=np.full((1, 1), goal),
        items=problem.summed_items,
        price=price,
        rounds=4 * MAX_ROUNDS,
    )


def even_packs_of_ranks(problem: Problem, packs: Packs) -> None:
    """Exchange samples between packs of one rank until its largest is near their mean (pipelines)."""
    ranks, count = problem.num_ranks, packs.count
    load = packs.loads(problem).sum(axis=2)
    mean = load.sum(axis=1, keepdims=True) // count
    exchange(
        problem,
        packs,
        groups=np.arange(ranks * count).reshape(ranks, count),
        bins_per_unit=1,
        excess=load - mean,
        goal=mean // GOOD_ENOUGH,
        items=problem.summed_items,
        patience=count,
    )

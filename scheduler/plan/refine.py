"""Exchange samples between packs or ranks until loads are even: what all plans have in common."""

import numpy as np

from . import kernels
from .bins import Bins
from .problem import Problem
from .table import Ints

ROUNDS = 24
#: Pairs of samples looked at per pair of packs.
BUDGET = 2048
#: Rounds without success, each with other partners, before a group of packs is left as it is.
PATIENCE = 4
#: Excess over the mean that is not worth an exchange: a fraction of it.
GOOD_ENOUGH = 4000


def exchange(
    problem: Problem,
    bins: Bins,
    *,
    groups: Ints,
    bins_per_unit: int,
    excess: Ints,
    cost: Ints,
    goal: Ints | None = None,
    price: Ints | None = None,
    rounds: int = ROUNDS,
    patience: int = PATIENCE,
    choices: int = 1,
) -> None:
    """Call `kernels.refine` where a unit of a group lies above its goal (0), at the least price (nothing)."""
    if not len(problem.size):
        return
    kernels.refine(
        np.ascontiguousarray(groups),
        bins_per_unit,
        np.ascontiguousarray(excess),
        np.ascontiguousarray(goal) if goal is not None else np.zeros((len(groups), cost.shape[1]), np.int64),
        np.ascontiguousarray(cost),
        problem.size,
        price if price is not None else np.zeros(len(problem.size), np.int64),
        bins.room,
        bins.places,
        bins.bin_of,
        rounds,
        BUDGET if problem.num_phases == 1 else BUDGET // 4,
        patience,
        choices,
        problem.work,
        problem.home,
        problem.allowed_or_any,
        bins.count,
    )


def column_goals(problem: Problem, bins: Bins, load: Ints) -> Ints:
    """`[M, K]` what each micro-batch may cost: the mean of its packs, or its heaviest sample where that is more."""
    count = bins.count
    mean = load.reshape(problem.num_ranks, count, -1).sum(axis=0) // problem.num_ranks
    goals: Ints = np.maximum(mean, kernels.heaviest(problem.cost, bins.bin_of, count))
    return goals


def even_columns(problem: Problem, bins: Bins, *, across: bool) -> None:
    """Exchange samples between packs of one index, or `across` all packs, until each costs what its index may."""
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem)
    goals = column_goals(problem, bins, load)
    packs = np.arange(ranks * count)
    close = goals // GOOD_ENOUGH
    exchange(
        problem,
        bins,
        groups=packs[None, :] if across else packs.reshape(ranks, count).T,
        bins_per_unit=1,
        excess=load - np.tile(goals, (ranks, 1)),
        goal=close.min(axis=0, keepdims=True) if across else close,
        cost=problem.cost,
    )


def even_ranks(
    problem: Problem, bins: Bins, target: int, *, goal: int, price: Ints | None = None, patience: int = PATIENCE
) -> None:
    """Exchange samples between ranks until their sums are at most `target + goal`."""
    ranks = problem.num_ranks
    load = bins.loads(problem).sum(axis=1).reshape(ranks, bins.count).sum(axis=1)
    if load.max() <= target + goal:
        return
    exchange(
        problem,
        bins,
        groups=np.arange(ranks)[None, :],
        bins_per_unit=bins.count,
        excess=(load - target)[:, None],
        goal=np.full((1, 1), goal),
        cost=problem.weight[:, None],
        price=price,
        rounds=4 * ROUNDS,
        patience=patience,
    )


def even_packs_of_ranks(problem: Problem, bins: Bins) -> None:
    """Exchange samples between packs of one rank until its largest is near their mean (pipelines)."""
    ranks, count = problem.num_ranks, bins.count
    load = bins.loads(problem).sum(axis=1).reshape(ranks, count)
    mean = load.sum(axis=1, keepdims=True) // count
    exchange(
        problem,
        bins,
        groups=np.arange(ranks * count).reshape(ranks, count),
        bins_per_unit=1,
        excess=(load - mean).reshape(-1, 1),
        goal=mean // GOOD_ENOUGH,
        cost=problem.weight[:, None],
        patience=count,
    )

"""Lower bounds of the objective and of the bytes to move."""

import numpy as np

from .problem import Problem
from .table import Ints


def fewest_bins(size: Ints, capacity: int, limit: int) -> int:
    """Packs that any packing needs at least (Martello and Toth's L2, and the limit on samples per pack).

    L2: for each threshold t <= C/2, samples above C - t stay alone, those in (C/2, C - t] open a pack each, and those in
    [t, C/2] fill what these leave.
    """
    count = len(size)
    if count == 0:
        return 0
    ordered = np.sort(size)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    half = np.searchsorted(ordered, capacity // 2, "right")
    thresholds = np.concatenate([[0], ordered[:half]])
    first = np.searchsorted(ordered, thresholds, "left")
    alone = np.searchsorted(ordered, capacity - thresholds, "right")
    alone = np.maximum(alone, half)
    large = count - half
    medium_room = (alone - half) * capacity - (sums[alone] - sums[half])
    small = sums[half] - sums[first]
    extra = np.maximum(-(-(small - medium_room) // capacity), 0)
    return max(int((large + extra).max()), -(-count // limit), 1)


def objective_bound(problem: Problem, num_microbatches: int) -> int:
    """Lower bound of the objective without `microbatch_cost`, for plans with at most `num_microbatches`."""
    total = int(problem.weight.sum())
    if not len(problem.weight):
        return 0
    return max(-(-total // problem.num_ranks), int(problem.weight.max()))

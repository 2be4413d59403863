"""First-fit decreasing by tokens, as NeMo-RL packs; with Karmarkar-Karp and swaps on top, as prime-rl does."""

import numpy as np

from evenpack.cli.what_if.opponents.alone import pack_decreasing
from evenpack.cli.what_if.opponents.common import Pack, to_plan, weights
from evenpack.cli.what_if.opponents.karmarkar_karp import partition
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from evenpack.scheduler.plan.settings import NO_TOWERS

from .common import split_to_multiple


def first_fit_decreasing(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Pack b goes to rank b modulo R; each rank runs its fullest packs first."""
    lengths = table.padded.tolist()
    packs = split_to_multiple(pack_decreasing(lengths, config.max_tokens), num_ranks)
    ranks = [sorted(packs[r::num_ranks], key=lambda pack: -sum(lengths[i] for i in pack)) for r in range(num_ranks)]
    return to_plan(table, ranks, num_ranks=num_ranks, config=config, towers=towers)


def ffd_karmarkar_karp_swaps(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """FFD packs, split to a multiple of the ranks, dealt in equal numbers by Karmarkar-Karp, then swapped pairwise."""
    cost = weights(table)
    packs = split_to_multiple(pack_decreasing(table.padded.tolist(), config.max_tokens), num_ranks)
    loads = [sum(cost[i] for i in pack) for pack in packs]
    groups = partition(loads, num_ranks, equal_counts=True)
    _swap(groups, loads)
    ranks = [[packs[b] for b in sorted(group, key=lambda b: -loads[b])] for group in groups]
    return to_plan(table, ranks, num_ranks=num_ranks, config=config, towers=towers)


def _swap(groups: list[Pack], loads: list[int], most: int = 200) -> None:
    """Exchange packs between the most and the least loaded group while that lowers the largest sum."""
    for _ in range(most):
        sums = [sum(loads[b] for b in group) for group in groups]
        high, low = int(np.argmax(sums)), int(np.argmin(sums))
        best, chosen = 0, None
        for i, a in enumerate(groups[high]):
            for j, b in enumerate(groups[low]):
                moved = loads[a] - loads[b]
                gain = sums[high] - max(sums[high] - moved, sums[low] + moved)
                if gain > best:
                    best, chosen = gain, (i, j)
        if chosen is None:
            return
        i, j = chosen
        groups[high][i], groups[low][j] = groups[low][j], groups[high][i]

"""What every rank does for itself: padded batches, and packs of its own samples."""

import msgspec
import numpy as np

from ....scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from ....scheduler.plan.settings import NO_TOWERS
from .common import Pack, to_plan, weights


def pack_decreasing(lengths: list[int], capacity: int) -> list[Pack]:
    """Longest first, each into the first pack with room."""
    packs: list[Pack] = []
    room = np.zeros(len(lengths), np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = np.flatnonzero(room[: len(packs)] >= lengths[index])
        if len(fits):
            chosen = int(fits[0])
        else:
            chosen = len(packs)
            packs.append([])
            room[chosen] = capacity
        packs[chosen].append(index)
        room[chosen] -= lengths[index]
    return packs


def own_samples(table: SampleTable, num_ranks: int) -> list[list[int]]:
    """Return the rows that each rank brought, in their order."""
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, rank in enumerate(table.home.tolist()):
        own[rank].append(row)
    return own


def packed_alone(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Every rank packs what it read, longest first into the first pack with room, and runs its heaviest packs first.

    Ranks with fewer packs than others run dummies.
    """
    lengths, cost = table.padded.tolist(), weights(table)
    ranks = []
    for own in own_samples(table, num_ranks):
        packs = [[own[j] for j in pack] for pack in pack_decreasing([lengths[i] for i in own], config.max_tokens)]
        ranks.append(sorted(packs, key=lambda pack: -sum(cost[i] for i in pack)))
    return to_plan(table, ranks, num_ranks=num_ranks, config=config, towers=towers)


def padded_alone(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Every rank cuts what it read into batches, in order, padded to their longest sample.

    A batch takes as many samples as fit `max_tokens` with their padding. Padding is computed like tokens: in the plan a
    sample occupies, and costs, as much as the longest of its batch.
    """
    ranks = padded_batches(table, num_ranks, config.max_tokens)
    return to_plan(_padded_table(table, ranks), ranks, num_ranks=num_ranks, config=config, towers=towers)


def padded_batches(table: SampleTable, num_ranks: int, capacity: int) -> list[list[Pack]]:
    """Return the batches of each rank."""
    lengths = table.padded.tolist()
    ranks = []
    for own in own_samples(table, num_ranks):
        batches: list[Pack] = []
        longest = 0
        for i in own:
            longest = max(longest, lengths[i])
            if not batches or longest * (len(batches[-1]) + 1) > capacity:
                batches.append([])
                longest = lengths[i]
            batches[-1].append(i)
        ranks.append(batches)
    return ranks


def _padded_table(table: SampleTable, ranks: list[list[Pack]]) -> SampleTable:
    """Return the table in which every sample has the padded length, and the decoder's cost, of the longest of its batch."""
    padded, cost = table.padded.copy(), table.cost.copy().reshape(len(table), -1)
    for batches in ranks:
        for batch in batches:
            longest = batch[int(np.argmax(table.padded[batch]))]
            padded[batch] = table.padded[longest]
            # The last phase is the decoder; images are not padded.
            cost[batch, -1] = cost[longest, -1]
    return msgspec.structs.replace(table, padded=padded, cost=cost.reshape(table.cost.shape))

"""Longest-first with a soft capacity and a few swaps per micro-batch, as LoongForge balances a DP group."""

import numpy as np

from evenpack.cli.what_if.opponents.common import Pack, to_plan, weights
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from evenpack.scheduler.plan.settings import NO_TOWERS

from .common import pack_in_order

SOFT_CAPACITY = 1.2
MOST_SWAPS = 20


def longest_first_swaps(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Every rank packs what it has in arrival order; then the samples of each micro-batch are dealt anew.

    Costliest first onto the rank with the least cost so far whose pack stays below 1.2 times the mean tokens (ignored
    where none does), then up to 20 moves or swaps between the most and the least loaded rank. Earlier micro-batches count.
    """
    cost, tokens = weights(table), table.padded.tolist()
    own = []
    for r in range(num_ranks):
        mine = np.flatnonzero(table.home == r).tolist()
        own.append([[mine[j] for j in entry] for entry in pack_in_order([tokens[i] for i in mine], config.max_tokens)])
    count = max(len(packs) for packs in own)
    ranks: list[list[Pack]] = [[] for _ in range(num_ranks)]
    history = [0] * num_ranks
    for m in range(count):
        samples = [i for packs in own if m < len(packs) for i in packs[m]]
        dealt = _deal(samples, cost, tokens, history, num_ranks)
        _improve(dealt, cost)
        for r in range(num_ranks):
            ranks[r].append(dealt[r])
            history[r] += sum(cost[i] for i in dealt[r])
    return to_plan(table, ranks, num_ranks=num_ranks, config=config, towers=towers)


def _deal(samples: Pack, cost: list[int], tokens: list[int], history: list[int], num_ranks: int) -> list[Pack]:
    dealt: list[Pack] = [[] for _ in range(num_ranks)]
    load, length = np.array(history, np.float64), np.zeros(num_ranks)
    most = SOFT_CAPACITY * sum(tokens[i] for i in samples) / num_ranks
    for index in sorted(samples, key=lambda i: -cost[i]):
        fits = length + tokens[index] <= most
        where = np.where(fits, load, np.inf) if fits.any() else load
        chosen = int(np.argmin(where))
        dealt[chosen].append(index)
        load[chosen] += cost[index]
        length[chosen] += tokens[index]
    return dealt


def _improve(dealt: list[Pack], cost: list[int]) -> None:
    for _ in range(MOST_SWAPS):
        sums = [sum(cost[i] for i in entry) for entry in dealt]
        high, low = int(np.argmax(sums)), int(np.argmin(sums))
        gap = sums[high] - sums[low]
        if not dealt[high] or gap <= 0.05 * sums[high]:
            return
        heavy = max(dealt[high], key=lambda i: cost[i])
        light = min(dealt[low], key=lambda i: cost[i], default=None)
        options: list[tuple[int, int | None]] = [(abs(gap - 2 * cost[heavy]), None)]
        if light is not None:
            options.append((abs(gap - 2 * (cost[heavy] - cost[light])), light))
        after, other = min(options, key=lambda option: option[0])
        if after >= gap:
            return
        dealt[high].remove(heavy)
        dealt[low].append(heavy)
        if other is not None:
            dealt[low].remove(other)
            dealt[high].append(other)

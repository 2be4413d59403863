"""Karmarkar-Karp differencing, as verl balances its ranks and micro-batches."""

import heapq

import numpy as np

from evenpack.scheduler.plan import PlanConfig, SampleTable, StepPlan

from .common import Pack, to_plan, weights


def partition(values: list[int], parts: int, *, equal_counts: bool) -> list[Pack]:
    """Split indices of `values` into `parts` sets of about equal sum.

    The two states with the largest spread are merged, largest set with smallest, until one is left. With `equal_counts`
    states start as `parts` neighbours in sorted order, so that all sets end with the same number.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    states: list[list[tuple[int, Pack]]] = []
    if equal_counts:
        for start in range(0, len(order), parts):
            chunk = order[start : start + parts]
            states.append([(values[i], [i]) for i in chunk] + [(0, []) for _ in range(parts - len(chunk))])
    else:
        states = [[(values[i], [i])] + [(0, []) for _ in range(parts - 1)] for i in order]
    heap = []
    for number, state in enumerate(states):
        state.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (state[-1][0] - state[0][0], number, state))
    number = len(states)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [pack for _, pack in heap[0][2]] if heap else [[] for _ in range(parts)]


def karmarkar_karp_equal(table: SampleTable, *, num_ranks: int, config: PlanConfig, **_: object) -> StepPlan:
    """Ranks get equal numbers of samples; each splits its own into micro-batches, more until all fit the capacity."""
    cost = weights(table)
    groups = [
        [i for i in group if i < len(table)]
        for group in partition(cost + [0] * (-len(cost) % num_ranks), num_ranks, equal_counts=True)
    ]
    tokens = table.padded
    count = max(max(-(-int(tokens[group].sum()) // config.max_tokens) for group in groups), 1)
    # Ranks agree on the number of micro-batches and raise it together until every pack of every rank fits.
    while True:
        ranks = [
            [[group[j] for j in pack] for pack in partition([cost[i] for i in group], count, equal_counts=False)]
            for group in groups
        ]
        if count >= len(table) or all(tokens[pack].sum() <= config.max_tokens for packs in ranks for pack in packs if pack):
            break
        count += 1
    ordered = [sorted(packs, key=lambda pack: -sum(cost[i] for i in pack)) for packs in ranks]
    if config.order == "small_ends":
        ordered = [packs[::2][::-1] + packs[1::2] for packs in ordered]
    return to_plan(table, ordered, num_ranks=num_ranks, config=config)


def spread(values: list[int], packs: list[Pack]) -> float:
    """Largest over mean of the sums."""
    sums = np.array([sum(values[i] for i in pack) for pack in packs])
    return float(sums.max() / max(sums.mean(), 1e-9))

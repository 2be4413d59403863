"""Karmarkar-Karp differencing, as verl balances its ranks and micro-batches."""

import heapq
from collections.abc import Sequence
from typing import Any

from ....scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from ....scheduler.plan.settings import NO_TOWERS
from .common import Pack, to_plan, weights

#: A set while it is being merged: an index, a pair of sets, or None for none; a list only in the end.
Tree = Any


def partition(values: Sequence[int], parts: int, *, equal_counts: bool) -> list[Pack]:
    """Split indices of `values` into `parts` sets of about equal sum.

    The two states with the largest spread are merged, largest set with smallest, until one is left. With `equal_counts`
    states start as `parts` neighbours in sorted order, so that all sets end with the same number.

    Example:
        >>> partition([8, 7, 6, 5, 4], 2, equal_counts=False)
        [[4, 1, 3], [0, 2]]
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    width = parts if equal_counts else 1
    heap: list[tuple[int, int, list[int], list[Tree]]] = []
    for number, start in enumerate(range(0, len(order), width)):
        chunk: list[Tree] = [*order[start : start + width]]
        empty = parts - len(chunk)
        sums, sets = _descending([values[i] for i in chunk] + [0] * empty, chunk + [None] * empty)
        heap.append((sums[-1] - sums[0], number, sums, sets))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, sums, sets = heapq.heappop(heap)
        _, _, other_sums, other_sets = heapq.heappop(heap)
        other_sums.reverse()
        other_sets.reverse()
        merged = [
            left if right is None else right if left is None else (left, right)
            for left, right in zip(sets, other_sets, strict=True)
        ]
        sums, sets = _descending([a + b for a, b in zip(sums, other_sums, strict=True)], merged)
        heapq.heappush(heap, (sums[-1] - sums[0], number, sums, sets))
        number += 1
    return [_leaves(tree) for tree in heap[0][3]] if heap else [[] for _ in range(parts)]


def _descending(sums: list[int], sets: list[Tree]) -> tuple[list[int], list[Tree]]:
    """Sort sets by their sum, largest first; equal ones keep their order."""
    order = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)
    return [sums[i] for i in order], [sets[i] for i in order]


def _leaves(tree: Tree) -> Pack:
    """Return the indices of a set, in the order in which they were put together."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting.extend((node[1], node[0]))
        elif node is not None:
            found.append(node)
    return found


def karmarkar_karp_equal(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Ranks get equal numbers of samples; each splits its own into micro-batches, more until all fit the capacity."""
    cost, tokens = weights(table), table.padded.tolist()
    groups = [
        [i for i in group if i < len(table)]
        for group in partition(cost + [0] * (-len(cost) % num_ranks), num_ranks, equal_counts=True)
    ]
    count = max(max(-(-sum(tokens[i] for i in group) // config.max_tokens) for group in groups), 1)
    # Ranks agree on the number of micro-batches and raise it together until every pack of every rank fits. The rank that
    # did not fit is tried first with the next number: the same answer, sooner.
    ranks: dict[int, list[Pack]] = {}
    waiting = list(range(num_ranks))
    while waiting:
        rank = waiting[-1]
        split = partition([cost[i] for i in groups[rank]], count, equal_counts=False)
        packs = [[groups[rank][j] for j in pack] for pack in split]
        if count < len(table) and any(sum(tokens[i] for i in pack) > config.max_tokens for pack in packs if pack):
            count += 1
            waiting, ranks = [*(other for other in range(num_ranks) if other != rank), rank], {}
            continue
        ranks[rank] = packs
        waiting.pop()
    ordered = [sorted(ranks[rank], key=lambda pack: -sum(cost[i] for i in pack)) for rank in range(num_ranks)]
    if config.pipeline_stages > 1:
        ordered = [packs[::2][::-1] + packs[1::2] for packs in ordered]
    return to_plan(table, ordered, num_ranks=num_ranks, config=config, towers=towers)

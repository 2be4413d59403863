"""Other frameworks' algorithms against their plainest form."""

import heapq

import numpy as np
import pytest

from evenpack.cli.what_if.opponents.alone import packed_alone, padded_alone, padded_batches
from evenpack.cli.what_if.opponents.karmarkar_karp import karmarkar_karp_equal, partition
from evenpack.cli.what_if.workloads import WORKLOADS
from evenpack.scheduler.plan import PlanConfig, SampleTable


def plain_partition(values, parts, equal_counts):
    """Differencing with whole sets at every merge, as one would write it down."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    width = parts if equal_counts else 1
    heap = []
    for number, start in enumerate(range(0, len(order), width)):
        chunk = order[start : start + width]
        state = [(values[i], [i]) for i in chunk] + [(0, []) for _ in range(parts - len(chunk))]
        state.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (state[-1][0] - state[0][0], number, state))
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [pack for _, pack in heap[0][2]] if heap else [[] for _ in range(parts)]


@pytest.mark.parametrize("equal_counts", [False, True])
def test_differencing_equals_its_plain_form(equal_counts):
    rng = np.random.default_rng(0)
    for _ in range(600):
        parts = int(rng.integers(1, 8))
        values = rng.integers(0, rng.integers(2, 40), int(rng.integers(0, 24))).tolist()
        values += [0] * (-len(values) % parts if equal_counts else 0)
        assert partition(values, parts, equal_counts=equal_counts) == plain_partition(values, parts, equal_counts)


@pytest.mark.parametrize(
    "name, seed, more", [("sft", 1, 0), ("agent", 1, 0), ("bimodal", 0, 1), ("agent", 0, 2), ("agent", 5, 2)]
)
def test_all_ranks_raise_the_number_of_micro_batches_together(name, seed, more):
    """The count is the first at which every pack of every rank fits, tried one after the other."""
    workload = WORKLOADS[name](np.random.default_rng(seed), 4, 12)
    table, capacity = workload.table, workload.capacity
    plan = karmarkar_karp_equal(table, num_ranks=4, config=PlanConfig(max_tokens=capacity))
    groups = plain_partition(table.cost.tolist(), 4, True)
    count = fewest = max(-(-int(table.padded[group].sum()) // capacity) for group in groups)
    while any(
        table.padded[[group[j] for j in pack]].sum() > capacity
        for group in groups
        for pack in plain_partition(table.cost[group].tolist(), count, False)
        if pack
    ):
        count += 1
    assert plan.num_microbatches == count == fewest + more
    assert [sorted(np.flatnonzero(plan.rank == r)) for r in range(4)] == [sorted(group) for group in groups]
    assert plan.padded.max() <= capacity


def test_padded_batches_cost_what_their_longest_sample_costs():
    table = SampleTable.from_lengths([4, 2, 3, 9, 1], cost=[40, 20, 30, 90, 10], home=[0, 0, 0, 1, 1])
    config = PlanConfig(max_tokens=9, sync="microbatch")
    # Rank 0: 4 and 2 as 2 x 4; 3 alone, since 3 x 4 is too much. Rank 1: 9 fills a batch, then 1.
    assert padded_batches(table, 2, 9) == [[[0, 1], [2]], [[3], [4]]]
    plan = padded_alone(table, num_ranks=2, config=config)
    assert plan.padded.tolist() == [[8, 3], [9, 1]]
    assert plan.cost[:, :, 0].tolist() == [[80, 30], [90, 10]]
    assert plan.value == 90 + 30 and plan.moved_bytes == 0
    assert plan.tokens.tolist() == [[6, 3], [9, 1]]


def test_padding_never_changes_what_images_cost():
    table = SampleTable.from_lengths([4, 2], cost=[[7, 40], [5, 20]], home=[0, 0])
    plan = padded_alone(table, num_ranks=1, config=PlanConfig(max_tokens=8))
    assert plan.cost.tolist() == [[[12, 80]]]


def test_packing_alone_moves_nothing_and_fits():
    workload = WORKLOADS["long tail"](np.random.default_rng(0), 8, 16)
    plan = packed_alone(workload.table, num_ranks=8, config=PlanConfig(max_tokens=workload.capacity))
    assert np.array_equal(plan.rank, workload.table.home) and plan.moved_bytes == 0
    assert plan.padded.max() <= workload.capacity
    loads = np.bincount(workload.table.home, workload.table.cost)
    assert plan.value == loads.max()

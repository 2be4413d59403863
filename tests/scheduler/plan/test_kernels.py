"""Compiled loops against the same thing written plainly."""

import numpy as np
import pytest

from evenpack.scheduler.plan.kernels import fill, scan, swap
from evenpack.scheduler.plan.kernels.jit import Bins, Effort, Items, Units, Window

ANYWHERE = np.zeros((0, 0), bool)


def items_of(weight, size, cost=None, price=None):
    zeros = np.zeros(len(size), np.int64)
    return Items(weight, weight[:, None] if cost is None else cost, size, zeros if price is None else price, zeros)


def instance(seed, samples=40, bins=7):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 20, samples)
    return rng, size, size * 3 + rng.integers(0, 9, samples), np.full(bins, 90), np.full(bins, 9)


@pytest.mark.parametrize("seed", range(20))
def test_fill_deepest_equals_longest_processing_time(seed):
    _, size, weight, room, places = instance(seed)
    order = np.argsort(-weight, kind="stable")
    found = np.full(len(size), -1)
    target = np.full(len(room), 1000)
    deficit, bins = np.full((len(room), 1), 1000), Bins(room.copy(), places.copy(), found)
    left = fill.fill_deepest(
        order, items_of(weight, size), bins, weight, target.copy(), deficit, Window(0, 1, 1), 2**40, False, 64
    )  # fmt: skip
    expected, load, rest, free = np.full(len(size), -1), np.zeros(len(room), int), room.copy(), places.copy()
    for i in order:
        fits = [b for b in range(len(room)) if rest[b] >= size[i] and free[b] > 0]
        if fits:
            b = min(fits, key=lambda b: (load[b], b))
            expected[i] = b
            load[b], rest[b], free[b] = load[b] + weight[i], rest[b] - size[i], free[b] - 1
    assert found.tolist() == expected.tolist()
    assert left == (expected < 0).sum()


@pytest.mark.parametrize("seed", range(20))
def test_fit_first_equals_first_fit(seed):
    _, size, _, room, places = instance(seed, samples=60)
    order = np.argsort(-size, kind="stable")
    found = np.full(len(size), -1)
    left = fill.fit_first(order, size, Bins(room.copy(), places.copy(), found))
    rest, free, expected = room.copy(), places.copy(), np.full(len(size), -1)
    for i in order:
        b = next((b for b in range(len(room)) if rest[b] >= size[i] and free[b] > 0), -1)
        if b >= 0:
            expected[i], rest[b], free[b] = b, rest[b] - size[i], free[b] - 1
    assert found.tolist() == expected.tolist() and left == (expected < 0).sum()


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("samples", [8, 40])
@pytest.mark.parametrize("seed", range(8))
def test_refine_keeps_its_books_and_never_gets_worse(seed, samples, phases):
    rng, size, _, _, _ = instance(seed, samples=samples, bins=4)
    cost = rng.integers(1, 100, (samples, phases))
    bin_of = rng.integers(0, 4, samples)
    load = np.zeros((4, phases), np.int64)
    np.add.at(load, bin_of, cost)
    capacity = max(np.bincount(bin_of, size, 4).max(), 60) + 10
    room = (capacity - np.bincount(bin_of, size, 4)).astype(np.int64)
    places = 50 - np.bincount(bin_of, minlength=4)
    excess = load - load.sum(axis=0) // 4
    before = np.maximum(excess, 0).max(axis=0).sum()
    units = Units(np.arange(4)[None, :], 1, excess, np.zeros((1, phases), np.int64))
    bins, items = Bins(room, places, bin_of), items_of(cost.sum(axis=1), size, cost)
    swap.refine(units, items, bins, Effort(30, 4096, 4, 1, 10**9), ANYWHERE, 4)
    again = np.zeros((4, phases), np.int64)
    np.add.at(again, bin_of, cost)
    assert (again - load.sum(axis=0) // 4 == excess).all()
    assert (room == capacity - np.bincount(bin_of, size, 4)).all() and (room >= 0).all()
    assert (places == 50 - np.bincount(bin_of, minlength=4)).all()
    if phases == 1:
        assert np.maximum(excess, 0).max(axis=0).sum() <= before


@pytest.mark.parametrize("seed", range(10))
def test_few_samples_of_two_packs_are_dealt_in_the_best_way(seed):
    rng = np.random.default_rng(seed)
    cost, size = rng.integers(1, 100, (8, 1)), rng.integers(1, 10, 8)
    bin_of = np.array([0] * 5 + [1] * 3)
    capacity = 40
    masks = [np.array([mask >> i & 1 for i in range(8)]) for mask in range(256)]
    fitting = [m for m in masks if size[m == 0].sum() <= capacity and size[m == 1].sum() <= capacity]
    best = min(max(cost[m == 0].sum(), cost[m == 1].sum()) for m in fitting)
    load = np.array([[cost[:5].sum()], [cost[5:].sum()]])
    room = np.array([capacity - size[:5].sum(), capacity - size[5:].sum()])
    units = Units(np.array([[0, 1]]), 1, load, np.zeros((1, 1), np.int64))
    bins, items = Bins(room, np.array([50, 50]), bin_of), items_of(cost[:, 0], size, cost)
    swap.refine(units, items, bins, Effort(5, 4096, 4, 1, 10**9), ANYWHERE, 1)
    assert load.max() == best


def test_group_is_a_stable_sort():
    keys = np.random.default_rng(0).integers(0, 9, 200)
    order, starts = scan.group(keys, 10)
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()
    assert starts.tolist() == np.searchsorted(np.sort(keys), np.arange(11)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_polish_ends_near_the_mean_and_keeps_the_capacity(seed):
    rng = np.random.default_rng(seed)
    weight, size = rng.integers(1, 10_000, 120), rng.integers(1, 10, 120)
    bin_of = np.arange(120) % 8
    load = np.bincount(bin_of // 2, weight, 4).astype(np.int64)
    room = (120 - np.bincount(bin_of, size, 8)).astype(np.int64)
    mean = -(-int(weight.sum()) // 4)
    bins = Bins(room, np.full(8, 50), bin_of)
    swap.polish(load, mean, items_of(weight, size), bins, 2, 100, 3)
    assert (load == np.bincount(bin_of // 2, weight, 4)).all()
    assert (room == 120 - np.bincount(bin_of, size, 8)).all() and (room >= 0).all()
    assert load.max() <= mean + 2


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_heap_has_every_entry_above_its_children(seed, indexed):
    """Also one that knows where its entries are: an entry must not rise past parents that are not in order yet."""
    rng = np.random.default_rng(seed)
    key, heap = rng.integers(0, 30, 40), rng.permutation(40)
    where = np.argsort(heap) if indexed else np.zeros(0, np.int64)
    fill._order_heap(heap, where, key, 40)
    for child in range(1, 40):
        above, below = heap[(child - 1) // 2], heap[child]
        assert (-key[above], above) < (-key[below], below)
    assert sorted(heap) == list(range(40))
    assert not indexed or (heap[where] == np.arange(40)).all()

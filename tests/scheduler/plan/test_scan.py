"""Compiled passes over all samples against plain loops."""

from fractions import Fraction

import numpy as np
import pytest

from evenpack.scheduler.plan.kernels import scan


def samples(seed: int, count: int):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 21, count)
    return rng, size, size * rng.integers(0, 5, count) + rng.integers(0, 2, count)


@pytest.mark.parametrize("seed", range(20))
def test_sums_and_flags(seed):
    rng, size, _ = samples(seed, 30)
    packs, media = rng.integers(-1, 6, 30), rng.integers(0, 8, 30)
    members = [np.flatnonzero(packs == pack) for pack in range(6)]
    assert scan.sums(packs, size, 6).tolist() == [size[own].sum() for own in members]
    assert scan.flags(packs, media, 6).tolist() == [np.bitwise_or.reduce(media[own], initial=0) for own in members]


@pytest.mark.parametrize("seed", range(40))
def test_packs_that_any_packing_needs(seed):
    rng, size, _ = samples(seed, int(np.random.default_rng(seed).integers(1, 40)))
    capacity = int(size.max() + rng.integers(0, 10))
    bounds = []
    for threshold in range(capacity // 2 + 1):
        alone, medium = size > capacity - threshold, (size > capacity // 2) & (size <= capacity - threshold)
        small = (size >= threshold) & (size <= capacity // 2)
        rest = size[small].sum() - (medium.sum() * capacity - size[medium].sum())
        bounds.append(alone.sum() + medium.sum() + max(0, -(-rest // capacity)))
    assert scan.most_packs(np.sort(size), capacity) == max(bounds)


@pytest.mark.parametrize("seed", range(40))
def test_stairs(seed):
    rng, size, weight = samples(seed, 30)
    ranks, capacity, limit = int(rng.integers(1, 5)), int(size.max() + rng.integers(0, 20)), int(rng.integers(1, 8))
    order = np.argsort(-weight, kind="stable")
    expected: list[int] = []
    for number in range(1, 31):
        first = size[order[:number]]
        packs = max(-(-first.sum() // capacity), (2 * first > capacity).sum(), -(-number // limit))
        expected += [number - 1] * (-(-packs // ranks) - len(expected))
    assert scan.stairs(size, order, ranks, capacity, limit).tolist() == expected


@pytest.mark.parametrize("seed", range(40))
def test_knapsacks_are_never_below_the_exact_value_and_hardly_above(seed):
    rng, size, weight = samples(seed, 30)
    rooms = np.sort(rng.integers(0, int(size.sum()) + 10, 5))
    found = scan.knapsacks(weight, size, rooms)
    for room, value in zip(rooms, found, strict=True):
        exact, rest = Fraction(0), int(room)
        for index in sorted(range(30), key=lambda i: Fraction(int(weight[i]), int(size[i])), reverse=True):
            part = min(rest, int(size[index]))
            exact, rest = exact + Fraction(part * int(weight[index]), int(size[index])), rest - part
        assert exact <= value <= exact + 2

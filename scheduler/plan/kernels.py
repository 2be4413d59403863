# mypy: disable-error-code="no-untyped-def, assignment"
"""Every compiled loop of the planner, in one module.

Numba's cache does not notice a changed helper in another module, so functions that call each other stay together. All of
them take and return integers; none allocates per sample; all release the GIL. A `bin` is one pack, `rank * M + index`.
"""

from typing import Any

import numba
import numpy as np

#: Two packs with at most so many samples are dealt anew in the best of all ways.
FEW = 10


def _jit(function: Any) -> Any:
    """Compile without the GIL, and cache on disk where some folder can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True)(function)


@_jit
def group(keys, num_keys):
    """Stable order of `keys` (`[n]`, from 0 to `num_keys` - 1) and where each key starts in it (`[num_keys + 1]`)."""
    starts = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        starts[key + 1] += 1
    for key in range(num_keys):
        starts[key + 1] += starts[key]
    following = starts.copy()
    order = np.empty(len(keys), np.int64)
    for index in range(len(keys)):
        order[following[keys[index]]] = index
        following[keys[index]] += 1
    return order, starts


@_jit
def heaviest(cost, bin_of, count):
    """`[M, K]` largest cost of a sample in each micro-batch."""
    out = np.zeros((count, cost.shape[1]), np.int64)
    for index in range(len(bin_of)):
        if bin_of[index] >= 0:
            for k in range(cost.shape[1]):
                out[bin_of[index] % count, k] = max(out[bin_of[index] % count, k], cost[index, k])
    return out


@_jit
def _sift_down(heap, key, position, size):
    """Restore a max-heap of bins by (key, lower bin first) below `position`."""
    item = heap[position]
    value = key[item]
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            key[heap[other]] > key[heap[child]] or (key[heap[other]] == key[heap[child]] and heap[other] < heap[child])
        ):
            child = other
        below = heap[child]
        if key[below] < value or (key[below] == value and below > item):
            break
        heap[position] = below
        position = child
    heap[position] = item


@_jit
def _sift_up(heap, key, position):
    item = heap[position]
    value = key[item]
    while position > 0:
        parent = (position - 1) >> 1
        above = heap[parent]
        if key[above] > value or (key[above] == value and above < item):
            break
        heap[position] = above
        position = parent
    heap[position] = item


@_jit
def _reach(target, room, rate):
    """What a pack can still take: the cost it misses, or what its room holds at the usual cost per token."""
    return min(target, (room * rate) >> 10)


@_jit
def fill_deepest(order, weight, cost, size, target, deficit, room, places, bin_of, first, last, count, rate, strict, tries):
    """Give each sample, in `order`, to the pack that can still take most.

    With equal targets this is longest-processing-time-first under a capacity. Packs that are too full for the sample at
    hand are set aside, at most `tries` of them; then the sample is left over.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        weight, size: `[N]` cost and padded tokens; cost: `[N, K]`, in all phases.
        target, room, places: `[B]` cost to reach, tokens and samples that still fit; all three are updated, target
            to what is still missing.
        deficit: `[B, K]` what is missing in every phase, updated.
        bin_of: `[N]` output, untouched where left over.
        first, last, count: only bins of micro-batches in [first, last), out of `count`.
        rate: usual cost of 1,024 tokens, to weigh room against cost.
        strict: leave over what would end above the target of the pack that can take most, in any phase.
        tries: most full packs to pass over per sample.

    Returns:
        How many samples were left over.
    """
    num_bins = len(target) // count * (last - first)
    heap = np.empty(num_bins, np.int64)
    key = np.empty(len(target), np.int64)
    n = 0
    for b in range(len(target)):
        if first <= b % count < last:
            heap[n] = b
            key[b] = _reach(target[b], room[b], rate)
            n += 1
    for position in range(num_bins // 2 - 1, -1, -1):
        _sift_down(heap, key, position, num_bins)
    aside = np.empty(tries + 1, np.int64)
    heap_size = num_bins
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        if strict and (heap_size == 0 or key[heap[0]] <= 0):
            left += 1
            continue
        num_aside = 0
        placed = False
        while heap_size > 0 and num_aside <= tries:
            top = heap[0]
            if strict:
                fits = target[top] >= weight[index]
                for k in range(cost.shape[1]):
                    fits &= deficit[top, k] >= cost[index, k]
                if not fits:
                    break
            if room[top] >= size[index] and places[top] > 0:
                bin_of[index] = top
                target[top] -= weight[index]
                room[top] -= size[index]
                places[top] -= 1
                for k in range(cost.shape[1]):
                    deficit[top, k] -= cost[index, k]
                key[top] = _reach(target[top], room[top], rate)
                _sift_down(heap, key, 0, heap_size)
                placed = True
                break
            if places[top] > 0:
                aside[num_aside] = top
                num_aside += 1
            heap_size -= 1
            heap[0] = heap[heap_size]
            if heap_size > 0:
                _sift_down(heap, key, 0, heap_size)
        for k in range(num_aside):
            heap[heap_size] = aside[k]
            heap_size += 1
            _sift_up(heap, key, heap_size - 1)
        if not placed:
            left += 1
    return left


@_jit
def fit_first(order, weight, size, target, room, places, bin_of):
    """First fit by tokens with a tournament tree: the lowest bin with room takes the sample.

    Arguments as in `fill_deepest`. Returns how many samples were left over.
    """
    num_bins = len(room)
    width = 1
    while width < num_bins:
        width *= 2
    tree = np.full(2 * width, np.int64(-1))
    for k in range(num_bins):
        tree[width + k] = room[k] if places[k] > 0 else -1
    for k in range(width - 1, 0, -1):
        tree[k] = max(tree[2 * k], tree[2 * k + 1])
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        need = size[index]
        if tree[1] < need:
            left += 1
            continue
        node = 1
        while node < width:
            node *= 2
            if tree[node] < need:
                node += 1
        chosen = node - width
        bin_of[index] = chosen
        target[chosen] -= weight[index]
        room[chosen] -= need
        places[chosen] -= 1
        tree[node] = room[chosen] if places[chosen] > 0 else -1
        node >>= 1
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node >>= 1
    return left


@_jit
def _place(heap, where, key, position, size):
    """Move the entry at `position` of an indexed max-heap to where its key belongs."""
    item = heap[position]
    value = key[item]
    while position > 0:
        parent = (position - 1) >> 1
        above = heap[parent]
        if key[above] > value or (key[above] == value and above < item):
            break
        heap[position] = above
        where[above] = position
        position = parent
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            key[heap[other]] > key[heap[child]] or (key[heap[other]] == key[heap[child]] and heap[other] < heap[child])
        ):
            child = other
        below = heap[child]
        if key[below] < value or (key[below] == value and below > item):
            break
        heap[position] = below
        where[below] = position
        position = child
    heap[position] = item
    where[item] = position


@_jit
def fill_deepest_phases(order, phase, cost, size, scale, target, room, places, bin_of, first, last, count, tries):
    """`fill_deepest` for K phases: near the top of the heap of a sample's main phase, the pack that it suits best.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        phase: `[N]` main phase of each sample.
        cost: `[N, K]`.
        size: `[N]` padded tokens.
        scale: `[K]` typical cost of a pack per phase, at least 1.
        target: `[K, B]` cost per phase to reach, updated.
        room, places, bin_of, first, last, count, tries: as in `fill_deepest`.

    Returns:
        How many samples were left over.
    """
    num_phases = target.shape[0]
    num_bins = len(room) // count * (last - first)
    heaps = np.empty((num_phases, num_bins), np.int64)
    where = np.empty((num_phases, len(room)), np.int64)
    for k in range(num_phases):
        n = 0
        for b in range(len(room)):
            if first <= b % count < last:
                heaps[k, n] = b
                where[k, b] = n
                n += 1
        for position in range(num_bins // 2 - 1, -1, -1):
            _place(heaps[k], where[k], target[k], position, num_bins)
    saved = np.empty(tries + 1, np.int64)
    aside = np.empty(tries + 1, np.int64)
    low = np.int64(-(2**62))
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        k = phase[index]
        num_aside = 0
        chosen = -1
        while num_aside <= tries:
            best = low
            for position in range(min(num_bins, 31)):
                b = heaps[k, position]
                if target[k, b] == low or room[b] < size[index] or places[b] <= 0:
                    continue
                worst = -low
                for j in range(num_phases):
                    worst = min(worst, ((target[j, b] - cost[index, j]) << 10) // scale[j])
                if worst > best:
                    best, chosen = worst, b
            if chosen >= 0:
                break
            top = heaps[k, 0]
            if target[k, top] == low:
                break
            aside[num_aside] = top
            saved[num_aside] = target[k, top]
            num_aside += 1
            target[k, top] = low
            _place(heaps[k], where[k], target[k], 0, num_bins)
        for a in range(num_aside):
            target[k, aside[a]] = saved[a]
            _place(heaps[k], where[k], target[k], where[k, aside[a]], num_bins)
        if chosen < 0:
            left += 1
            continue
        bin_of[index] = chosen
        room[chosen] -= size[index]
        places[chosen] -= 1
        for j in range(num_phases):
            target[j, chosen] -= cost[index, j]
            _place(heaps[j], where[j], target[j], where[j, chosen], num_bins)
    return left


@_jit
def _bin_in(first, last, need, index, cost, deficit, room, places, phase, tight):
    """Bin in [first, last) that takes a sample: furthest below target, or (tight) with the least room; -1 if none."""
    chosen = -1
    for b in range(first, last):
        if room[b] < need or places[b] <= 0:
            continue
        if chosen < 0 or (room[b] < room[chosen] if tight else deficit[b, phase] > deficit[chosen, phase]):
            chosen = b
    return chosen


@_jit
def fill_ranks(order, phase, weight, cost, size, key, deficit, room, places, bin_of, tries, tight):
    """Give each sample, in `order`, to the rank furthest below its target that has a pack with room.

    Args:
        order: `[n]` samples, heaviest first.
        phase: `[N]` main phase of each sample.
        weight: `[N]`; cost: `[N, K]`; size: `[N]`.
        key: `[R]` what each rank misses of its target, updated.
        deficit: `[B, K]` what each pack misses, updated; chooses the pack within the rank.
        room, places: `[B]`, updated. bin_of: `[N]` output.
        tries: most full ranks to pass over per sample.
        tight: choose the pack with the least room that fits, instead of the emptiest.

    Returns:
        How many samples were left over.
    """
    num_ranks = len(key)
    count = len(room) // num_ranks
    num_phases = cost.shape[1]
    heap = np.arange(num_ranks)
    for position in range(num_ranks // 2 - 1, -1, -1):
        _sift_down(heap, key, position, num_ranks)
    aside = np.empty(tries + 1, np.int64)
    heap_size = num_ranks
    left = 0
    for index in order:
        num_aside = 0
        placed = False
        while heap_size > 0 and num_aside <= tries:
            top = heap[0]
            b = _bin_in(top * count, (top + 1) * count, size[index], index, cost, deficit, room, places, phase[index], tight)
            if b >= 0:
                bin_of[index] = b
                key[top] -= weight[index]
                room[b] -= size[index]
                places[b] -= 1
                for k in range(num_phases):
                    deficit[b, k] -= cost[index, k]
                _sift_down(heap, key, 0, heap_size)
                placed = True
                break
            aside[num_aside] = top
            num_aside += 1
            heap_size -= 1
            heap[0] = heap[heap_size]
            if heap_size > 0:
                _sift_down(heap, key, 0, heap_size)
        for k in range(num_aside):
            heap[heap_size] = aside[k]
            heap_size += 1
            _sift_up(heap, key, heap_size - 1)
        if not placed:
            left += 1
    return left


@_jit
def fill_home(order, phase, rank_of, cost, size, deficit, room, places, bin_of, first, last, count, strict, tight):
    """Give each sample, in `order`, to a pack of its own rank, where one takes it.

    Args:
        order, phase, cost, size, deficit, room, places, bin_of, tight: as in `fill_ranks`; samples that have a bin are
            passed over.
        rank_of: `[N]` rank to stay on.
        first, last, count: only packs of micro-batches in [first, last), out of `count`.
        strict: leave over what would end above the target of its pack in any phase; an empty pack takes anything.

    Returns:
        How many samples found no pack.
    """
    num_phases = cost.shape[1]
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        start = rank_of[index] * count
        b = _bin_in(start + first, start + last, size[index], index, cost, deficit, room, places, phase[index], tight)
        if b >= 0 and strict:
            for j in range(num_phases):
                if cost[index, j] > deficit[b, j]:
                    b = -1
                    break
        if b < 0:
            left += 1
            continue
        bin_of[index] = b
        room[b] -= size[index]
        places[b] -= 1
        for j in range(num_phases):
            deficit[b, j] -= cost[index, j]
    return left


@_jit
def fill_allowed(order, phase, home, allowed, cost, size, deficit, room, places, bin_of, first, last, count):
    """Give each sample, in `order`, to the pack furthest below its target on a rank that its home may send to.

    Arguments as in `fill_home`; allowed: `[R, R]` bool. Returns how many samples found no pack.
    """
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        k = phase[index]
        chosen = -1
        for rank in range(len(allowed)):
            if not allowed[home[index], rank]:
                continue
            b = _bin_in(rank * count + first, rank * count + last, size[index], index, cost, deficit, room, places, k, False)
            if b >= 0 and (chosen < 0 or deficit[b, k] > deficit[chosen, k]):
                chosen = b
        if chosen < 0:
            left += 1
            continue
        bin_of[index] = chosen
        room[chosen] -= size[index]
        places[chosen] -= 1
        for j in range(cost.shape[1]):
            deficit[chosen, j] -= cost[index, j]
    return left


@_jit
def _unlink(head, after, before, unit, index):
    if before[index] >= 0:
        after[before[index]] = after[index]
    else:
        head[unit] = after[index]
    if after[index] >= 0:
        before[after[index]] = before[index]


@_jit
def _link(head, after, before, unit, index):
    before[index] = -1
    after[index] = head[unit]
    if head[unit] >= 0:
        before[head[unit]] = index
    head[unit] = index


@_jit
def _move(index, source, target, to_bin, head, after, before, cost, size, excess, room, places, bin_of):
    """Move a sample from one unit to a bin of another."""
    _unlink(head, after, before, source, index)
    room[bin_of[index]] += size[index]
    places[bin_of[index]] += 1
    _link(head, after, before, target, index)
    bin_of[index] = to_bin
    room[to_bin] -= size[index]
    places[to_bin] -= 1
    for k in range(cost.shape[1]):
        excess[source, k] -= cost[index, k]
        excess[target, k] += cost[index, k]


@_jit
def _penalty(high, low, moved, goal):
    """How far the larger of two loads, after `moved` went over, lies above `goal`."""
    return max(max(high - moved, low + moved) - goal, 0)


@_jit
def _best_exchange(
    high,
    low,
    first,
    last,
    num_first,
    num_last,
    cost,
    size,
    price,
    excess,
    room,
    places,
    bin_of,
    spare,
    goal,
    budget,
    home,
    allowed,
    count,
):
    """Best (gain, price, sample of `high`, sample of `low`) to exchange; either sample may be -1 (none).

    The result is the pair with the least penalty over phases, then the least price, then the first found. `budget` caps
    the pairs looked at, so that units of many samples cost no more than others.
    """
    num_phases = cost.shape[1]
    best_a, best_b = np.int64(-1), np.int64(-1)
    best_price = np.int64(0)
    best = np.int64(0)
    for k in range(num_phases):
        best += _penalty(excess[high, k], excess[low, k], 0, goal[k])
    start = best
    looked = 0
    for i in range(-1, num_first):
        a = first[i] if i >= 0 else -1
        if looked > budget:
            break
        for j in range(-1, num_last):
            b = last[j] if j >= 0 else -1
            if a < 0 and b < 0:
                continue
            looked += 1
            penalty = np.int64(0)
            for k in range(num_phases):
                moved = (cost[a, k] if a >= 0 else 0) - (cost[b, k] if b >= 0 else 0)
                penalty += _penalty(excess[high, k], excess[low, k], moved, goal[k])
            if penalty > best:
                continue
            paid = (price[a] if a >= 0 else 0) + (price[b] if b >= 0 else 0)
            if penalty == best and (paid >= best_price or (best_a < 0 and best_b < 0)):
                continue
            if a >= 0 and b >= 0:
                bin_a, bin_b = bin_of[a], bin_of[b]
                if bin_a != bin_b and (size[a] - size[b] > room[bin_b] or size[b] - size[a] > room[bin_a]):
                    continue
            elif a >= 0:
                if spare[1] < 0 or size[a] > room[spare[1]] or places[spare[1]] <= 0:
                    continue
            elif spare[0] < 0 or size[b] > room[spare[0]] or places[spare[0]] <= 0:
                continue
            if len(allowed) > 0:
                to_low = (bin_of[b] if b >= 0 else spare[1]) // count
                to_high = (bin_of[a] if a >= 0 else spare[0]) // count
                if (a >= 0 and not allowed[home[a], to_low]) or (b >= 0 and not allowed[home[b], to_high]):
                    continue
            best, best_price, best_a, best_b = penalty, paid, a, b
            if best == 0 and best_price == 0:
                return start - best, best_price, best_a, best_b
    return start - best, best_price, best_a, best_b


@_jit
def _best_partition(high, low, first, last, num_first, num_last, cost, size, price, excess, room, places, goal):
    """Best way to deal the few samples of two packs anew: (gain, price, bits of those that change sides, or 0).

    Bits count through `first`, then `last`. All partitions, one change at a time (Gray code); least penalty, then least price.
    """
    num_phases = cost.shape[1]
    total = num_first + num_last
    moved = np.zeros(num_phases, np.int64)
    best, best_price, chosen = np.int64(0), np.int64(0), 0
    for k in range(num_phases):
        best += _penalty(excess[high, k], excess[low, k], 0, goal[k])
    start = best
    tokens, number, paid = np.int64(0), np.int64(0), np.int64(0)
    mask = 0
    for step in range(1, 1 << total):
        bit = 0
        while not step >> bit & 1:
            bit += 1
        mask ^= 1 << bit
        index = first[bit] if bit < num_first else last[bit - num_first]
        # What `high` loses: a sample of its own that leaves, or one of `low` that comes (negative).
        sign = 1 if bit < num_first else -1
        on = mask >> bit & 1
        sign = sign if on else -sign
        tokens += sign * size[index]
        number += sign
        paid += price[index] if on else -price[index]
        for k in range(num_phases):
            moved[k] += sign * cost[index, k]
        if tokens > room[low] or -tokens > room[high] or number > places[low] or -number > places[high]:
            continue
        penalty = np.int64(0)
        for k in range(num_phases):
            penalty += _penalty(excess[high, k], excess[low, k], moved[k], goal[k])
        if penalty < best or (penalty == best and chosen != 0 and paid < best_price):
            best, best_price, chosen = penalty, paid, mask
    return start - best, best_price, chosen


@_jit
def _roomiest(unit, bins_per_unit, room, places):
    chosen = -1
    for b in range(unit * bins_per_unit, (unit + 1) * bins_per_unit):
        if places[b] > 0 and (chosen < 0 or room[b] > room[chosen]):
            chosen = b
    return chosen


@_jit
def _members(head, after, unit, out):
    """Write the samples of a unit to `out`, as many as it holds; returns their number."""
    number, index = 0, head[unit]
    while index >= 0 and number < len(out):
        out[number] = index
        number += 1
        index = after[index]
    return number


@_jit
def refine(
    groups,
    bins_per_unit,
    excess,
    goal,
    cost,
    size,
    price,
    room,
    places,
    bin_of,
    rounds,
    budget,
    patience,
    choices,
    work,
    home,
    allowed,
    count,
):
    """Exchange samples between units of a group until none lies more than `goal` above its target.

    In every round the unit furthest above its target meets the one furthest below, the second the second, and so on;
    each pair makes its best exchange, or moves one sample.

    Args:
        groups: `[G, S]` units; a unit is a pack, or all packs of a rank.
        bins_per_unit: packs of a unit; unit u holds bins `u * bins_per_unit` onwards.
        excess: `[U, K]` load minus target of each unit, updated.
        goal: `[G, K]` how much excess is good enough.
        cost: `[N, K]`; size, price: `[N]`; price breaks ties (bytes to move), zero where moves are free.
        room, places: `[B]`, updated. bin_of: `[N]`, updated.
        rounds: most rounds.
        budget: most pairs of samples looked at per pair of units.
        patience: rounds without an exchange, each with other partners, before a group is left as it is.
        choices: partners that a unit looks at before it takes the best, then the cheapest exchange.
        work: most pairs of samples looked at in all.
        home: `[N]`; allowed: `[R, R]` bool, or `[0, 0]` where any rank may send to any.
        count: packs of a rank.

    Returns:
        Number of exchanges.
    """
    num_units = len(excess)
    num_groups, group_size = groups.shape
    num_phases = cost.shape[1]
    head = np.full(num_units, np.int64(-1))
    after = np.empty(len(bin_of), np.int64)
    before = np.empty(len(bin_of), np.int64)
    for index in range(len(bin_of) - 1, -1, -1):
        if bin_of[index] >= 0:
            _link(head, after, before, bin_of[index] // bins_per_unit, index)
    spare = np.full(2, np.int64(-1))
    first, last = np.empty(4096, np.int64), np.empty(4096, np.int64)
    key = np.empty(group_size, np.int64)
    done = 0
    for g in range(num_groups):
        idle = 0
        for turn in range(rounds):
            k = turn % (num_phases + 1) if num_phases > 1 else 0
            above = False
            for s in range(group_size):
                unit = groups[g, s]
                if k < num_phases:
                    key[s] = -excess[unit, k]
                else:
                    key[s] = 0
                    for j in range(num_phases):
                        key[s] -= excess[unit, j]
                for j in range(num_phases):
                    above |= excess[unit, j] > goal[g, j]
            if not above:
                break
            ranked = np.argsort(key, kind="mergesort")
            changed = 0
            for s in range(group_size):
                if work <= 0:
                    return done + changed
                high, low = groups[g, ranked[s]], np.int64(-1)
                gain, paid, mask = np.int64(0), np.int64(0), 0
                give, take = np.int64(-1), np.int64(-1)
                num_first = _members(head, after, high, first)
                spare[0] = _roomiest(high, bins_per_unit, room, places)
                for choice in range(choices):
                    # After a round without success, everyone meets the next neighbour of the last partner.
                    partner = group_size - 1 - s - idle - choice
                    if partner <= s:
                        break
                    other = groups[g, ranked[partner]]
                    needed = False
                    for j in range(num_phases):
                        needed |= excess[high, j] > goal[g, j] or excess[other, j] > goal[g, j]
                    if not needed:
                        break
                    num_last = _members(head, after, other, last)
                    a, b, bits = np.int64(-1), np.int64(-1), 0
                    few = bins_per_unit == 1 and num_first + num_last <= FEW and len(allowed) == 0
                    work -= 1 << (num_first + num_last) if few else min((num_first + 1) * (num_last + 1), budget)
                    if few:
                        better, bill, bits = _best_partition(
                            high, other, first, last, num_first, num_last, cost, size, price, excess, room, places, goal[g]
                        )
                    else:
                        spare[1] = _roomiest(other, bins_per_unit, room, places)
                        better, bill, a, b = _best_exchange(
                            high, other, first, last, num_first, num_last, cost, size, price, excess, room, places,
                            bin_of, spare, goal[g], budget, home, allowed, count,
                        )  # fmt: skip
                    if better > gain or (better == gain and better > 0 and bill < paid):
                        gain, paid, low, mask, give, take = better, bill, other, bits, a, b
                    if gain > 0 and paid == 0:
                        break
                if gain <= 0:
                    continue
                changed += 1
                if mask > 0:
                    num_last = _members(head, after, low, last)
                    for i in range(num_first):
                        if mask >> i & 1:
                            _move(first[i], high, low, low, head, after, before, cost, size, excess, room, places, bin_of)
                    for i in range(num_last):
                        if mask >> (num_first + i) & 1:
                            _move(last[i], low, high, high, head, after, before, cost, size, excess, room, places, bin_of)
                    continue
                to_low = bin_of[take] if take >= 0 else _roomiest(low, bins_per_unit, room, places)
                to_high = bin_of[give] if give >= 0 else spare[0]
                if give >= 0:
                    _move(give, high, low, to_low, head, after, before, cost, size, excess, room, places, bin_of)
                if take >= 0:
                    _move(take, low, high, to_high, head, after, before, cost, size, excess, room, places, bin_of)
            done += changed
            idle = 0 if changed else idle + 1
            if idle > patience:
                break
    return done


@_jit
def _pairs(items, number, weight, one, two, value):
    """Write all pairs of items and the sums of their weights; returns how many."""
    written = 0
    for i in range(number):
        for j in range(i):
            one[written], two[written] = items[i], items[j]
            value[written] = weight[items[i]] + weight[items[j]]
            written += 1
    return written


@_jit
def _fits(bins, changes, room):
    """Whether bins keep room after `changes` in tokens; a bin may occur several times."""
    for i in range(len(bins)):
        total = np.int64(0)
        for j in range(len(bins)):
            if bins[j] == bins[i]:
                total += changes[j]
        if total > room[bins[i]]:
            return False
    return True


@_jit
def polish(load, target, weight, size, room, bin_of, count, steps, partners):
    """Exchange two samples for two between the costliest rank and one of the least costly, to the last units.

    The sums of all pairs of either rank, sorted, meet in one pass: among a million exchanges one comes very near half the
    difference. Stops when the costliest rank cannot come down, is at `target`, or after `steps`.

    Args:
        load: `[R]`, updated. weight, size: `[N]`. room: `[B]`, bin_of: `[N]`, updated. count: packs of a rank.
        partners: ranks tried per step, least costly first.

    Returns:
        Number of exchanges.
    """
    most = 64
    pairs = most * (most - 1) // 2
    one, two, value = np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    three, four, other = np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    first, last = np.empty(most, np.int64), np.empty(most, np.int64)
    bins, changes = np.empty(4, np.int64), np.empty(4, np.int64)
    members = np.full((len(load), most), np.int64(-1))
    filled = np.zeros(len(load), np.int64)
    for index in range(len(bin_of)):
        rank = bin_of[index] // count
        if bin_of[index] >= 0 and filled[rank] < most:
            members[rank, filled[rank]] = index
            filled[rank] += 1
    for done in range(steps):
        ranked = np.argsort(load, kind="mergesort")
        high = ranked[-1]
        if load[high] <= target:
            return done
        first[: filled[high]] = members[high, : filled[high]]
        n = _pairs(first, filled[high], weight, one, two, value)
        ascending = np.argsort(value[:n], kind="mergesort")
        best, chosen = load[high], np.full(4, np.int64(-1))
        partner = high
        for p in range(min(partners, len(load) - 1)):
            low = ranked[p]
            last[: filled[low]] = members[low, : filled[low]]
            m = _pairs(last, filled[low], weight, three, four, other)
            rising = np.argsort(other[:m], kind="mergesort")
            half = (load[high] - load[low]) // 2
            position = 0
            for i in ascending:
                while position < m - 1 and other[rising[position]] < value[i] - half:
                    position += 1
                for near in range(max(position - 1, 0), min(position + 2, m)):
                    j = rising[near]
                    moved = value[i] - other[j]
                    after = max(load[high] - moved, load[low] + moved)
                    if after >= best:
                        continue
                    for turn in range(2):
                        x, y = (three[j], four[j]) if turn == 0 else (four[j], three[j])
                        bins[0], bins[1], bins[2], bins[3] = bin_of[one[i]], bin_of[two[i]], bin_of[x], bin_of[y]
                        changes[0], changes[1] = size[x] - size[one[i]], size[y] - size[two[i]]
                        changes[2], changes[3] = -changes[0], -changes[1]
                        if _fits(bins, changes, room):
                            best, partner = after, low
                            chosen[0], chosen[1], chosen[2], chosen[3] = one[i], two[i], x, y
                            break
        if chosen[0] < 0:
            return done
        for a, b in ((chosen[0], chosen[2]), (chosen[1], chosen[3])):
            room[bin_of[a]] += size[a] - size[b]
            room[bin_of[b]] += size[b] - size[a]
            bin_of[a], bin_of[b] = bin_of[b], bin_of[a]
            load[high] -= weight[a] - weight[b]
            load[partner] += weight[a] - weight[b]
            for k in range(most):
                if members[high, k] == a:
                    members[high, k] = b
                    break
            for k in range(most):
                if members[partner, k] == b:
                    members[partner, k] = a
                    break
    return steps


@_jit
def surplus_bytes(by_home, starts, gain, nbytes, surplus):
    """`[R]` least bytes with which each rank gets rid of its surplus, fractions of a sample allowed.

    Args:
        by_home: `[N]` samples, home after home; starts: `[R + 1]`.
        gain: `[N]` what the rank loses of its surplus when the sample leaves.
        surplus: `[R]`; nothing to do where it is not positive.
    """
    out = np.zeros(len(surplus), np.int64)
    for rank in range(len(surplus)):
        rest = surplus[rank]
        if rest <= 0:
            continue
        items = by_home[starts[rank] : starts[rank + 1]]
        density = np.empty(len(items), np.float64)
        for i in range(len(items)):
            density[i] = -gain[items[i]] / max(nbytes[items[i]], 1)
        for i in np.argsort(density, kind="mergesort"):
            index = items[i]
            if gain[index] >= rest:
                # Rounded down, with one byte to spare for the division: a bound must not be too high.
                if gain[index] > 0:
                    out[rank] += max(np.int64(nbytes[index] * (rest / gain[index])) - 1, 0)
                break
            rest -= gain[index]
            out[rank] += nbytes[index]
    return out


@_jit
def _choose_gift(items, rank, rank_of, weight, size, nbytes, movable, surplus, most, most_size):
    """Sample that `rank` gives away next, -1 if none: towards the least bytes in all.

    Either the sample that ends the surplus at the least bytes, or the one with the most cost per byte that does not
    overshoot; the first where its bytes are not above what the surplus would take at the second's rate.
    """
    last, part = np.int64(-1), np.int64(-1)
    rate = 0.0
    for index in items:
        if rank_of[index] != rank or not movable[index] or weight[index] > most or size[index] > most_size:
            continue
        if weight[index] >= surplus:
            if last < 0 or nbytes[index] < nbytes[last]:
                last = index
        else:
            density = weight[index] / max(nbytes[index], 1)
            if part < 0 or density > rate or (density == rate and weight[index] > weight[part]):
                part, rate = index, density
    if part < 0 or (last >= 0 and nbytes[last] * rate <= surplus):
        return last
    return part


@_jit
def _give(ranks, starts, by_home, weight, size, nbytes, movable, load, tokens, limit, most_tokens, rate, allowed, rank_of):
    """Samples leave the ranks above `limit` among `ranks` for those below; returns how many ranks stay above it."""
    num = len(ranks)
    total = len(load)
    donors, receivers = np.empty(num, np.int64), np.empty(num, np.int64)
    surplus, reach = np.empty(total, np.int64), np.full(total, np.int64(-(2**62)))
    where = np.full(total, np.int64(-1))
    num_donors, num_receivers = 0, 0
    for r in ranks:
        surplus[r] = load[r] - limit
        if surplus[r] > 0:
            donors[num_donors] = r
            num_donors += 1
        else:
            reach[r] = _reach(limit - load[r], most_tokens - tokens[r], rate)
            receivers[num_receivers] = r
            where[r] = num_receivers
            num_receivers += 1
    for position in range(num_donors // 2 - 1, -1, -1):
        _sift_down(donors, surplus, position, num_donors)
    for position in range(num_receivers // 2 - 1, -1, -1):
        _place(receivers, where, reach, position, num_receivers)
    partner = np.full(total, np.int64(-1))
    stuck = 0
    while num_donors > 0 and num_receivers > 0:
        giver = donors[0]
        taker = receivers[0]
        if len(allowed) > 0:
            taker = -1
            for s in range(num_receivers):
                r = receivers[s]
                if allowed[giver, r] and (taker < 0 or reach[r] > reach[taker]):
                    taker = r
        index = np.int64(-1)
        if taker >= 0:
            items = by_home[starts[giver] : starts[giver + 1]]
            index = _choose_gift(
                items, giver, rank_of, weight, size, nbytes, movable, surplus[giver], limit - load[taker],
                most_tokens - tokens[taker],
            )  # fmt: skip
        if index < 0:
            stuck += 1
            num_donors -= 1
            donors[0] = donors[num_donors]
            if num_donors > 0:
                _sift_down(donors, surplus, 0, num_donors)
            continue
        # Few pairs of ranks talk: the last partner takes it where it can.
        last = partner[giver]
        if last >= 0 and load[last] + weight[index] <= limit and tokens[last] + size[index] <= most_tokens:
            taker = last
        partner[giver] = taker
        rank_of[index] = taker
        load[giver] -= weight[index]
        tokens[giver] -= size[index]
        load[taker] += weight[index]
        tokens[taker] += size[index]
        reach[taker] = _reach(limit - load[taker], most_tokens - tokens[taker], rate)
        _place(receivers, where, reach, where[taker], num_receivers)
        surplus[giver] = load[giver] - limit
        if surplus[giver] <= 0:
            num_donors -= 1
            donors[0] = donors[num_donors]
        if num_donors > 0:
            _sift_down(donors, surplus, 0, num_donors)
    return stuck + num_donors


@_jit
def balance(starts, by_home, weight, size, nbytes, movable, load, tokens, limit, most_tokens, rate, node, allowed, rank_of):
    """Bring every rank to at most `limit`, moving few bytes: inside a node first, then anywhere.

    Args:
        starts: `[R + 1]`, by_home: `[N]` samples, rank after rank, as `rank_of` has them at the start.
        weight, size, nbytes, movable: `[N]`.
        load, tokens: `[R]` sums, updated.
        limit: most load of a rank; most_tokens: most tokens of a rank.
        rate: usual cost of 1,024 tokens.
        node: `[R]`, numbered from 0.
        allowed: `[R, R]` bool, or `[0, 0]` where any rank may send to any.
        rank_of: `[N]`, updated.

    Returns:
        Number of ranks still above the limit.
    """
    num_ranks = len(load)
    num_nodes = node.max() + 1
    if num_nodes > 1:
        by_node = np.argsort(node, kind="mergesort")
        first = 0
        for r in range(1, num_ranks + 1):
            if r == num_ranks or node[by_node[r]] != node[by_node[first]]:
                _give(
                    by_node[first:r], starts, by_home, weight, size, nbytes, movable, load, tokens, limit, most_tokens,
                    rate, allowed, rank_of,
                )  # fmt: skip
                first = r
    return _give(
        np.arange(num_ranks), starts, by_home, weight, size, nbytes, movable, load, tokens, limit, most_tokens, rate,
        allowed, rank_of,
    )  # fmt: skip

# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled passes over all samples that bounds, checks and sums need: each is one loop, and none calls another."""

import numpy as np

from .jit import compiled


@compiled
def group(keys, num_keys):
    """Stable order of `keys` (`[n]`, from 0 to `num_keys` - 1) and where each key starts in it (`[num_keys + 1]`)."""
    starts = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        starts[key + 1] += 1
    for key in range(num_keys):
        starts[key + 1] += starts[key]
    # Counting sort: positions of a key are handed out in the order of the samples, so it is stable.
    following = starts.copy()
    order = np.empty(len(keys), np.int64)
    for index in range(len(keys)):
        order[following[keys[index]]] = index
        following[keys[index]] += 1
    return order, starts


@compiled
def heaviest(cost, bin_of, count):
    """`[M, K]` largest cost of a sample in each micro-batch."""
    out = np.zeros((count, cost.shape[1]), np.int64)
    for index in range(len(bin_of)):
        if bin_of[index] >= 0:
            for k in range(cost.shape[1]):
                out[bin_of[index] % count, k] = max(out[bin_of[index] % count, k], cost[index, k])
    return out


@compiled
def flags(keys, media, num_keys):
    """`[num_keys]` bit flags of all `media` by key; keys of -1 count nowhere."""
    out = np.zeros(num_keys, np.int64)
    for index in range(len(keys)):
        if keys[index] >= 0:
            out[keys[index]] |= media[index]
    return out


@compiled
def sums(keys, values, num_keys):
    """`[num_keys]` sums of `values` by key; keys of -1 count nowhere."""
    out = np.zeros(num_keys, np.int64)
    for index in range(len(keys)):
        if keys[index] >= 0:
            out[keys[index]] += values[index]
    return out


@compiled
def most_packs(ordered, capacity):
    """Largest, over all thresholds t, of the packs that Martello and Toth's L2 asks for; `ordered` is ascending."""
    count = len(ordered)
    # Samples up to `half` may share a pack with one of those above; two of those above may not.
    half = 0
    while half < count and ordered[half] <= capacity // 2:
        half += 1
    small = np.int64(0)
    for index in range(half):
        small += ordered[index]
    # For threshold 0 nothing stays alone; `alone` and what medium samples take move down as the threshold goes up.
    alone, taken = count, np.int64(0)
    for index in range(half, count):
        taken += ordered[index]
    most = np.int64(0)
    for first in range(-1, half):
        threshold = ordered[first] if first >= 0 else 0
        if first >= 1 and ordered[first] == ordered[first - 1]:
            continue
        while alone > half and ordered[alone - 1] > capacity - threshold:
            alone -= 1
            taken -= ordered[alone]
        rest = small - ((alone - half) * capacity - taken)
        most = max(most, count - half + max(-(-rest // max(capacity, 1)), 0))
        if first >= 0:
            # What is below the next threshold does not count there.
            at = first
            while at < half and ordered[at] == threshold:
                small -= ordered[at]
                at += 1
    return most


@compiled
def stairs(size, order, num_ranks, capacity, limit):
    """`[m]` positions in `order`, heaviest sample first, at which one more micro-batch is needed (`bounds.staircase`)."""
    out = np.empty(len(order), np.int64)
    tokens, halves, number = np.int64(0), np.int64(0), np.int64(0)
    # What `number` micro-batches hold; divisions would take most of the time.
    most, most_tokens, most_items = np.int64(0), np.int64(0), np.int64(0)
    for position in range(len(order)):
        index = order[position]
        tokens += size[index]
        halves += 2 * size[index] > capacity
        while tokens > most_tokens or halves > most or position >= most_items:
            out[number] = position
            number += 1
            most += num_ranks
            most_tokens += num_ranks * capacity
            most_items += num_ranks * limit
    return out[:number]


@compiled
def knapsacks(weight, size, rooms):
    """`[len(rooms)]` most work that each room can hold, fractions of a sample allowed, rounded up with one to spare.

    Samples go into buckets by density, and only the bucket in which a room ends is sorted.

    Args:
        weight, size: `[N]`.
        rooms: tokens, ascending.
    """
    # Each quotient is rounded once, so it is the same on every machine (`limits.MAX_SUM`). Read as integers, floats that are
    # not negative keep their order.
    density = weight / size
    bits = density.view(np.int64)
    shift = 42  # leaves 10 bits of the fraction: buckets a thousandth wide
    low, high = np.int64(2**62), np.int64(0)
    for index in range(len(weight)):
        low, high = min(low, bits[index] >> shift), max(high, bits[index] >> shift)
    num = high - low + 1
    tokens, works = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for index in range(len(weight)):
        bucket = high - (bits[index] >> shift)
        tokens[bucket] += size[index]
        works[bucket] += weight[index]
    out = np.empty(len(rooms), np.int64)
    held, work, bucket = np.int64(0), np.int64(0), 0
    for r in range(len(rooms)):
        while bucket < num and held + tokens[bucket] <= rooms[r]:
            held += tokens[bucket]
            work += works[bucket]
            bucket += 1
        out[r] = work + 1
        if bucket == num:
            continue
        members = np.empty(len(weight), np.int64)
        number = 0
        for index in range(len(weight)):
            if high - (bits[index] >> shift) == bucket:
                members[number] = index
                number += 1
        rest = rooms[r] - held
        keys = np.empty(number, np.float64)
        for i in range(number):
            keys[i] = -density[members[i]]
        for i in np.argsort(keys, kind="mergesort"):
            index = members[i]
            if size[index] > rest:
                out[r] += np.int64(np.ceil(rest * density[index]))
                break
            rest -= size[index]
            out[r] += weight[index]
    return out


@compiled
def surplus_bytes(by_rank, starts, gain, nbytes, surplus):
    """`[R]` least bytes with which each rank gets rid of its surplus, fractions of a sample allowed.

    Args:
        by_rank: `[N]` samples, rank after rank; starts: `[R + 1]`.
        gain: `[N]` what the rank loses of its surplus when the sample leaves.
        surplus: `[R]`; nothing to do where it is not positive.
    """
    out = np.zeros(len(surplus), np.int64)
    for rank in range(len(surplus)):
        rest = surplus[rank]
        if rest <= 0:
            continue
        items = by_rank[starts[rank] : starts[rank + 1]]
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

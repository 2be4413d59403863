# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled loops that give samples to packs or ranks, one after the other, by a heap of what each can still take."""

import numpy as np

from .jit import compiled

#: Key of a pack that is set aside: below every real one.
LOWEST = -(2**62)
#: Packs at the top of a heap that are compared for a sample of several phases: its first five levels.
TOP = 31


@compiled
def _place(heap, where, key, position, size, top):
    """Move the entry at `position` of a max-heap to where its key belongs, not above position `top`.

    Of equal keys the lower number is above. Invariant: every other entry below `top` is above its children, and
    `where[heap[p]] == p` unless `where` is empty.
    """
    # The entry is written once, at the end: on its way up or down others only move into the hole that it leaves.
    item = heap[position]
    value = key[item]
    indexed = len(where) > 0
    while position > top:
        parent = (position - 1) >> 1
        above = heap[parent]
        # Ties go by number, or equal packs would be filled in an order that depends on what came before.
        if key[above] > value or (key[above] == value and above < item):
            break
        heap[position] = above
        if indexed:
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
        if indexed:
            where[below] = position
        position = child
    heap[position] = item
    if indexed:
        where[item] = position


@compiled
def _order_heap(heap, where, key, size):
    """Make a heap of entries in any order, from the bottom up; what is above `position` is no heap yet."""
    for position in range(size // 2 - 1, -1, -1):
        _place(heap, where, key, position, size, position)


@compiled
def _can_take(target, free_tokens, rate):
    """What a pack can still take: the cost it misses, or what its free tokens hold at the usual cost per token."""
    return min(target, (free_tokens * rate) >> 10)


@compiled
def _put(index, b, items, bins, deficit):
    """Put a sample into a pack."""
    free_tokens, free_slots, bin_of = bins
    cost = items.cost
    bin_of[index] = b
    free_tokens[b] -= items.size[index]
    free_slots[b] -= 1
    for k in range(cost.shape[1]):
        deficit[b, k] -= cost[index, k]


@compiled
def fill_deepest(order, items, bins, weight, target, deficit, window, rate, strict, tries):
    """Give each sample, in `order`, to the pack that can still take most.

    With equal targets this is longest-processing-time-first under a capacity. Packs that are too full for the sample at
    hand are set aside, at most `tries` of them; then the sample is left over.

    Invariant: between two samples the heap holds every pack of the window that has a free slot, by `_can_take`.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        items, bins, window: see `jit`.
        weight: `[N]` what a sample counts towards `target`.
        target: `[B]` cost to reach, updated to what is still missing.
        deficit: `[B, K]` what is missing in every phase, updated.
        rate: usual cost of 1,024 tokens, to weigh free tokens against cost.
        strict: leave over what would end above the target of the pack that can take most, in any phase.
        tries: most full packs to pass over per sample.

    Returns:
        How many samples were left over.
    """
    free_tokens, free_slots, bin_of = bins
    size, cost = items.size, items.cost
    num_bins = len(target) // window.num_microbatches * (window.last - window.first)
    heap, where = np.empty(num_bins, np.int64), np.empty(0, np.int64)
    key = np.empty(len(target), np.int64)
    n = 0
    for b in range(len(target)):
        if window.first <= b % window.num_microbatches < window.last:
            heap[n] = b
            key[b] = _can_take(target[b], free_tokens[b], rate)
            n += 1
    _order_heap(heap, where, key, num_bins)
    aside = np.empty(tries + 1, np.int64)
    heap_size = num_bins
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        # No pack can take anything: none of the samples that follow can be placed either.
        if strict and (heap_size == 0 or key[heap[0]] <= 0):
            left += 1
            continue
        num_aside = 0
        placed = False
        while heap_size > 0 and num_aside <= tries:
            top = heap[0]
            # The top can take most: what would overfill it is left to a pass without targets.
            if strict:
                fits = target[top] >= weight[index]
                for k in range(cost.shape[1]):
                    fits &= deficit[top, k] >= cost[index, k]
                if not fits:
                    break
            if free_tokens[top] >= size[index] and free_slots[top] > 0:
                _put(index, top, items, bins, deficit)
                target[top] -= weight[index]
                key[top] = _can_take(target[top], free_tokens[top], rate)
                _place(heap, where, key, 0, heap_size, 0)
                placed = True
                break
            # A pack without a free slot takes no later sample either: it leaves the heap for good.
            if free_slots[top] > 0:
                aside[num_aside] = top
                num_aside += 1
            heap_size -= 1
            heap[0] = heap[heap_size]
            _place(heap, where, key, 0, heap_size, 0)
        # They were too full for this sample only.
        for k in range(num_aside):
            heap[heap_size] = aside[k]
            heap_size += 1
            _place(heap, where, key, heap_size - 1, heap_size, 0)
        if not placed:
            left += 1
    return left


@compiled
def fit_first(order, size, bins):
    """First fit by tokens with a tournament tree: the lowest bin with room takes the sample.

    Invariant: a node of the tree holds the most free tokens of the bins below it that have a free slot, -1 for none.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        size: `[N]` padded tokens.
        bins: see `jit`.

    Returns:
        How many samples were left over.
    """
    free_tokens, free_slots, bin_of = bins
    num_bins = len(free_tokens)
    # Leaves lie from `width` on; those without a bin hold -1 and take nothing.
    width = 1
    while width < num_bins:
        width *= 2
    tree = np.full(2 * width, np.int64(-1))
    for k in range(num_bins):
        tree[width + k] = free_tokens[k] if free_slots[k] > 0 else -1
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
        # The left child first: the lowest bin with room.
        node = 1
        while node < width:
            node *= 2
            if tree[node] < need:
                node += 1
        chosen = node - width
        bin_of[index] = chosen
        free_tokens[chosen] -= need
        free_slots[chosen] -= 1
        # Only the nodes above the bin can have changed.
        tree[node] = free_tokens[chosen] if free_slots[chosen] > 0 else -1
        node >>= 1
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node >>= 1
    return left


@compiled
def fill_deepest_phases(order, items, bins, phase, scale, target, window, tries):
    """`fill_deepest` for K phases: near the top of the heap of a sample's main phase, the pack that it suits best.

    A pack suits a sample by the phase that ends nearest its target, in units of `scale`. Where none of the `TOP` packs has
    room, the fullest at hand is set aside, at most `tries` of them.

    Invariant: heap k holds every pack of the window by `target[k]`; those set aside are at its bottom, as `LOWEST`.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        items, bins, window: see `jit`.
        phase: `[N]` main phase of each sample.
        scale: `[K]` typical cost of a pack per phase, at least 1.
        target: `[K, B]` cost per phase to reach, updated.
        tries: most full packs to pass over per sample.

    Returns:
        How many samples were left over.
    """
    free_tokens, free_slots, bin_of = bins
    size, cost = items.size, items.cost
    num_phases = target.shape[0]
    num_bins = len(free_tokens) // window.num_microbatches * (window.last - window.first)
    heaps = np.empty((num_phases, num_bins), np.int64)
    where = np.empty((num_phases, len(free_tokens)), np.int64)
    for k in range(num_phases):
        n = 0
        for b in range(len(free_tokens)):
            if window.first <= b % window.num_microbatches < window.last:
                heaps[k, n] = b
                where[k, b] = n
                n += 1
        _order_heap(heaps[k], where[k], target[k], num_bins)
    saved = np.empty(tries + 1, np.int64)
    aside = np.empty(tries + 1, np.int64)
    low = np.int64(LOWEST)
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        k = phase[index]
        num_aside = 0
        chosen = -1
        while num_aside <= tries:
            best = low
            for position in range(min(num_bins, TOP)):
                b = heaps[k, position]
                if target[k, b] == low or free_tokens[b] < size[index] or free_slots[b] <= 0:
                    continue
                # A pack that one phase fills up is full, whatever the others miss: the tightest phase decides.
                worst = -low
                for j in range(num_phases):
                    worst = min(worst, ((target[j, b] - cost[index, j]) << 10) // scale[j])
                if worst > best:
                    best, chosen = worst, b
            if chosen >= 0:
                break
            # All near the top are too full for the sample: the first sinks, and another rises into view.
            top = heaps[k, 0]
            if target[k, top] == low:
                break
            aside[num_aside] = top
            saved[num_aside] = target[k, top]
            num_aside += 1
            target[k, top] = low
            _place(heaps[k], where[k], target[k], 0, num_bins, 0)
        # Before the sample is put into its pack, so that keys and heap agree again.
        for a in range(num_aside):
            target[k, aside[a]] = saved[a]
            _place(heaps[k], where[k], target[k], where[k, aside[a]], num_bins, 0)
        if chosen < 0:
            left += 1
            continue
        bin_of[index] = chosen
        free_tokens[chosen] -= size[index]
        free_slots[chosen] -= 1
        for j in range(num_phases):
            target[j, chosen] -= cost[index, j]
            _place(heaps[j], where[j], target[j], where[j, chosen], num_bins, 0)
    return left


@compiled
def _bin_in(first, last, need, free_tokens, free_slots, deficit, phase, tight):
    """Bin in [first, last) that takes a sample: furthest below target, or (tight) with the least room; -1 if none."""
    chosen = -1
    for b in range(first, last):
        if free_tokens[b] < need or free_slots[b] <= 0:
            continue
        if chosen < 0 or (free_tokens[b] < free_tokens[chosen] if tight else deficit[b, phase] > deficit[chosen, phase]):
            chosen = b
    return chosen


@compiled
def fill_ranks(order, items, bins, key, deficit, tries, tight):
    """Give each sample, in `order`, to the rank furthest below its target that has a pack with room.

    Invariant: between two samples the heap holds every rank, by `key`.

    Args:
        order: `[n]` samples, heaviest first.
        items, bins: see `jit`; `items.cost` has one phase.
        key: `[R]` what each rank misses of its target, updated.
        deficit: `[B, 1]` what each pack misses, updated; chooses the pack within the rank.
        tries: most full ranks to pass over per sample.
        tight: choose the pack with the least room that fits, instead of the emptiest.

    Returns:
        How many samples were left over.
    """
    weight, size = items.weight, items.size
    free_tokens, free_slots, _ = bins
    num_ranks = len(key)
    count = len(free_tokens) // num_ranks
    # Ranks with equal keys are in the order of their numbers already.
    heap, where = np.arange(num_ranks), np.empty(0, np.int64)
    _order_heap(heap, where, key, num_ranks)
    aside = np.empty(tries + 1, np.int64)
    heap_size = num_ranks
    left = 0
    for index in order:
        num_aside = 0
        placed = False
        while heap_size > 0 and num_aside <= tries:
            top = heap[0]
            b = _bin_in(top * count, (top + 1) * count, size[index], free_tokens, free_slots, deficit, 0, tight)
            if b >= 0:
                _put(index, b, items, bins, deficit)
                key[top] -= weight[index]
                _place(heap, where, key, 0, heap_size, 0)
                placed = True
                break
            aside[num_aside] = top
            num_aside += 1
            heap_size -= 1
            heap[0] = heap[heap_size]
            _place(heap, where, key, 0, heap_size, 0)
        for k in range(num_aside):
            heap[heap_size] = aside[k]
            heap_size += 1
            _place(heap, where, key, heap_size - 1, heap_size, 0)
        if not placed:
            left += 1
    return left


@compiled
def fill_home(order, items, bins, phase, rank_of, allowed, deficit, window, strict, tight):
    """Give each sample, in `order`, to a pack of its rank that takes it, or of any rank that its home may send to.

    Invariant: `deficit` is what every pack misses of its target after the samples so far.

    Args:
        order: `[n]` samples; those with a bin already are passed over.
        items, bins, window: see `jit`.
        phase: `[N]` main phase of each sample.
        rank_of: `[N]` rank to stay on.
        allowed: `[R, R]` bool, whether samples of one rank may go to another; `[0, 0]` to stay on `rank_of`.
        deficit: `[B, K]` what each pack misses, updated.
        strict: leave over what would end above the target of its pack in any phase.
        tight: choose the pack of a rank with the least room that fits, instead of the one furthest below its target.

    Returns:
        How many samples found no pack.
    """
    cost, size, home = items.cost, items.size, items.home
    free_tokens, free_slots, bin_of = bins
    first, last, num_microbatches = window
    left = 0
    for index in order:
        if bin_of[index] >= 0:
            continue
        k = phase[index]
        # One rank, or all that the home may send to.
        chosen = -1
        limited = len(allowed) > 0
        for rank in range(0 if limited else rank_of[index], len(allowed) if limited else rank_of[index] + 1):
            if limited and not allowed[home[index], rank]:
                continue
            start = rank * num_microbatches
            b = _bin_in(start + first, start + last, size[index], free_tokens, free_slots, deficit, k, tight)
            if b >= 0 and (chosen < 0 or deficit[b, k] > deficit[chosen, k]):
                chosen = b
        if chosen >= 0 and strict:
            for j in range(cost.shape[1]):
                if cost[index, j] > deficit[chosen, j]:
                    chosen = -1
                    break
        if chosen < 0:
            left += 1
            continue
        _put(index, chosen, items, bins, deficit)
    return left


@compiled
def _choose_gift(own, rank, items, gifts, surplus, most, most_size):
    """Sample that `rank` gives away next, -1 if none: towards the least bytes in all.

    Either the sample that ends the surplus at the least bytes, or the one with the most cost per byte that does not
    overshoot; the first where its bytes are not above what the surplus would take at the second's rate.
    """
    weight, size, nbytes = items.weight, items.size, items.nbytes
    movable, rank_of = gifts.movable, gifts.rank_of
    last, part = np.int64(-1), np.int64(-1)
    rate = 0.0
    for index in own:
        if rank_of[index] != rank or not movable[index] or weight[index] > most or size[index] > most_size:
            continue
        # What ends the surplus counts by bytes alone; what is beyond it gains nothing.
        if weight[index] >= surplus:
            if last < 0 or nbytes[index] < nbytes[last]:
                last = index
        else:
            density = weight[index] / max(nbytes[index], 1)
            if part < 0 or density > rate or (density == rate and weight[index] > weight[part]):
                part, rate = index, density
    # `surplus / rate` are the bytes that the surplus would take at the best density.
    if part < 0 or (last >= 0 and nbytes[last] * rate <= surplus):
        return last
    return part


@compiled
def _give(ranks, items, gifts, loads, rate, allowed):
    """Samples leave the ranks above the limit among `ranks` for those below; returns how many ranks stay above it.

    Invariant: `donors` is a heap of the ranks above the limit that still find something to give, by `surplus`; `receivers`
    one of those that were below it at the start, by what they can still take.
    """
    load, tokens, limit, most_tokens = loads
    by_rank, starts, _, rank_of = gifts
    weight, size = items.weight, items.size
    num = len(ranks)
    total = len(load)
    donors, receivers = np.empty(num, np.int64), np.empty(num, np.int64)
    surplus, takes = np.empty(total, np.int64), np.full(total, np.int64(LOWEST))
    where, none = np.full(total, np.int64(-1)), np.empty(0, np.int64)
    num_donors, num_receivers = 0, 0
    for r in ranks:
        surplus[r] = load[r] - limit[r]
        if surplus[r] > 0:
            donors[num_donors] = r
            num_donors += 1
        else:
            takes[r] = _can_take(limit[r] - load[r], most_tokens - tokens[r], rate)
            receivers[num_receivers] = r
            where[r] = num_receivers
            num_receivers += 1
    _order_heap(donors, none, surplus, num_donors)
    _order_heap(receivers, where, takes, num_receivers)
    partner = np.full(total, np.int64(-1))
    stuck = 0
    while num_donors > 0 and num_receivers > 0:
        giver = donors[0]
        taker = receivers[0]
        # With fixed peers the top of the heap may be out of reach; few ranks are within it.
        if len(allowed) > 0:
            taker = -1
            for s in range(num_receivers):
                r = receivers[s]
                if allowed[giver, r] and (taker < 0 or takes[r] > takes[taker]):
                    taker = r
        index = np.int64(-1)
        if taker >= 0:
            own = by_rank[starts[giver] : starts[giver + 1]]
            index = _choose_gift(
                own, giver, items, gifts, surplus[giver], limit[taker] - load[taker], most_tokens - tokens[taker]
            )
        # Takers only fill up: what finds none now finds none later.
        if index < 0:
            stuck += 1
            num_donors -= 1
            donors[0] = donors[num_donors]
            _place(donors, none, surplus, 0, num_donors, 0)
            continue
        # Few pairs of ranks talk: the last partner takes it where it can.
        last = partner[giver]
        if last >= 0 and load[last] + weight[index] <= limit[last] and tokens[last] + size[index] <= most_tokens:
            taker = last
        partner[giver] = taker
        rank_of[index] = taker
        load[giver] -= weight[index]
        tokens[giver] -= size[index]
        load[taker] += weight[index]
        tokens[taker] += size[index]
        takes[taker] = _can_take(limit[taker] - load[taker], most_tokens - tokens[taker], rate)
        _place(receivers, where, takes, where[taker], num_receivers, 0)
        surplus[giver] = load[giver] - limit[giver]
        if surplus[giver] <= 0:
            num_donors -= 1
            donors[0] = donors[num_donors]
        _place(donors, none, surplus, 0, num_donors, 0)
    return stuck + num_donors


@compiled
def balance(items, gifts, loads, rate, node, allowed):
    """Bring every rank to at most its limit, moving few bytes: inside a node first, then anywhere.

    Args:
        items, gifts, loads: see `jit`.
        rate: usual cost of 1,024 tokens.
        node: `[R]`, numbered from 0.
        allowed: `[R, R]` bool, or `[0, 0]` where any rank may send to any.

    Returns:
        Number of ranks still above the limit.
    """
    num_ranks = len(loads.weight)
    num_nodes = node.max() + 1
    # Inside a node a move costs least. What a node cannot level is left to the pass over all ranks.
    if num_nodes > 1:
        by_node = np.argsort(node, kind="mergesort")
        first = 0
        for r in range(1, num_ranks + 1):
            if r == num_ranks or node[by_node[r]] != node[by_node[first]]:
                _give(by_node[first:r], items, gifts, loads, rate, allowed)
                first = r
    return _give(np.arange(num_ranks), items, gifts, loads, rate, allowed)

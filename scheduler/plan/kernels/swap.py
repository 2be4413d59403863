# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled loops that exchange samples between packs or ranks that are filled already, and bring samples home."""

from typing import NamedTuple

import numpy as np

from ..table import Ints
from .jit import compiled

#: Two packs with at most so many samples are dealt out again in the best of all ways.
MOST_DEALT = 10
#: Samples of a unit that are looked at for an exchange.
MOST_MEMBERS = 4096
#: Samples of a rank that `polish` pairs.
MOST_POLISHED = 64


class Members(NamedTuple):
    """The samples of every unit, as lists with links both ways; -1 ends a list.

    Attributes:
        head: `[U]` first sample.
        after, before: `[N]` neighbours of each sample.
    """

    head: Ints
    after: Ints
    before: Ints


@compiled
def _unlink(members, unit, index):
    """Take a sample out of its unit's list."""
    head, after, before = members
    if before[index] >= 0:
        after[before[index]] = after[index]
    else:
        head[unit] = after[index]
    if after[index] >= 0:
        before[after[index]] = before[index]


@compiled
def _link(members, unit, index):
    """Put a sample at the head of a unit's list."""
    head, after, before = members
    # At the head: the next exchange looks at what came last first, in the same order on every machine.
    before[index] = -1
    after[index] = head[unit]
    if head[unit] >= 0:
        before[head[unit]] = index
    head[unit] = index


@compiled
def _move(index, source, target, to_bin, members, items, bins, load):
    """Move a sample from one unit to a bin of another, in all that is kept about them; load: `[U, K]`."""
    free_tokens, free_slots, bin_of = bins
    size, cost = items.size, items.cost
    _unlink(members, source, index)
    free_tokens[bin_of[index]] += size[index]
    free_slots[bin_of[index]] += 1
    _link(members, target, index)
    bin_of[index] = to_bin
    free_tokens[to_bin] -= size[index]
    free_slots[to_bin] -= 1
    for k in range(cost.shape[1]):
        load[source, k] -= cost[index, k]
        load[target, k] += cost[index, k]


@compiled
def _penalty(high, low, moved, goal):
    """How far the larger of two loads, after `moved` went over, lies above `goal`."""
    return max(max(high - moved, low + moved) - goal, 0)


@compiled
def _best_exchange(high, low, first, last, items, bins, excess, spare, goal, pairs, allowed, count):
    """Best (gain, price, sample of `high`, sample of `low`) to exchange; either sample may be -1 (none).

    The result is the pair with the least penalty over phases, then the least price, then the first found. `pairs` caps
    the pairs looked at, so that units of many samples cost no more than others.

    Invariant: `best`, `best_price`, `best_a` and `best_b` are those of the best pair so far that fits.

    Args:
        high, low: units.
        first, last: their samples.
        items, bins: see `jit`; `items.nbytes` is the price.
        excess: `[U, K]`.
        spare: `[2]` bin of either unit that takes a sample alone, -1 for none.
        goal: `[K]` excess that is good enough.
        pairs: most pairs to look at.
        allowed: `[R, R]`, or `[0, 0]`.
        count: packs of a rank.
    """
    cost, size, price, home = items.cost, items.size, items.nbytes, items.home
    free_tokens, free_slots, bin_of = bins
    num_phases = cost.shape[1]
    best_a, best_b = np.int64(-1), np.int64(-1)
    best_price = np.int64(0)
    best = np.int64(0)
    for k in range(num_phases):
        best += _penalty(excess[high, k], excess[low, k], 0, goal[k])
    start = best
    looked = 0
    for i in range(-1, len(first)):
        a = first[i] if i >= 0 else -1
        if looked > pairs:
            break
        for j in range(-1, len(last)):
            b = last[j] if j >= 0 else -1
            if a < 0 and b < 0:
                continue
            looked += 1
            # Cheapest test first: most pairs fail on balance, few on room.
            penalty = np.int64(0)
            for k in range(num_phases):
                moved = (cost[a, k] if a >= 0 else 0) - (cost[b, k] if b >= 0 else 0)
                penalty += _penalty(excess[high, k], excess[low, k], moved, goal[k])
            if penalty > best:
                continue
            paid = (price[a] if a >= 0 else 0) + (price[b] if b >= 0 else 0)
            if penalty == best and (paid >= best_price or (best_a < 0 and best_b < 0)):
                continue
            # In exchange, samples take each other's places, so only the difference in tokens needs room.
            if a >= 0 and b >= 0:
                bin_a, bin_b = bin_of[a], bin_of[b]
                if bin_a != bin_b and (size[a] - size[b] > free_tokens[bin_b] or size[b] - size[a] > free_tokens[bin_a]):
                    continue
            elif a >= 0:
                if spare[1] < 0 or size[a] > free_tokens[spare[1]] or free_slots[spare[1]] <= 0:
                    continue
            elif spare[0] < 0 or size[b] > free_tokens[spare[0]] or free_slots[spare[0]] <= 0:
                continue
            if len(allowed) > 0:
                to_low = (bin_of[b] if b >= 0 else spare[1]) // count
                to_high = (bin_of[a] if a >= 0 else spare[0]) // count
                if (a >= 0 and not allowed[home[a], to_low]) or (b >= 0 and not allowed[home[b], to_high]):
                    continue
            best, best_price, best_a, best_b = penalty, paid, a, b
            # Nothing can be better than even and free.
            if best == 0 and best_price == 0:
                return start - best, best_price, best_a, best_b
    return start - best, best_price, best_a, best_b


@compiled
def _best_partition(high, low, first, last, items, bins, excess, goal):
    """Best way to share the few samples of two packs out again: (gain, price, bits of those that change sides, or 0).

    Bits count through `first`, then `last`. All partitions, one change at a time (Gray code); least penalty, then least price.

    Invariant: `moved`, `tokens`, `number` and `paid` are those of the partition `mask`.
    """
    cost, size, price = items.cost, items.size, items.nbytes
    free_tokens, free_slots = bins.free_tokens, bins.free_slots
    num_phases = cost.shape[1]
    num_first = len(first)
    total = num_first + len(last)
    moved = np.zeros(num_phases, np.int64)
    best, best_price, chosen = np.int64(0), np.int64(0), 0
    for k in range(num_phases):
        best += _penalty(excess[high, k], excess[low, k], 0, goal[k])
    start = best
    tokens, number, paid = np.int64(0), np.int64(0), np.int64(0)
    mask = 0
    for step in range(1, 1 << total):
        # In a Gray code step s flips the lowest set bit of s: every partition comes once, one sample away from the last.
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
        # Both packs may only grow by what is free: what one loses the other takes.
        if tokens > free_tokens[low] or -tokens > free_tokens[high] or number > free_slots[low] or -number > free_slots[high]:
            continue
        penalty = np.int64(0)
        for k in range(num_phases):
            penalty += _penalty(excess[high, k], excess[low, k], moved[k], goal[k])
        if penalty < best or (penalty == best and chosen != 0 and paid < best_price):
            best, best_price, chosen = penalty, paid, mask
    return start - best, best_price, chosen


@compiled
def _roomiest(unit, bins_per_unit, bins):
    """Bin of a unit with the most free tokens among those with a free slot; -1 for none."""
    free_tokens, free_slots, _ = bins
    chosen = -1
    for b in range(unit * bins_per_unit, (unit + 1) * bins_per_unit):
        if free_slots[b] > 0 and (chosen < 0 or free_tokens[b] > free_tokens[chosen]):
            chosen = b
    return chosen


@compiled
def _members_of(members, unit, out):
    """Write the samples of a unit to `out`, as many as it holds; returns their number."""
    head, after, _ = members
    number, index = 0, head[unit]
    while index >= 0 and number < len(out):
        out[number] = index
        number += 1
        index = after[index]
    return number


@compiled
def refine(units, items, bins, effort, allowed, count):
    """Exchange samples between units of a group until none lies more than `goal` above its target.

    In every round the unit furthest above its target meets the one furthest below, the second the second, and so on;
    each pair makes its best exchange, or moves one sample.

    Invariant: `units.excess`, the lists of members and `bins` agree after every move, and no exchange raises the sum of a
    pair's penalties.

    Args:
        units, items, bins, effort: see `jit`; `items.nbytes` is the price that breaks ties, zero where moves are free.
        allowed: `[R, R]` bool, or `[0, 0]` where any rank may send to any.
        count: packs of a rank.

    Returns:
        Number of exchanges.
    """
    groups, bins_per_unit, excess, goal = units
    bin_of = bins.bin_of
    work = effort.work
    num_units = len(excess)
    num_groups, group_size = groups.shape
    num_phases = items.cost.shape[1]
    members = Members(np.full(num_units, np.int64(-1)), np.empty(len(bin_of), np.int64), np.empty(len(bin_of), np.int64))
    # From the last on, so that lists are in ascending order.
    for index in range(len(bin_of) - 1, -1, -1):
        if bin_of[index] >= 0:
            _link(members, bin_of[index] // bins_per_unit, index)
    spare = np.full(2, np.int64(-1))
    first, last = np.empty(MOST_MEMBERS, np.int64), np.empty(MOST_MEMBERS, np.int64)
    key = np.empty(group_size, np.int64)
    done = 0
    for g in range(num_groups):
        idle = 0
        for turn in range(effort.rounds):
            # Phases take turns, then their sum: what is furthest above in one may be below in another.
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
                # The best exchange over all partners so far.
                gain, paid, mask = np.int64(0), np.int64(0), 0
                give, take = np.int64(-1), np.int64(-1)
                num_first = _members_of(members, high, first)
                spare[0] = _roomiest(high, bins_per_unit, bins)
                for choice in range(effort.choices):
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
                    num_last = _members_of(members, other, last)
                    a, b, bits = np.int64(-1), np.int64(-1), 0
                    few = bins_per_unit == 1 and num_first + num_last <= MOST_DEALT and len(allowed) == 0
                    # What a pair costs is known before: the limit on work holds whatever the samples are.
                    work -= 1 << (num_first + num_last) if few else min((num_first + 1) * (num_last + 1), effort.pairs)
                    if few:
                        better, bill, bits = _best_partition(
                            high, other, first[:num_first], last[:num_last], items, bins, excess, goal[g]
                        )
                    else:
                        spare[1] = _roomiest(other, bins_per_unit, bins)
                        better, bill, a, b = _best_exchange(
                            high, other, first[:num_first], last[:num_last], items, bins, excess, spare, goal[g],
                            effort.pairs, allowed, count,
                        )  # fmt: skip
                    if better > gain or (better == gain and better > 0 and bill < paid):
                        gain, paid, low, mask, give, take = better, bill, other, bits, a, b
                    # Another partner could only be better balanced, at the price of a look at all its samples.
                    if gain > 0 and paid == 0:
                        break
                if gain <= 0:
                    continue
                changed += 1
                # `last` holds the samples of the partner that was looked at last, not of the best one.
                if mask > 0:
                    num_last = _members_of(members, low, last)
                    for i in range(num_first):
                        if mask >> i & 1:
                            _move(first[i], high, low, low, members, items, bins, excess)
                    for i in range(num_last):
                        if mask >> (num_first + i) & 1:
                            _move(last[i], low, high, high, members, items, bins, excess)
                    continue
                to_low = bin_of[take] if take >= 0 else _roomiest(low, bins_per_unit, bins)
                to_high = bin_of[give] if give >= 0 else spare[0]
                if give >= 0:
                    _move(give, high, low, to_low, members, items, bins, excess)
                if take >= 0:
                    _move(take, low, high, to_high, members, items, bins, excess)
            done += changed
            # The next round pairs units with other partners: an exchange that helps may be one neighbour away.
            idle = 0 if changed else idle + 1
            if idle > effort.patience:
                break
    return done


@compiled
def _pairs(items, number, weight, one, two, value):
    """Write all pairs of items and the sums of their weights; returns how many."""
    written = 0
    for i in range(number):
        for j in range(i):
            one[written], two[written] = items[i], items[j]
            value[written] = weight[items[i]] + weight[items[j]]
            written += 1
    return written


@compiled
def _fits(bins, changes, free_tokens):
    """Whether bins keep room after `changes` in tokens; a bin may occur several times."""
    for i in range(len(bins)):
        total = np.int64(0)
        for j in range(len(bins)):
            if bins[j] == bins[i]:
                total += changes[j]
        if total > free_tokens[bins[i]]:
            return False
    return True


@compiled
def polish(load, target, items, bins, count, steps, partners):
    """Exchange two samples for two between the costliest rank and one of the least costly, to the last units.

    The sums of all pairs of either rank, sorted, meet in one pass: among a million exchanges one comes very near half the
    difference. Stops when the costliest rank cannot come down, is at `target`, or after `steps`.

    Invariant: `load` and `members` are those of `bins.bin_of` after every exchange.

    Args:
        load: `[R]` costs, updated.
        target: load that is low enough.
        items, bins: see `jit`.
        count: packs of a rank.
        steps: most exchanges.
        partners: ranks tried per step, least costly first.

    Returns:
        Number of exchanges.
    """
    weight, size, free_tokens, bin_of = items.weight, items.size, bins.free_tokens, bins.bin_of
    most = MOST_POLISHED
    pairs = most * (most - 1) // 2
    one, two, value = np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    three, fourth, other = np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    first, last = np.empty(most, np.int64), np.empty(most, np.int64)
    four, changes = np.empty(4, np.int64), np.empty(4, np.int64)
    members = np.full((len(load), most), np.int64(-1))
    filled = np.zeros(len(load), np.int64)
    for index in range(len(bin_of)):
        rank = bin_of[index] // count
        if bin_of[index] >= 0 and filled[rank] < most:
            members[rank, filled[rank]] = index
            filled[rank] += 1
    # Samples beyond the first `most` of a rank stay where they are: their pairs would take too long to sort.
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
            m = _pairs(last, filled[low], weight, three, fourth, other)
            rising = np.argsort(other[:m], kind="mergesort")
            # What goes over less what comes back should be half the difference: both then end at the middle.
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
                    # Either of the two that come back may take either place; one way may fit where the other does not.
                    for turn in range(2):
                        x, y = (three[j], fourth[j]) if turn == 0 else (fourth[j], three[j])
                        four[0], four[1], four[2], four[3] = bin_of[one[i]], bin_of[two[i]], bin_of[x], bin_of[y]
                        changes[0], changes[1] = size[x] - size[one[i]], size[y] - size[two[i]]
                        changes[2], changes[3] = -changes[0], -changes[1]
                        if _fits(four, changes, free_tokens):
                            best, partner = after, low
                            chosen[0], chosen[1], chosen[2], chosen[3] = one[i], two[i], x, y
                            break
        if chosen[0] < 0:
            return done
        for a, b in ((chosen[0], chosen[2]), (chosen[1], chosen[3])):
            free_tokens[bin_of[a]] += size[a] - size[b]
            free_tokens[bin_of[b]] += size[b] - size[a]
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


@compiled
def _may_change(item, other, here, there, cost, size, media, load, goals, free_tokens, free_slots):
    """Whether `item` may go from pack `here` to `there`, and `other` (-1: none) the other way."""
    if other < 0:
        if media[item] != 0 or free_tokens[there] < size[item] or free_slots[there] < 1:
            return False
    elif (
        media[item] != media[other]
        or free_tokens[there] + size[other] < size[item]
        or free_tokens[here] + size[item] < size[other]
    ):
        return False
    for k in range(cost.shape[1]):
        difference = cost[item, k] - (cost[other, k] if other >= 0 else 0)
        if load[there, k] + difference > goals[there, k]:
            return False
        if load[here, k] - difference > goals[here, k]:
            return False
    return True


@compiled
def return_home(order, items, media, bins, load, goals, count, passes):
    """Bring the samples `order` home, alone or in exchange for one of the packs there; the most bytes win.

    Only samples with the same media change places.

    Invariant: no pack costs more than `goals` after a move that did not before, and the bytes away from home fall with each.

    Args:
        order: `[n]` samples.
        items, bins: see `jit`.
        media: `[N]` bit flags.
        load: `[B, K]` cost of each pack, updated.
        goals: `[B, K]` most cost of each pack.
        count: packs of a rank.
        passes: times that `order` is gone through.
    """
    cost, size, nbytes, home = items.cost, items.size, items.nbytes, items.home
    free_tokens, free_slots, bin_of = bins
    num_samples = len(bin_of)
    num_bins = len(bins.free_tokens)
    members = Members(np.full(num_bins, np.int64(-1)), np.full(num_samples, np.int64(-1)), np.full(num_samples, np.int64(-1)))
    for index in range(num_samples):
        _link(members, bin_of[index], index)
    head, after, _ = members
    for _ in range(passes):
        changed = False
        for item in order:
            here = bin_of[item]
            rank = here // count
            if rank == home[item]:
                continue
            best, partner, target = np.int64(0), np.int64(-1), np.int64(-1)
            for there in range(home[item] * count, home[item] * count + count):
                # Alone: `other` is -1. Then in exchange for each of the samples there.
                other = np.int64(-1)
                while True:
                    # Bytes that come home, less those that leave it.
                    gain = nbytes[item]
                    if other >= 0:
                        if home[other] == rank:
                            gain += nbytes[other]
                        elif home[other] == home[item]:
                            gain -= nbytes[other]
                    if gain > best and _may_change(
                        item, other, here, there, cost, size, media, load, goals, free_tokens, free_slots
                    ):
                        best, partner, target = gain, other, there
                    other = head[there] if other < 0 else after[other]
                    if other < 0:
                        break
            if target < 0:
                continue
            changed = True
            _move(item, here, target, target, members, items, bins, load)
            if partner >= 0:
                _move(partner, target, here, here, members, items, bins, load)
        if not changed:
            break

# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled loop that brings samples home; apart from the other kernels, with which it shares no function."""

import numpy as np

from .kernels import _jit as compiled


@compiled
def _link(item, pack, first, after, before):
    """Put a sample at the head of its pack's list."""
    after[item], before[item] = first[pack], -1
    if first[pack] >= 0:
        before[first[pack]] = item
    first[pack] = item


@compiled
def _shift(item, here, there, cost, size, load, room, places, bin_of, first, after, before):
    """Move a sample from one pack to another, in all that is kept about them."""
    if before[item] >= 0:
        after[before[item]] = after[item]
    else:
        first[here] = after[item]
    if after[item] >= 0:
        before[after[item]] = before[item]
    _link(item, there, first, after, before)
    bin_of[item] = there
    room[here] += size[item]
    room[there] -= size[item]
    places[here] += 1
    places[there] -= 1
    for k in range(cost.shape[1]):
        load[here, k] -= cost[item, k]
        load[there, k] += cost[item, k]


@compiled
def _may_change(item, other, here, there, cost, size, media, load, goals, room, places, count, phases):
    """Whether `item` may go from pack `here` to `there`, and `other` (-1: none) the other way."""
    if other < 0:
        if media[item] != 0 or room[there] < size[item] or places[there] < 1:
            return False
    elif media[item] != media[other] or room[there] + size[other] < size[item] or room[here] + size[item] < size[other]:
        return False
    for k in range(phases):
        difference = cost[item, k] - (cost[other, k] if other >= 0 else 0)
        if load[there, k] + difference > goals[there % count, k]:
            return False
        if load[here, k] - difference > goals[here % count, k]:
            return False
    return True


@compiled
def return_home(order, cost, size, nbytes, home, media, load, goals, room, places, bin_of, count, passes):
    """Bring the samples `order` home, alone or in exchange for one of the packs there; the most bytes win.

    A pack never gets more than `goals[index, k]`, and only samples with the same media change places.
    """
    num_samples, phases = cost.shape
    # The samples of a pack, as lists with links both ways.
    first = np.full(len(room), -1, np.int64)
    after = np.full(num_samples, -1, np.int64)
    before = np.full(num_samples, -1, np.int64)
    for index in range(num_samples):
        _link(index, bin_of[index], first, after, before)
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
                    gain = nbytes[item]
                    if other >= 0:
                        if home[other] == rank:
                            gain += nbytes[other]
                        elif home[other] == home[item]:
                            gain -= nbytes[other]
                    if gain > best and _may_change(
                        item, other, here, there, cost, size, media, load, goals, room, places, count, phases
                    ):
                        best, partner, target = gain, other, there
                    other = first[there] if other < 0 else after[other]
                    if other < 0:
                        break
            if target < 0:
                continue
            changed = True
            _shift(item, here, target, cost, size, load, room, places, bin_of, first, after, before)
            if partner >= 0:
                _shift(partner, target, here, cost, size, load, room, places, bin_of, first, after, before)
        if not changed:
            break

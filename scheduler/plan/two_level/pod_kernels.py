# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled loops of the coarse level of a plan by pods; none calls another."""

import numpy as np

from ..kernels.jit import compiled

#: Bits of a fraction that shares of pods are compared by: what is below 2**53 (`limits.MAX_SUM`) has room for so many.
SHARE_BITS = 9


@compiled
def deal_out(order, weight, sizes, power, load, in_rounds, out):
    """Deal samples, heaviest first, to pods in turn; in every round the pod that has least so far comes first.

    The others go one by one to the pod that has least, which evens out what the heavy ones left.

    Invariant: `load` is the sum of what every pod has, `at` samples are dealt so far, and `share` is `load` by `power`.

    Args:
        order: `[n]` samples. weight: `[N]`.
        sizes: `[P]` ranks of each pod; a round gives every rank one sample.
        power: `[P]` sum of the speeds of its ranks, in any unit.
        load: `[P]` what every pod has already, updated.
        in_rounds: samples dealt in rounds, of which every rank takes one; the others go one by one.
        out: `[N]` pod of each sample, output.
    """
    most = sizes.max()
    at = 0
    while at < in_rounds:
        ranked = np.argsort((load << SHARE_BITS) // power, kind="mergesort")
        for turn in range(most):
            for pod in ranked:
                if turn < sizes[pod] and at < len(order):
                    out[order[at]] = pod
                    load[pod] += weight[order[at]]
                    at += 1
    share = (load << SHARE_BITS) // power
    while at < len(order):
        least = 0
        for pod in range(1, len(sizes)):
            if share[pod] < share[least]:
                least = pod
        out[order[at]] = least
        load[least] += weight[order[at]]
        share[least] = (load[least] << SHARE_BITS) // power[least]
        at += 1


@compiled
def relieve(pod, gifts, gain, other, nbytes, load, pods, rank_limit):
    """Pods above their limit give samples to ranks of others: those with the most gain per byte on their fullest ranks.

    Each such rank gives one sample, then the next, round after round. Receivers are the emptiest ranks, one after the other.

    Invariant: `load`, `pods.load` and `pods.other` are sums over `gifts.rank_of` after every gift, and no receiver ends above
    its limits.

    Args:
        pod: `[R]` pod of each rank.
        gifts, pods: see `kernels.jit`; a pod gives above `max_load` and takes up to both limits.
        gain: `[N]` what a sample counts.
        other: `[N]` what it counts in the second respect.
        nbytes: `[N]`.
        load: `[R]` sums of gain, updated.
        rank_limit: `[R]` load up to which a rank takes.
    """
    by_rank, starts, movable, rank_of = gifts
    pod_load, pod_other, most, most_other = pods
    ranks = len(load)
    shift = 62
    for index in range(len(gain)):
        while gain[index] >> (62 - shift):
            shift -= 1
    # Sorted once: receivers are taken in turn, which keeps them about as even as a heap would.
    ranked = np.argsort(load - rank_limit, kind="mergesort")
    at = 0
    for giver in range(len(most)):
        if pod_load[giver] <= most[giver]:
            continue
        donors = ranked[pod[ranked] == giver][::-1]
        given = True
        while given and pod_load[giver] > most[giver]:
            given = False
            for rank in donors:
                surplus = pod_load[giver] - most[giver]
                if surplus <= 0:
                    break
                looked, taker, host = 0, np.int64(-1), np.int64(-1)
                while looked < ranks:
                    taker = ranked[at]
                    host = pod[taker]
                    if host != giver and pod_load[host] < most[host] and load[taker] < rank_limit[taker]:
                        break
                    at = at + 1 if at + 1 < ranks else 0
                    looked += 1
                # No pod has room left, for this giver or any other.
                if looked == ranks:
                    return
                room = min(rank_limit[taker] - load[taker], most[host] - pod_load[host])
                room_other = most_other[host] - pod_other[host]
                chosen, best = np.int64(-1), np.int64(-1)
                for position in range(starts[rank], starts[rank + 1]):
                    index = by_rank[position]
                    if not movable[index] or rank_of[index] != rank or gain[index] > room or other[index] > room_other:
                        continue
                    if gain[index] == 0:
                        continue
                    # What goes beyond the surplus gains nothing.
                    density = (min(gain[index], surplus) << shift) // max(nbytes[index], 1)
                    if density > best:
                        chosen, best = index, density
                at = at + 1 if at + 1 < ranks else 0
                if chosen < 0:
                    continue
                given = True
                rank_of[chosen] = taker
                load[rank] -= gain[chosen]
                load[taker] += gain[chosen]
                pod_load[giver] -= gain[chosen]
                pod_load[host] += gain[chosen]
                pod_other[giver] -= other[chosen]
                pod_other[host] += other[chosen]

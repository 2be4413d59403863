"""Every compiled loop of the planner, in one module.

Numba's cache does not notice a changed helper in another module, so functions that call each other stay together. All of
them take and return integers; none allocates per sample; all release the GIL. A `bin` is one pack, `rank * M + index`.
"""

from typing import Any

import numba
import numpy as np

_jit: Any = numba.njit(nogil=True, cache=True)


@_jit
def _sift_down(heap, key, position, size):  # type: ignore[no-untyped-def]
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
def _sift_up(heap, key, position):  # type: ignore[no-untyped-def]
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
def fill_deepest(order, weight, size, target, room, places, bin_of, tries):  # type: ignore[no-untyped-def]
    """Give each sample, in `order`, to the bin that lies furthest below its target and has room.

    With equal targets this is longest-processing-time-first under a capacity. Bins that are full for the sample at hand
    are set aside, at most `tries` of them; then the sample is left over.

    Args:
        order: `[n]` samples, heaviest first.
        weight, size: `[N]` cost and padded tokens.
        target, room, places: `[B]` cost to reach, tokens and samples that still fit; all three are updated, target
            to what is still missing.
        bin_of: `[N]` output, untouched where left over.
        tries: most full bins to pass over per sample.

    Returns:
        How many samples were left over.
    """
    num_bins = len(target)
    heap = np.arange(num_bins)
    for position in range(num_bins // 2 - 1, -1, -1):
        _sift_down(heap, target, position, num_bins)
    aside = np.empty(tries + 1, np.int64)
    heap_size = num_bins
    left = 0
    smallest = np.int64(2**62)
    for index in order:
        smallest = min(smallest, size[index])
    for index in order:
        num_aside = 0
        placed = False
        while heap_size > 0 and num_aside <= tries:
            top = heap[0]
            if room[top] >= size[index] and places[top] > 0:
                bin_of[index] = top
                target[top] -= weight[index]
                room[top] -= size[index]
                places[top] -= 1
                _sift_down(heap, target, 0, heap_size)
                placed = True
                break
            if not (room[top] < smallest or places[top] == 0):
                aside[num_aside] = top
                num_aside += 1
            heap_size -= 1
            heap[0] = heap[heap_size]
            if heap_size > 0:
                _sift_down(heap, target, 0, heap_size)
        for k in range(num_aside):
            heap[heap_size] = aside[k]
            heap_size += 1
            _sift_up(heap, target, heap_size - 1)
        if not placed:
            left += 1
    return left


@_jit
def fit_first(order, weight, size, target, room, places, bin_of):  # type: ignore[no-untyped-def]
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

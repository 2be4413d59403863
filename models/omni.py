"""Qwen3-Omni's positions: fractions of a second, in float32, where the order of the roundings is part of the rule.

As in Qwen2.5-Omni, the token after an item stands one beyond the item's largest position on any axis. There the positions are
truncated to integers and the general code serves; here they are not, so from a sample's first video on every sum is rounded,
and sums must be taken in the model's own order: text, start marker, item, end marker.
"""

from collections.abc import Callable

import numpy as np


def fractional_positions(
    runs: np.ndarray, seconds: np.ndarray, cu: np.ndarray, template: Callable[[tuple[int, ...], float], np.ndarray]
) -> np.ndarray:
    """Return M-RoPE positions of a pack, float32 [3, T].

    Args:
        runs: int64 [n, 6] with starts in the row.
        seconds: float32 [n].
        cu: padded boundaries, int64 [S + 1].
        template: positions of an item that begins at 0, float32 [3, length], from its (length, code, t, h, w) and seconds.
    """
    positions = np.empty((3, int(cu[-1])), np.float32)
    positions[:] = np.arange(cu[-1]) - np.repeat(cu[:-1], np.diff(cu))
    segment = np.searchsorted(cu, runs[:, 0], side="right") - 1
    for s in np.unique(segment).tolist():
        own = np.flatnonzero(segment == s)
        items = [
            (run, template(tuple(run[1:]), pace)) for run, pace in zip(runs[own].tolist(), seconds[own].tolist(), strict=True)
        ]
        fill_segment(positions, int(cu[s]), int(cu[s + 1]), items)
    return positions


def fill_segment(positions: np.ndarray, at: int, stop: int, items: list[tuple[list[int], np.ndarray]]) -> None:
    """Write a segment's positions, item by item; `at` is the first slot not yet written, `base` its position."""
    one, base = np.float32(1), np.float32(0)
    for (start, length, *_), relative in items:
        text = base + np.arange(start - at, dtype=np.float32)  # its last token is the start marker
        positions[:, at:start] = text
        origin = text[-1] + one if len(text) else base
        item = relative + origin
        positions[:, start : start + length] = item
        at, marker = start + length, item.max() + one
        if at < stop:
            positions[:, at] = marker
            at, base = at + 1, marker + one
    positions[:, at:stop] = base + np.arange(stop - at, dtype=np.float32)

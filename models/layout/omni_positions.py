"""Positions that must be summed in order: Qwen3-Omni's fractions of a second, and videos interleaved with their sound.

In Omni families the token after an item stands one beyond the item's largest position on any axis. Where positions are
integers, the general code does that at once for a whole pack. Two things it cannot do, so such segments are written item by
item here:

- Qwen3-Omni keeps fractions, in float32, so every sum is rounded and the order of the sums is part of the rule: text, start
  marker, item, end marker.
- The sound track of a video stands between its frames. Both begin at one position; two start markers stand before them, and
  two end markers after; the text goes on from the last piece, be it frames or sound.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ...core import TYPE_CODES
from ..adapter import ModelAdapter

VIDEO, AUDIO = TYPE_CODES["video"], TYPE_CODES["audio"]
#: Positions of a run that begins at 0, [3, length], from its (length, code, t, h, w) and seconds.
Template = Callable[[tuple[int, ...], float], np.ndarray]
#: A run (start, length, code, t, h, w) and its seconds.
Run = tuple[tuple[int, ...], float]


def interleaved_segments(runs: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """Return the segments, ascending, in which frames and sound stand side by side without a marker between."""
    codes = runs[:, 2]
    touching = runs[1:, 0] == runs[:-1, 0] + runs[:-1, 1]
    mixed = (codes[1:] != codes[:-1]) & np.isin(codes[1:], (VIDEO, AUDIO)) & np.isin(codes[:-1], (VIDEO, AUDIO))
    found: np.ndarray = np.unique(segment[1:][touching & mixed])
    return found


def fill_segment(positions: np.ndarray, at: int, stop: int, runs: list[Run], template: Template, adapter: ModelAdapter) -> None:
    """Write one segment's positions.

    Args:
        positions: [3, T] in the adapter's position dtype, written from `at` to `stop`.
        at: the segment's first slot.
        stop: the slot after its last.
        runs: the segment's runs, in order.
        template: positions of a run that begins at 0.
        adapter: the family.
    """
    number = np.dtype(adapter.position_dtype).type
    base = number(0)  # position of slot `at`
    for item in _items_of(runs):
        (start, *_), _ = item[0]
        markers = 1 if len(item) == 1 else 2
        text = base + np.arange(start - at).astype(number)
        if markers == 2:
            text[-2:] = text[-2] + _marker_steps(adapter)
        positions[:, at:start] = text
        origin = text[-1] + number(1) if adapter.stacked_markers and markers == 2 else after(text, markers, base)
        relative, last = _item_positions(item, template)
        at = start + relative.shape[1]
        positions[:, start:at] = relative + origin
        ends = last + origin + number(1) + (_marker_steps(adapter) if markers == 2 else np.zeros(1, number))
        ends = ends[: stop - at]
        positions[:, at : at + len(ends)] = ends
        at, base = at + len(ends), (ends[-1] if len(ends) else last + origin) + number(1)
    positions[:, at:stop] = base + np.arange(stop - at).astype(number)


def after(text: np.ndarray, markers: int, base: np.number) -> np.number:
    """Return the position after text that ends with markers, summed from before the markers as the model does."""
    number = type(base)
    return text[-markers] + number(markers) if len(text) >= markers else base


def _marker_steps(adapter: ModelAdapter) -> np.ndarray:
    """Return where the second of two markers stands from the first: on it in Qwen2.5-Omni, after it in Qwen3-Omni."""
    return np.array([0, 0 if adapter.stacked_markers else 1], adapter.position_dtype)


def _items_of(runs: list[Run]) -> Iterator[list[Run]]:
    """Group runs into items: one run each, or the runs of a video and its sound, side by side."""
    item: list[Run] = []
    for run in runs:
        if item:
            (start, length, code, *_), _ = item[-1]
            if run[0][0] == start + length and {code, run[0][2]} <= {VIDEO, AUDIO}:
                item.append(run)
                continue
            yield item
        item = [run]
    if item:
        yield item


def _item_positions(item: list[Run], template: Template) -> tuple[np.ndarray, np.number]:
    """Return an item's positions from 0, [3, n], and the largest of its last piece."""
    if len(item) == 1:
        (_, *run), seconds = item[0]
        relative = template(tuple(run), seconds)
        return relative, relative.max()
    whole: dict[int, np.ndarray] = {}
    for code in (VIDEO, AUDIO):
        mine = [(run, seconds) for run, seconds in item if run[2] == code]
        (_, _, _, t, h, w), seconds = mine[-1]  # the last run of an item holds its frames
        whole[code] = template((sum(run[1] for run, _ in mine), code, t, h, w), seconds)
    used, pieces = {VIDEO: 0, AUDIO: 0}, []
    for (_, length, code, *_), _ in item:
        pieces.append(whole[code][:, used[code] : used[code] + length])
        used[code] += length
    return np.concatenate(pieces, axis=1), pieces[-1].max()

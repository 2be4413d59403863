"""Positions of a whole pack, from its runs alone: M-RoPE in one vectorised pass, no tensor read.

The rules are those of `get_rope_index` in transformers 5.24 (4.57 counted a video's frames into the text that follows; 5.x
does not). For every family but Omni (see `_advances` and `models.layout.omni_positions`), with `m` the merge size:

- text: all three axes count up by one per token;
- a run of grid (t, h, w) at position p: p + (temporal index, row, column), rows and columns in units of m patches;
- the token after a run is at p + max(h, w) // m.

Only the temporal index differs between the rules: the frame ("grid"), the frame times seconds, truncated ("seconds"), the
merged frame ("temporal_merge"); with "timestamp" every run has one frame.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...core import TYPE_CODES, SampleLayout
from ..adapter import ModelAdapter
from .omni_positions import fill_segment, interleaved_segments

_counting = np.arange(0)


def pack_positions(layouts: Sequence[SampleLayout], cu_padded: np.ndarray, adapter: ModelAdapter) -> np.ndarray:
    """Return the position ids of a pack.

    Args:
        layouts: one per segment, in order. Segments beyond the last layout hold no sample: tails.
        cu_padded: padded boundaries, integers [S + 1].
        adapter: the family.

    Returns:
        [3, T], or [1, T] for the "1d" rule; int64 (float32 where the adapter says so).

    Example:
        >>> from evenpack.models import adapter_for
        >>> pack_positions([SampleLayout.text(2)], np.array([0, 3, 5]), adapter_for("text"))
        array([[0, 1, 2, 0, 1]])
    """
    cu = np.asarray(cu_padded, np.int64)
    if adapter.rope == "1d":
        return _text_positions(cu)[None]
    runs, seconds = pack_runs(layouts, cu)
    lengths = np.zeros(len(cu) - 1, np.int64)
    lengths[: len(layouts)] = [layout.num_tokens for layout in layouts]
    return mrope_positions(runs, seconds, cu, lengths, adapter)


def _text_positions(cu_padded: np.ndarray) -> np.ndarray:
    """Return 1-D positions, int64 [T]: each segment counts from 0, padding included."""
    cu = np.asarray(cu_padded, np.int64).tolist()
    positions = np.empty(cu[-1], np.int64)
    for start, stop in itertools.pairwise(cu):
        positions[start:stop] = counting(stop - start)
    return positions


def counting(length: int) -> np.ndarray:
    """Return 0, 1, ..., int64, as a read-only view of the longest that was asked for."""
    global _counting
    found = _counting  # threads may take turns between here and the end
    if len(found) < length:
        found = np.arange(2 * length)
        found.setflags(write=False)
        _counting = found
    return found[:length]


def pack_runs(layouts: Sequence[SampleLayout], cu_padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of a pack, int64 [n, 6] with starts counted from the row's beginning, and their seconds [n]."""
    if not layouts:
        return np.zeros((0, 6), np.int64), np.zeros(0, np.float32)
    runs = np.concatenate([layout.runs for layout in layouts])
    runs[:, 0] += np.repeat(cu_padded[: len(layouts)], [len(layout.runs) for layout in layouts])
    return runs, np.concatenate([layout.seconds for layout in layouts])


def mrope_positions(
    runs: np.ndarray, seconds: np.ndarray, cu_padded: np.ndarray, lengths: np.ndarray, adapter: ModelAdapter
) -> np.ndarray:
    """Return M-RoPE positions of a pack.

    Every segment starts at 0. Padded slots at a segment's end get what further text would get.

    Args:
        runs: int64 [n, 6], ascending: start in the row, length, type code, grid t, h, w (see `pack_runs`).
        seconds: float32 [n], seconds per temporal patch of each run ("seconds" rule).
        cu_padded: padded boundaries, integers [S + 1].
        lengths: real length of each segment, integers [S]; 0 for a tail.
        adapter: the family.

    Returns:
        int64 [3, T]; float32 where the adapter says so.
    """
    cu = np.asarray(cu_padded, np.int64)
    segment = np.searchsorted(cu, runs[:, 0], side="right") - 1
    assert np.all(runs[:, 0] + runs[:, 1] <= cu[segment] + np.asarray(lengths)[segment]), "a run leaves its segment"
    ordered = _segments_in_order(runs, segment, adapter)
    at_once = ~np.isin(segment, ordered)
    positions = np.empty((3, int(cu[-1])), adapter.position_dtype)
    _fill_at_once(positions, runs[at_once], seconds[at_once], segment[at_once], cu, adapter)

    def template(run: tuple[int, ...], pace: float) -> np.ndarray:
        return run_template(run, pace, adapter)

    for s in ordered.tolist():
        own = segment == s
        pairs = list(zip(map(tuple, runs[own].tolist()), seconds[own].tolist(), strict=True))
        fill_segment(positions, int(cu[s]), int(cu[s + 1]), pairs, template, adapter)
    return positions


def _segments_in_order(runs: np.ndarray, segment: np.ndarray, adapter: ModelAdapter) -> np.ndarray:
    """Return the segments whose positions must be summed in order: see `models.layout.omni_positions`."""
    if adapter.position_dtype == "float32":
        return np.unique(segment)
    return interleaved_segments(runs, segment) if adapter.rope == "omni" else np.zeros(0, np.int64)


def _fill_at_once(
    positions: np.ndarray,
    runs: np.ndarray,
    seconds: np.ndarray,
    segment: np.ndarray,
    cu: np.ndarray,
    adapter: ModelAdapter,
) -> None:
    """Write the positions of all segments, given the runs of all (or of those that are not written again afterwards)."""
    starts, sizes = runs[:, 0], runs[:, 1]
    # A run of n tokens moves the text after it on by `advance`, so text lags n - advance behind its index in the row.
    lag = sizes - _advances(runs, seconds, adapter)
    total = np.concatenate(([0], np.cumsum(lag)))
    first = np.searchsorted(starts, cu[:-1])
    base = cu[segment] - total[first][segment]
    _fill_text(positions, cu, starts + sizes, base + total[1:])
    _fill_runs(positions, runs, seconds, (starts - base - total[:-1]).tolist(), adapter)


def _fill_text(positions: np.ndarray, cu: np.ndarray, ends: np.ndarray, lags: np.ndarray) -> None:
    """Write index minus lag on all axes: the lag is `cu[s]` from a segment's start on, and `lags[k]` from `ends[k]` on."""
    inside = ~np.isin(ends, cu)  # no text follows a run that ends with its segment
    points = np.concatenate((cu[:-1], ends[inside]))
    order = np.argsort(points, kind="stable")
    values = np.concatenate((cu[:-1], lags[inside]))[order]
    lag = np.repeat(values, np.diff(points[order], append=cu[-1]))
    np.subtract(np.arange(cu[-1]), lag, out=positions[0])
    positions[1:] = positions[0]


def _advances(runs: np.ndarray, seconds: np.ndarray, adapter: ModelAdapter) -> np.ndarray:
    """Return by how much each run moves the text after it on, int64 [n].

    By its larger side; in Omni families by its extent on any axis, seconds included.
    """
    if adapter.rope != "omni":
        larger: np.ndarray = np.maximum(runs[:, 4], runs[:, 5]) // adapter.merge_size
        return larger
    pairs = zip(runs[:, 1:].tolist(), seconds.tolist(), strict=True)
    return np.array([run_template(tuple(run), pace, adapter).max() + 1 for run, pace in pairs], np.int64)


def _fill_runs(positions: np.ndarray, runs: np.ndarray, seconds: np.ndarray, origins: list[int], adapter: ModelAdapter) -> None:
    """Write the positions of every media run: its template plus where the run begins."""
    for (start, *run), origin, pace in zip(runs.tolist(), origins, seconds.tolist(), strict=True):
        np.add(run_template(tuple(run), pace, adapter), origin, out=positions[:, start : start + run[0]])


def run_template(run: tuple[int, ...], pace: float, adapter: ModelAdapter) -> np.ndarray:
    """Return the positions of a run (length, code, t, h, w) that begins at 0, [3, length], read-only.

    `pace` is the seconds per temporal patch of a video.
    """
    length, code, t, h, w = run
    is_video, dtype, speed = code == TYPE_CODES["video"], adapter.position_dtype, adapter.tokens_per_second
    if code == TYPE_CODES["audio"]:
        template = _grid_template(length, 1, 1, None, dtype)  # sound is laid out like text, along all axes
        template = np.broadcast_to(template[0], (3, length))
        return template
    if is_video and adapter.rope == "temporal_merge":
        t //= adapter.temporal_merge
    spacing: tuple[float, float] | None = None
    if is_video and adapter.rope == "seconds":
        spacing = (float(np.float32(speed) * np.float32(pace)), 1.0)
    elif adapter.rope == "omni":
        spacing = (pace if is_video else 1.0, speed)
    # Large templates are built anew, so that the cache stays below 100 MB.
    build = _grid_template if length <= 4096 else _grid_template.__wrapped__
    template = build(t, h // adapter.merge_size, w // adapter.merge_size, spacing, dtype)
    assert template.shape[1] == length, run
    return template


@lru_cache(maxsize=1024)
def _grid_template(t: int, h: int, w: int, spacing: tuple[float, float] | None, dtype: str) -> np.ndarray:
    """Return the positions of a grid that begins at 0, [3, t * h * w], read-only.

    With a spacing (a, b), frame f lies at the float32 product (f * a) * b, truncated for integers: precision and order are
    part of the rule.
    """
    frames: np.ndarray = np.arange(t)
    if spacing is not None:
        frames = frames.astype(np.float32) * np.float32(spacing[0]) * np.float32(spacing[1])
    template = np.empty((3, t, h, w), dtype)
    template[0] = frames.astype(dtype)[:, None, None]
    template[1] = np.arange(h)[:, None]
    template[2] = np.arange(w)
    template.setflags(write=False)
    return template.reshape(3, -1)

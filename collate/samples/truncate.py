"""A sample cut to a number of tokens, never through a media item."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core import TYPE_CODES, Field, OversizeSampleError, Sample, SampleLayout
from ...models.adapter import ModelAdapter
from ...models.layout.items import media_items, rows_needed
from .prepare import item_grids


def truncate_sample(sample: Sample, max_tokens: int, adapter: ModelAdapter) -> Sample:
    """Return the longest beginning of a sample that has at most `max_tokens` tokens and whole media items only.

    A media item that does not fit wholly, its start and end markers included, is dropped with its features, and
    everything after it too. A video whose frames are written apart is one item. In families without grids, what stands in one
    run is dropped together: an image, or a tile of one where text stands between tiles.

    Args:
        sample: a prepared sample.
        max_tokens: most tokens to keep, at least 1.
        adapter: the model family.

    Returns:
        The sample itself where it fits, else a new one on the same memory.

    Raises:
        OversizeSampleError: nothing would be left, because the sample begins with an item that does not fit.

    Example:
        >>> from evenpack.collate import prepare_sample
        >>> from evenpack.models import adapter_for
        >>> sample = prepare_sample({"input_ids": [1, 2, 3]}, adapter=adapter_for("text"))
        >>> truncate_sample(sample, 2, adapter_for("text")).tensor("input_ids").tolist()
        [1, 2]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if sample.num_tokens <= max_tokens:
        return sample
    grids = item_grids(sample.values, adapter)
    without = media_items(sample.values, adapter)  # items of modalities without grids
    parts = {name: grid[:, 0].tolist() for name, grid in grids.items()}
    parts |= {name: _parts(sample, name, adapter) for name in without}
    items = _item_spans(sample, parts, adapter)
    stop = max_tokens
    while crossing := [start for _, start, end in items if start < stop < end]:
        stop = min(crossing)  # items of two modalities may interleave, so the new stop is looked at again
    if stop == 0:
        raise OversizeSampleError(
            f"sample {sample.sample_id!r} begins with a media item of {min(end for _, _, end in items)} tokens, "
            f"which cannot be truncated to {max_tokens}"
        )
    rows: dict[str, int | None] = {}
    for field in adapter.fields.of_kind("media"):
        name = field.modality or ""
        kept = sum(1 for modality, _, end in items if modality == name and end <= stop)
        if name in without:
            ends = np.cumsum(without[name].grids[:, 0])
            whole = int(np.searchsorted(ends, sum(parts[name][:kept]), side="right"))
            left = without[name]._replace(grids=without[name].grids[:whole])
            rows[field.name] = rows_needed(field, left, adapter.anchors[name]) if kept else 0
        else:
            grid = grids.get(name, np.zeros((0, 3), np.int64))[:kept]
            rows[field.name] = int(grid.prod(axis=1).sum()) if field.rows == "patches" else kept
    fields = [adapter.fields[name] for name in sample.values]
    return Sample(
        values={f.name: _cut(sample, f, stop, rows) for f in fields if f.kind != "media" or rows[f.name] != 0},
        layout=_cut_layout(sample, stop, adapter),
        shifted=sample.shifted,
        sample_id=sample.sample_id,
    )


def _parts(sample: Sample, modality: str, adapter: ModelAdapter) -> list[int]:
    """Return the rows of each part of a modality without grids that may be dropped alone: all of them, or what a run ends.

    Several images of one sample are cut differently than one where `max_tiles` says so, and rows that nothing counts, or that
    two fields share, cannot be told apart.
    """
    rule = adapter.anchors[modality]
    runs = sample.layout.runs[(sample.layout.runs[:, 2] == TYPE_CODES[modality]) & (sample.layout.runs[:, 3] > 0)]
    uncounted = any(f.rows == "free" for f in adapter.fields.of_kind("media") if f.modality == modality)
    if rule.rule == "trust" or rule.max_tiles or len(rule.per_row) > 1 or uncounted:
        return [int(runs[:, 3].sum())]
    parts: list[int] = runs[:, 3].tolist()
    return parts


def _item_spans(sample: Sample, parts: Mapping[str, list[int]], adapter: ModelAdapter) -> list[tuple[str, int, int]]:
    """Return (modality, start, stop) of each media item in its modality's order, start and end markers included.

    The runs of one item are those whose frames add up to the frames of its grid.
    """
    ids = sample.tensor("input_ids").tolist()
    spans: list[tuple[str, int, int]] = []
    for modality, sizes in parts.items():
        runs = iter(sample.layout.runs[sample.layout.runs[:, 2] == TYPE_CODES[modality]].tolist())
        for frames in sizes:
            start, length, _, seen, _, _ = next(runs)
            end = start + length
            while seen < frames:
                more = next(runs)
                end, seen = more[0] + more[1], seen + more[3]
            spans.append((modality, *_with_markers(ids, start, end, adapter.brackets(modality))))
    return spans


def _with_markers(ids: list[int], start: int, end: int, brackets: tuple[list[int], list[int]]) -> tuple[int, int]:
    """Return a span of tokens made wider by the start and end markers that stand around it."""
    for marker in reversed(brackets[0]):
        if start and ids[start - 1] == marker:
            start -= 1
    for marker in brackets[1]:
        if end < len(ids) and ids[end] == marker:
            end += 1
    return start, end


def _cut(sample: Sample, field: Field, stop: int, rows: Mapping[str, int | None]) -> Any:
    """Return one field of the truncated sample: its tokens up to `stop`, or the rows of the items kept."""
    if field.kind == "token":
        return sample.tensor(field.name).narrow(field.axis, 0, stop).contiguous()
    if field.kind == "media":
        value, kept = sample.tensor(field.name), rows[field.name]
        return value if kept is None else value.narrow(field.axis, 0, kept)
    return sample.values[field.name]


def _cut_layout(sample: Sample, stop: int, adapter: ModelAdapter) -> SampleLayout:
    """Return the layout of the first `stop` tokens, which hold whole runs only."""
    keep = sample.layout.runs[:, 0] < stop
    runs = sample.layout.runs[keep]
    ids = sample.tensor("input_ids")[:stop].cpu().numpy()
    media = int(np.isin(ids, list(adapter.media_tokens.values())).sum())
    return SampleLayout(
        num_tokens=stop,
        runs=runs,
        seconds=sample.layout.seconds[keep],
        num_spelled=media - int(runs[:, 1].sum()),
    )

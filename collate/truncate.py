"""A sample cut to a number of tokens, never through a media item."""

from typing import Any

import numpy as np

from ..core import TYPE_CODES, OversizeSampleError, Sample, SampleLayout
from ..models.adapter import ModelAdapter


def truncate_sample(sample: Sample, max_tokens: int, adapter: ModelAdapter) -> Sample:
    """Return the longest beginning of a sample that has at most `max_tokens` tokens and whole media items only.

    A media item that does not fit wholly, its start and end markers included, is dropped with its features, and
    everything after it too. A video whose frames are written apart is one item.

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
    items = item_spans(sample, adapter)
    stop = whole_item_stop(items, max_tokens)
    if stop == 0:
        raise OversizeSampleError(
            f"sample {sample.sample_id!r} begins with a media item of {min(end for _, _, end in items)} tokens, "
            f"which cannot be truncated to {max_tokens}"
        )
    kept = {name: sum(1 for modality, _, end in items if modality == name and end <= stop) for name in TYPE_CODES}
    gone = {f.name for f in adapter.fields.of_kind("media") if not kept[f.modality or ""]}
    return Sample(
        values={name: cut(sample, name, stop, kept, adapter) for name in sample.values if name not in gone},
        layout=cut_layout(sample, stop, adapter),
        shifted=sample.shifted,
        sample_id=sample.sample_id,
    )


def whole_item_stop(items: list[tuple[str, int, int]], limit: int) -> int:
    """Return the largest stop up to `limit` that lies inside no item."""
    stop = limit
    while crossing := [start for _, start, end in items if start < stop < end]:
        stop = min(crossing)  # items of two modalities may interleave, so the new stop is looked at again
    return stop


def item_spans(sample: Sample, adapter: ModelAdapter) -> list[tuple[str, int, int]]:
    """Return (modality, start, stop) of each media item in its modality's order, start and end markers included.

    The runs of one item are those whose frames add up to the frames of its grid.
    """
    ids = sample.tensor("input_ids").cpu().numpy()
    spans: list[tuple[str, int, int]] = []
    for modality, code in TYPE_CODES.items():
        runs = iter(sample.layout.runs[sample.layout.runs[:, 2] == code].tolist())
        frames_of = [t for t, _, _ in sample.grids(modality)]
        for start, length, _, frames, _, _ in runs:
            end, wanted = start + length, frames_of.pop(0) if frames_of else frames
            while frames < wanted:
                more = next(runs)
                end, frames = more[0] + more[1], frames + more[3]
            if start and ids[start - 1] == adapter.vision_start:
                start -= 1
            if end < len(ids) and ids[end] == adapter.vision_end:
                end += 1
            spans.append((modality, start, end))
    return spans


def cut(sample: Sample, name: str, stop: int, kept: dict[str, int], adapter: ModelAdapter) -> Any:
    """Return one field of the truncated sample: its tokens up to `stop`, or the rows of the items kept."""
    value, field = sample.values[name], adapter.fields[name]
    if field.kind == "token":
        return sample.tensor(name).narrow(field.axis, 0, stop).contiguous()
    if field.kind == "media":
        rows = kept[field.modality or ""]
        if field.rows == "patches":
            rows = sum(t * h * w for t, h, w in sample.grids(field.modality or "")[:rows])
        return sample.tensor(name)[:rows]
    return value


def cut_layout(sample: Sample, stop: int, adapter: ModelAdapter) -> SampleLayout:
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

"""The smallest legal samples: what fills a micro-batch that lacks a modality, or a sample altogether, with zero loss."""

import numpy as np
import torch

from ...core import TYPE_CODES, Field, Sample, SampleLayout
from ...core.fields import TENSOR_DTYPES, dtype_of
from ..adapter import ModelAdapter
from ..layout.items import AUDIO_LENGTHS, AUDIO_MASK, items_by_rule, rows_needed
from ..layout.pieces import pieces_of

#: Value of every number of a dummy's rows. Not 0: some models (Idefics, SmolVLM) take rows of zeros for padding.
_FILL = 1e-3


def dummy_text(adapter: ModelAdapter) -> Sample:
    """Return a sample of one text token without loss.

    Its token is not padding: a row that is all padding gives NaN in mixture-of-experts routers.
    """
    return _unlearned([adapter.pad_token_id], SampleLayout.text(1), adapter)


def dummy_sample(modality: str, adapter: ModelAdapter, dtype: torch.dtype = torch.float32) -> Sample:
    """Return a sample with the smallest legal item of a modality, between its start and end markers, without loss.

    Args:
        modality: "image", "video" or "audio".
        adapter: the family.
        dtype: dtype of the item's rows, all of one small value.

    Raises:
        ValueError: a modality that the family does not have.

    Example:
        >>> from evenpack.models import adapter_for
        >>> dummy_sample("image", adapter_for("qwen2_5_vl")).tensor("input_ids").tolist()
        [151652, 151655, 151653]
    """
    if modality not in adapter.dummy_grids:
        raise ValueError(f"{adapter.name} has no {modality}; it has {sorted(adapter.dummy_grids)}")
    before, after = adapter.brackets(modality)
    if modality in adapter.anchors:
        return _without_grid(modality, adapter, dtype)
    grid = adapter.dummy_grids[modality]
    length = adapter.token_count(modality, grid)
    ids = [*before, *[adapter.media_tokens[modality]] * length, *after]
    pace = 1.0 if modality == "video" and adapter.has_seconds else 0.0
    layout = SampleLayout(
        num_tokens=len(ids),
        runs=np.array([[len(before), length, TYPE_CODES[modality], *grid]], np.int64),
        seconds=np.array([pace], np.float32),
    )
    return _unlearned(ids, layout, adapter, _media_values(modality, grid, adapter, dtype))


def _without_grid(modality: str, adapter: ModelAdapter, dtype: torch.dtype) -> Sample:
    """Return a dummy of a modality whose items come without a grid: one row, or the tiles of the smallest image."""
    rule = adapter.anchors[modality]
    values: dict[str, torch.Tensor] = {}
    mine = [field for field in adapter.fields.of_kind("media") if field.modality == modality]
    # What sizes say comes first, and then the pixels of that many tiles.
    for field in sorted(mine, key=adapter.is_pixels):
        rows = 1
        if field.rows in ("tiles", "patches") and rule.field in values:
            rows = rows_needed(field, items_by_rule(values, rule, adapter), rule) or 1
        sizes = [rule.free_size if size is None else size for size in field.shape or ()]
        sizes.insert(field.axis, rows)
        if field.name in rule.smallest:
            values[field.name] = torch.tensor(rule.smallest[field.name])
        elif adapter.is_pixels(field):
            values[field.name] = torch.full(sizes, _FILL, dtype=dtype)
        else:
            values[field.name] = torch.ones(sizes, dtype=torch.int64)
    items = items_by_rule(values, rule, adapter)
    length = 1 if items.tokens is None else int(items.tokens.sum())
    before, after = adapter.brackets(modality)
    ids = [*before, *[adapter.media_tokens[modality]] * length, *after]
    grids = [(t, h, w) for t, h, w in items.grids.tolist()]
    spans, parts = pieces_of([(len(before), length)], grids, items.tokens, modality, "dummy")
    code = TYPE_CODES[modality]
    layout = SampleLayout(
        num_tokens=len(ids),
        runs=np.array([(*span, code, *part) for span, part in zip(spans, parts, strict=True)], np.int64),
        seconds=np.zeros(len(spans), np.float32),
    )
    return _unlearned(ids, layout, adapter, {field.name: values[field.name] for field in mine})


def _media_values(
    modality: str, grid: tuple[int, int, int], adapter: ModelAdapter, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the media fields of one item: rows of one value, its grid, and ones for values per item such as seconds."""
    fields = [field for field in adapter.fields.of_kind("media") if field.modality == modality]
    return {field.name: _item_value(field, grid, dtype) for field in fields}


def _item_value(field: Field, grid: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return one media field of one item."""
    if field.shape == (3,):
        return torch.tensor([grid], dtype=torch.int64)
    if field.name == AUDIO_LENGTHS:
        return torch.tensor([grid[0]], dtype=torch.int64)
    if field.name == AUDIO_MASK:
        return torch.ones(1, grid[0], dtype=torch.int64)
    if not field.shape and field.default is not None:
        return torch.tensor([field.default], dtype=dtype_of(field.dtype))
    if not field.shape:
        return torch.ones(1, dtype=torch.float32)  # seconds
    if field.modality == "audio":
        return torch.full((1, *(grid[0] if size is None else size for size in field.shape)), _FILL, dtype=dtype)
    return torch.full((grid[0] * grid[1] * grid[2], *(size or 1 for size in field.shape)), _FILL, dtype=dtype)


def _unlearned(
    ids: list[int], layout: SampleLayout, adapter: ModelAdapter, media: dict[str, torch.Tensor] | None = None
) -> Sample:
    """Return a sample of the given ids that has no target."""
    length = len(ids)
    values: dict[str, torch.Tensor] = {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "labels": torch.full((length,), -100, dtype=torch.int64),
        "loss_weights": torch.zeros(length),
        **(media or {}),
    }
    types = torch.from_numpy(layout.type_ids())
    for field in adapter.fields.of_kind("token"):
        if field.name == "mm_token_type_ids":
            values[field.name] = types
        elif field.name in values:
            continue
        elif field.required and field.name.endswith("token_type_ids"):
            # ERNIE's router types: the markers around an item count as media too.
            values[field.name] = torch.full_like(types, int(types.max()))
        elif (field.required or field.default is not None) and field.dtype in TENSOR_DTYPES and _is_fixed(field):
            # A user's field that every sample has: padding here, so that a pack of dummies alone has it too.
            sizes = [size or 0 for size in field.shape or ()]
            sizes.insert(field.axis, length)
            values[field.name] = torch.full(sizes, field.pad, dtype=dtype_of(field.dtype))
    return Sample(values=values, layout=layout)


def _is_fixed(field: Field) -> bool:
    """Whether a field's sizes besides the packed axis are known."""
    return field.shape is not None and None not in field.shape

"""From a raw mapping to a checked sample: nothing is dropped, cast or guessed without a named error."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...core import Field, FieldShapeError, Sample, SampleLayout
from ...core.sample import Value
from ...models.adapter import ModelAdapter
from ...models.layout.items import media_seconds
from ...models.layout.sample_layout import sample_layout
from .check import (
    check_finite,
    check_ids,
    check_labels,
    check_names,
    check_rank,
    check_seconds,
    check_token_lengths,
    check_weights,
    convert,
    item_counts,
    item_grids,
    refuse_padded,
)
from .targets import IGNORED
from .trim import mask_span, megatron_names, megatron_span, trim

TYPES = "mm_token_type_ids"


def prepare_sample(raw: Mapping[str, Any], *, adapter: ModelAdapter, where: str = "sample") -> Sample:
    """Check a raw sample against its declaration, trim its padding and fill in its defaults.

    A row that comes padded needs `attention_mask` and is cut to its real tokens. Samples with Megatron-Core's keys
    (`tokens`, `labels`, `loss_mask`, `original_seq_len`, `padded_seq_len`) hold shifted targets already: they are cut to
    `original_seq_len` and marked. Lists of numbers become tensors where that is exact; tensors and arrays must have the
    declared dtype. None stands for absent.

    Args:
        raw: names to values, as a processor returns them: `input_ids [L]`, optional `labels [L]`, `loss_weights [L]`,
            media tensors, declared extra fields, `sample_id`.
        adapter: the model family, with any further fields of the user in `adapter.fields`.
        where: how error messages name the sample, for example "rank 1, sample 'x'".

    Returns:
        The sample. `input_ids`, `labels` and `loss_weights` are always there; labels default to the ids, media tokens
        excluded. `mm_token_type_ids` are kept as the layout alone.

    Raises:
        UndeclaredFieldError: a field that nobody declared.
        MissingFieldError: a required field that is absent.
        FieldShapeError: a wrong type, dtype, rank or size, an empty sample, values that are not finite, lengths that
            disagree, or a padded row without `attention_mask`.
        MediaMismatchError: anchors and features that differ in number.
        AmbiguousMediaError: media tokens that do not match the grids in exactly one way.

    Example:
        >>> from evenpack.models import adapter_for
        >>> sample = prepare_sample({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, adapter=adapter_for("text"))
        >>> sample.tensor("labels").tolist()
        [5, 6]
    """
    if not isinstance(raw, Mapping):
        raise FieldShapeError(f"{where}: a sample must be a mapping of named values, got {type(raw).__name__}")
    given = {name: value for name, value in raw.items() if value is not None}
    shifted = "tokens" in given and "input_ids" not in given  # Megatron-Core's keys: labels are shifted, the row is padded
    mask = None if "attention_mask" in adapter.fields else given.pop("attention_mask", None)
    values = typed(megatron_names(given) if shifted else given, adapter, where)
    length = check_token_lengths(values, adapter.fields, where)
    if shifted:
        trim(values, adapter.fields, megatron_span(given, length, where))
    if mask is not None:
        trim(values, adapter.fields, mask_span(mask, len(values["input_ids"]), where))
    elif not shifted:
        refuse_padded(values["input_ids"], values.get("labels"), adapter.pad_token_id, where)
    check_ids(values["input_ids"], where)
    if "labels" in values:
        check_labels(values["labels"], where)
    check_finite(values, where)
    if "loss_weights" in values:
        check_weights(values["loss_weights"], where)
    seconds = values.get(adapter.seconds_field) if adapter.has_seconds else None
    if seconds is not None:
        check_seconds(seconds, adapter.seconds_field, where)
    grids = item_grids(values, adapter)
    layout = _layout_of(values, grids, adapter, where)
    counts = item_counts(values, grids, adapter.fields, where)
    _fill_defaults(values, counts, layout, adapter)
    return Sample(values=values, layout=layout, shifted=shifted, sample_id=values.pop("sample_id", None))


def typed(given: Mapping[str, Any], adapter: ModelAdapter, where: str) -> dict[str, Any]:
    """Return the given fields, declared and of the declared types and ranks, in declaration order."""
    check_names(given, adapter.fields, where)
    values: dict[str, Any] = {}
    for field in adapter.fields:
        if field.name in given:
            value = convert(given[field.name], field, where)
            if isinstance(value, torch.Tensor):
                if field.kind == "media" and value.numel() == 0 and len(value) == 0:
                    continue  # no items is the same as no field
                check_rank(value, field, where)
            values[field.name] = value
    return values


def _layout_of(values: dict[str, Any], grids: Mapping[str, np.ndarray], adapter: ModelAdapter, where: str) -> SampleLayout:
    """Return the layout of a sample's media, and take `mm_token_type_ids` out: the layout holds them from here on."""
    ids, types = values["input_ids"], values.pop(TYPES, None)
    if not adapter.media_tokens:
        return SampleLayout.text(len(ids))
    seconds = media_seconds(values, adapter)
    given = [None if tensor is None else tensor.cpu().numpy() for tensor in (seconds, types)]
    return sample_layout(ids.cpu().numpy(), grids, *given, adapter=adapter, where=where)


def _fill_defaults(values: dict[str, Any], counts: Mapping[str, int], layout: SampleLayout, adapter: ModelAdapter) -> None:
    """Give every absent optional field its declared default, in place."""
    ids = values["input_ids"]
    if "labels" not in values:
        # Media tokens are no text to learn, spelled ones neither.
        values["labels"] = labels = ids.clone()
        for token in adapter.media_tokens.values():
            labels.masked_fill_(ids == token, IGNORED)
    for field in adapter.fields:
        if field.name not in values and field.name not in ("sample_id", TYPES):
            value = _default_value(field, ids, counts, adapter)
            if value is not None:
                values[field.name] = value


def _default_value(field: Field, ids: torch.Tensor, counts: Mapping[str, int], adapter: ModelAdapter) -> Value:
    """Return the declared default of an absent field; None leaves it absent."""
    if field.kind == "media":
        count = counts.get(field.modality or "", 0)
        # Where no seconds per grid are given, transformers takes 1.
        fill = 1.0 if field.name == adapter.seconds_field else field.default
        if not count or fill is None or field.rows != "items":
            return None
        return filled(field, count, fill)
    if field.kind == "token":
        return None if field.default is None else filled(field, len(ids), field.default).to(ids.device)
    if field.default is None or not field.is_tensor:
        return field.default
    return filled(field, None, field.default)


def filled(field: Field, length: int | None, fill: int | float | str) -> torch.Tensor:
    """Return a tensor of a field's dtype and shape, full of one value; free sizes are 1."""
    assert not isinstance(fill, str), field.name
    sizes = [1 if size is None else size for size in field.shape or ()]
    if length is not None:
        sizes.insert(field.axis, length)
    dtype = torch.float32 if field.dtype in ("float", "any") else getattr(torch, field.dtype)
    return torch.full(sizes, fill, dtype=dtype)

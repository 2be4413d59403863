"""The samples that most training runs consist of, prepared at once: plain tensors of text."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import torch

from ...core import Field, Sample, SampleLayout
from ...models.adapter import TEXT_FIELDS, ModelAdapter
from ...models.layout.positions import counting
from .check import has_wrong_labels

_SHIFTED = frozenset(("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len"))
_OWN = frozenset(("input_ids", "labels", "loss_weights", "sample_id"))


def plain_sample(raw: Mapping[str, Any], adapter: ModelAdapter) -> Sample | None:
    """Return what `prepare_sample` returns, where a sample is as plain as can be; None where it is not.

    None says nothing about a sample: it may be right in another form, or wrong, which is for `prepare_sample` to name. The
    tens of small steps that every form of every family needs take several times as long as to look at the tokens.
    """
    if type(raw) is not dict or adapter.media_tokens or not _is_enough(adapter.fields.fields):
        return None
    shifted = raw.keys() <= _SHIFTED
    if not shifted and not raw.keys() <= _OWN:
        return None
    values = _shifted(raw) if shifted else _unshifted(raw, adapter.pad_token_id)
    if values is None:
        return None
    ids, weights = values["input_ids"], values["loss_weights"]
    if ids.numpy().min() < 0 or not np.isfinite(weights.numpy()).all() or has_wrong_labels(values["labels"].numpy()):
        return None
    name = None if shifted else raw.get("sample_id")
    return Sample(values=values, layout=SampleLayout.text(ids.shape[0]), shifted=shifted, sample_id=name)


def _shifted(raw: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the real part of a row under Megatron-Core's keys; None where it is not plain."""
    ids, labels, weights = raw.get("tokens"), raw.get("labels"), raw.get("loss_mask")
    if not (_is_plain(ids, torch.int64) and _is_plain(labels, torch.int64) and _is_plain(weights, torch.float32)):
        return None
    width = ids.shape[0]
    length = _length(raw.get("original_seq_len"))
    if not 0 < length <= width or labels.shape[0] != width or weights.shape[0] != width:
        return None
    if "padded_seq_len" in raw and _length(raw["padded_seq_len"]) != width:
        return None
    if "position_ids" in raw and not _counts(raw["position_ids"], width, length):
        return None
    if length < width:
        ids, labels, weights = ids[:length], labels[:length], weights[:length]
    return {"input_ids": ids, "labels": labels, "loss_weights": weights}


def _unshifted(raw: dict[str, Any], pad: int) -> dict[str, torch.Tensor] | None:
    """Return ids, labels and weights under our keys, what is absent filled in; None where they are not plain."""
    ids, name = raw.get("input_ids"), raw.get("sample_id")
    if not _is_plain(ids, torch.int64) or not len(ids) or not _is_name(name):
        return None
    values = {"input_ids": ids}
    for key, dtype in (("labels", torch.int64), ("loss_weights", torch.float32)):
        given = raw.get(key)
        if given is None:
            continue
        if not _is_plain(given, dtype) or given.shape != ids.shape:
            return None
        values[key] = given
    array = ids.numpy()
    if pad and pad in (array[0], array[-1]):  # perhaps a padded row
        return None
    if "labels" not in values:
        values["labels"] = ids.clone()
    if "loss_weights" not in values:
        values["loss_weights"] = torch.ones(len(array), dtype=torch.float32)
    return values


def _is_name(value: Any) -> bool:
    return value is None or (type(value) is str and value.isascii()) or (type(value) is int and 0 <= value < 2**63)


def _is_enough(fields: tuple[Field, ...]) -> bool:
    """Whether ids, labels and weights are all that a sample must have, in the order in which it has them."""
    return fields[:3] == TEXT_FIELDS[:3] and not any(field.required or field.default is not None for field in fields[3:])


def _is_plain(value: Any, dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of one axis and a dtype, in one piece of host memory, that nobody differentiates."""
    return (
        type(value) is torch.Tensor
        and value.dtype is dtype
        and value.ndim == 1
        and value.is_cpu
        and value.layout is torch.strided
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_neg()
    )


def _length(value: Any) -> int:
    """Return a length that is an integer, or a tensor of one; -1 for anything else."""
    if type(value) is int:
        return value
    plain = type(value) is torch.Tensor and value.dtype in (torch.int32, torch.int64) and value.numel() == 1
    return int(value.item()) if plain and value.layout is torch.strided else -1


def _counts(positions: Any, width: int, length: int) -> bool:
    """Whether positions of a row count up from 0 in its real part."""
    if not _is_plain(positions, torch.int64) or positions.shape[0] != width:
        return False
    return bool((positions.numpy()[:length] == counting(length)).all())

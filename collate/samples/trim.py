"""Rows that come padded: which span of a row is real, and the row cut to it."""

from collections.abc import Mapping
from typing import Any

import torch

from ...core import FieldSet, FieldShapeError, MissingFieldError
from ...core.fields import Field
from ...models.layout.positions import counting

#: Keys of a Megatron-Core sample, beside the names they have here; None where the value is used up or recomputed.
_MEGATRON_KEYS: dict[str, str | None] = {
    "tokens": "input_ids",
    "labels": "labels",
    "loss_mask": "loss_weights",
    "position_ids": None,
    "original_seq_len": None,
    "padded_seq_len": None,
}
#: Fields that say which span of a row is real, as they are converted before the functions below read them.
MASK_FIELD = Field(name="attention_mask", kind="token", dtype="any")
MEGATRON_FIELDS = (
    Field(name="original_seq_len", kind="sample", dtype="any"),
    Field(name="padded_seq_len", kind="sample", dtype="any"),
    Field(name="position_ids", kind="token", dtype="int64"),
)


def megatron_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Megatron-Core sample under our names, without the keys that only describe the row."""
    return {_MEGATRON_KEYS.get(name, name) or "": value for name, value in raw.items() if _MEGATRON_KEYS.get(name, name)}


def megatron_span(given: Mapping[str, Any], width: int, where: str) -> tuple[int, int]:
    """Return the real span (start, stop) of a Megatron-Core sample whose row is `width` tokens wide.

    Args:
        given: the sample, `MEGATRON_FIELDS` as tensors.
        width: tokens of the row.
        where: prefix of error messages.

    Raises:
        MissingFieldError: no labels, or no `original_seq_len`.
        FieldShapeError: lengths that disagree, or position ids that do not count up from 0 (they are recomputed by the
            family's rule, so others would be lost).
    """
    for name in ("labels", "original_seq_len"):
        if name not in given:
            raise MissingFieldError(f"{where}: a sample with 'tokens' (already shifted) needs {name!r}")
    real = _length_of(given, "original_seq_len", where)
    padded = _length_of(given, "padded_seq_len", where) if "padded_seq_len" in given else width
    if padded != width or not 0 < real <= padded:
        raise FieldShapeError(
            f"{where}: original_seq_len {real}, padded_seq_len {padded}, but {width} tokens: "
            "0 < original_seq_len <= padded_seq_len = tokens must hold"
        )
    if "position_ids" in given:
        positions: torch.Tensor = given["position_ids"]
        if positions.shape != (width,) or not (positions.cpu().numpy()[:real] == counting(real)).all():
            raise FieldShapeError(f"{where}: position_ids must count 0..{real - 1} in a row of {width}: they are recomputed")
    return 0, real


def _length_of(given: Mapping[str, Any], name: str, where: str) -> int:
    """Return a length that comes as a tensor of one element."""
    tensor: torch.Tensor = given[name]
    if tensor.numel() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise FieldShapeError(f"{where}: {name!r} must be one integer, got {tensor.dtype} of shape {list(tensor.shape)}")
    return int(tensor.item())


def mask_span(mask: torch.Tensor, width: int, where: str) -> tuple[int, int]:
    """Return the real span (start, stop) that an attention mask of ones and zeros marks in a row `width` tokens wide.

    Raises:
        FieldShapeError: another width, other values, no real token, or padding between real tokens.

    Example:
        >>> mask_span(torch.tensor([0, 1, 1, 0]), 4, "sample")
        (1, 3)
    """
    if mask.shape != (width,):
        raise FieldShapeError(f"{where}: 'attention_mask' has shape {list(mask.shape)}, but input_ids has {width} tokens")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise FieldShapeError(f"{where}: 'attention_mask' must hold zeros and ones, got {sorted(set(mask.tolist()))[:8]}")
    real = mask.nonzero().flatten()
    if len(real) == 0:
        raise FieldShapeError(f"{where}: the sample is empty: its attention_mask marks 0 of {width} tokens")
    start, stop = int(real[0]), int(real[-1]) + 1
    if stop - start != len(real):
        raise FieldShapeError(
            f"{where}: 'attention_mask' marks {len(real)} tokens between {start} and {stop}: padding may only surround them"
        )
    return start, stop


def trim(values: dict[str, Any], fields: FieldSet, span: tuple[int, int]) -> None:
    """Cut every token field of a row to a span, in place."""
    start, stop = span
    if (start, stop) == (0, len(values["input_ids"])):
        return
    for field in fields.of_kind("token"):
        if field.name in values:
            values[field.name] = values[field.name].narrow(field.axis, start, stop - start).contiguous()

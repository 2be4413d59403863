"""From a raw mapping to a checked sample: nothing is dropped, cast or guessed without a named error.

`prepare_sample` calls the checks below in order: fields that are declared, values converted where that is exact, lengths that
agree, a padded row cut to its real tokens, then ids, labels, weights and media one by one.
"""

import cmath
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...core import (
    IGNORED,
    TYPE_CODES,
    Field,
    FieldSet,
    FieldShapeError,
    MissingFieldError,
    Sample,
    SampleLayout,
    UndeclaredFieldError,
)
from ...core.fields import ANY, FLOAT, ID, TEXT, dtype_name, dtype_of
from ...core.sample import Value
from ...models.adapter import ModelAdapter
from ...models.layout.items import MediaItems, flattened, media_grids, media_items, media_seconds, rows_needed
from ...models.layout.sample_layout import sample_layout
from .trim import MASK_FIELD, MEGATRON_FIELDS, mask_span, megatron_names, megatron_span, trim

TYPES = "mm_token_type_ids"

#: What makes a batch of a sample, and the remedies.
_BATCHED = (
    ": a batch, not a sample. A DataLoader needs batch_size=None, or a collate_fn that leaves lists as they are "
    "(collate_fn=list); of a processor's batch of one take [0]"
)


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
        row = {field.name: convert(given[field.name], field, where) for field in MEGATRON_FIELDS if field.name in given}
        trim(values, adapter.fields, megatron_span({**given, **row}, length, where))
    if mask is not None:
        real = convert(mask, MASK_FIELD, where)
        assert isinstance(real, torch.Tensor)
        trim(values, adapter.fields, mask_span(real, len(values["input_ids"]), where))
    elif not shifted:
        refuse_padded(values["input_ids"], values.get("labels"), adapter.pad_token_id, where)
    check_ids(values["input_ids"], where)
    if "labels" in values:
        check_labels(values["labels"], where)
    check_finite(values, where)
    if "loss_weights" in values:
        check_weights(values["loss_weights"], where)
    seconds = values.get(adapter.seconds_field)
    if seconds is not None and adapter.has_seconds:
        check_seconds(seconds, adapter.seconds_field, where)
    grids, items = item_grids(values, adapter), media_items(values, adapter, where) if adapter.anchors else {}
    layout = _layout_of(values, grids, items, adapter, where)
    counts = item_counts(values, grids, items, adapter, where)
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
                if field.kind == "media" and value.numel() == 0 and value.ndim > field.axis and value.shape[field.axis] == 0:
                    continue  # no items is the same as no field
                if adapter.anchors:
                    value = flattened(value, field, given, adapter)
                check_rank(value, field, where)
            values[field.name] = value
    return values


def _layout_of(
    values: dict[str, Any],
    grids: Mapping[str, np.ndarray],
    items: Mapping[str, MediaItems],
    adapter: ModelAdapter,
    where: str,
) -> SampleLayout:
    """Return the layout of a sample's media, and take `mm_token_type_ids` out: the layout holds them from here on."""
    ids, types = values["input_ids"], values.pop(TYPES, None)
    if not adapter.media_tokens:
        return SampleLayout.text(len(ids))
    seconds = media_seconds(values, adapter)
    given = [None if tensor is None else tensor.cpu().numpy() for tensor in (seconds, types)]
    counts = {name: one.tokens for name, one in items.items()}
    all_grids = {**grids, **{name: one.grids for name, one in items.items()}} if items else grids
    return sample_layout(ids.cpu().numpy(), all_grids, *given, adapter=adapter, counts=counts, where=where)


def _fill_defaults(values: dict[str, Any], counts: Mapping[str, int], layout: SampleLayout, adapter: ModelAdapter) -> None:
    """Give every absent optional field its declared default, in place."""
    ids = values["input_ids"]
    if "labels" not in values:
        # Media tokens are no text to learn, spelled ones neither.
        values["labels"] = labels = ids.clone()
        for token in adapter.media_tokens.values():
            labels.masked_fill_(ids == token, IGNORED)
    for field in adapter.fields:
        if field.name not in values and field.name not in ("sample_id", "group_id", TYPES):
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


def convert(value: Any, field: Field, where: str) -> Value:
    """Return a raw value as the value of `field`: a contiguous tensor, a string or an integer.

    Tensors and numpy arrays carry a dtype, which must be one that the field accepts. Lists carry none: their numbers
    take the field's dtype ("float" means float32), if every one of them is in its range, integers exactly.

    Args:
        value: what the user gave; not None.
        field: its declaration.
        where: prefix of error messages.

    Raises:
        FieldShapeError: a value of another type or dtype, or one that does not convert exactly.
    """
    if not field.is_tensor:
        return _scalar(value, field, where)
    if isinstance(value, torch.Tensor):
        tensor = value.detach() if value.requires_grad else value
    elif isinstance(value, np.ndarray | np.generic):
        tensor = _from_array(np.asarray(value), field, where)
    elif isinstance(value, list | tuple | bool | int | float):
        tensor = from_list(value, field, where)
    else:
        raise FieldShapeError(f"{where}: {field.name!r} must be a tensor, an array or a list, got {type(value).__name__}")
    if tensor.layout != torch.strided:
        raise FieldShapeError(f"{where}: {field.name!r} must be a dense tensor, got layout {tensor.layout}")
    if not field.accepts(tensor.dtype):
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        remedy = ": convert it with .long()" if is_whole and field.dtype == "int64" else ""
        if remedy and isinstance(value, np.ndarray | np.generic):
            remedy = ": convert it with .astype(numpy.int64)"
        raise FieldShapeError(f"{where}: {field.name!r} must be {field.dtype}, got {dtype_name(tensor.dtype)}{remedy}")
    return tensor.contiguous()


def _scalar(value: Any, field: Field, where: str) -> str | int:
    """Return the value of a field that is a string, or an identifier (a string or an integer)."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FieldShapeError(f"{where}: {field.name!r} is no text that UTF-8 can hold ({error})") from error
        return value
    if field.dtype == ID:
        if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point():
            value = value.item()
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            if not -(2**63) <= value < 2**64:
                raise FieldShapeError(f"{where}: {field.name!r} must lie between -2^63 and 2^64 - 1, got {value}")
            return int(value)
    wanted = "a string" if field.dtype == TEXT else "a string or an integer"
    raise FieldShapeError(f"{where}: {field.name!r} must be {wanted}, got {type(value).__name__} {value!r:.40}")


def _from_array(value: np.ndarray, field: Field, where: str) -> torch.Tensor:
    """Return a tensor on an array's memory; a copy where the array is read-only or strided backwards."""
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise FieldShapeError(f"{where}: {field.name!r} has dtype {value.dtype}, which is no tensor dtype") from error


def from_list(value: Any, field: Field, where: str) -> torch.Tensor:
    """Return a tensor of the field's dtype from nested lists of plain numbers."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged, or a tensor that numpy cannot read
        raise FieldShapeError(f"{where}: {field.name!r} is no regular list of numbers ({error})") from error
    if array.dtype.kind == "u" and array.size and int(array.max()) < 2**63:
        array = array.astype(np.int64)
    if array.dtype.kind not in "bif":
        raise FieldShapeError(f"{where}: {field.name!r} must hold numbers, got {array.dtype} values")
    if array.size == 0:
        return torch.empty(array.shape, dtype=torch.float32 if field.dtype in (FLOAT, ANY) else dtype_of(field.dtype))
    target = _list_dtype(field, array.dtype.kind)
    if target is None:
        raise FieldShapeError(f"{where}: {field.name!r} must be {field.dtype}, got a list of {array.dtype} values")
    exact = torch.from_numpy(array.astype({"b": np.bool_, "i": np.int64, "f": np.float64}[array.dtype.kind]))
    tensor = exact.to(target)
    # Decimal fractions are rounded by any floating dtype: there, only the range can be wrong.
    in_range = torch.isfinite(tensor) | ~torch.isfinite(exact)
    fits = in_range if array.dtype.kind == "f" else tensor.to(exact.dtype) == exact
    if not bool(fits.all()):
        wrong = exact[~fits].flatten()[0].item()
        raise FieldShapeError(f"{where}: {field.name!r} holds {wrong}, which {dtype_name(target)} cannot represent")
    return tensor


def _list_dtype(field: Field, kind: str) -> torch.dtype | None:
    """Return the dtype that a list of bools ("b"), integers ("i") or floats ("f") takes, None where it has none."""
    if field.dtype == ANY:
        return {"b": torch.bool, "i": torch.int64}.get(kind)  # a list of floats could be any floating dtype
    target = torch.float32 if field.dtype == FLOAT else dtype_of(field.dtype)
    if kind == "b":
        return target if target == torch.bool else None
    if kind == "f":
        return target if target.is_floating_point else None
    return None if target == torch.bool else target


def check_names(given: Mapping[str, Any], fields: FieldSet, where: str) -> None:
    """Check that every field is declared and every required one is there.

    Raises:
        UndeclaredFieldError: a field that neither the adapter nor the user declared.
        MissingFieldError: a required field that is absent or None.
    """
    unknown = [name for name in given if name not in fields]
    if unknown:
        declared = ", ".join(field.name for field in fields)
        raise UndeclaredFieldError(f"{where}: undeclared field {unknown[0]!r}; declared are {declared}")
    for field in fields:
        if field.required and field.name not in given:
            raise MissingFieldError(f"{where}: required field {field.name!r} is missing")


def check_rank(value: torch.Tensor, field: Field, where: str) -> None:
    """Check a tensor's rank, and its sizes besides the packed axis.

    Raises:
        FieldShapeError: a tensor that does not fit; both shapes are named.
    """
    packed = field.kind != "sample"
    if field.shape == () and value.ndim == packed:
        return  # most fields of most samples
    if field.shape is None:
        wanted: list[int | None] | None = None
        fits = not packed or value.ndim > field.axis
    else:
        wanted = list(field.shape)
        if packed:
            wanted.insert(field.axis, None)
        fits = len(wanted) == value.ndim and all(w is None or w == n for w, n in zip(wanted, value.shape, strict=True))
    if not fits:
        shown = f"at least {field.axis + 1} axes" if wanted is None else str(wanted).replace("None", "*").replace("'", "")
        hint = _BATCHED if field.kind == "token" and wanted is not None and value.ndim == len(wanted) + 1 else ""
        raise FieldShapeError(f"{where}: {field.name!r} must have shape {shown}, got {list(value.shape)}{hint}")


def check_token_lengths(values: Mapping[str, Any], fields: FieldSet, where: str) -> int:
    """Check that every token field has one value per token, and return the number of tokens.

    Raises:
        FieldShapeError: an empty sample, or a field of another length.
    """
    length = len(values["input_ids"])
    if length == 0:
        raise FieldShapeError(f"{where}: the sample is empty: 'input_ids' has 0 tokens, at least 1 is needed")
    for field in fields.of_kind("token"):
        if field.name in values and values[field.name].shape[field.axis] != length:
            have = values[field.name].shape[field.axis]
            raise FieldShapeError(f"{where}: {field.name!r} has {have} values, but 'input_ids' has {length}")
    return length


def check_finite(values: Mapping[str, Any], where: str) -> None:
    """Check that floating tensors in host memory hold no NaN and no infinity.

    Tensors on a device are left alone: reading them would wait for the device once per sample.

    Raises:
        FieldShapeError: a tensor with values that are not finite; their number is named.
    """
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device.type != "cpu":
            continue
        # One pass without a mask: a finite sum means finite values. A sum may overflow though values are finite.
        if cmath.isfinite(value.sum().item()):
            continue
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            raise FieldShapeError(f"{where}: {name!r} has {bad} of {value.numel()} values that are not finite")


def check_ids(input_ids: torch.Tensor, where: str) -> None:
    """Check that no token id is negative.

    Raises:
        FieldShapeError: a negative id; the first is named.
    """
    if int(input_ids.numpy().min() if input_ids.is_cpu else input_ids.min()) < 0:
        at = int(torch.argmax((input_ids < 0).to(torch.uint8)))
        raise FieldShapeError(f"{where}: input_ids[{at}] is {int(input_ids[at])}, ids must be at least 0")


def check_weights(weights: torch.Tensor, where: str) -> None:
    """Check that no loss weight is below 0: weights that cancel would leave the loss without a divisor.

    Raises:
        FieldShapeError: a negative weight; the first is named.
    """
    array = weights.cpu().numpy()
    if array.min() < 0:
        at = int(np.argmax(array < 0))
        raise FieldShapeError(f"{where}: loss_weights[{at}] is {array[at]:g}, weights must be at least 0")


def check_seconds(seconds: torch.Tensor, name: str, where: str) -> None:
    """Check that every video's seconds per temporal patch are above 0: time does not stand still or run backwards.

    Raises:
        FieldShapeError: seconds of 0 or below; the first video is named.
    """
    array = seconds.cpu().numpy()
    if array.size and array.min() <= 0:
        at = int(np.argmax(array <= 0))
        raise FieldShapeError(f"{where}: {name}[{at}] is {array[at]:g}, seconds per grid must be above 0")


def check_labels(labels: torch.Tensor, where: str) -> None:
    """Check that labels are ids, or -100 where nothing is learned.

    Raises:
        FieldShapeError: another negative label; the first is named.
    """
    array = labels.cpu().numpy()
    if np.count_nonzero(array < 0) != np.count_nonzero(array == IGNORED):
        at = int(np.argmax((array < 0) & (array != IGNORED)))
        raise FieldShapeError(f"{where}: labels[{at}] is {array[at]}, labels must be at least 0, or {IGNORED} for no target")


def item_grids(values: Mapping[str, Any], adapter: ModelAdapter) -> dict[str, np.ndarray]:
    """Return the grids of a sample's media items by modality, int64 [n, 3], wherever the tensors lie; pixels stay there."""
    small = {
        field.name: values[field.name].cpu()
        for field in adapter.fields.of_kind("media")
        if field.name in values and field.rows == "items" and not values[field.name].is_floating_point()
    }
    return media_grids(small, adapter) if small else {}


def item_counts(
    values: Mapping[str, Any],
    grids: Mapping[str, np.ndarray],
    items: Mapping[str, MediaItems],
    adapter: ModelAdapter,
    where: str,
) -> dict[str, int]:
    """Check that the media fields of each modality agree on its items, and return the number of items per modality.

    A field with one row per item has as many rows as the modality has items; one with a row per patch has as many rows as
    the grids t * h * w add up to. An item needs its grid and its patches: a grid alone, or patches alone, are refused.

    Raises:
        FieldShapeError: row numbers that disagree; both are named.
    """
    counts: dict[str, int] = {}
    media = adapter.fields.of_kind("media")
    for modality in TYPE_CODES if media else ():
        mine = [field for field in media if field.modality == modality]
        if modality in items:
            for field in mine:
                needed = rows_needed(field, items[modality], adapter.anchors[modality])
                rows = values[field.name].shape[field.axis] if field.name in values else needed
                if needed is not None and rows != needed:
                    told = f"{len(items[modality].grids)} {modality} items need {needed}"
                    raise FieldShapeError(f"{where}: {field.name!r} has {rows} rows, but the sample's {told}")
            counts[modality] = len(items[modality].grids)
            continue
        per_item = {field.name: len(values[field.name]) for field in mine if field.rows == "items" and field.name in values}
        if len(set(per_item.values())) > 1:
            raise FieldShapeError(f"{where}: {modality} fields disagree on the number of items: {per_item}")
        counts[modality] = next(iter(per_item.values()), 0)
        patches = int(grids[modality].prod(axis=1).sum()) if modality in grids else 0
        for name in [field.name for field in mine if field.rows == "patches"]:
            rows = len(values[name]) if name in values else 0
            if rows != patches:
                told = f"{counts[modality]} {modality} items"
                raise FieldShapeError(f"{where}: {name!r} has {rows} rows, but the grids of {told} have {patches}")
    return {modality: count for modality, count in counts.items() if count}


def refuse_padded(input_ids: torch.Tensor, labels: torch.Tensor | None, pad: int, where: str) -> None:
    """Refuse a row that looks padded and came without `attention_mask`: its padding would be trained on.

    Two or more padding ids at an end, none of them learned by the sample's own labels, look padded. Id 0 is no sign: it
    stands for a family without a padding token.

    Raises:
        FieldShapeError: such a row; an attention mask, of ones if all tokens are real, settles it.
    """
    if pad == 0 or len(input_ids) < 2:
        return
    is_pad = input_ids == pad
    if labels is not None:
        is_pad &= labels == IGNORED
    if not bool(is_pad[:2].all() | is_pad[-2:].all()):
        return
    count = int((input_ids == pad).sum())
    raise FieldShapeError(
        f"{where}: {count} of {len(input_ids)} tokens are the padding token {pad}, at an end of the row: "
        "a padded row needs 'attention_mask' (all ones if these tokens are real)"
    )

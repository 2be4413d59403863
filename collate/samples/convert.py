"""Values of a raw sample to tensors: lists are converted where that is exact, tensors and arrays must fit as they are."""

from typing import Any

import numpy as np
import torch

from ...core import Field, FieldShapeError
from ...core.fields import ANY, FLOAT, ID, TEXT, dtype_name, dtype_of
from ...core.sample import Value


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

"""Columns of integers in few bytes: less their smallest value, in the narrowest type that holds them.

A general compressor would save another third, and cost as much time as planning the step.
"""

import msgspec
import numpy as np

from ..plan.table import Ints

_TYPES = tuple(np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8"))


class Column(msgspec.Struct, frozen=True, array_like=True):
    """Integers, packed.

    Attributes:
        count: number of values.
        low: the smallest.
        width: bytes of a value; 0 where all are the same.
        data: the values less `low`.
    """

    count: int
    low: int
    width: int
    data: bytes


def pack(values: Ints) -> Column:
    """Pack int64 values whose spread is below 2**63.

    Example:
        >>> pack(np.array([7, 7, 7])), pack(np.array([-1, 254])).width, unpack(pack(np.array([-1, 255]))).tolist()
        (Column(count=3, low=7, width=0, data=b''), 1, [-1, 255])
    """
    if not len(values):
        return Column(0, 0, 0, b"")
    low, high = int(values.min()), int(values.max())
    if low == high:
        return Column(len(values), low, 0, b"")
    dtype = next(dtype for dtype in _TYPES if (high - low) >> (8 * dtype.itemsize) == 0)
    assert high - low < 2**63, (low, high)
    # A cast drops the high bytes, and so does the difference: it may be taken after the cast.
    narrow = values.astype(dtype)
    narrow -= np.array(low, np.int64).astype(dtype)
    return Column(len(values), low, dtype.itemsize, narrow.tobytes())


def unpack(column: Column) -> Ints:
    """Return the int64 values.

    Raises:
        ValueError: a column that is not one.
    """
    if column.width == 0:
        return np.full(column.count, column.low, np.int64)
    dtype = next((dtype for dtype in _TYPES if dtype.itemsize == column.width), None)
    if dtype is None or len(column.data) != column.count * column.width:
        raise ValueError(f"a column of {column.count} values of {column.width} bytes has {len(column.data)} bytes")
    values: Ints = np.frombuffer(column.data, dtype).astype(np.int64)
    values += column.low
    return values

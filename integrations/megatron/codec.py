"""Micro-batches as one run of bytes: a msgpack header, then the bytes of every tensor, each at a multiple of 16."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from ...core.fields import dtype_name, dtype_of

_ALIGN = 16


class _Header(msgspec.Struct, array_like=True, frozen=True):
    facts: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...]]]
    batches: list[dict[str, tuple[bool, Any]]]


_DECODER = msgspec.msgpack.Decoder(_Header)


def encode(facts: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return facts and micro-batches as uint8 `[n]`.

    Args:
        facts: plain values.
        batches: named tensors on the host, and plain values. One tensor under two names is written once, and is one object
            again after `decode`: Transformer Engine tells by identity whether a row has padding.

    Example:
        >>> facts, batches = decode(encode({"step": 3}, [{"tokens": torch.tensor([5, 6])}]))
        >>> facts, batches[0]["tokens"].tolist()
        ({'step': 3}, [5, 6])
    """
    numbers: dict[int, int] = {}
    tensors: list[torch.Tensor] = []

    def placed(value: Any) -> tuple[bool, Any]:
        if not isinstance(value, torch.Tensor):
            return False, value
        if id(value) not in numbers:
            numbers[id(value)] = len(tensors)
            tensors.append(value.detach().contiguous())
        return True, numbers[id(value)]

    placed_batches = [{name: placed(value) for name, value in batch.items()} for batch in batches]
    kinds = [(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    header = msgspec.msgpack.encode(_Header(dict(facts), kinds, placed_batches))
    sizes = [len(header), *(tensor.numel() * tensor.element_size() for tensor in tensors)]
    out = torch.zeros(_ALIGN + sum(map(_aligned, sizes)), dtype=torch.uint8)
    raw = out.numpy()
    raw[:8].view(np.int64)[0] = len(header)
    raw[_ALIGN : _ALIGN + len(header)] = np.frombuffer(header, np.uint8)
    at = _ALIGN + _aligned(len(header))
    for tensor, size in zip(tensors, sizes[1:], strict=True):
        if size:
            out[at : at + size] = tensor.reshape(-1).view(torch.uint8)
        at += _aligned(size)
    return out


def decode(data: torch.Tensor) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what `encode` wrote; the tensors are views of `data`."""
    length = int(data[:8].view(torch.int64)[0])
    header = _DECODER.decode(data[_ALIGN : _ALIGN + length].numpy().data)
    at = _ALIGN + _aligned(length)
    tensors = []
    for name, shape in header.tensors:
        dtype = dtype_of(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors.append(data[at : at + size].view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype))
        at += _aligned(size)
    batches = [
        {name: tensors[value] if is_tensor else value for name, (is_tensor, value) in entry.items()} for entry in header.batches
    ]
    return header.facts, batches


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

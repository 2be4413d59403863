"""Micro-batches as one block of bytes, written like the blocks in which samples move."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ...core import Sample, SampleLayout
from ...scheduler.stages.blocks import Block, read_block, write_blocks

_HEADER = "header"


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
    header = bytearray(msgspec.msgpack.encode((dict(facts), placed_batches)))
    values = {_HEADER: torch.frombuffer(header, dtype=torch.uint8), **{str(n): tensor for n, tensor in enumerate(tensors)}}
    block = Block.of(Sample(values=values, layout=SampleLayout.text(0)))
    out = torch.empty(block.nbytes, dtype=torch.uint8)
    write_blocks(out, [block], [0], 0)
    return out


def decode(data: torch.Tensor) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what `encode` wrote; the tensors are views of `data`.

    Raises:
        CorruptBlockError: bytes that `encode` did not write.
    """
    sample = read_block(data, verify=False)  # it came from this machine or over TCP, and pixels are many
    assert isinstance(sample, Sample)
    facts, batches = msgspec.msgpack.decode(sample.tensor(_HEADER).numpy().data)
    return facts, [
        {name: sample.values[str(value)] if is_tensor else value for name, (is_tensor, value) in entry.items()}
        for entry in batches
    ]

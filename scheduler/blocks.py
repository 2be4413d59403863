"""Wire format: one sample is one block of bytes.

A block is a fixed prefix, a msgpack header (names, dtypes, shapes, layout, strings) and the raw bytes of every tensor, each
part aligned to 16 bytes::

    0      4        6      8            12   16      24           32        40       48
    | EVPK | version | flags | header size | row | length | plan digest | checksum | 0 | header | tensor | tensor | ...

Nothing is pickled, and a received block is never copied: its tensors are views.
"""

import struct
from typing import Any

import msgspec
import numpy as np
import torch

from ..core import CorruptBlockError, Sample, SampleLayout
from ..core.fields import TENSOR_DTYPES, dtype_name, dtype_of
from .checksum import checksum

WIRE_VERSION = 1
ALIGN = 16

_MAGIC = b"EVPK"
_PREFIX = struct.Struct("<4sHHIIQQQQ")
_CHECKSUM_AT = 32
_SHIFTED = 1
_CODES = {name: code for code, name in enumerate(TENSOR_DTYPES, start=1)}


class _Header(msgspec.Struct, array_like=True, frozen=True):
    sample_id: str | int | None
    num_tokens: int
    num_spelled: int
    runs: bytes
    seconds: bytes
    tensors: list[tuple[str, int, tuple[int, ...]]]
    others: dict[str, str | int | float | None]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


class Block(msgspec.Struct, frozen=True):
    """A sample, its encoded header, and the size of its block; made once, when the sample is described.

    Attributes:
        sample: the sample.
        header: msgpack bytes.
        nbytes: size of the whole block in bytes, a multiple of 16.
    """

    sample: Sample
    header: bytes
    nbytes: int

    @classmethod
    def of(cls, sample: Sample) -> "Block":
        """Describe a sample's block without building it."""
        tensors = [(name, value) for name, value in sample.values.items() if isinstance(value, torch.Tensor)]
        header = _ENCODER.encode(
            _Header(
                sample_id=sample.sample_id,
                num_tokens=sample.layout.num_tokens,
                num_spelled=sample.layout.num_spelled,
                runs=sample.layout.runs.astype("<i8").tobytes(),
                seconds=sample.layout.seconds.astype("<f4").tobytes(),
                tensors=[(name, _CODES[dtype_name(value.dtype)], tuple(value.shape)) for name, value in tensors],
                others={name: value for name, value in sample.values.items() if not isinstance(value, torch.Tensor)},
            )
        )
        payload = sum(aligned(value.numel() * value.element_size()) for _, value in tensors)
        return cls(sample, header, _PREFIX.size + aligned(len(header)) + payload)

    def write(self, out: np.ndarray, *, row: int, digest: int) -> None:
        """Write the block into uint8 `[nbytes]`, which starts at a multiple of 16 bytes of its buffer.

        Args:
            out: where to write.
            row: the sample's row in the step's table.
            digest: the plan's digest.
        """
        assert out.size == self.nbytes, (out.size, self.nbytes)
        flags = _SHIFTED if self.sample.shifted else 0
        prefix = _PREFIX.pack(_MAGIC, WIRE_VERSION, flags, len(self.header), row, self.nbytes, digest, 0, 0)
        at = _put(out, 0, np.frombuffer(prefix, np.uint8))
        at = _put(out, at, np.frombuffer(self.header, np.uint8))
        for value in self.sample.values.values():
            if isinstance(value, torch.Tensor):
                at = _put(out, at, _raw(value))
        assert at == self.nbytes, (at, self.nbytes)
        out[_CHECKSUM_AT : _CHECKSUM_AT + 8].view(np.uint64)[0] = checksum(out)


def read_block(data: torch.Tensor, *, row: int | None = None, digest: int | None = None) -> Sample:
    """Return the sample in a block, as views of it.

    Args:
        data: uint8 `[n]` on the host, contiguous, starting at a multiple of 16 bytes.
        row: expected row, None to accept any.
        digest: expected plan digest, None to accept any.

    Raises:
        CorruptBlockError: anything that is not a block of this version, whole and unchanged.
    """
    raw = data.numpy()
    size, header_size, flags = _check_prefix(raw, row, digest)
    try:
        header = _DECODER.decode(raw[_PREFIX.size : _PREFIX.size + header_size].data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptBlockError(f"block header cannot be read: {error}") from None
    values: dict[str, Any] = {}
    at = _PREFIX.size + aligned(header_size)
    for name, code, shape in header.tensors:
        values[name], at = _tensor(data, at, name, code, shape)
    if at != size:
        raise CorruptBlockError(f"block has {size} bytes, its header accounts for {at}")
    values.update(header.others)
    return Sample(values=values, layout=_layout(header), shifted=bool(flags & _SHIFTED), sample_id=header.sample_id)


def aligned(num_bytes: int) -> int:
    """Round a size up to the alignment of blocks.

    Example:
        >>> aligned(17)
        32
    """
    return -(-num_bytes // ALIGN) * ALIGN


def _raw(value: torch.Tensor) -> np.ndarray:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _put(out: np.ndarray, at: int, data: np.ndarray) -> int:
    end, padded = at + data.size, at + aligned(data.size)
    out[at:end] = data
    out[end:padded] = 0
    return padded


def _check_prefix(raw: np.ndarray, row: int | None, digest: int | None) -> tuple[int, int, int]:
    if raw.size < _PREFIX.size or raw.size % ALIGN:
        raise CorruptBlockError(f"block has {raw.size} bytes, needs at least {_PREFIX.size} and a multiple of {ALIGN}")
    magic, version, flags, header_size, found_row, size, found_digest, found_sum, _ = _PREFIX.unpack_from(raw.data)
    if magic != _MAGIC:
        raise CorruptBlockError(f"block starts with {magic!r}, not {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise CorruptBlockError(f"block has wire version {version}, this is version {WIRE_VERSION}")
    if size != raw.size:
        raise CorruptBlockError(f"block says {size} bytes, {raw.size} arrived")
    if header_size > raw.size - _PREFIX.size:
        raise CorruptBlockError(f"block header says {header_size} bytes, block has {raw.size}")
    expected = _zero_sum(raw)
    if found_sum != expected:
        raise CorruptBlockError(f"block checksum is {found_sum:016x}, its bytes give {expected:016x}")
    if digest is not None and found_digest != digest:
        raise CorruptBlockError(f"block belongs to plan {found_digest:016x}, expected {digest:016x}")
    if row is not None and found_row != row:
        raise CorruptBlockError(f"block is row {found_row} of the step, expected row {row}")
    return size, header_size, flags


def _zero_sum(raw: np.ndarray) -> int:
    field = raw[_CHECKSUM_AT : _CHECKSUM_AT + 8]
    kept = field.copy()
    field[:] = 0
    try:
        return checksum(raw)
    finally:
        field[:] = kept


def _tensor(data: torch.Tensor, at: int, name: str, code: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    if not 1 <= code <= len(TENSOR_DTYPES) or any(side < 0 for side in shape):
        raise CorruptBlockError(f"block field {name!r} has dtype code {code} and shape {shape}")
    dtype = dtype_of(TENSOR_DTYPES[code - 1])
    count = 1
    for side in shape:
        count *= side  # Python integers: no overflow
    size = count * dtype.itemsize
    if at + aligned(size) > data.numel():
        raise CorruptBlockError(f"block field {name!r} of {size} bytes at {at} ends beyond the block's {data.numel()}")
    return data[at : at + size].view(dtype).reshape(shape), at + aligned(size)


def _layout(header: _Header) -> SampleLayout:
    if len(header.runs) % 48 or len(header.seconds) * 12 != len(header.runs):
        raise CorruptBlockError(f"block has {len(header.runs)} bytes of runs and {len(header.seconds)} of seconds")
    runs = np.frombuffer(header.runs, "<i8").astype(np.int64, copy=False).reshape(-1, 6)
    seconds = np.frombuffer(header.seconds, "<f4").astype(np.float32, copy=False)
    return SampleLayout(num_tokens=header.num_tokens, runs=runs, seconds=seconds, num_spelled=header.num_spelled)

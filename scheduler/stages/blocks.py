"""Wire format: one sample, or one group of samples, is one block of bytes.

A block is a fixed prefix, a msgpack header (names, dtypes, shapes, layout, strings) and the raw bytes of every tensor, each
part aligned to 16 bytes::

    0      4        6      8            12   16      24           32        40       48
    | EVPK | version | flags | header size | row | length | plan digest | checksum | 0 | header | tensor | tensor | ...

Nothing is pickled, and a received block is never copied: its tensors are views.
"""

import ctypes
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from ...core import CorruptBlockError, Sample, SampleGroup, SampleLayout, members_of, round_up
from ...core.fields import TENSOR_DTYPES, dtype_name, dtype_of

BLOCK_VERSION = 2
ALIGN = 16

_MAGIC = b"EVPK"
_PREFIX = struct.Struct("<4sHHIIQQQQ")
#: Where the checksum lies: it covers every byte but its own.
_SUM, _SUM_END = 32, 40
_WORD = struct.Struct("<Q")
_SHIFTED, _GROUP = 1, 2
_ZEROS = bytes(ALIGN)
#: Of every dtype: torch's, its size in bytes, and numpy's, None where it has none.
_DTYPES = [
    (dtype_of(name), dtype_of(name).itemsize, np.dtype(name) if name == "bool" or hasattr(np, name) else None)
    for name in TENSOR_DTYPES
]
_NUM_CODES = len(TENSOR_DTYPES)
#: Looked up once: they are called for every tensor of every sample that moves.
_array, _from_numpy = np.ndarray, torch.from_numpy
_CODES = {name: code for code, name in enumerate(TENSOR_DTYPES, start=1)}


class _Header(msgspec.Struct, array_like=True, frozen=True):
    sample_id: str | int | None
    num_tokens: int
    num_spelled: int
    runs: bytes
    seconds: bytes
    tensors: list[tuple[str, int, tuple[int, ...]]]
    others: dict[str, str | int | float | None]


class _GroupHeader(msgspec.Struct, array_like=True, frozen=True):
    prefix: int
    num_groups: int
    members: list[_Header]


_NO_RUNS, _NO_SECONDS = np.zeros((0, 6), np.int64), np.zeros(0, np.float32)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)
_GROUP_DECODER = msgspec.msgpack.Decoder(_GroupHeader)


class Block(msgspec.Struct, frozen=True):
    """A sample, its encoded header, and what is copied behind it; made once, when the sample is described.

    Attributes:
        sample: the sample, or the group.
        header: msgpack bytes.
        nbytes: size of the whole block in bytes, a multiple of 16.
        parts: every tensor and the size of its bytes, in the order of the header; empty where one of them does not lie on the
            host in one piece.
    """

    sample: Sample | SampleGroup
    header: bytes
    nbytes: int
    parts: tuple[tuple[torch.Tensor, int], ...]

    @classmethod
    def of(cls, sample: Sample | SampleGroup) -> "Block":
        """Describe the block of a sample or a group without building it; its tensors must stay as they are."""
        described: Any = _header_of(sample) if isinstance(sample, Sample) else _group_header_of(sample)
        header = _ENCODER.encode(described)
        tensors = list(_tensors_of(sample))
        sizes = [value.numel() * value.element_size() for value in tensors]
        direct = all(_lies_plain(value) for value in tensors)
        parts = list(zip(tensors, sizes, strict=True)) if direct else []
        return cls(
            sample,
            header,
            _PREFIX.size + round_up(len(header), ALIGN) + sum(round_up(size, ALIGN) for size in sizes),
            tuple(parts),
        )

    def write(self, out: np.ndarray, address: int | None = None, *, row: int, digest: int) -> None:
        """Write the block into uint8 `[nbytes]`, which starts at a multiple of 16 bytes of its buffer.

        Args:
            out: where to write.
            address: where in memory that is, if known.
            row: the sample's row in the step's table.
            digest: the plan's digest.
        """
        address = out.ctypes.data if address is None else address
        assert out.size == self.nbytes, (out.size, self.nbytes)
        flags = (_SHIFTED if members_of(self.sample)[0].shifted else 0) | (0 if isinstance(self.sample, Sample) else _GROUP)
        size = len(self.header)
        memory = out.data
        _PREFIX.pack_into(memory, 0, _MAGIC, BLOCK_VERSION, flags, size, row, self.nbytes, digest, 0, 0)
        memory[_PREFIX.size : _PREFIX.size + size] = self.header
        at = _PREFIX.size + round_up(size, ALIGN)
        memory[_PREFIX.size + size : at] = _ZEROS[: at - _PREFIX.size - size]
        for piece, length in self.parts or self._pieces():
            # Where a tensor lies is asked only now: to send one to another process, torch moves it.
            ctypes.memmove(address + at, piece.data_ptr(), length)
            at += length
            if gap := -at & (ALIGN - 1):
                memory[at : at + gap] = _ZEROS[:gap]
                at += gap
        assert at == self.nbytes, (at, self.nbytes)
        _WORD.pack_into(memory, _SUM, block_checksum(memory))  # at once, while the block is in the cache

    def _pieces(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Bring every tensor to the host in one piece, one after the other."""
        for value in _tensors_of(self.sample):
            piece = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield piece, piece.numel() * piece.element_size()


def _tensors_of(sample: Sample | SampleGroup) -> Iterator[torch.Tensor]:
    """Yield all tensors of a sample or a group, in the order in which they travel."""
    for member in members_of(sample):
        yield from (value for value in member.values.values() if isinstance(value, torch.Tensor))


def _header_of(sample: Sample) -> _Header:
    tensors = [(name, value) for name, value in sample.values.items() if isinstance(value, torch.Tensor)]
    return _Header(
        sample_id=sample.sample_id,
        num_tokens=sample.layout.num_tokens,
        num_spelled=sample.layout.num_spelled,
        runs=sample.layout.runs.astype("<i8").tobytes(),
        seconds=sample.layout.seconds.astype("<f4").tobytes(),
        tensors=[(name, _CODES[dtype_name(value.dtype)], tuple(value.shape)) for name, value in tensors],
        others={name: value for name, value in sample.values.items() if not isinstance(value, torch.Tensor)},
    )


def _group_header_of(group: SampleGroup) -> _GroupHeader:
    members = [_header_of(member) for member in group.members]
    return _GroupHeader(prefix=group.prefix, num_groups=group.num_groups, members=members)


def _lies_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds its values, in order, on the host."""
    return value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())


def write_blocks(out: torch.Tensor, blocks: Sequence[Block], rows: Sequence[int], digest: int) -> None:
    """Write blocks end to end into uint8 `[sum of their nbytes]` on the host; `rows` and `digest` as for `Block.write`."""
    raw, address, at = out.numpy(), out.data_ptr(), 0
    for block, row in zip(blocks, rows, strict=True):
        block.write(raw[at : at + block.nbytes], address + at, row=row, digest=digest)
        at += block.nbytes
    assert at == raw.size, (at, raw.size)


def read_block(
    data: torch.Tensor, *, row: int | None = None, digest: int | None = None, verify: bool = True
) -> Sample | SampleGroup:
    """Return the sample or the group in a block, as views of it.

    Args:
        data: uint8 `[n]` on the host, contiguous, starting at a multiple of 16 bytes.
        row: expected row, None to accept any.
        digest: expected plan digest, None to accept any.
        verify: compare the checksum, which reads every byte once.

    Raises:
        CorruptBlockError: anything that is not a block of this version, whole and unchanged.
    """
    raw = data.numpy()
    return _read(raw, raw.data, row, digest, verify)


def read_blocks(data: torch.Tensor, sizes: Sequence[int], rows: Sequence[int], digest: int) -> list[Sample | SampleGroup]:
    """Return the samples of blocks that lie end to end, as views; arguments and errors as for `read_block`."""
    raw = data.numpy()
    memory = raw.data
    samples: list[Sample | SampleGroup] = []
    at = 0
    for size, row in zip(sizes, rows, strict=True):
        samples.append(_read(raw[at : at + size], memory[at : at + size], row, digest))
        at += size
    return samples


def block_checksum(block: memoryview) -> int:
    """Return the 64-bit XXH3 of a block, the checksum's own bytes left out. It finds accidents, not attacks.

    Example:
        >>> block_checksum(memoryview(bytes(48))) == block_checksum(memoryview(bytes(64)))
        False
    """
    return xxhash.xxh3_64_intdigest(block[_SUM_END:], seed=xxhash.xxh3_64_intdigest(block[:_SUM]))


def _read(
    raw: np.ndarray, memory: memoryview, row: int | None, digest: int | None, verify: bool = True
) -> Sample | SampleGroup:
    """Check and parse one block, given as an array and as a view of the same bytes."""
    found_size = len(memory)
    if found_size < _PREFIX.size or found_size % ALIGN:
        raise CorruptBlockError(f"block has {found_size} bytes, needs at least {_PREFIX.size} and a multiple of {ALIGN}")
    magic, version, flags, header_size, found_row, size, found_digest, found_sum, _ = _PREFIX.unpack_from(memory)
    if magic != _MAGIC:
        raise CorruptBlockError(f"block starts with {magic!r}, not {_MAGIC!r}")
    if version != BLOCK_VERSION:
        raise CorruptBlockError(f"block has wire version {version}, this is version {BLOCK_VERSION}")
    if size != found_size:
        raise CorruptBlockError(f"block says {size} bytes, {found_size} arrived")
    if header_size > size - _PREFIX.size:
        raise CorruptBlockError(f"block header says {header_size} bytes, block has {size}")
    if verify and (expected := block_checksum(memory)) != found_sum:
        raise CorruptBlockError(f"block checksum is {found_sum:016x}, its bytes give {expected:016x}")
    if digest is not None and found_digest != digest:
        raise CorruptBlockError(f"block belongs to plan {found_digest:016x}, expected {digest:016x}")
    if row is not None and found_row != row:
        raise CorruptBlockError(f"block is row {found_row} of the step, expected row {row}")
    return _parse(raw, size, memory[_PREFIX.size : _PREFIX.size + header_size], flags)


def _parse(raw: np.ndarray, size: int, encoded: memoryview, flags: int) -> Sample | SampleGroup:
    try:
        group = _GROUP_DECODER.decode(encoded) if flags & _GROUP else None
        headers = [_DECODER.decode(encoded)] if group is None else group.members
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptBlockError(f"block header cannot be read: {error}") from None
    at = _PREFIX.size + round_up(len(encoded), ALIGN)
    samples = []
    for header in headers:
        sample, at = _sample(raw, size, at, header, bool(flags & _SHIFTED))
        samples.append(sample)
    if at != size or not samples:
        raise CorruptBlockError(f"block has {size} bytes, its header accounts for {at}")
    if group is None:
        return samples[0]
    return SampleGroup(members=tuple(samples), prefix=group.prefix, num_groups=group.num_groups)


def _sample(raw: np.ndarray, size: int, at: int, header: _Header, shifted: bool) -> tuple[Sample, int]:
    values: dict[str, Any] = {}
    for name, code, shape in header.tensors:
        values[name], at = _tensor(raw, size, at, name, code, shape)
    if header.others:
        values.update(header.others)
    return Sample(values=values, layout=_layout(header), shifted=shifted, sample_id=header.sample_id), at


def _tensor(raw: np.ndarray, size: int, at: int, name: str, code: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    # Most tensors have one dimension, and there are many of them.
    count, least = (shape[0], shape[0]) if len(shape) == 1 else (math.prod(shape), min(shape, default=0))
    if not 1 <= code <= _NUM_CODES or least < 0:
        raise CorruptBlockError(f"block field {name!r} has dtype code {code} and shape {shape}")
    dtype, itemsize, in_numpy = _DTYPES[code - 1]
    nbytes = count * itemsize  # Python integers: no overflow
    end = at + round_up(nbytes, ALIGN)
    if end > size:
        raise CorruptBlockError(f"block field {name!r} of {nbytes} bytes at {at} ends beyond the block's {size}")
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu"), at
    if in_numpy is not None:
        return _from_numpy(_array(shape, in_numpy, raw, at)), end
    return torch.from_numpy(raw[at : at + nbytes]).view(dtype).reshape(shape), end


def _layout(header: _Header) -> SampleLayout:
    if not header.runs and not header.seconds:
        return SampleLayout(num_tokens=header.num_tokens, runs=_NO_RUNS, seconds=_NO_SECONDS, num_spelled=header.num_spelled)
    if len(header.runs) % 48 or len(header.seconds) * 12 != len(header.runs):
        raise CorruptBlockError(f"block has {len(header.runs)} bytes of runs and {len(header.seconds)} of seconds")
    runs = np.frombuffer(header.runs, "<i8").astype(np.int64, copy=False).reshape(-1, 6)
    seconds = np.frombuffer(header.seconds, "<f4").astype(np.float32, copy=False)
    return SampleLayout(num_tokens=header.num_tokens, runs=runs, seconds=seconds, num_spelled=header.num_spelled)

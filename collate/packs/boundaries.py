"""Where the segments of a pack begin and end, on the host: real and padded, with the tail as a segment of its own."""

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from ...core import OversizeSampleError, round_up


class Boundaries:
    """Boundaries of a pack of S segments, as host integers: no use of them ever waits for a device.

    The tail, where there is one, is the last segment: it has padded slots only.

    Attributes:
        lengths: int64 [S], real tokens of each segment; 0 for a tail.
        padded: int64 [S], slots of each segment.
        num_samples: segments that hold a sample, dummies included.

    Example:
        >>> bounds = Boundaries([3, 2], align=1, pack_align=8)
        >>> bounds.cu_real.tolist(), bounds.cu_padded.tolist()
        ([0, 3, 5, 5], [0, 3, 5, 8])
    """

    def __init__(self, lengths: Sequence[int], *, align: int = 1, pack_align: int = 1, pad_to: int | None = None) -> None:
        """Lay segments end to end.

        Args:
            lengths: real tokens of each sample.
            align: multiple to which each segment is padded.
            pack_align: multiple to which the pack is padded by a tail; a multiple of `align`.
            pad_to: slots of the whole pack, a multiple of `pack_align`; None for as few as fit.

        Raises:
            ValueError: settings that are no such multiples.
            OversizeSampleError: more slots than `pad_to`.
        """
        if align < 1 or pack_align < 1 or (pack_align % align and pack_align != 1):
            raise ValueError(f"pack_align must be a multiple of align, both at least 1, got {pack_align} and {align}")
        pack_align = max(align, pack_align)
        self.num_samples = len(lengths)
        real = np.array(lengths, np.int64)
        padded = real if align == 1 else round_up(real, align)
        used = int(padded.sum())
        total = round_up(used, pack_align) if pad_to is None else pad_to
        if total % pack_align:
            raise ValueError(f"pad_to must be a multiple of {pack_align}, got {pad_to}")
        if used > total:
            raise OversizeSampleError(
                f"{len(lengths)} samples of {int(real.sum())} tokens need {used} slots (align={align}), "
                f"more than pad_to={total}; the longest has {int(real.max())}"
            )
        has_tail = total > used
        self.lengths = np.append(real, 0) if has_tail else real
        self.padded = np.append(padded, total - used) if has_tail else padded

    @property
    def num_segments(self) -> int:
        """Number of segments, the tail included."""
        return len(self.padded)

    @property
    def total(self) -> int:
        """Number of slots T."""
        return int(self.cu_padded[-1])

    @property
    def has_padding(self) -> bool:
        """Whether any slot is padding."""
        return self.lengths is not self.padded and bool(np.any(self.lengths != self.padded))

    @cached_property
    def cu_real(self) -> np.ndarray:
        """Cumulative real lengths, int64 [S + 1]."""
        return _cumulative(self.lengths)

    @cached_property
    def cu_padded(self) -> np.ndarray:
        """Cumulative padded lengths, int64 [S + 1]: where each segment begins in the row."""
        return self.cu_real if self.lengths is self.padded else _cumulative(self.padded)

    @cached_property
    def segment_ids(self) -> np.ndarray:
        """Segment of each slot, int32 [T]; padding belongs to its segment, the tail is a segment."""
        ids = np.empty(self.total, np.int32)
        for segment, (start, stop) in enumerate(itertools.pairwise(self.cu_padded.tolist())):
            ids[start:stop] = segment
        return ids

    @cached_property
    def padding_mask(self) -> np.ndarray:
        """True at padding, bool [T]."""
        mask = np.zeros(self.total, np.bool_)
        if not self.has_padding:
            return mask
        for start, real, stop in zip(self.cu_padded.tolist(), self.lengths.tolist(), self.cu_padded[1:].tolist(), strict=False):
            mask[start + real : stop] = True
        return mask


def _cumulative(sizes: np.ndarray) -> np.ndarray:
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def ahead(values: torch.Tensor, bounds: Boundaries, depth: int, fill: float) -> torch.Tensor:
    """Return the values `depth` slots further on in the same padded segment, [1, T]; `fill` where it ends before."""
    slots = np.arange(bounds.total) + depth
    inside = slots < np.repeat(bounds.cu_padded[1:], bounds.padded)
    index = torch.from_numpy(np.where(inside, slots, 0)).to(values.device)
    return values.index_select(1, index).masked_fill_(~torch.from_numpy(inside).to(values.device), fill)

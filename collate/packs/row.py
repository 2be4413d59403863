"""A THD row: the boundaries of its segments as host integers, its tensors, and the names that models have for them."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from ...core import OversizeSampleError, round_up
from ...core.sample import Value
from ...models.adapter import ModelAdapter
from ...models.setup.call_check import BLOCKS_MARK, KEYS_MARK, SEGMENTS_MARK, SHIFTED_MARK
from .tree import PackTree


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

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        align: int = 1,
        pack_align: int = 1,
        pad_to: int | None = None,
        joined: Sequence[bool] | None = None,
    ) -> None:
        """Lay segments end to end.

        Args:
            lengths: real tokens of each sample.
            align: multiple to which each segment is padded.
            pack_align: multiple to which the pack is padded by a tail; a multiple of `align`.
            pad_to: slots of the whole pack, a multiple of `pack_align`; None for as few as fit.
            joined: whether the next segment follows without padding, as those of a group do; None where none does.

        Raises:
            ValueError: settings that are no such multiples.
            OversizeSampleError: more slots than `pad_to`.
        """
        if align < 1 or pack_align < 1 or (pack_align % align and pack_align != 1):
            raise ValueError(f"pack_align must be a multiple of align, both at least 1, got {pack_align} and {align}")
        pack_align = max(align, pack_align)
        self.num_samples = len(lengths)
        real = np.array(lengths, np.int64)
        padded = real if align == 1 else _padded(real, align, joined)
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


def _padded(real: np.ndarray, align: int, joined: Sequence[bool] | None) -> np.ndarray:
    """Return lengths padded to a multiple; of segments that are joined, the last one is padded until their sum is one."""
    if joined is None or not any(joined):
        return round_up(real, align)
    padded, ends = real.copy(), np.flatnonzero(~np.asarray(joined, bool))
    sums = np.diff(np.cumsum(real)[ends], prepend=0)
    padded[ends] += round_up(sums, align) - sums
    return padded


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


#: Per-token attributes of every pack; the packed axis is the last.
_TOKEN_ATTRIBUTES = (
    "input_ids",
    "labels",
    "loss_mask",
    "padding_mask",
    "position_ids",
    "mm_token_type_ids",
    "media_token_validity_mask",
    "segment_ids",
)


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A THD row of T slots and S segments: the tensors of a `PackedBatch`.

    Media tensors, further token fields and per-sample fields are attributes under their own names too
    (`pixel_values`); a declared field that this pack does not have is None.

    Attributes:
        adapter: the family it was packed for.
        bounds: boundaries as host integers, real and padded.
        input_ids: int64 [1, T]; the family's padding id at padding.
        labels: int64 [1, T], next-token targets, already shifted; -100 where nothing is learned. Megatron-Core's name for them;
            Hugging Face's is `shift_labels`, which is the same tensor.
        loss_mask: float32 [1, T], the weight of each target; 0 where there is none.
        padding_mask: bool [1, T], True at padding.
        position_ids: int64 [3, 1, T] (M-RoPE) or [1, T]; float32 where the family's rule is.
        mm_token_type_ids: int64 [1, T]: 0 text and padding, 1 image, 2 video, 3 audio.
        media_token_validity_mask: bool [1, T], True where a token anchors a media feature.
        segment_ids: int32 [1, T], the segment of each slot; padding belongs to its segment, the tail is one.
        seq_idx: the same for state-space and linear-attention layers; of the whole row, in a shard too.
        cu_seqlens_q: int32 [S + 1], cumulative real lengths; static shapes repeat the last entry.
        cu_seqlens_q_padded: int32 [S + 1], where segments begin in the row; the same object where nothing is padded.
        max_seqlen_q: longest padded segment.
        media: media tensors in segment order.
        token_fields: further token fields, a batch axis before the packed one.
        sample_fields: per-sample fields, one entry per segment.
        sample_ids: one entry per segment; None for a dummy or the tail.
        loss_tokens: targets that count (of the whole pack, in a shard too).
        num_samples: samples that are no dummies (of the whole pack, in a shard too).
        num_spelled: tokens that text spells like a media token.
        cp_rank: context-parallel rank that this is the shard of.
        cp_size: context-parallel size; 1 for a whole pack.
        cp_indices: int64 [T / cp_size], slots of the whole row that this rank computes; None for a whole pack.
        media_feature_index: int64 [1, T / cp_size] in a shard cut by the caller: the feature that each anchor takes, counted
            within its modality, and -1 elsewhere; None otherwise.
        microbatch: number of the pack within its step; None for a pack that belongs to none.
        step_number: number of that step.
        tree: which segments make up the samples, where some are members of groups; None where every segment is a sample.
        key_index: int64 [K], where groups share a prefix: the slots that each segment sees, its prefix before its own; None
            otherwise.
        cu_seen: int32 [S + 1], where each segment's begin in `key_index`.
    """

    adapter: ModelAdapter
    bounds: Boundaries
    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    padding_mask: torch.Tensor
    position_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    media_token_validity_mask: torch.Tensor
    segment_ids: torch.Tensor
    seq_idx: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor
    max_seqlen_q: int
    media: Mapping[str, torch.Tensor]
    token_fields: Mapping[str, torch.Tensor]
    sample_fields: Mapping[str, list[Value]]
    sample_ids: Sequence[str | int | None]
    loss_tokens: int
    num_samples: int
    num_spelled: int = 0
    cp_rank: int = 0
    cp_size: int = 1
    cp_indices: torch.Tensor | None = None
    media_feature_index: torch.Tensor | None = None
    microbatch: int | None = None
    step_number: int | None = None
    tree: PackTree | None = None
    key_index: torch.Tensor | None = None
    cu_seen: torch.Tensor | None = None

    def __post_init__(self) -> None:
        setattr(self.input_ids, SEGMENTS_MARK, self.num_segments)
        setattr(self.labels, SHIFTED_MARK, True)
        if self.adapter.bidirectional is not None:
            setattr(self.input_ids, BLOCKS_MARK, True)
        if self.key_index is not None:
            setattr(self.input_ids, KEYS_MARK, True)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for fields in (self.media, self.token_fields, self.sample_fields):
                if name in fields:
                    return fields[name]
            if name in self.adapter.fields:
                return None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    @property
    def shift_labels(self) -> torch.Tensor:
        """The targets under the name that Hugging Face gives to shifted labels."""
        return self.labels

    @property
    def loss_weights(self) -> torch.Tensor:
        """The weights under the name that they have in a sample; here they lie at the positions that learn."""
        return self.loss_mask

    @property
    def cu_seqlens_kv(self) -> torch.Tensor:
        """The same object as `cu_seqlens_q`, because attention is within one row; `cu_seen` where groups share a prefix."""
        return self.cu_seqlens_q if self.cu_seen is None else self.cu_seen

    @property
    def cu_seqlens_kv_padded(self) -> torch.Tensor:
        """The same object as `cu_seqlens_q_padded`; `cu_seen` where groups share a prefix."""
        return self.cu_seqlens_q_padded if self.cu_seen is None else self.cu_seen

    @property
    def max_seqlen_kv(self) -> int:
        """The same as `max_seqlen_q`; where groups share a prefix, the most slots that a segment sees."""
        return self.max_seqlen_q if self.cu_seen is None else int(self.cu_seen.diff().max())

    @property
    def total_tokens(self) -> int:
        """Slots of this row, padding included."""
        return self.input_ids.shape[1]

    @property
    def num_segments(self) -> int:
        """Segments of the pack, the tail included, repeated boundaries not."""
        return self.bounds.num_segments

    @property
    def segments(self) -> np.ndarray:
        """Segments of each sample, int64 [samples and dummies, 2]: that of a prefix it shares, -1 for none, and its own."""
        if self.tree is not None:
            return self.tree.segments
        return np.stack([np.full(self.bounds.num_samples, -1), np.arange(self.bounds.num_samples)], axis=1)

    @property
    def sample_ends(self) -> torch.Tensor:
        """Slot of each sample's last token, int64 [num_samples], without dummies."""
        own = self.segments[: self.num_samples, 1]
        return torch.from_numpy(self.bounds.cu_padded[own] + self.bounds.lengths[own] - 1).to(self.input_ids.device)

    def token_tensors(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return every per-token tensor of the row with its packed axis."""
        own = {name: getattr(self, name) for name in _TOKEN_ATTRIBUTES}
        if self.media_feature_index is not None:
            own["media_feature_index"] = self.media_feature_index
        tensors = {name: (tensor, tensor.ndim - 1) for name, tensor in own.items()}
        further = {name: (tensor, self.adapter.fields[name].axis + 1) for name, tensor in self.token_fields.items()}
        return tensors | further


AnyRow = TypeVar("AnyRow", bound=Row)


def check_pack(row: Row) -> None:
    """Check what every pack promises, once, after it is built: a misaligned field does not raise later, it trains wrongly."""
    total, rows = row.bounds.total, [getattr(row, name) for name in _TOKEN_ATTRIBUTES]
    further = {row.token_fields[name].shape[row.adapter.fields[name].axis + 1] for name in row.token_fields}
    sizes = {*(row.shape[-1] for row in rows), *further}
    assert sizes == {total}, (total, {name: tensor.shape for name, (tensor, _) in row.token_tensors().items()})
    assert row.cu_seqlens_q.shape == row.cu_seqlens_q_padded.shape
    num_entries = (
        row.num_segments if row.tree is None else len(row.tree.segments) + row.num_segments - 1 - row.tree.segments.max()
    )
    assert len(row.sample_ids) == num_entries
    assert all(len(values) == num_entries for values in row.sample_fields.values())

"""The tensors of one packed micro-batch, and the names that models have for them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from ...core.sample import Value
from ...models.adapter import ModelAdapter
from ...models.setup.call_check import mark_pack
from .boundaries import Boundaries

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

    def __post_init__(self) -> None:
        mark_pack(self.input_ids, self.labels, self.num_segments)

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
        """The same object as `cu_seqlens_q`: attention is within one row."""
        return self.cu_seqlens_q

    @property
    def cu_seqlens_kv_padded(self) -> torch.Tensor:
        """The same object as `cu_seqlens_q_padded`."""
        return self.cu_seqlens_q_padded

    @property
    def max_seqlen_kv(self) -> int:
        """The same as `max_seqlen_q`."""
        return self.max_seqlen_q

    @property
    def total_tokens(self) -> int:
        """Slots of this row, padding included."""
        return self.input_ids.shape[1]

    @property
    def num_segments(self) -> int:
        """Segments of the pack, the tail included, repeated boundaries not."""
        return self.bounds.num_segments

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
    assert len(row.sample_ids) == row.num_segments
    assert all(len(values) == row.num_segments for values in row.sample_fields.values())

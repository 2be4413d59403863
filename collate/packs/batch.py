"""One packed micro-batch, as a model takes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch

from ...core.sample import Value
from ...models.adapter import CpSlicing, ModelAdapter
from ...models.setup.call_check import mark_pack
from .boundaries import Boundaries
from .forward import Stage, forward_kwargs
from .megatron import Valid, packed_seq_params
from .shard import shard_pack
from .targets import IGNORED, ahead
from .unpack import token_axis, unpack_tokens, unshard_tokens


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A THD row of T slots and S segments, in host memory until `to(device)`.

    Media tensors, further token fields and per-sample fields are attributes under their own names too
    (`batch.pixel_values`); a declared field that this pack does not have is None.

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
        own = {name: getattr(self, name) for name in TOKEN_ATTRIBUTES}
        if self.media_feature_index is not None:
            own["media_feature_index"] = self.media_feature_index
        tensors = {name: (tensor, tensor.ndim - 1) for name, tensor in own.items()}
        further = {name: (tensor, self.adapter.fields[name].axis + 1) for name, tensor in self.token_fields.items()}
        return tensors | further

    def to(self, device: torch.device | str | int, *, non_blocking: bool = True) -> Self:
        """Return the pack with every tensor on a device; host boundaries stay.

        From pinned memory the copies run beside the computation. Copies to the host always wait: nothing tells their reader
        when they are done.
        """
        on_host = torch.device(device).type == "cpu"
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking and not on_host))

    def pin_memory(self) -> Self:
        """Return the pack with every host tensor in pinned memory; as it is where there is no accelerator."""
        if not torch.accelerator.is_available():
            return self
        return self.mapped(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the pack with a function applied to every tensor once; tensors that were one object stay one."""
        done: dict[int, torch.Tensor] = {}

        def once(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in done:
                    done[id(value)] = change(value)
                return done[id(value)]
            if isinstance(value, dict):
                return {name: once(entry) for name, entry in value.items()}
            return [once(entry) for entry in value] if isinstance(value, list) else value

        return type(self)(**{name: once(getattr(self, name)) for name in self.__struct_fields__})

    def unpack(self, values: torch.Tensor, axis: int | None = None) -> list[torch.Tensor]:
        """Return per-token results sample by sample, without padding, dummies and tail.

        Args:
            values: a tensor with one axis of T entries: `[1, T, ...]`, `[..., 1, T]`, `[T, ...]` or `[..., T]`.
            axis: the axis of tokens; None finds it in that order. A batch axis of 1 right before it is removed.

        Returns:
            One view per sample.

        Raises:
            ValueError: no axis of T entries, or a shard, which holds parts of its samples: put the shards together first.

        Example:
            >>> from evenpack.collate import pack_samples
            >>> from evenpack.models import adapter_for
            >>> pack = pack_samples([{"input_ids": [1, 2]}, {"input_ids": [7]}], adapter=adapter_for("text"), align=4)
            >>> [ids.tolist() for ids in pack.unpack(pack.input_ids)]
            [[1, 2], [7]]
        """
        return unpack_tokens(values, self.bounds, self.num_samples, axis)

    def shard(self, cp_rank: int, cp_size: int, *, slicing: CpSlicing | None = None) -> "PackedBatch":
        """Return what one context-parallel rank gets.

        Boundaries, media and counts stay those of the whole pack: attention needs the global ones. With "caller" every
        per-token field is cut to the rank's slots, positions too, and `media_feature_index` says which feature each local
        anchor takes. With "model" the row stays whole, because the model inserts media before it shards; `cp_indices` and
        `local` say what the rank will compute.

        Args:
            cp_rank: rank within the context-parallel group.
            cp_size: size of the group; segments must be multiples of 2 * cp_size.
            slicing: who cuts the row; None for what the adapter says.

        Raises:
            ValueError: a rank outside the group, segments that do not divide, or a pack that is a shard already.

        Example:
            >>> from evenpack.collate import pack_samples
            >>> from evenpack.models import adapter_for
            >>> pack = pack_samples([{"input_ids": [1, 2, 3, 4]}], adapter=adapter_for("text"))
            >>> pack.shard(0, 2).input_ids.tolist(), pack.shard(1, 2).input_ids.tolist()
            ([[1, 4]], [[2, 3]])
        """
        return shard_pack(self, cp_rank, cp_size, self.adapter.cp_slicing if slicing is None else slicing)

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """Return what this rank computes of per-token values of the whole row (axes as for `unpack`).

        Values that have the rank's length already, and values of a whole pack, are returned as they are.
        """
        total = self.bounds.total
        if self.cp_indices is None or total not in values.shape:
            return values
        return values.index_select(token_axis(values, total), self.cp_indices)

    def unshard(self, parts: Sequence[torch.Tensor], axis: int = 1) -> torch.Tensor:
        """Return per-token values of the whole row from those of all context-parallel ranks, in rank order.

        Raises:
            ValueError: parts that together do not have T entries along `axis`.
        """
        return unshard_tokens(parts, self.bounds, axis)

    def mtp_targets(self, depth: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return targets and weights `depth` tokens further ahead, for multi-token prediction.

        They never leave their padded segment: where the token ahead is in another one, the target is -100, its weight 0.

        Returns:
            int64 [1, T] and float32 [1, T].

        Raises:
            ValueError: a shard, whose neighbours are elsewhere: take the targets before sharding.
        """
        if self.cp_indices is not None:
            raise ValueError("take MTP targets of the whole pack, and shard them with local()")
        return ahead(self.labels, self.bounds, depth, IGNORED), ahead(self.loss_mask, self.bounds, depth, 0.0)

    def packed_seq_params(self, valid: Valid = "real", **further: Any) -> Any:
        """Return Megatron-Core's `PackedSeqParams` of the installed version.

        Args:
            valid: "real" lets attention see real tokens only. "padded" writes the padded boundaries in both places, for
                versions of Transformer Engine that mishandle the difference: then padding attends within its own segment.
            further: more fields of the class, such as `cp_group`; those that the installed version lacks are left out.
        """
        return packed_seq_params(self, valid, further)

    def forward_kwargs(self, model: torch.nn.Module, stage: Stage | None = None) -> dict[str, Any]:
        """Return the arguments of a model's forward pass.

        Args:
            model: the model, wrapped or not.
            stage: pipeline stage; None for a whole model, or what a Megatron module says of itself.

        Raises:
            UnsafeModelError: a model that would mix segments.
            SpelledMediaTokenError: text spells a media token, and the model cannot be told.
            NotImplementedError: a model that packs by itself.
            ValueError: a model whose config is not the one the pack was made for.
        """
        return forward_kwargs(self, model, stage)


#: Per-token attributes of every pack; the packed axis is the last.
TOKEN_ATTRIBUTES = (
    "input_ids",
    "labels",
    "loss_mask",
    "padding_mask",
    "position_ids",
    "mm_token_type_ids",
    "media_token_validity_mask",
    "segment_ids",
)


def check_pack(batch: PackedBatch) -> None:
    """Check what every pack promises, once, after it is built: a misaligned field does not raise later, it trains wrongly."""
    total, rows = batch.bounds.total, [getattr(batch, name) for name in TOKEN_ATTRIBUTES]
    further = {batch.token_fields[name].shape[batch.adapter.fields[name].axis + 1] for name in batch.token_fields}
    sizes = {*(row.shape[-1] for row in rows), *further}
    assert sizes == {total}, (total, {name: tensor.shape for name, (tensor, _) in batch.token_tensors().items()})
    assert batch.cu_seqlens_q.shape == batch.cu_seqlens_q_padded.shape
    assert len(batch.sample_ids) == batch.num_segments
    assert all(len(values) == batch.num_segments for values in batch.sample_fields.values())

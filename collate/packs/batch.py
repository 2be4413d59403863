"""One packed micro-batch, as a model takes it."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch

from ...core import IGNORED, UnsafeModelError
from ...models.adapter import CpSlicing
from .forward import Stage, forward_kwargs
from .megatron import Valid, check_causal, packed_seq_params
from .row import Row, ahead
from .shard import shard_pack, token_axis, unpack_tokens, unshard_tokens


class PackedBatch(Row, frozen=True, kw_only=True, eq=False):
    """A THD row of T slots and S segments, in host memory until `to(device)`; its attributes are those of `Row`."""

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
        """Return per-token results sample by sample, without padding, dummies and tail; a prefix that is shared with each.

        Args:
            values: a tensor with one axis of T entries: `[1, T, ...]`, `[..., 1, T]`, `[T, ...]` or `[..., T]`.
            axis: the axis of tokens; None finds it in that order. A batch axis of 1 right before it is removed.

        Returns:
            One tensor per sample, a view unless it has a shared prefix.

        Raises:
            ValueError: no axis of T entries, or a shard, which holds parts of its samples: put the shards together first.

        Example:
            >>> from evenpack.collate import pack_samples
            >>> from evenpack.models import adapter_for
            >>> pack = pack_samples([{"input_ids": [1, 2]}, {"input_ids": [7]}], adapter=adapter_for("text"), align=4)
            >>> [ids.tolist() for ids in pack.unpack(pack.input_ids)]
            [[1, 2], [7]]
        """
        return unpack_tokens(values, self.bounds, self.num_samples, axis, self.tree)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return, for each sample, the sum of per-token values over the tokens that are its own, `[num_samples]`.

        A prefix that several samples share counts for none of them: mask what should not count, for example
        `batch.sums(-losses * batch.loss_mask)`.

        Args:
            values: `[1, T]` or `[T]`.

        Example:
            >>> from evenpack.collate import pack_samples
            >>> from evenpack.models import adapter_for
            >>> pack = pack_samples([{"input_ids": [1, 2]}, {"input_ids": [7]}], adapter=adapter_for("text"), align=4)
            >>> pack.sums(pack.input_ids).tolist()
            [3, 7]
        """
        if values.numel() != self.bounds.total:
            raise ValueError(f"sums takes one value per token, {self.bounds.total} of them, got shape {list(values.shape)}")
        own = self.segments[: self.num_samples, 1]
        of_segment = np.full(self.num_segments + 1, self.num_samples)
        of_segment[own] = np.arange(self.num_samples)
        ids = np.where(self.bounds.padding_mask, self.num_samples, of_segment[self.bounds.segment_ids])
        index = torch.from_numpy(ids).to(values.device)
        found = values.new_zeros(self.num_samples + 1).index_add(0, index, values.flatten())
        return found[: self.num_samples]

    @property
    def group_index(self) -> torch.Tensor:
        """Number of each sample's group within the pack, int64 [num_samples] on the pack's device; without groups 0, 1, ..."""
        groups = np.arange(self.num_samples) if self.tree is None else self.tree.group_of[: self.num_samples]
        return torch.from_numpy(groups).to(self.input_ids.device)

    def shard(self, cp_rank: int, cp_size: int, *, slicing: CpSlicing | None = None) -> Self:
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
            UnsafeModelError: a family with tokens that see each other both ways.

        Example:
            >>> from evenpack.collate import pack_samples
            >>> from evenpack.models import adapter_for
            >>> pack = pack_samples([{"input_ids": [1, 2, 3, 4]}], adapter=adapter_for("text"))
            >>> pack.shard(0, 2).input_ids.tolist(), pack.shard(1, 2).input_ids.tolist()
            ([[1, 4]], [[2, 3]])
        """
        if cp_size > 1:
            self._refuse_shared("context parallelism, which cuts segments into equal chunks")
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
        self._refuse_shared("multi-token prediction: tokens further ahead differ between branches")
        return ahead(self.labels, self.bounds, depth, IGNORED), ahead(self.loss_mask, self.bounds, depth, 0.0)

    def packed_seq_params(self, valid: Valid = "real", **further: Any) -> Any:
        """Return Megatron-Core's `PackedSeqParams` of the installed version.

        Args:
            valid: "real" lets attention see real tokens only. "padded" writes the padded boundaries in both places, for
                versions of Transformer Engine that mishandle the difference: then padding attends within its own segment.
            further: more fields of the class, such as `cp_group`; those that the installed version lacks are left out.
        """
        check_causal(self.adapter)
        self._refuse_shared("PackedSeqParams, which only says where segments begin")
        return packed_seq_params(self, valid, further)

    def _refuse_shared(self, what: str) -> None:
        if self.key_index is not None:
            raise UnsafeModelError(f"a pack in which groups share a prefix cannot take {what}. Set groups='together'")

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

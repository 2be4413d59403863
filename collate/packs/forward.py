"""The forward contract: which of a pack's tensors a model is called with."""

from typing import Any, Literal, get_args

import torch
from torch import nn

from ...models.attention.blocks import media_blocks
from ...models.attention.boundaries import attention_boundaries
from ...models.setup.call_check import explain_ddp, position_bits
from ...models.setup.unwrap import is_transformers_model, unwrap_model
from .megatron import check_causal, packed_seq_params
from .model_check import MASK, check_batch, check_callable, is_megatron_module
from .row import Row

Stage = Literal["first", "middle", "last"]
_TYPES = "mm_token_type_ids"
#: Attributes of a pack that a model may name in its signature.
_BOUNDARIES = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
    "segment_ids",
    "media_feature_index",
)


def forward_kwargs(batch: Row, model: nn.Module, stage: Stage | None) -> dict[str, Any]:
    """Return the arguments of a model's forward pass; see `PackedBatch.forward_kwargs`."""
    if stage not in (None, *get_args(Stage)):
        raise ValueError(f"stage must be None or one of {get_args(Stage)}, got {stage!r}")
    explain_ddp(model)
    inner = unwrap_model(model)
    callable_model = check_callable(inner, batch.adapter)
    names = callable_model.names
    check_batch(batch, inner, callable_model)
    # Without labels for transformers: under that name the model would shift once more.
    offered = {**_common_arguments(batch), **_varlen_arguments(batch, callable_model.is_causal), **_block_arguments(batch)}
    if callable_model.takes_bits:
        offered["position_ids"] = position_bits(batch.position_ids)
    if not is_transformers_model(inner):
        offered |= _other_arguments(batch, inner, names)
    place = _stage_of(inner) if stage is None else (stage == "first", stage == "last")
    return {name: value for name, value in (offered | _staged(batch, *place)).items() if name in names}


def _other_arguments(batch: Row, inner: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    """Return what another model may get besides: the pack's attributes under their own names.

    `labels` are given only where the name means shifted ones: to Megatron-Core's modules, and where the adapter says so.
    """
    offered = {name: getattr(batch, name) for name in (*_BOUNDARIES, "shift_labels", "loss_mask")}
    if "packed_seq_params" in names:
        check_causal(batch.adapter)
        offered["packed_seq_params"] = packed_seq_params(batch, "real", {})
    if is_megatron_module(inner) or "labels" in batch.adapter.model_arguments:
        offered["labels"] = batch.labels
    return offered


def _varlen_arguments(batch: Row, causal: bool) -> dict[str, Any]:
    """Return the attention arguments of transformers."""
    keys = {} if batch.key_index is None else {"key_index": batch.key_index}
    return {
        **keys,
        "cu_seq_lens_q": attention_boundaries(batch.cu_seqlens_q, batch.cu_seqlens_q_padded, causal=causal),
        "cu_seq_lens_k": attention_boundaries(batch.cu_seqlens_kv, batch.cu_seqlens_kv_padded, causal=causal),
        "max_length_q": batch.max_seqlen_q,
        "max_length_k": batch.max_seqlen_kv,
        "use_cache": False,
    }


def _block_arguments(batch: Row) -> dict[str, Any]:
    """Return the arguments about tokens that see each other both ways, for families that have such.

    The model gets type ids of 0, or none where the family's are not for the model: from others it would build a mask, which a
    pack must not have.
    """
    adapter = batch.adapter
    if adapter.bidirectional is None:
        return {}
    blocks = media_blocks(
        adapter,
        input_ids=batch.input_ids,
        types=batch.mm_token_type_ids,
        segment_ids=batch.segment_ids,
        labels=batch.labels,
        padding=batch.padding_mask,
        token_type_ids=batch.token_fields.get("token_type_ids"),
    )
    wants_types = _TYPES in adapter.fields and adapter.fields[_TYPES].to_model
    types = torch.zeros_like(batch.mm_token_type_ids) if wants_types else None
    return {"media_blocks": blocks, "media_block_layers": adapter.block_layers, _TYPES: types}


def _common_arguments(batch: Row) -> dict[str, Any]:
    """Return the arguments under names that mean the same everywhere."""
    further = {**batch.media, **batch.token_fields, **batch.sample_fields}
    types = {_TYPES: batch.mm_token_type_ids} if _TYPES in batch.adapter.fields else {}
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "padding_mask": batch.padding_mask,
        MASK: batch.media_token_validity_mask,
        "seq_idx": batch.seq_idx,
        "sample_ends": batch.sample_ends,
        **{name: value for name, value in further.items() if batch.adapter.fields[name].to_model},
        **types,
    }


def _staged(batch: Row, is_first: bool, is_last: bool) -> dict[str, Any]:
    """Return the arguments that a pipeline stage does without, as None.

    Rows of pixels go to the first stage, targets to the last. Grids, ids, positions and boundaries go to every stage:
    positions and multi-token prediction need them.
    """
    absent: dict[str, Any] = {}
    if not is_first:
        small = ((), (3,))
        media, pixels = batch.adapter.fields.of_kind("media"), batch.adapter.is_pixels
        absent |= {f.name: None for f in media if pixels(f) or f.shape not in small}
    if not is_last:
        absent |= dict.fromkeys(("labels", "shift_labels", "loss_mask"))
    return absent


def _stage_of(inner: Any) -> tuple[bool, bool]:
    """Return whether a model holds the first and the last pipeline stage; both, unless a Megatron module says otherwise."""
    if not is_megatron_module(inner):
        return True, True
    return bool(getattr(inner, "pre_process", True)), bool(getattr(inner, "post_process", True))

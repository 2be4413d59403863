"""The named tensors of a micro-batch, and which pipeline stage needs them."""

from collections.abc import Collection
from typing import Any, Literal

import torch

from ...collate import PackedBatch
from ...collate.packs.shard import feature_index
from ...scheduler import PackedStep

Part = Literal["first", "last"]

#: Targets: the last stage computes the loss.
LAST = ("labels", "loss_mask")
#: What every stage needs: boundaries, padding, positions (M-RoPE enters at every stage), and the step's divisor.
EVERYWHERE = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "padding_mask",
    "position_ids",
    "sample_ids",
    "cp_slicing",
    "token_axes",
    "num_spelled",
    "global_loss_tokens",
    "loss_divisor",
)


def parts_of(config: Any, is_first: bool, is_last: bool) -> tuple[Part, ...]:
    """Return what a pipeline rank needs besides metadata; both where multi-token prediction is computed."""
    if getattr(config, "mtp_num_layers", None) and _has_mtp(config, is_last):
        return ("first", "last")
    return (*(("first",) if is_first else ()), *(("last",) if is_last else ()))


def _has_mtp(config: Any, is_last: bool) -> bool:
    if getattr(config, "pipeline_model_parallel_layout", None) is None:
        return is_last
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    return bool(mtp_on_this_rank(config, ignore_virtual=True))


def fields_of(batch: PackedBatch, step: PackedStep) -> dict[str, Any]:
    """Return a pack under Megatron-Core's names, without the batch axis.

    Returns:
        tokens, labels int64 `[T]`; loss_mask float32 `[T]`; position_ids `[T]`, or `[3, T]` with M-RoPE; cu_seqlens,
        cu_seqlens_padded int32 `[S + 1]`; max_seqlen int32 scalar, of padded lengths; padding_mask bool `[T]`; with media,
        their tensors, mm_token_type_ids, media_token_validity_mask and media_feature_index `[T]`; further declared fields;
        sample_ids; and as plain values the axis of each further per-token tensor, and what the step's loss is divided by, and
        the number of spelled media tokens.
    """
    adapter = batch.adapter
    found: dict[str, Any] = {
        "tokens": batch.input_ids[0],
        "labels": batch.labels[0],
        "loss_mask": batch.loss_mask[0],
        "position_ids": batch.position_ids[0] if batch.position_ids.ndim == 2 else batch.position_ids[:, 0],
        "cu_seqlens": batch.cu_seqlens_q,
        "cu_seqlens_padded": batch.cu_seqlens_q_padded,
        "max_seqlen": torch.tensor(batch.max_seqlen_q, dtype=torch.int32),
        "padding_mask": batch.padding_mask[0],
        "sample_ids": list(batch.sample_ids),
        "cp_slicing": adapter.cp_slicing,
        "num_spelled": batch.num_spelled,
        "global_loss_tokens": step.global_loss_tokens,
        "loss_divisor": step.loss_divisor,
    }
    axes = {name: adapter.fields[name].axis for name in batch.token_fields}
    if adapter.media_tokens:
        axes |= dict.fromkeys(("mm_token_type_ids", "media_token_validity_mask", "media_feature_index"), 0)
        found["mm_token_type_ids"] = batch.mm_token_type_ids[0]
        found["media_token_validity_mask"] = batch.media_token_validity_mask[0]
        found["media_feature_index"] = feature_index(batch)[0]
    further = {name: tensor.squeeze(axes[name]) for name, tensor in batch.token_fields.items()}
    return found | {"token_axes": axes} | dict(batch.media) | further | dict(batch.sample_fields)


def selected(found: dict[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Return the fields that a rank with these parts gets."""
    last, first = "last" in parts, "first" in parts
    return {name: value for name, value in found.items() if name in EVERYWHERE or (last if name in LAST else first)}

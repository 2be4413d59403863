"""From a micro-batch of the iterator to what one rank computes on."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from ...collate.packs.megatron import Valid, packed_seq_params
from ...collate.packs.shard import cp_slots
from .fields import EVERYWHERE, LAST
from .ranks import Ranks

_TOKENS = ("tokens", "position_ids")
#: What has its own attribute, or only describes the row.
_OWN = ("tokens", *LAST, *EVERYWHERE)

Tensor = torch.Tensor


class StageBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one rank needs of a micro-batch, on its device; T is the rank's own share under context parallelism.

    Attributes:
        tokens: int64 [1, T] on the first stage and where multi-token prediction is, else None.
        labels: int64 [1, T] on the last stage and where multi-token prediction is, else None; shifted.
        loss_mask: float32 [1, T] beside the labels.
        position_ids: int64 [1, T] beside the tokens; with M-RoPE [3, 1, T] of the whole row, on every stage.
        packed_seq_params: boundaries of the whole row.
        padding_mask: bool [1, T], True at padding.
        further: the other fields that came: media tensors, per-token fields (cut like the tokens, a batch axis before the
            packed one), declared fields.
        sample_ids: one per segment, None for a dummy or a tail.
        global_loss_tokens: targets of the step that count, over all ranks.
        loss_divisor: sum of their weights.
        num_spelled: tokens of the whole row that text spells like a media token.
    """

    tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    position_ids: Tensor | None
    packed_seq_params: Any
    padding_mask: Tensor
    further: Mapping[str, Any]
    sample_ids: list[Any]
    global_loss_tokens: int
    loss_divisor: float
    num_spelled: int = 0

    def loss(self, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what Megatron-Core's loss function returns with `calculate_per_token_loss`.

        Megatron-Core adds the counts up over all ranks and micro-batches and divides by that sum; with fractional weights
        the sum of losses is scaled so that the quotient is the weighted mean.

        Args:
            losses: `[1, T]`, of every token, as a model with labels returns them.

        Returns:
            Sum of the weighted losses, number of targets that count (int), and both for the report.
        """
        assert self.loss_mask is not None, "only the last stage has a loss"
        scale = self.global_loss_tokens / self.loss_divisor if self.loss_divisor else 0.0
        wide = losses if losses.dtype == torch.float64 else losses.float()
        total = (wide.flatten() * self.loss_mask.flatten().to(wide.dtype)).sum() * scale
        count = torch.count_nonzero(self.loss_mask).to(torch.int32)
        return total, count, {"lm loss": torch.stack((total.detach(), count.to(total.dtype)))}


def next_batch(
    data_iterator: Any,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: Any = None,
    *,
    valid: Valid = "real",
) -> StageBatch:
    """Take the next micro-batch of an iterator that `wrap_data_iterator` returned; no communication.

    Args:
        data_iterator: the iterator, or the list of a virtual pipeline.
        vpp_size: model chunks of a pipeline rank; None for what `parallel_state` says.
        mtp_on_this_rank: whether this stage predicts several tokens, and needs all fields.
        vp_stage: the model chunk that runs.
        pg_collection: groups; None for those of `parallel_state`.
        valid: "real", or "padded" for versions of Transformer Engine that mishandle padding between segments.

    Raises:
        ValueError: an iterator that `wrap_data_iterator` did not make, or a virtual pipeline without `vp_stage`.
    """
    ranks = Ranks.of(pg_collection)
    is_first, is_last = _place(ranks, vpp_size, vp_stage)
    raw = next(data_iterator[vp_stage or 0] if isinstance(data_iterator, list) else data_iterator)
    if not isinstance(raw, Mapping) or "cp_slicing" not in raw:
        raise ValueError("take the iterator that wrap_data_iterator returned, not the one that it was given")
    wanted = {
        *(_TOKENS if is_first or mtp_on_this_rank else ()),
        *(LAST if is_last or mtp_on_this_rank else ()),
        *(["position_ids"] if raw["position_ids"].ndim == 2 else ()),
    }
    slots = _slots(raw, ranks)
    row = _local({name: raw[name] for name in (*wanted, "padding_mask")}, slots)
    positions = row.get("position_ids")
    device = _device()
    further = _further(raw, slots) if is_first or mtp_on_this_rank else {}
    return StageBatch(
        tokens=_batched(row.get("tokens"), device),
        labels=_batched(row.get("labels"), device),
        loss_mask=_batched(row.get("loss_mask"), device),
        position_ids=None if positions is None else positions.unsqueeze(-2).to(device, non_blocking=True),
        padding_mask=row["padding_mask"][None].to(device, non_blocking=True),
        packed_seq_params=_boundaries(raw, valid, device),
        further={name: _moved(value, device) for name, value in further.items()},
        sample_ids=raw["sample_ids"],
        global_loss_tokens=raw["global_loss_tokens"],
        loss_divisor=raw["loss_divisor"],
        num_spelled=raw["num_spelled"],
    )


def get_packed_batch(
    data_iterator: Any,
    vpp_size: int | None = None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
    pg_collection: Any = None,
    *,
    valid: Valid = "real",
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, Tensor | None, Any, Tensor]:
    """Take the next micro-batch as Megatron-Core's `get_batch_on_this_rank_for_sequence_packing` returns it.

    Arguments and errors are those of `next_batch`.

    Returns:
        tokens, labels, loss_mask, None, position_ids, `PackedSeqParams` of the installed version, padding_mask.
    """
    batch = next_batch(data_iterator, vpp_size, mtp_on_this_rank, vp_stage, pg_collection, valid=valid)
    tensors = (batch.tokens, batch.labels, batch.loss_mask)
    return (*tensors, None, batch.position_ids, batch.packed_seq_params, batch.padding_mask)


def _place(ranks: Ranks, vpp_size: int | None, vp_stage: int | None) -> tuple[bool, bool]:
    """Return whether the running model chunk is the first and the last of the pipeline."""
    if vpp_size is None:
        from megatron.core import parallel_state

        vpp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if vpp_size is None or vpp_size == 1:
        return ranks.is_first, ranks.is_last
    if vp_stage is None or not 0 <= vp_stage < vpp_size:
        raise ValueError(f"vp_stage must be in 0..{vpp_size - 1} with a virtual pipeline, got {vp_stage}")
    return ranks.is_first and vp_stage == 0, ranks.is_last and vp_stage == vpp_size - 1


def _slots(raw: Mapping[str, Any], ranks: Ranks) -> Tensor | None:
    """Return the slots of the row that this context-parallel rank computes; None where the row stays whole."""
    if ranks.cp_size == 1 or raw["cp_slicing"] == "model":
        return None
    return torch.from_numpy(cp_slots(raw["cu_seqlens_padded"].numpy(), ranks.cp_rank, ranks.cp_size))


def _local(row: dict[str, Tensor], slots: Tensor | None) -> dict[str, Tensor]:
    """Return this rank's share of per-token tensors, padding set to 0.

    M-RoPE's positions stay those of the whole row: Megatron-Core cuts the angles segment by segment.
    """
    padding = row["padding_mask"]
    row = {name: row[name].masked_fill(padding, 0) if name in ("tokens", *LAST) else row[name] for name in row}
    if slots is None:
        return row
    return {name: tensor if tensor.ndim == 2 else tensor.index_select(0, slots) for name, tensor in row.items()}


def _further(raw: Mapping[str, Any], slots: Tensor | None) -> dict[str, Any]:
    found = {name: value for name, value in raw.items() if name not in _OWN}
    for name, axis in raw["token_axes"].items():
        mine = found[name] if slots is None else found[name].index_select(axis, slots)
        found[name] = mine.unsqueeze(axis)
    return found


def _boundaries(raw: Mapping[str, Any], valid: Valid, device: torch.device) -> Any:
    padded = raw["cu_seqlens_padded"]
    on_device = padded.to(device, non_blocking=True)
    lengths = padded.diff().long()
    described: Any = SimpleNamespace(
        # One object where nothing is padded: Transformer Engine tells by identity.
        cu_seqlens_q=on_device if raw["cu_seqlens"] is padded else raw["cu_seqlens"].to(device, non_blocking=True),
        cu_seqlens_q_padded=on_device,
        max_seqlen_q=int(raw["max_seqlen"]),
        max_seqlen_kv=int(raw["max_seqlen"]),
        seq_idx=torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None].to(device, non_blocking=True),
    )
    params = packed_seq_params(described, valid, {})
    if hasattr(params, "total_tokens"):
        # Set behind construction, which would derive `seq_idx` from it with operations that wait for the device.
        params.total_tokens = int(padded[-1])
    return params


def _batched(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor[None].to(device, non_blocking=True)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

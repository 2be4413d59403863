"""Megatron-Core's description of a packed row, for whatever version is installed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ...core import UnsafeModelError
from ...models.adapter import ModelAdapter
from .row import Row

Valid = Literal["real", "padded"]


def check_causal(adapter: ModelAdapter) -> None:
    """Refuse a family of which `PackedSeqParams` cannot say who sees whom.

    Raises:
        UnsafeModelError: tokens of the family see each other both ways.
    """
    if adapter.bidirectional is not None:
        raise UnsafeModelError(
            f"{adapter.name} has tokens that see each other both ways ({adapter.bidirectional}), and PackedSeqParams can only "
            "say where segments begin: Megatron-Core's attention would be causal"
        )


def packed_seq_params(batch: Row, valid: Valid, further: Mapping[str, Any]) -> Any:
    """Return `PackedSeqParams` of a pack; see `PackedBatch.packed_seq_params`.

    Boundaries and lengths are those of the whole row, in a context-parallel shard too: Transformer Engine divides them.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    values = {**thd_arguments(batch, valid), **further}
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})


def thd_arguments(batch: Row, valid: Valid) -> dict[str, Any]:
    """Return every field of `PackedSeqParams` that a pack determines, of any version.

    `total_tokens` is left out: from it the class would derive `seq_idx` with device operations that wait for the host.
    """
    if valid not in get_args(Valid):
        raise ValueError(f"valid must be one of {get_args(Valid)}, got {valid!r}")
    padded = batch.cu_seqlens_q_padded
    real = batch.cu_seqlens_q if valid == "real" else padded
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": batch.max_seqlen_q,
        "max_seqlen_kv": batch.max_seqlen_kv,
        # Said outright: its detection by identity misses a pack whose only padding is the tail.
        "pad_between_seqs": real is not padded,
        "seq_idx": batch.seq_idx,
    }

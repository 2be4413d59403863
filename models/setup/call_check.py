"""A prepared model sees when it is called with less than a pack's own arguments, or with the pack's targets as labels.

Both train wrongly without an error: samples see each other, or every target is shifted twice. A pack marks its ids and its
targets; the mark is an attribute of the tensor, so that nothing is read from a device, and an unpacked call is never refused.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...core import UnsafeModelError

#: Attributes of a pack's ids, how many segments it has, and of its targets, which are shifted already.
SEGMENTS_MARK, SHIFTED_MARK = "_evenpack_segments", "_evenpack_shifted"
#: Attribute of a pack's ids whose family has blocks of tokens that see each other.
BLOCKS_MARK = "_evenpack_blocks"
#: Attribute of a pack's ids in which groups share a prefix.
KEYS_MARK = "_evenpack_keys"
#: Positions with fractions of a second, and the integers that carry their bits.
_FRACTIONS, _BITS = torch.float32, torch.int32
#: What DistributedDataParallel says where a step's backward passes do not fit its reductions, and what helps.
_DDP_ERRORS = ("Expected to have finished reduction in the prior iteration", "Expected to mark a variable ready only once")
_SYNC_NOTE = (
    "evenpack: a step runs several micro-batches, and DistributedDataParallel expects a reduction in each: run "
    "forward and backward inside `with step.sync_on_last(model, batch):`"
)


def watch_calls(model: nn.Module) -> None:
    """Let a transformers model check what it is called with; again is fine."""
    if _check_call not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check_call, with_kwargs=True)


def explain_ddp(model: nn.Module) -> None:
    """Let the error of DistributedDataParallel about a missing reduction say what to do; again is fine."""
    if isinstance(model, DistributedDataParallel) and _note_error not in model._forward_hooks.values():
        model.register_forward_hook(_note_error, always_call=True)


def _note_error(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Add the note to the error that ends a forward pass, as its forward hook."""
    if not torch.compiler.is_compiling():
        note_missing_sync(sys.exc_info()[1])


def note_missing_sync(error: BaseException | None) -> None:
    """Add a note about `sync_on_last` to an error of DistributedDataParallel that comes of its absence; again is fine."""
    mine = isinstance(error, RuntimeError) and any(text in str(error) for text in _DDP_ERRORS)
    if error is not None and mine and _SYNC_NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_SYNC_NOTE)


def position_bits(position_ids: torch.Tensor) -> torch.Tensor:
    """Return fractional positions as integers of the same bits, which no mixed-precision policy casts.

    FSDP casts floating arguments of a model's forward pass to the dtype of its parameters, and bfloat16 holds no integer above
    256 exactly.
    """
    return position_ids.view(_BITS) if position_ids.dtype == _FRACTIONS else position_ids


def take_bits(decoder: nn.Module) -> None:
    """Let the decoder of a family with fractional positions take them as their bits; again is fine."""
    if not takes_bits(decoder):
        decoder.register_forward_pre_hook(_restore_positions, with_kwargs=True)


def takes_bits(decoder: nn.Module) -> bool:
    """Whether a decoder was set up to take fractional positions as their bits."""
    return _restore_positions in decoder._forward_pre_hooks.values()


def _restore_positions(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Turn the bits of fractional positions into positions again, as a forward pre-hook: FSDP's come before it."""
    position_ids = kwargs.get("position_ids")
    if not isinstance(position_ids, torch.Tensor) or position_ids.dtype != _BITS:
        return None
    # Bits of a fraction of a second or more are large integers; small ones are positions that were given as integers.
    given = torch.where(position_ids < 2**23, position_ids.to(_FRACTIONS), position_ids.view(_FRACTIONS))
    return args, {**kwargs, "position_ids": given}


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call of a model, as its forward pre-hook; nothing is checked while a graph is captured by `torch.compile`.

    Raises:
        UnsafeModelError: several samples without their boundaries, positions or blocks, or labels that are shifted already.
    """
    if torch.compiler.is_compiling():
        return
    if hasattr(kwargs.get("labels"), SHIFTED_MARK) and kwargs.get("shift_labels") is None:
        raise UnsafeModelError(
            f"labels of a pack are shifted already, and {type(model).__name__} would shift them once more: leave labels out, "
            "model(**batch.forward_kwargs(model)), and take the loss from step.loss(logits, batch)"
        )
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    num_segments = getattr(input_ids, SEGMENTS_MARK, 0)
    if hasattr(input_ids, BLOCKS_MARK) and kwargs.get("cu_seq_lens_q") is not None and kwargs.get("media_blocks") is None:
        raise UnsafeModelError(
            f"{type(model).__name__} is called with a pack, but without media_blocks: tokens of an image would not see all "
            "of it. Call model(**batch.forward_kwargs(model))"
        )
    if hasattr(input_ids, KEYS_MARK) and kwargs.get("key_index") is None:
        raise UnsafeModelError(
            f"{type(model).__name__} is called with a pack of groups, but without key_index: branches would not see their "
            "prefix. Call model(**batch.forward_kwargs(model))"
        )
    if num_segments < 2:
        return
    missing = [name for name in ("cu_seq_lens_q", "position_ids") if kwargs.get(name) is None]
    if missing:
        raise UnsafeModelError(
            f"{type(model).__name__} is called with a pack of {num_segments} segments, but without {' and '.join(missing)}: "
            "its samples would be taken for one. Call model(**batch.forward_kwargs(model))"
        )

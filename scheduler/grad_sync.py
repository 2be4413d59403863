"""Reduce gradients in the last micro-batch only, with whichever wrapper the model is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..core import UnsafeModelError


def refuse_ddp(model: Any, sync: str, trained_modalities: tuple[str, ...]) -> None:
    """Refuse PyTorch's DDP where a step's last micro-batch may leave a trained tower out.

    DDP reduces a parameter when its gradient arrives in the last backward. One that does not arrive is left as it is, local,
    and DDP says so only in the next step.

    Raises:
        UnsafeModelError: DDP, trained towers, and a plan that does not put them into the last micro-batch.
    """
    if sync == "microbatch" and trained_modalities and isinstance(model, DistributedDataParallel):
        raise UnsafeModelError(
            f"DDP reduces the towers of {list(trained_modalities)} only if the last micro-batch runs them, which "
            "sync='microbatch' does not promise: set sync='step', which is also how DDP waits"
        )


def refuse_fsdp(model: Any, sync: str, modalities: tuple[str, ...]) -> None:
    """Refuse FSDP, also of a part of the model, where ranks may run other towers in the same micro-batch.

    FSDP gathers the weights of a module whenever it runs, on every rank of the group: a tower that one rank skips while another
    runs it is a collective that meets another one, or nothing. That goes for frozen towers too, which are sharded as well.
    Without towers every rank runs every layer in each of its micro-batches, of which all ranks have the same number.

    Args:
        model: the wrapped model.
        sync: as `SchedulerConfig.sync`.
        modalities: the family's media.

    Raises:
        UnsafeModelError: FSDP, towers, and a plan that does not run them on all ranks together.
    """
    if sync == "step" and modalities and _is_sharded(model):
        raise UnsafeModelError(
            f"FSDP gathers weights in every micro-batch, which needs the towers of {list(modalities)} to run on all ranks or "
            "on none; sync='step' promises that for the last micro-batch alone: set sync='microbatch', which is also how FSDP "
            "waits"
        )


def _is_sharded(model: Any) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(model, torch.nn.Module) and any(
        isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()
    )


@contextmanager
def reduce_if(model: Any, is_last: bool) -> Iterator[None]:
    """Let a wrapper reduce gradients only where `is_last`.

    Knows DDP, FSDP and Megatron-Core's DDP (a `no_sync` context) and FSDP2 (`set_requires_gradient_sync`). A model
    without either has nothing to reduce.

    Args:
        model: the wrapped model; forward and backward both run inside the context.
        is_last: whether this is the step's last micro-batch.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        if hasattr(model, "set_is_last_backward"):
            model.set_is_last_backward(is_last)
        yield
    elif not is_last and hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        yield

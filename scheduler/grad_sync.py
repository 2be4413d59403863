"""Reduce gradients in the last micro-batch only, with whichever wrapper the model is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

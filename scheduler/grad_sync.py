"""Reduce gradients in the last micro-batch only, with whichever wrapper the model is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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

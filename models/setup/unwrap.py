"""From a wrapped model to the model itself: DDP, FSDP, compile, PEFT, Megatron's wrappers, in any order."""

from torch import nn

#: Attributes under which wrappers keep the one module they wrap.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside any number of wrappers.

    A wrapper is a module whose only child stands under a name that wrappers use (`module` in DDP, FSDP, DeepSpeed and
    Megatron-Core's Float16Module and DDP; `_orig_mod` in torch.compile), or a PEFT model. FSDP2 wraps nothing: it changes the
    class of the modules in place.

    Example:
        >>> inner = nn.Linear(2, 2)
        >>> unwrap_model(nn.DataParallel(inner)) is inner
        True
    """
    while True:
        inner = _wrapped_module(model)
        if inner is None:
            return model
        model = inner


def _wrapped_module(model: nn.Module) -> nn.Module | None:
    """Return what one wrapper wraps, or None for a model that is no wrapper."""
    base = getattr(model, "get_base_model", None)
    if callable(base):  # peft.PeftModel
        inner = base()
        return inner if isinstance(inner, nn.Module) and inner is not model else None
    children = dict(model.named_children())
    if len(children) != 1:
        return None
    name, child = next(iter(children.items()))
    return child if name in _WRAPPED else None


def is_transformers_model(model: nn.Module) -> bool:
    """Whether an unwrapped model is a `transformers` model, told without importing transformers."""
    return any(cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(model).__mro__)

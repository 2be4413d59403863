"""Media features merged by a mask of anchors, where the model itself would go by token ids.

A stock `transformers` model puts features wherever an id equals the media token, so text that spells the token breaks it, and
GLM-4V, which writes the image token inside videos too, cannot take images and videos in one row. Both come from one method,
`get_placeholder_mask` (`inputs_merger` in Idefics); here it sees only the ids that anchor features of the modality it is asked
for.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from ...core import TYPE_CODES
from ..subclass import subclass
from .unwrap import unwrap_model

#: Argument of the model's forward pass that this adds.
_MASK_ARGUMENT = "media_token_validity_mask"


class MaskedMerge:
    """Mixin of the module that places features: it sees anchors only."""

    #: Anchors and type ids of the call in progress.
    evenpack_anchors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def get_placeholder_mask(self, input_ids: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Hide ids that anchor nothing, or features of another modality than the one asked for, from the model's own method."""
        valid, types = self.evenpack_anchors
        if input_ids is not None and valid is not None:
            keep = valid.bool()
            asked = [code for name, code in TYPE_CODES.items() if kwargs.get(f"{name}_features") is not None]
            if types is not None and len(asked) == 1:
                keep = keep & (types == asked[0])
            input_ids = torch.where(keep, input_ids, -1)  # compared with media tokens, never looked up
        return super().get_placeholder_mask(input_ids, *args, **kwargs)  # type: ignore[misc]


class MaskedMerger(MaskedMerge):
    """The same for a module that places images in a method of another name."""

    def inputs_merger(self, input_ids: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Hide ids that anchor nothing from the model's own method."""
        valid, _ = self.evenpack_anchors
        if input_ids is not None and valid is not None:
            input_ids = torch.where(valid.bool(), input_ids, -1)
        return super().inputs_merger(input_ids, *args, **kwargs)  # type: ignore[misc]


class MaskArgument:
    """Mark of a model whose forward pass takes the mask."""

    #: Where the modules stand that place features; some versions of a model hand the call on from one to the other.
    evenpack_merge_paths: ClassVar[tuple[str, ...]]


def merge_by_mask(model: nn.Module) -> bool:
    """Make an unwrapped model take `media_token_validity_mask`, bool [1, T]; False where it has no media to place."""
    methods = ("get_placeholder_mask", "inputs_merger")
    paths = tuple(name for name, module in model.named_modules() if any(hasattr(module, method) for method in methods))
    if not paths:
        return False
    for path in paths:
        module = model.get_submodule(path)
        subclass(module, MaskedMerger if hasattr(module, "inputs_merger") else MaskedMerge)
    if not isinstance(model, MaskArgument):
        marked: Any = model
        stock: Any = type(model)
        subclass(model, MaskArgument, _masked_forward(stock))
        marked.evenpack_merge_paths = paths
    return True


@functools.cache
def _masked_forward(cls: Any) -> Callable[..., Any]:
    """Return the forward pass of `cls` with the mask as a further argument, in its signature too."""
    stock = cls.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        anchors = (kwargs.pop(_MASK_ARGUMENT, None), kwargs.get("mm_token_type_ids"))
        places: list[Any] = [unwrap_model(self.get_submodule(path)) for path in self.evenpack_merge_paths]
        for place in places:
            place.evenpack_anchors = anchors
        try:
            return stock(self, *args, **kwargs)
        finally:
            for place in places:
                del place.evenpack_anchors

    signature = inspect.signature(stock)
    parameters = list(signature.parameters.values())
    at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    mask = inspect.Parameter(_MASK_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None)
    shown = signature.replace(parameters=[*parameters[:at], mask, *parameters[at:]])
    forward.__signature__ = shown  # type: ignore[attr-defined]
    return forward

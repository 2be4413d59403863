"""Heads that give one value per row (reward models, sequence classification): one value per sample of a pack instead."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...core import UnsafeModelError
from ..subclass import subclass

#: Ends of the names of classes whose head pools a row into one value.
_POOLING = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "DoubleHeadsModel",
    "ForImageTextRetrieval",
)


class PerSampleHead:
    """Mixin of a model with a head `score` on the last token of a row: in a pack, on the last token of every sample."""


def score_samples(model: nn.Module) -> None:
    """Let a model with a head on the last token give one value per sample of a pack; others are left alone, again is fine.

    With `sample_ends`, int64 `[num_samples]`, its `logits` are `[num_samples, num_labels]`, in the order of the samples.
    """
    if pools_rows(model) and isinstance(getattr(model, "score", None), nn.Module):
        cls: Any = type(model)
        subclass(model, PerSampleHead, _forward_of(cls))


@functools.cache
def _forward_of(cls: Any) -> Callable[..., Any]:
    run = cls.forward

    @functools.wraps(run)  # with its signature, by which callers know what the model takes
    def forward(self: Any, *args: Any, sample_ends: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if sample_ends is None:
            if kwargs.get("cu_seq_lens_q") is not None:
                raise UnsafeModelError(
                    f"{cls.__name__} is called with a pack, but without sample_ends: one value for all of its samples would "
                    "come back. Call model(**batch.forward_kwargs(model))"
                )
            return run(self, *args, **kwargs)
        if kwargs.get("labels") is not None:
            raise UnsafeModelError(f"{cls.__name__}: its loss takes a value per row; take the loss from logits")
        seen: list[torch.Tensor] = []
        handle = self.score.register_forward_hook(lambda _module, _args, output: seen.append(output))
        try:
            output = run(self, *args, **kwargs)
        finally:
            handle.remove()
        output.logits = seen[-1][0, sample_ends]
        return output

    return forward


def pools_rows(model: nn.Module) -> bool:
    """Whether a model's head pools a row into one value, by the name of its class."""
    return type(model).__name__.endswith(_POOLING)


def check_head(model: nn.Module, advice: str) -> None:
    """Raise `UnsafeModelError` for a model that would give one value for all samples of a pack."""
    known = isinstance(getattr(model, "score", None), nn.Module)
    if pools_rows(model) and not isinstance(model, PerSampleHead):
        raise UnsafeModelError(
            f"{type(model).__name__} gives one value per row: all samples of a pack would share it. "
            f"{advice if known else 'Only a head called score, on the last token, can give one per sample'}."
        )

"""The forward step of Megatron-Core's schedules, on packs: nothing is padded, packed or masked here."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...collate.packs.model_check import MASK, check_spelled, check_structure
from ...models.setup.unwrap import unwrap_model
from .batch import StageBatch, next_batch
from .model import check_model
from .ranks import Ranks

#: Arguments, of which one is enough, that tell a model where media features belong.
_ANCHORS = (MASK, "media_feature_index")

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Run one micro-batch through a pipeline stage; the `forward_step_func` of `forward_backward_func`.

    The model gets what its signature names, among them the media fields of the adapter; a stage gets None for what it does
    without.

    Args:
        data_iterator: an iterator of `wrap_data_iterator`.
        model: a `GPTModel`, or a model around one, wrapped or not.

    Returns:
        The model's output, and the loss function: sum, count and report of `StageBatch.loss`.

    Raises:
        UnsafeModelError, SpelledMediaTokenError, NotImplementedError: as `model_arguments`.
    """
    inner = unwrap_model(model)
    batch = next_batch(data_iterator, vp_stage=getattr(inner, "vp_stage", None), mtp_on_this_rank=_has_mtp(inner))
    return model(**model_arguments(batch, inner)), batch.loss


def model_arguments(batch: StageBatch, model: Any) -> dict[str, Any]:
    """Return the arguments of a model's forward pass for a micro-batch, by the names in its signature.

    Args:
        batch: what `next_batch` returned.
        model: the model, wrapped or not. It is checked as `PackedBatch.forward_kwargs` checks one.

    Raises:
        UnsafeModelError: a model that takes no `packed_seq_params`, or whose positions would be wrong: see `prepare_model`.
        SpelledMediaTokenError: text spells a media token, and the model takes neither `media_token_validity_mask` nor
            `media_feature_index`.
        NotImplementedError: a model that packs by itself.
    """
    model = unwrap_model(model)
    kind: Any = type(model)
    names = _names(kind)
    check_structure(model, names, is_megatron=True)
    check_model(model, Ranks.of().cp_size)
    if names.isdisjoint(_ANCHORS):
        check_spelled(batch.num_spelled, kind.__name__, " or ".join(_ANCHORS))
    offered = {
        **batch.further,
        "input_ids": batch.tokens,
        "tokens": batch.tokens,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "packed_seq_params": batch.packed_seq_params,
        "padding_mask": _padding_mask_for(batch.padding_mask, model),
    }
    return {name: value for name, value in offered.items() if name in names}


def _padding_mask_for(mask: torch.Tensor, model: Any) -> torch.Tensor:
    """Return the padding mask as a stage's router takes it.

    Under sequence parallelism a `GPTModel` cuts the mask beside its embedding; later stages, whose hidden states arrive cut,
    get their part here.
    """
    if getattr(model, "pre_process", True) or not getattr(model.config, "sequence_parallel", False):
        return mask
    tp = Ranks.of().tp
    part: torch.Tensor = mask.chunk(tp.size(), dim=1)[tp.rank()]
    return part


@functools.cache
def _names(kind: Hashable) -> frozenset[str]:
    parameters = inspect.signature(kind.forward).parameters.values()  # type: ignore[attr-defined]
    return frozenset(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD)


def _has_mtp(model: Any) -> bool:
    return bool(getattr(model, "mtp_process", False))

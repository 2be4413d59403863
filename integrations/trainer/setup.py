"""Set a model up for packs, and see which of its parts are trained."""

from typing import Any

import msgspec
from torch import nn

from ...models import ModelAdapter, adapter_for, prepare_model
from ...models.setup.prepare import decoder_modules, decoder_of
from ...models.setup.unwrap import is_transformers_model, unwrap_model


def prepare_for_packs(model: nn.Module, adapter: ModelAdapter | None = None) -> None:
    """Set a model up in place; flash attention that the user chose stays.

    Args:
        model: the model, wrapped or not.
        adapter: the user's adapter; None for that of the model's family.

    Raises:
        UnsafeModelError: a model that cannot be made to keep segments apart.
    """
    inner: Any = unwrap_model(model)
    chosen = str(getattr(getattr(inner, "config", None), "_attn_implementation", ""))
    prepare_model(model, adapter)
    if "flash" in chosen and is_transformers_model(inner):
        # Under mixed precision the weights are fp32 here, so that flash attention does not seem to be possible.
        inner.set_attn_implementation(chosen)


def adapter_of(model: nn.Module, given: ModelAdapter | None = None) -> ModelAdapter:
    """Return the adapter of a model; its towers count as trained where anything outside of the decoder is.

    Args:
        model: the model, wrapped or not.
        given: the user's adapter; None for that of the model's family.

    Raises:
        ValueError: a model of no known family.
    """
    inner: Any = unwrap_model(model)
    adapter = adapter_for(inner.config) if given is None else given
    return adapter if _trains_towers(inner) else msgspec.structs.replace(adapter, trained_modalities=())


def _trains_towers(model: nn.Module) -> bool:
    """Return whether a parameter outside of the decoder and the output layer is trained."""
    inner: Any = model
    output = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    text = [*decoder_modules(decoder_of(inner)), *(output.modules() if output is not None else [])]
    known = {id(parameter) for part in text for parameter in part.parameters(recurse=False)}
    return any(parameter.requires_grad and id(parameter) not in known for parameter in inner.parameters())


def is_lora(model: nn.Module) -> bool:
    """Return whether a model trains adapters of PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")

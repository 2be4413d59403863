"""Which arguments a model's forward pass takes, seen through its wrappers."""

import inspect
from typing import Any

from torch import nn

from ..adapter import ModelAdapter
from ..attention.recurrent import uses_varlen_kernels
from .heads import PerSampleHead
from .unwrap import is_transformers_model, unwrap_model

#: What a transformers model takes through its typed keyword arguments, though its signature does not name it.
VARLEN_ARGUMENTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache"})
#: What its attention takes besides where groups share a prefix.
GROUP_ARGUMENTS = frozenset({"key_index"})
#: What its attention takes besides, in families with blocks of tokens that see each other.
BLOCK_ARGUMENTS = frozenset({"media_blocks", "media_block_layers"})


def forward_arguments(model: nn.Module, adapter: ModelAdapter) -> set[str]:
    """Return the names of the arguments that a model's forward pass takes.

    Those that the signature of the unwrapped model names and those that the adapter declares; a bare `**kwargs` counts for
    nothing, because what it swallows it may ignore. A transformers model takes the varlen attention arguments and
    `use_cache` as well, `media_blocks` in families with blocks of tokens that see each other, and `seq_idx` where recurrent
    layers run on kernels. `media_token_validity_mask` is among them for a model that `prepare_model` set up: it then places
    features by the mask.

    Example:
        >>> from evenpack.models import adapter_for
        >>> class Tiny(nn.Module):
        ...     def forward(self, input_ids, position_ids=None, **kwargs): ...
        >>> sorted(forward_arguments(nn.DataParallel(Tiny()), adapter_for("text")))
        ['input_ids', 'position_ids']
    """
    inner: Any = unwrap_model(model)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = {name for name, parameter in inspect.signature(inner.forward).parameters.items() if parameter.kind not in kinds}
    names |= set(adapter.model_arguments)
    if is_transformers_model(inner):
        names |= VARLEN_ARGUMENTS | GROUP_ARGUMENTS | (BLOCK_ARGUMENTS if adapter.bidirectional else frozenset())
        if uses_varlen_kernels(inner):
            names.add("seq_idx")
        if isinstance(inner, PerSampleHead):
            names.add("sample_ends")
    return names

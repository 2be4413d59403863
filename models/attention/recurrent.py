"""Layers that carry a state along the row (Gated DeltaNet), kept apart per segment.

Neither masks nor positions isolate them: the recurrent state and the causal convolution run over the whole row. With
flash-linear-attention and causal-conv1d on a GPU, transformers takes `cu_seq_lens_q` and `seq_idx`; everywhere else the layer
is run segment by segment.
"""

import importlib.util
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...core import UnsafeModelError
from ..subclass import subclass
from .boundaries import ROW_ARGUMENTS
from .varlen import lengths_of

#: Classes whose forward maps hidden states [1, T, D] to [1, T, D], so that it can be run per segment.
_ISOLATABLE = re.compile(r"(GatedDeltaNet|ShortConv)$")
#: Other layers that carry a state along the row, by name.
_RECURRENT = re.compile(
    r"(Mixer|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|MambaLayer|Rglru|RecurrentBlock|RwkvSelfAttention"
    r"|LSTM(Block|Layer|Cell)?|ShortConv|Convolution|Retention)$"
)


class Isolated:
    """Mixin of a layer that runs once per segment of a pack."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layer on each segment alone; without boundaries, on the row as it is."""
        run = super().forward  # type: ignore[misc]
        boundaries, index = kwargs.get("cu_seq_lens_q"), kwargs.get("key_index")
        if boundaries is None:
            output: torch.Tensor = run(hidden_states, *args, **kwargs)
            return output
        given = [
            name for name, value in kwargs.items() if name in ("cache", "cache_params", "past_key_values") and value is not None
        ]
        if args or given or kwargs.get("attention_mask") is not None:
            raise UnsafeModelError(f"{type(self).__name__}: a pack takes neither a cache nor an attention mask")
        lengths = lengths_of(boundaries)
        if hidden_states.shape[0] != 1 or sum(lengths) != hidden_states.shape[1]:
            raise UnsafeModelError(f"boundaries of {sum(lengths)} tokens for hidden states {tuple(hidden_states.shape)}")
        alone = {name: value for name, value in kwargs.items() if name not in ROW_ARGUMENTS}  # it sees one segment
        if index is None:
            parts = torch.split(hidden_states, lengths, dim=1)
            return torch.cat([run(part, **alone) for part in parts], dim=1)
        # A state does not branch: each segment runs after a copy of its prefix, whose output is dropped.
        parts = torch.split(hidden_states[:, index], lengths_of(kwargs["cu_seq_lens_k"]), dim=1)
        return torch.cat([run(part, **alone)[:, -own:] for part, own in zip(parts, lengths, strict=True)], dim=1)


def isolate_recurrent(modules: Iterable[nn.Module]) -> int:
    """Make every layer, among a decoder's modules, that can be run per segment do so; return how many layers that are."""
    layers = [module for module in modules if is_isolatable(module)]
    for layer in layers:
        subclass(layer, Isolated)
    return len(layers)


def is_isolatable(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer that `isolate_recurrent` knows how to run."""
    return _ISOLATABLE.search(type(module).__name__) is not None


def leaking_layers(modules: Iterable[nn.Module]) -> list[str]:
    """Return the class names of layers, among a decoder's modules, that carry a state from segment to segment of a pack."""
    return sorted({type(module).__name__ for module in modules if _carries_state(module) and not _is_safe(module)})


def _carries_state(module: nn.Module) -> bool:
    """Whether a module looks along the row other than by attention: by its name, or by a convolution of its own."""
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves or isinstance(module, nn.RNNBase) or _RECURRENT.search(type(module).__name__) is not None


def _is_safe(module: nn.Module) -> bool:
    """Whether a module that carries a state is kept apart per segment."""
    return isinstance(module, Isolated) or (is_isolatable(module) and has_varlen_kernels(module))


def uses_varlen_kernels(model: nn.Module) -> bool:
    """Whether a model has recurrent layers that run on kernels, and so want `seq_idx` beside the boundaries."""
    return any(is_isolatable(m) and not isinstance(m, Isolated) and has_varlen_kernels(m) for m in model.modules())


def has_varlen_kernels(module: nn.Module) -> bool:
    """Whether a Gated DeltaNet runs on kernels that take boundaries: on a GPU, with both packages installed."""
    if type(module).__name__.endswith("ShortConv"):  # LFM2's convolution runs per segment everywhere
        return False
    on_gpu = next((p.device.type for p in module.parameters()), "cpu") == "cuda"
    return on_gpu and all(importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d"))

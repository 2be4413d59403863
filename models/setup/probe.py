"""See for oneself that a model keeps the segments of a pack apart: run a sample in a pack and alone, and compare."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ...core import SampleLayout, UnsafeModelError, round_up
from ..adapter import ModelAdapter
from ..attention.boundaries import attention_boundaries
from ..attention.rope import rope_threshold
from ..layout.positions import pack_positions
from .forward import forward_arguments
from .prepare import decoder_of, is_causal
from .unwrap import unwrap_model

#: Largest change of a logit, over the largest logit, that rounding may explain.
ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: Multiple that the probe pads its segments to, so that padding is seen too.
_ALIGN = 4
#: Longest text of the probe, in tokens: beyond it, rotary tables for long samples are not tried.
_LONGEST = 16384


@torch.no_grad()
def verify_isolation(model: nn.Module, adapter: ModelAdapter, *, lengths: tuple[int, int] | None = None) -> float:
    """Run a short text behind another one in a pack, with padding behind each, and alone, and compare its outputs.

    `check_model` goes by what it knows about layers; this goes by what the model does, and so finds what is new. It needs a
    transformers model that is ready to run, and runs it twice (on every rank, where it is sharded).

    Args:
        model: the model, wrapped or not.
        adapter: its family.
        lengths: tokens of the two texts; default: 9 and 7, or a first text long enough for the rotary tables of long samples
            where the model has such.

    Returns:
        The largest difference of a logit (of a hidden state, for a model without a head), relative to the largest one:
        rounding, if anything.

    Raises:
        UnsafeModelError: the second text's outputs depend on the pack around it.
    """
    decoder = decoder_of(unwrap_model(model))
    if lengths is None:
        threshold = rope_threshold(decoder) or 0
        lengths = (threshold + 1 if 9 <= threshold < _LONGEST else 9, 7)
    was_training, causal = model.training, is_causal(decoder)
    model.eval()
    try:
        packed = _outputs(model, adapter, lengths, _ALIGN, causal)
        alone = _outputs(model, adapter, lengths[1:], 1, causal)
    finally:
        model.train(was_training)
    change = float((packed - alone).abs().max() / alone.abs().max())
    if not change <= ROUNDING.get(alone.dtype, 1e-4):
        raise UnsafeModelError(
            f"{type(model).__name__} mixes the segments of a pack: outputs of one sample differ by {change:.2g} of the largest "
            "from the same sample alone"
        )
    return change


def _outputs(model: nn.Module, adapter: ModelAdapter, lengths: tuple[int, ...], align: int, causal: bool) -> torch.Tensor:
    """Return the outputs [L, V] of the last text of a row."""
    device = next(model.parameters()).device
    padded = [round_up(length, align) for length in lengths]
    real, cu = (np.cumsum([0, *sizes]) for sizes in (lengths, padded))
    positions = torch.from_numpy(pack_positions([SampleLayout.text(size) for size in padded], cu, adapter))
    boundaries = attention_boundaries(*(torch.from_numpy(one.astype(np.int32)) for one in (real, cu)), causal=causal)
    boundaries = boundaries.to(device)
    # The first text repeats a token that the second one lacks; padding repeats another.
    texts = [[1] * size for size in lengths[:-1]] + [[3 + k % 5 for k in range(lengths[-1])]]
    ids = [token for text, size in zip(texts, padded, strict=True) for token in text + [2] * (size - len(text))]
    segments = torch.repeat_interleave(torch.arange(len(padded), dtype=torch.int32), torch.tensor(padded))
    offered: dict[str, Any] = {
        "input_ids": torch.tensor([ids], device=device),
        "position_ids": (positions if adapter.rope == "1d" else positions[:, None]).to(device),
        "mm_token_type_ids": torch.zeros(1, int(cu[-1]), dtype=torch.int64, device=device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(padded),
        "max_length_k": max(padded),
        "seq_idx": segments.to(device)[None],
        "use_cache": False,
    }
    if len(lengths) == 1 and adapter.rope == "1d":  # alone, as anyone would call the model: with its own positions
        offered = {"input_ids": offered["input_ids"], "use_cache": False}
    names = forward_arguments(model, adapter)
    output = model(**{name: value for name, value in offered.items() if name in names})
    logits: torch.Tensor | None = getattr(output, "logits", None)
    outputs: torch.Tensor = output[0] if logits is None else logits
    start = int(cu[-2])
    return outputs[0, start : start + lengths[-1]]

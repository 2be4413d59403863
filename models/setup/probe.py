"""See for oneself that a model keeps the segments of a pack apart: change one sample, and watch the next one."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ...core import SampleLayout, UnsafeModelError
from ..adapter import ModelAdapter
from ..layout.positions import pack_positions
from .forward import forward_arguments

#: Largest change of a logit, over the largest logit, that rounding may explain.
ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def verify_isolation(model: nn.Module, adapter: ModelAdapter, *, lengths: tuple[int, int] = (9, 7)) -> float:
    """Run a pack of two texts twice, with another first text, and compare the second text's logits.

    `check_model` goes by what it knows about layers; this goes by what the model does, and so finds what is new. It needs a
    transformers model that is ready to run, and runs it twice on a few tokens (on every rank, where it is sharded).

    Args:
        model: the model, wrapped or not.
        adapter: its family.
        lengths: tokens of the two texts.

    Returns:
        The largest change of a logit, relative to the largest logit: rounding, if anything.

    Raises:
        UnsafeModelError: the second text's logits depend on the first text.
    """
    was_training = model.training
    model.eval()
    try:
        first, second = (second_logits(model, adapter, lengths, token) for token in (1, 2))
    finally:
        model.train(was_training)
    change = float((first - second).abs().max() / first.abs().max())
    if not change <= ROUNDING.get(first.dtype, 1e-4):
        raise UnsafeModelError(
            f"{type(model).__name__} mixes the segments of a pack: logits of one sample change by {change:.2g} of the largest "
            "with the sample before it"
        )
    return change


def second_logits(model: nn.Module, adapter: ModelAdapter, lengths: tuple[int, int], token: int) -> torch.Tensor:
    """Return the second text's logits [L, V], after a first text of one token repeated."""
    device = next(model.parameters()).device
    cu = np.array([0, lengths[0], sum(lengths)])
    positions = torch.from_numpy(pack_positions([SampleLayout.text(length) for length in lengths], cu, adapter))
    boundaries = torch.from_numpy(cu.astype(np.int32)).to(device)
    ids = torch.tensor([[token] * lengths[0] + [3 + k % 5 for k in range(lengths[1])]], device=device)
    offered: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": (positions if adapter.rope == "1d" else positions[:, None]).to(device),
        "mm_token_type_ids": torch.zeros_like(ids),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(lengths)).to(device)[None],
        "use_cache": False,
    }
    names = forward_arguments(model, adapter)
    output: torch.Tensor = model(**{name: value for name, value in offered.items() if name in names}).logits
    return output[0, lengths[0] :]

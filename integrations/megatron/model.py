"""What a Megatron-Core model needs before packs run exactly, and models that are refused."""

from typing import Any

from ...core import UnsafeModelError
from ...models.setup.unwrap import unwrap_model

_FUSED = "M-RoPE on packed rows needs apply_rope_fusion=False: the fused kernel counts positions from 0 in every segment"
_UNPREPARED = "M-RoPE with context parallelism needs prepare_model(model): Megatron-Core cuts the angles of the row twice"


class _Alone:
    """Stands for a context-parallel group of one where the angles of the whole row are wanted."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


def prepare_model(model: Any) -> Any:
    """Set a model with M-RoPE up, in place, so that context parallelism takes the right angles; call it before training.

    Megatron-Core cuts the angles of M-RoPE as if the row were one sequence, and attention cuts them once more, segment by
    segment: the loss is wrong without an error. Here every rank computes the angles of the whole row, and attention cuts.
    Models without M-RoPE are left as they are.

    Args:
        model: a `GPTModel`, or a model with one inside, wrapped or not.

    Returns:
        The same model.

    Raises:
        UnsafeModelError: M-RoPE with `apply_rope_fusion`, whose kernel counts positions from 0 in every segment.
    """
    for module in _mrope_modules(model):
        if module.config.apply_rope_fusion:
            raise UnsafeModelError(_FUSED)
        module.rotary_pos_emb.cp_group = _Alone()
    return model


def check_model(model: Any, cp_size: int) -> None:
    """Refuse a model whose packed rows would be computed wrongly.

    Args:
        model: unwrapped.
        cp_size: context-parallel size.

    Raises:
        UnsafeModelError: M-RoPE with fused rotary embeddings, or with context parallelism and without `prepare_model`.
    """
    for module in _mrope_modules(model):
        if module.config.apply_rope_fusion:
            raise UnsafeModelError(_FUSED)
        if cp_size > 1 and not isinstance(module.rotary_pos_emb.cp_group, _Alone):
            raise UnsafeModelError(_UNPREPARED)


def _mrope_modules(model: Any) -> list[Any]:
    inner = unwrap_model(model)
    return [module for module in inner.modules() if getattr(module, "position_embedding_type", None) == "mrope"]

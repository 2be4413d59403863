"""Whether a model may be called with packs of a family; the answer is kept, because looking through a model takes long."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ...core import SpelledMediaTokenError, UnsafeModelError
from ...models.adapter import ModelAdapter
from ...models.attention.recurrent import uses_varlen_kernels
from ...models.attention.rope import rope_threshold
from ...models.attention.varlen import VARLEN_ATTENTION
from ...models.registry import check_config
from ...models.setup.call_check import takes_bits
from ...models.setup.forward import forward_arguments
from ...models.setup.prepare import check_model, decoder_of, implementations_of, is_causal
from ...models.setup.unwrap import is_transformers_model
from .row import Row

MASK = "media_token_validity_mask"
#: Arguments of models that lay media and text out anew inside their forward pass, so that boundaries no longer fit.
_REPACKING = frozenset({"packing_kwargs", "num_image_tiles"})


class CallableModel(NamedTuple):
    """How an unwrapped model may be called.

    Attributes:
        names: arguments that its forward pass takes.
        is_causal: whether no token sees a later one.
        rope_threshold: length beyond which its rotary tables change, None where they do not.
        takes_bits: whether it takes fractional positions as their bits (`models.setup.call_check`).
    """

    names: frozenset[str]
    is_causal: bool = True
    rope_threshold: int | None = None
    takes_bits: bool = False


_accepted: "WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], ModelAdapter, CallableModel]]" = WeakKeyDictionary()


def check_callable(inner: nn.Module, adapter: ModelAdapter) -> CallableModel:
    """Return how an unwrapped model is called, after checking that it is safe to call.

    Only a model that passed is remembered, and only until its class, its attention implementation or its device changes.

    Raises:
        NotImplementedError: a model that packs by itself.
        UnsafeModelError: a model that would mix segments.
        ValueError: a model whose config is not the one that the adapter was made for.
    """
    state = _model_state(inner)
    known = _accepted.get(inner)
    if known is not None and known[0] == state and known[1] is adapter:
        return known[2]
    names = frozenset(forward_arguments(inner, adapter))
    check_structure(inner, names, is_megatron=is_megatron_module(inner))
    check_model(inner, adapter)
    check_config(adapter, getattr(inner, "config", None))
    found = CallableModel(names)
    if is_transformers_model(inner):
        decoder = decoder_of(inner)
        found = CallableModel(names, is_causal(decoder), rope_threshold(decoder), takes_bits(decoder))
    _accepted[inner] = state, adapter, found
    return found


def _model_state(inner: Any) -> tuple[object, ...]:
    """Return what the answer depends on and a user may change: class, device, attention implementations."""
    config = getattr(inner, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    implementations = [getattr(one, "_attn_implementation", None) for one in configs]
    device = next((parameter.device for parameter in inner.parameters()), None)
    return type(inner), device, *implementations


def check_structure(inner: Any, names: frozenset[str], *, is_megatron: bool) -> None:
    """Check a model by the names of its arguments.

    Args:
        inner: the unwrapped model.
        names: arguments of its forward pass.
        is_megatron: whether it gets its boundaries as `packed_seq_params`.

    Raises:
        NotImplementedError: a model that packs by itself.
        UnsafeModelError: a model of Megatron-Core that takes no boundaries.
    """
    name = type(inner).__name__
    if getattr(inner, "packs_internally", False) or names & _REPACKING:
        raise NotImplementedError(f"{name} packs by itself: the boundaries and masks of this pack would no longer fit")
    if is_megatron and "packed_seq_params" not in names:
        raise UnsafeModelError(f"{name} takes no packed_seq_params: its attention would run over the whole row")


def check_batch(batch: Row, inner: nn.Module, model: CallableModel) -> None:
    """Check that a model can be told what is special about one pack.

    Raises:
        SpelledMediaTokenError: text spells a media token, and the model cannot be told.
        UnsafeModelError: a shard, for a transformers model; a sample that padding makes long for the rotary tables; or tokens
            that see each other both ways, for a model that cannot be told.
    """
    threshold = model.rope_threshold
    if threshold is not None and batch.cu_seqlens_q is not batch.cu_seqlens_q_padded:
        real, padded = batch.cu_seqlens_q.diff(), batch.cu_seqlens_q_padded.diff()
        crossing = (real <= threshold) & (padded > threshold) & (real > 0)
        if bool(crossing.any()):
            at = int(crossing.nonzero()[0])
            raise UnsafeModelError(
                f"{type(inner).__name__} takes other rotary factors beyond {threshold} tokens, and padding makes a sample of "
                f"{int(real[at])} tokens {int(padded[at])} long: use align=1"
            )
    if batch.adapter.bidirectional is not None and "media_blocks" not in model.names:
        raise UnsafeModelError(
            f"{type(inner).__name__} takes no media_blocks: in {batch.adapter.name} some tokens see each other both ways, "
            "and its attention cannot be told"
        )
    if batch.key_index is not None:
        _check_groups(inner, model, threshold)
    if MASK not in model.names:
        check_spelled(batch.num_spelled, type(inner).__name__, MASK)
    if batch.cp_size > 1 and is_transformers_model(inner):
        shard = f"shard {batch.cp_rank} of {batch.cp_size}"
        raise UnsafeModelError(f"{type(inner).__name__} cannot run {shard}: its boundaries fit whole rows only")


def _check_groups(inner: nn.Module, model: CallableModel, threshold: int | None) -> None:
    """Check that a model can run packs in which groups share a prefix."""
    name = type(inner).__name__
    if "key_index" not in model.names:
        raise UnsafeModelError(
            f"{name} takes no key_index: branches would not see the prefix that their group shares. Set groups='together'"
        )
    if threshold is not None:
        raise UnsafeModelError(
            f"{name} takes other rotary factors beyond {threshold} tokens, so samples of a group have no prefix in common. Set "
            "groups='together'"
        )
    if not model.is_causal:
        raise UnsafeModelError(f"{name} lets tokens see later ones, so a prefix would see its branches. Set groups='together'")
    found = implementations_of(decoder_of(inner))
    if found != {VARLEN_ATTENTION} or uses_varlen_kernels(inner):
        raise UnsafeModelError(
            f"{name} runs on kernels ({', '.join(sorted(found))}) that cannot be told what branches see. "
            "evenpack.models.prepare_model(model, kernels=False) sets it up for groups that share a prefix"
        )


def check_spelled(num_spelled: int, model: str, lacking: str) -> None:
    """Refuse a pack whose text spells media tokens, for a model that cannot be told which ids are anchors.

    Args:
        num_spelled: tokens that text of the pack spells like a media token.
        model: its name.
        lacking: the arguments, of which the model takes none, that would tell it.

    Raises:
        SpelledMediaTokenError: there are such tokens.
    """
    if num_spelled:
        raise SpelledMediaTokenError(
            f"text of this pack spells a media token {num_spelled} times, and {model} goes by ids alone: it takes no "
            f"{lacking}. evenpack.models.prepare_model(model) makes a transformers model take it."
        )


def is_megatron_module(inner: nn.Module) -> bool:
    """Whether an unwrapped model is a Megatron-Core module, told without importing Megatron."""
    return any(cls.__name__ == "MegatronModule" and cls.__module__.startswith("megatron.") for cls in type(inner).__mro__)

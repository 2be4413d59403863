"""Set a transformers model up so that packs run exactly, and refuse one that would mix segments silently."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...core import UnsafeModelError
from ..adapter import ModelAdapter
from ..attention.boundaries import without_row
from ..attention.recurrent import has_varlen_kernels, is_isolatable, isolate_recurrent, leaking_layers
from ..attention.rope import check_rope, isolate_rope
from ..attention.varlen import VARLEN_ATTENTION, register_varlen_attention
from ..registry import adapter_for, family_of
from .call_check import take_bits, watch_calls
from .heads import check_head, score_samples
from .merge import merge_by_mask
from .unwrap import is_transformers_model, unwrap_model

#: Attention implementations, besides every flavour of flash attention, that honour `cu_seq_lens_q`.
_HONOURING: set[str] = {VARLEN_ATTENTION}


#: Kinds of layers, as configs name them, whose attention is full or a window, or that carry a state (checked by itself).
#: Others (chunks, indexers, compressed keys) pick what a token sees from the whole row.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "sparse", "dense"})


def prepare_model(model: nn.Module, adapter: ModelAdapter | None = None, *, kernels: bool = True) -> nn.Module:
    """Set a model up, in place, so that packs run exactly like their segments alone.

    Attention becomes `flash_attention_2` where it can run (a GPU, half precision, the package installed), else evenpack's own
    function. Gated DeltaNet runs per segment where its kernels are missing. Media features are placed by the mask of anchors.
    Call it on the device that trains, because what can run there decides, and before the model is wrapped or compiled. A model
    that is not a transformers model is returned as it is.

    A prepared model raises `UnsafeModelError` when it is called with a pack, but with less than `forward_kwargs` gives, or with
    the pack's targets as `labels`.

    Args:
        model: the model.
        adapter: its family; None for that of its config, where that is known.
        kernels: use flash attention and the kernels of recurrent layers where they can run. Groups that share a prefix
            (`groups="prompt"`) need evenpack's own functions: give False.

    Returns:
        The same model.

    Raises:
        UnsafeModelError: a model that cannot be made to keep segments apart.
    """
    inner = unwrap_model(model)
    if not is_transformers_model(inner):
        return model
    bidirectional = _has_blocks(inner, adapter)
    _set_attention(inner, flash=kernels and not bidirectional and _can_flash(inner))
    decoder = decoder_of(inner)
    modules = decoder_modules(decoder)
    if any(is_isolatable(module) and not (kernels and has_varlen_kernels(module)) for module in modules):
        isolate_recurrent(modules)
    isolate_rope(decoder)
    merge_by_mask(inner)
    _keep_row_from_towers(inner, modules)
    score_samples(inner)
    watch_calls(inner)
    if _has_fractional_positions(inner.config):
        take_bits(decoder)
    _check(inner, bidirectional, "prepare_model cannot change that")
    return model


def check_model(model: nn.Module, adapter: ModelAdapter | None = None) -> None:
    """Check that a model keeps the segments of a pack apart.

    A model that is not a transformers model passes: what it is given is what its signature names.

    Args:
        model: the model, wrapped or not.
        adapter: its family; None for that of its config, where that is known.

    Raises:
        UnsafeModelError: attention, named by its implementation, that would ignore the boundaries (sdpa, eager and flex
            attention take the varlen arguments and drop them), a recurrent layer that runs over the whole row, a kind of
            layer that picks what it attends to, rotary tables that follow the longest segment, attention that looks both ways
            in a model with media where a mask decides about that, a head that gives one value per row, or a decoder in which no
            attention layer was found: what is not known to keep segments apart is refused.
    """
    inner = unwrap_model(model)
    if is_transformers_model(inner):
        _check(inner, _has_blocks(inner, adapter), "evenpack.models.prepare_model(model) sets it up, if it can")


def _has_blocks(model: Any, adapter: ModelAdapter | None) -> bool:
    """Whether a model's family has blocks of tokens that see each other both ways."""
    if adapter is None:
        try:
            adapter = adapter_for(model.config)
        except ValueError:
            return False  # no family of ours
    return adapter.bidirectional is not None


def _check(inner: Any, bidirectional: bool, advice: str) -> None:
    name = type(inner).__name__
    check_head(inner, advice)
    decoder = decoder_of(inner)
    if not _uses_interface(inner, decoder):
        raise UnsafeModelError(
            f"{name} has attention of its own, which never sees the boundaries of segments: it cannot run packs"
        )
    modules = decoder_modules(decoder)
    leaking = leaking_layers(modules)
    if not leaking and "position_ids" not in inspect.signature(inner.forward).parameters:
        raise UnsafeModelError(
            f"{name} takes no position_ids: positions would run on through a pack instead of starting at 0 in every sample"
        )
    if not leaking and next(_attention_layers(decoder), None) is None:
        raise UnsafeModelError(
            f"{name} has no attention layer that goes through transformers' interface, and nothing else in it is known to keep "
            "the samples of a pack apart"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in modules):
        raise UnsafeModelError(f"{name} counts positions from its padding id on, and those of a pack start at 0")
    withheld = _withholding_layers(decoder)
    if withheld:
        raise UnsafeModelError(f"{name} does not hand the boundaries of segments on to its attention: {withheld}")
    for implementation in sorted(implementations_of(decoder)):
        if bidirectional and implementation != VARLEN_ATTENTION:
            raise UnsafeModelError(
                f"{name} uses attention implementation {implementation!r}, which takes no blocks of tokens that see each "
                f"other: tokens of an image would not see all of it. {advice}."
            )
        if implementation not in _HONOURING and "flash" not in implementation:
            raise UnsafeModelError(
                f"{name} uses attention implementation {implementation!r}, which ignores segment boundaries: "
                f"tokens would see other samples of the pack. {advice}."
            )
    kinds = getattr(getattr(decoder, "config", None), "layer_types", None)
    unknown = sorted(set(kinds or ()) - _KNOWN_LAYERS)
    if unknown:
        raise UnsafeModelError(f"{name} has layers that are not known to keep samples of a pack apart: {unknown}")
    looking = _looking_both_ways(inner, decoder)
    if looking and not bidirectional:
        raise UnsafeModelError(
            f"{name} leaves it to its mask which tokens see later ones, and a pack has no mask: {', '.join(looking)} of its "
            "decoder would look both ways (is_causal is False). An adapter with `bidirectional` says which tokens do"
        )
    if _drops_window(decoder):
        raise UnsafeModelError(f"{name} has a sliding window that it puts into its mask alone, and a pack has no mask")
    if leaking:
        raise UnsafeModelError(f"{name} has layers that carry a state from sample to sample of a pack: {leaking}. {advice}.")
    check_rope(decoder, name, advice)


def _has_fractional_positions(config: Any) -> bool:
    """Whether the positions of a model's family are fractions of a second."""
    try:
        return family_of(config).adapter.position_dtype == "float32"
    except ValueError:
        return False  # no family of ours; its positions are integers


def _set_attention(model: Any, *, flash: bool) -> None:
    """Choose the attention implementation of a transformers model, its towers included."""
    if flash:
        model.set_attn_implementation("flash_attention_2")
    elif implementations_of(decoder_of(model)) - {VARLEN_ATTENTION}:
        model.set_attn_implementation(register_varlen_attention())


def _can_flash(model: Any) -> bool:
    """Whether `flash_attention_2` can run this model where it is."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    parameter = next(model.parameters())
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return (
        parameter.device.type == "cuda"
        and half
        and getattr(model, "_supports_flash_attn", False)
        and is_flash_attn_2_available()
    )


def decoder_of(model: Any) -> nn.Module:
    """Return the text decoder of a transformers model; the whole model where it does not say."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    return decoder if isinstance(decoder, nn.Module) else model


def decoder_modules(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules of a text decoder without those of towers that some models (Phi-4) keep inside it."""
    kind = type(getattr(decoder, "config", None))

    def is_tower(module: Any) -> bool:
        return is_transformers_model(module) and type(module.config) is not kind

    children = [child for child in decoder.children() if not any(map(is_tower, child.modules()))]
    return [decoder, *dict.fromkeys(module for child in children for module in child.modules())]


def _keep_row_from_towers(model: nn.Module, decoder: list[nn.Module]) -> None:
    """Let the towers of a model never see the boundaries of the text row; again is fine."""
    known = set(decoder)
    for module in model.modules():
        is_tower = is_transformers_model(module) and known.isdisjoint(module.modules())
        if is_tower and _leave_row_out not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_leave_row_out, with_kwargs=True)


def _leave_row_out(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, without_row(kwargs)


def _uses_interface(model: Any, decoder: Any) -> bool:
    """Whether attention goes through transformers' attention interface, so that its implementation can be chosen."""
    asked = decoder if hasattr(decoder, "_can_set_attn_implementation") else model
    return bool(asked._can_set_attn_implementation())


def implementations_of(decoder: nn.Module) -> set[str]:
    """Return the attention implementations that a decoder's layers run with."""
    found = {implementation for _, implementation in _attention_layers(decoder)}
    return found or {str(getattr(getattr(decoder, "config", None), "_attn_implementation", None))}


def _attention_layers(decoder: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the attention layers of a decoder, each with the implementation that its config names."""
    for module in decoder_modules(decoder):
        config = getattr(module, "config", None)
        if config is not None and hasattr(module, "layer_idx") and type(module).__name__.endswith(("Attention", "MLA")):
            yield module, str(config._attn_implementation)


def is_causal(decoder: nn.Module) -> bool:
    """Whether no token of a decoder sees a later one: what lies behind a sample's last token then changes nothing in it."""
    # Where the config says so, transformers hands it to every attention layer as an argument, which wins.
    if not getattr(getattr(decoder, "config", None), "is_causal", True):
        return False
    return all(bool(getattr(module, "is_causal", True)) for module, _ in _attention_layers(decoder))


def _looking_both_ways(model: Any, decoder: Any) -> list[str]:
    """Return the classes of attention that say they look both ways, in a model with media whose config does not say so.

    PaliGemma's decoder is one: its mask is causal but for the prefix, and the layers expect that mask.
    """
    has_media = any(name.endswith("_config") and name != "text_config" for name in getattr(model.config, "sub_configs", {}))
    if not has_media or not getattr(getattr(decoder, "config", None), "is_causal", True):
        return []
    layers = [module for module, _ in _attention_layers(decoder)]
    return sorted({type(module).__name__ for module in layers if not getattr(module, "is_causal", True)})


def attention_lists(decoder: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of layers of a decoder, each of which has attention inside."""
    attention = {id(module) for module, _ in _attention_layers(decoder)}
    lists = [module for module in decoder_modules(decoder) if isinstance(module, nn.ModuleList)]
    return [one for one in lists if any(id(module) in attention for module in one.modules())]


def _withholding_layers(decoder: nn.Module) -> list[str]:
    """Return the class names of layers that keep further arguments, such as boundaries, from the attention inside them.

    Doge's attention is among them: it builds a mask from the whole row.
    """
    attention = {id(module) for module, _ in _attention_layers(decoder)}
    found = {type(module).__name__ for module, _ in _attention_layers(decoder) if hasattr(module, "prepare_dynamic_mask")}
    modules = decoder_modules(decoder)
    lists = {id(one) for one in modules if isinstance(one, nn.ModuleList) and attention & set(map(id, one))}
    holders = {type(one): one for one in modules if (attention | lists) & set(map(id, one.children()))}
    for holder in holders.values():
        if isinstance(holder, nn.ModuleList):
            continue
        forward = inspect.unwrap(holder.forward)
        kinds = inspect.signature(forward).parameters.values()
        name = next((one.name for one in kinds if one.kind is inspect.Parameter.VAR_KEYWORD), None)
        # Once in the signature, and once more in the call of the attention.
        if name is None or inspect.getsource(forward).count(f"**{name}") < 2:
            found.add(type(holder).__name__)
    return sorted(found)


def _drops_window(decoder: Any) -> bool:
    """Whether a decoder has a sliding window that its attention layers do not hand on to the attention function."""
    config = getattr(decoder, "config", None)
    window, longest = (getattr(config, name, None) for name in ("sliding_window", "max_position_embeddings"))
    if window is None or not hasattr(type(config), "sliding_window") or (longest is not None and window >= longest):
        return False
    layers = {type(module) for module, _ in _attention_layers(decoder)}
    return any("sliding_window" not in inspect.getsource(inspect.unwrap(layer.forward)) for layer in layers)

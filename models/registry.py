"""From a family's name, or a model's config, to its adapter."""

from collections.abc import Iterable
from typing import Any

import msgspec

from .adapter import ModelAdapter
from .configs import adapter_value, config_values, from_config
from .families.cohere_compass import COHERE_COMPASS
from .families.ernie4_5_vl import ERNIE4_5_VL_MOE
from .families.generic import GENERIC, generic_adapter
from .families.glm4v import GLM4V, GLM4V_MOE, GLM46V, GLM_OCR
from .families.paddleocr_vl import PADDLEOCR_VL
from .families.qwen2_5_vl import QWEN2_5_VL
from .families.qwen2_vl import QWEN2_VL
from .families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .families.qwen3_vl import COSMOS3_OMNI, QWEN3_VL, QWEN3_VL_MOE
from .families.qwen_omni import QWEN2_5_OMNI, QWEN3_OMNI_MOE
from .families.refused import reason_against
from .families.text import TEXT
from .family import Family

#: Every family by name; a new one is a file of its own and a line here.
FAMILIES: dict[str, Family] = {
    family.adapter.name: family
    for family in (
        TEXT,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        COSMOS3_OMNI,
        COHERE_COMPASS,
        QWEN3_5,
        QWEN3_5_MOE,
        GLM4V,
        GLM4V_MOE,
        GLM46V,
        GLM_OCR,
        ERNIE4_5_VL_MOE,
        PADDLEOCR_VL,
        QWEN2_5_OMNI,
        QWEN3_OMNI_MOE,
    )
}


def adapter_for(name_or_config: Any, *, trained_modalities: Iterable[str] | None = None) -> ModelAdapter:
    """Return the adapter of a model family.

    Args:
        name_or_config: a family's name (its constants are those of the released checkpoint, or of the config class in
            families with ordinary positions), or the config of a `transformers` model (its own values). "text", and the config
            of any model without media towers, give the text adapter.
        trained_modalities: modalities whose towers are trained; default: all that the family has.

    Raises:
        ValueError: a family that is not known, or a modality that the family does not have.

    Example:
        >>> adapter_for("qwen2_5_vl").token_count("image", (1, 4, 4))
        4
    """
    if isinstance(name_or_config, str):
        adapter = _named(name_or_config)
    elif getattr(name_or_config, "model_type", None) in GENERIC:
        _refuse_known(name_or_config.model_type)
        adapter = generic_adapter(name_or_config)
    else:
        adapter = from_config(family_of(name_or_config), name_or_config)
    return adapter if trained_modalities is None else _training_only(adapter, tuple(trained_modalities))


def _named(name: str) -> ModelAdapter:
    """Return the adapter of a family by its name."""
    if name in FAMILIES:
        return FAMILIES[name].adapter
    if name not in GENERIC:
        raise ValueError(f"unknown model family {name!r}; known: {', '.join((*FAMILIES, *GENERIC))}")
    from transformers import AutoConfig

    return generic_adapter(AutoConfig.for_model(name))


def register_family(family: Family) -> None:
    """Make a family of your own known to `adapter_for`, by its name and by the model types of its configs.

    Raises:
        ValueError: a name or a model type that is taken.
    """
    taken = {name for known in FAMILIES.values() for name in (known.adapter.name, *known.model_types)} | GENERIC.keys()
    twice = sorted(taken & {family.adapter.name, *family.model_types})
    if twice:
        raise ValueError(f"families known already: {twice}")
    FAMILIES[family.adapter.name] = family


def family_of(config: Any) -> Family:
    """Return the family that a config belongs to.

    Raises:
        ValueError: a config of no known family, or something that is no config.
    """
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"expected a family's name or a config with a model_type, got {type(config).__name__}")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    _refuse_known(model_type)
    has_towers = any(name.endswith("_config") and name != "text_config" for name in getattr(config, "sub_configs", {}))
    if has_towers or getattr(config, "is_encoder_decoder", False) or not hasattr(config, "vocab_size"):
        known = ", ".join((*FAMILIES, *GENERIC))
        raise ValueError(f"no adapter for model_type {model_type!r}; known: {known}, and text-only decoders")
    return TEXT


def _refuse_known(model_type: str) -> None:
    """Raise `ValueError` with the reason for a family that packs are known not to serve."""
    reason = reason_against(model_type)
    if reason is not None:
        raise ValueError(f"{model_type!r} cannot run packs: {reason}")


def _training_only(adapter: ModelAdapter, modalities: tuple[str, ...]) -> ModelAdapter:
    """Return the adapter with only some modalities' towers trained."""
    unknown = sorted(set(modalities) - set(adapter.media_tokens))
    if unknown:
        raise ValueError(f"{adapter.name} has no modalities {unknown}; it has {sorted(adapter.media_tokens)}")
    return msgspec.structs.replace(adapter, trained_modalities=modalities)


def check_config(adapter: ModelAdapter, config: Any) -> None:
    """Check that a model's config agrees with the adapter its data was prepared with.

    A config of another class, such as Megatron-Core's, says nothing about media and passes.

    Raises:
        ValueError: another family, or values that differ, each with both sides (for example 2 tokens per second in the
            adapter, 4 in the config).
    """
    if not isinstance(getattr(config, "model_type", None), str):
        return
    if config.model_type in GENERIC:
        _check_generic(adapter, generic_adapter(config))
        return
    family = family_of(config)
    if family.adapter.name != adapter.name:
        raise ValueError(f"the adapter is for {adapter.name!r}, the model's config for {family.adapter.name!r}")
    differing = [
        f"{attribute} is {adapter_value(adapter, attribute)!r} in the adapter, {value!r} in the config"
        for attribute, value in config_values(family, config).items()
        if attribute != "pad_token_id" and value != adapter_value(adapter, attribute)
    ]
    if differing:
        raise ValueError(
            f"adapter {adapter.name!r} does not fit the model: {'; '.join(differing)}. "
            "Use adapter_for(model.config) where the data was prepared for this model."
        )


def _check_generic(adapter: ModelAdapter, own: ModelAdapter) -> None:
    """Check an adapter against that of a config of a family without grids."""
    if own.name != adapter.name:
        raise ValueError(f"the adapter is for {adapter.name!r}, the model's config for {own.name!r}")
    parts = ("media_tokens", "anchors", "merge_size")
    differing = [
        f"{part} is {getattr(adapter, part)} in the adapter, {getattr(own, part)} in the config"
        for part in parts
        if getattr(adapter, part) != getattr(own, part)
    ]
    if differing:
        raise ValueError(f"adapter {adapter.name!r} does not fit the model: {'; '.join(differing)}")

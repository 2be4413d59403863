"""What a transformers config says about its family: read into an adapter, or compared with one."""

import math
from typing import Any

import msgspec

from ..core import FieldSet
from .adapter import ModelAdapter
from .family import Family


def from_config(family: Family, config: Any) -> ModelAdapter:
    """Return a family's adapter with the values of a config."""
    adapter, changes = family.adapter, config_values(family, config)
    entries: dict[str, dict[str, Any]] = {}
    for attribute in [key for key in changes if "." in key]:
        head, _, entry = attribute.partition(".")
        entries.setdefault(head, dict(getattr(adapter, head)))[entry] = changes.pop(attribute)
    replaced = msgspec.structs.replace(adapter, **changes, **entries)
    merge, frames = replaced.merge_size, replaced.temporal_merge
    grids = {"image": (1, merge, merge), "video": (frames, merge, merge)}
    return msgspec.structs.replace(
        replaced,
        fields=_with_sizes(_with_patch_dim(adapter.fields, adapter.patch_dim, replaced.patch_dim), family, config),
        dummy_grids={modality: grids.get(modality, grid) for modality, grid in adapter.dummy_grids.items()},
    )


def _with_patch_dim(fields: FieldSet, before: int, after: int) -> FieldSet:
    """Return the fields with the size of a patch changed: one row of `before` numbers, or [channels, side, side]."""
    if before == after:
        return fields
    return FieldSet(tuple(msgspec.structs.replace(f, shape=_resized(f.shape, before, after)) for f in fields))


def _with_sizes(fields: FieldSet, family: Family, config: Any) -> FieldSet:
    """Return the fields with the sizes that a config says."""
    sizes = {name: _lookup(config, path) for name, path in family.sizes.items()}
    known = (
        msgspec.structs.replace(f, shape=(sizes[f.name], *(f.shape or ())[1:])) if sizes.get(f.name) else f for f in fields
    )
    return FieldSet(tuple(known))


def _resized(shape: tuple[int | None, ...] | None, before: int, after: int) -> tuple[int | None, ...] | None:
    """Return a patch's shape for `after` numbers, and any other shape as it is."""
    if not shape or None in shape or math.prod(shape) != before:  # type: ignore[arg-type]
        return shape
    if len(shape) == 1:
        return (after,)
    side = math.isqrt(after // (shape[0] or 1))
    return (shape[0], side, side)


def config_values(family: Family, config: Any) -> dict[str, Any]:
    """Return what a config says about each adapter attribute, keyed like `Family.paths` plus `patch_dim`.

    Values that the config leaves out, or leaves at None, are absent.
    """
    found = {attribute: _lookup(config, path) for attribute, path in family.paths.items()}
    factors = [_lookup(config, path) for path in family.patch]
    if factors and all(isinstance(factor, int) for factor in factors):
        found["patch_dim"] = math.prod(factors)
    return {attribute: value for attribute, value in found.items() if value is not None}


def adapter_value(adapter: ModelAdapter, attribute: str) -> Any:
    """Return an adapter attribute by the key that `Family.paths` uses: `media_tokens.image` reads one entry."""
    head, _, entry = attribute.partition(".")
    value = getattr(adapter, head)
    return value.get(entry) if entry else value


def _lookup(config: Any, path: str) -> Any:
    """Follow a dotted path through a config's attributes; None where it ends early.

    An Omni config keeps the model that is trained, its thinker, one level down.
    """
    config = getattr(config, "thinker_config", config)
    for name in path.split("."):
        config = getattr(config, name, None)
    return config

"""What `PackingScheduler` is given, checked before any rank waits for another."""

from collections.abc import Iterable
from typing import Any

from ..core import Field
from ..models import ModelAdapter, adapter_for
from .comm.groups import ProcessGroups
from .config import SchedulerConfig
from .stages.describe import segment_limit


def adapter_of(adapter: Any) -> ModelAdapter:
    """Return a model family, which may be named.

    Raises:
        TypeError: something else.
        ValueError: a name that is not known.
    """
    if isinstance(adapter, str):
        return adapter_for(adapter)
    if not isinstance(adapter, ModelAdapter):
        raise TypeError(f"adapter must be a ModelAdapter (adapter_for(model.config)) or a family's name, got {_shown(adapter)}")
    return adapter


def fields_of(fields: Any) -> list[Field]:
    """Return further fields.

    Raises:
        TypeError: something else.
    """
    if not isinstance(fields, Iterable):
        raise TypeError(f"fields must be Field(...) declarations in a list, got {_shown(fields)}")
    declared = list(fields)
    for field in declared:
        if not isinstance(field, Field):
            raise TypeError(f"fields must be Field(...) declarations, got {_shown(field)} among them")
    return declared


def check_types(*, config: Any, groups: Any, cost: Any, planner: Any, callbacks: Any) -> None:
    """Raise `TypeError` for an argument of another type, naming what is needed and what was given."""
    for name, needed, value, fits in (
        ("config", "a SchedulerConfig (SchedulerConfig(**settings))", config, isinstance(config, SchedulerConfig)),
        ("groups", "a ProcessGroups (ProcessGroups.from_world())", groups, isinstance(groups, ProcessGroups | None)),
        ("cost", "a CostModel (CostModel.from_config(model.config))", cost, cost is None or _is_cost(cost)),
        ("planner", "a function with plan_step's signature", planner, callable(planner)),
        ("callbacks", "a list of functions", callbacks, isinstance(callbacks, Iterable)),
    ):
        if not fits:
            raise TypeError(f"{name} must be {needed}, got {_shown(value)}")


def check_capacity(config: SchedulerConfig, cp_size: int) -> None:
    """Raise `ValueError` for packs in which no sample has room."""
    align = config.segment_align(cp_size)
    if segment_limit(config, cp_size) >= align:
        return
    name, multiple = ("pack_align", config.pack_align) if (config.pack_align or 0) > align else ("align", align)
    given = f"max_tokens={config.max_tokens}" + (f" times cp_size={cp_size}" if cp_size > 1 else "")
    raise ValueError(f"{given} is below {name}={multiple}: no sample would fit into a pack")


def _is_cost(cost: Any) -> bool:
    return not isinstance(cost, type) and hasattr(cost, "phases") and callable(getattr(cost, "sample_cost", None))


def _shown(value: object) -> str:
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"

"""Set a scheduler up: check its arguments, let the ranks agree that theirs are the same, and build the pipeline."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from .._version import __version__  # pyright: ignore[reportMissingImports]
from ..core import Field
from ..models import ModelAdapter, adapter_for
from .comm.agreement import agree
from .comm.channel import Channel
from .comm.groups import ProcessGroups
from .config import SchedulerConfig
from .cost.calibrate import Costs
from .pipeline import Pipeline
from .plan import CODE_VERSION
from .prefetch import MainThreadExecutor
from .sources import Source
from .stages.blocks import BLOCK_VERSION
from .stages.collect import Reader
from .stages.describe import Describer
from .stages.gather import WIRE_VERSION, Gatherer, digest_of
from .stages.planning import Planner
from .step import StepContext


def build_pipeline(
    source: Source,
    *,
    adapter: ModelAdapter,
    config: SchedulerConfig,
    costs: Costs,
    groups: ProcessGroups,
    channel: Channel,
    describer: Describer,
    phases: Sequence[str],
    planner: Planner,
    executor: MainThreadExecutor | None,
    count_items: bool,
) -> Pipeline:
    """Return the pipeline, once the ranks have agreed on what it depends on; collective.

    Args:
        source: this rank's samples.
        adapter: the model family, with the user's fields.
        config: settings.
        costs: the cost models.
        groups: process groups.
        channel: connection to the peers.
        describer: describes samples.
        phases: names of the cost's phases.
        planner: a function with `plan_step`'s signature.
        executor: runs collectives on the training thread; None if they may run on the worker thread.
        count_items: `samples_per_step` counts items of the source.

    Raises:
        FieldMismatchError: ranks with different settings, fields or versions; raised on every rank.
    """
    terms = {
        "version": __version__,
        "wire_version": WIRE_VERSION,
        "block_version": BLOCK_VERSION,
        "planner": CODE_VERSION,
        "adapter": adapter.name,
        "phases": phases,
        "fields": {field.name: msgspec.to_builtins(field) for field in adapter.fields},
        "count_items": count_items,
        "towers": msgspec.to_builtins(costs.towers),
        **{key: value for key, value in msgspec.to_builtins(config).items() if key not in ("timeout", "prefetch")},
    }
    if channel.gathers_on_device:
        terms["prefetch"] = config.prefetch  # the order of the training thread's collectives follows from it
    format_digest = digest_of(agree(channel.steps, terms))
    context = StepContext(
        adapter=adapter,
        config=config,
        towers=costs.towers,
        rank=groups.rank,
        cp_size=groups.cp_size,
        num_replicas=groups.num_replicas,
        channel=channel,
        pin=torch.cuda.is_available(),
        is_writer=bool(groups.is_writer),
        planner=f"{getattr(planner, '__module__', '')}.{getattr(planner, '__qualname__', type(planner).__qualname__)}",
        phases=tuple(phases),
    )
    return Pipeline(
        reader=Reader(source, describer, config=config, count_items=count_items),
        describer=describer,
        channel=channel,
        gatherer=Gatherer(channel.steps, format_digest=format_digest, slots=config.samples_per_step or 64),
        planner=planner,
        costs=costs,
        context=context,
        executor=executor,
    )


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
    if config.capacity(cp_size) >= align:
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

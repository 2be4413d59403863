"""evenpack: online sequence packing for data-parallel training of vision-language models.

Example:
    >>> from evenpack import PackingScheduler, SchedulerConfig
    >>> config = SchedulerConfig(max_tokens=8, samples_per_step=4)
    >>> with PackingScheduler([{"input_ids": [1] * n} for n in (5, 3, 2, 6)], config=config, adapter="text") as scheduler:
    ...     [[batch.total_tokens for batch in step] for step in scheduler]
    [[8, 8]]
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .models import adapter_for, prepare_model
    from .scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig

__all__ = ["CostModel", "PackingScheduler", "ProcessGroups", "SchedulerConfig", "adapter_for", "prepare_model"]

_MODELS = ("adapter_for", "prepare_model")


def __getattr__(name: str) -> Any:
    # Loaded when asked for: torch takes seconds, and `evenpack --help` needs none of it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(".models" if name in _MODELS else ".scheduler", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

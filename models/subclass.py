"""Change what one module does without touching its class: by giving it a subclass.

A function assigned to `module.forward` would be shared by `copy.deepcopy` (an averaged copy of the model would then run the
original's weights); a subclass is not. The name stays, because `save_pretrained` writes it into the config.
"""

from collections.abc import Callable
from functools import cache
from typing import Any


def subclass(module: Any, mixin: type, forward: Callable[..., Any] | None = None) -> None:
    """Put a mixin before a module's class, and another forward pass where one is given; again is fine."""
    if not isinstance(module, mixin):
        cls: Any = type(module)
        module.__class__ = _subclassed(mixin, cls, forward)


@cache
def _subclassed(mixin: type, cls: type, forward: Callable[..., Any] | None) -> Any:
    """Return the class `cls` with a mixin before it; one and the same for equal arguments."""
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if forward is not None:
        members["forward"] = forward
    return type(cls.__name__, (mixin, cls), members)

"""What all adapters share: who writes, how often, and what happens where writing fails."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ...scheduler.plan.settings import check_int
from ...scheduler.stats import StepStats
from ...scheduler.step import PackedStep
from ...scheduler.telemetry.summary import Summary


class Metrics:
    """A callback that writes the figures of the steps since it last wrote; `Summary` says what they are.

    The first rank of the group writes; every rank has the same figures, but for its own times. Where writing fails, a warning
    says so once, nothing more is written, and training goes on.

    Args:
        every: steps between two entries.
        all_ranks: write on every rank; each rank then needs another place to write to.
        prefix: in front of each name.

    Raises:
        ValueError: `every` out of range.
        ImportError: the library is not installed.
    """

    #: The library, as it is imported and as it is installed.
    _module = ""

    def __init__(self, *, every: int = 1, all_ranks: bool = False, prefix: str = "evenpack/") -> None:
        check_int("every", every, 1)
        self._library = import_library(self._module) if self._module else None
        self._every, self._all_ranks, self._prefix = every, all_ranks, prefix
        self._since: list[StepStats] = []
        self._last_step = 0
        self._failed = False

    def __call__(self, step: PackedStep) -> None:
        """Take note of a step, and write where it is time."""
        if self._failed or not (step.is_writer or self._all_ranks):
            return
        self._since.append(step.stats)
        self._last_step = step.stats.step
        if len(self._since) >= self._every:
            self._flush()

    def close(self) -> None:
        """Write what was not written yet."""
        if self._since and not self._failed:
            self._flush()

    def _flush(self) -> None:
        since, self._since = self._since, []
        figures = {f"{self._prefix}{name}": value for name, value in Summary.of(since).as_dict().items() if value is not None}
        self._attempt(lambda: self.write(self._last_step, figures))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do something that may fail without ending the training."""
        try:
            action()
        except OSError as error:
            if not self._failed:
                text = f"{type(self).__name__}: no more metrics are written, training goes on: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            self._failed = True

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write an entry; adapters of other systems override this.

        Args:
            step: number of the last step in it.
            figures: name to value.
        """
        raise NotImplementedError


def import_library(name: str) -> Any:
    """Import an optional library.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): pip install 'evenpack[metrics]'") from error

"""Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from .base import Metrics


class WandbMetrics(Metrics):
    """Logs the scheduler's figures to a run of Weights & Biases, online or offline.

    They are plotted over `evenpack/step`, the scheduler's own count, so they do not disturb the step that your own
    `wandb.log` counts.

    Args:
        run: the run; default: the one that `wandb.init` began, which may be after this is made.
        commit: end the run's current history row; False leaves that to your own next `wandb.log`.
        **settings: see `Metrics`.

    Raises:
        ImportError: `wandb` is not installed.

    Example:
        >>> wandb.init(project="packing", mode="offline")                                  # doctest: +SKIP
        >>> PackingScheduler(loader, ..., callbacks=[WandbMetrics()])                      # doctest: +SKIP
    """

    _module = "wandb"

    def __init__(self, run: Any = None, *, commit: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self._run, self._commit, self._defined = run, commit, False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log one row.

        Raises:
            RuntimeError: no run was begun.
            OSError: the run takes no more.
        """
        assert self._library is not None
        run = self._run or self._library.run
        if run is None:
            raise RuntimeError("WandbMetrics has no run: call wandb.init() before the first step, or pass run=")
        try:
            if not self._defined:
                run.define_metric(f"{self._prefix}step")
                run.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}step")
                self._defined = True
            run.log({**figures, f"{self._prefix}step": step}, commit=self._commit)
        except self._library.Error as error:  # a run that was finished before the scheduler was closed, a lost service
            raise OSError(str(error)) from error

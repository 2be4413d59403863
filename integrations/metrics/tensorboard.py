"""TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...scheduler.step import PackedStep
from .base import Metrics


class TensorBoardMetrics(Metrics):
    """Writes the scheduler's figures as TensorBoard scalars.

    Args:
        log_dir: folder of the event files; or give a writer.
        writer: a `SummaryWriter` of your own, which stays open.
        **settings: see `Metrics`.

    Raises:
        ValueError: neither a folder nor a writer, or both.
        ImportError: TensorBoard is not installed.

    Example:
        >>> PackingScheduler(loader, ..., callbacks=[TensorBoardMetrics("runs/first")])    # doctest: +SKIP
    """

    _module = "torch.utils.tensorboard"

    def __init__(self, log_dir: str | Path | None = None, *, writer: Any = None, **settings: Any) -> None:
        if (log_dir is None) == (writer is None):
            raise ValueError("give either log_dir or writer")
        super().__init__(**settings)
        self._log_dir, self._own = log_dir, writer is None
        self._writer: Any = writer

    def __call__(self, step: PackedStep) -> None:
        """Take note of a step, and write where it is time."""
        if self._writer is None and (step.is_writer or self._all_ranks) and not self._failed:
            self._attempt(self._open)
        super().__call__(step)

    def _open(self) -> None:
        assert self._library is not None
        self._writer = self._library.SummaryWriter(str(self._log_dir))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """Write what was not written yet, and close the writer, unless it is yours."""
        super().close()
        if self._own and self._writer is not None:
            writer, self._writer = self._writer, None
            self._attempt(writer.close)

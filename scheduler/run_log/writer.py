"""`RunLog`: a callback that records every step of a run."""

import os
import time
import warnings
from pathlib import Path

from ..channel import Channel
from ..plan.config import check_int
from ..step import PackedStep, StepContext
from .header import RunHeader
from .reader import SUFFIX
from .recording import Recording


class RunLog:
    """Records every step: the lengths of all samples, the plan, bytes, times. Pass it as a callback of the scheduler.

    The first rank of the group writes, the others do nothing. A step takes 12 to 18 bytes a sample, and little of the
    training thread's time: a thread of its own encodes and writes. Each record is handed to the operating system as it is
    made; where the process is killed, the steps of its last tenth of a second may be missing, and `read_run` reads all
    others. A run that goes on from a checkpoint takes the same folder, in which it begins a new file. So does a scheduler that
    takes the log after another has closed it, as in a second `train()` of a Trainer; one that begins at step 0 takes the place
    of the steps before it, and a warning says so.

    Training goes on where recording cannot: where the disk is full, or gone, a warning says so once and nothing more is
    recorded; where the disk is too slow, a warning says so once and the steps that find no room are left out.

    Args:
        path: folder of the run, one for each scheduler at a time; it is made where it does not exist.
        max_bytes: a file above it is closed, and the next begun.
        max_files: files that are kept, the oldest removed; None keeps all.
        max_waiting: steps that may wait for the disk.

    Raises:
        ValueError: a setting out of range.
        OSError: the path cannot be a folder, or cannot be written to.

    Example:
        >>> PackingScheduler(loader, ..., callbacks=[RunLog("runs/first")])                # doctest: +SKIP
    """

    def __init__(
        self, path: str | Path, *, max_bytes: int = 256 << 20, max_files: int | None = None, max_waiting: int = 64
    ) -> None:
        check_int("max_bytes", max_bytes, 1)
        check_int("max_waiting", max_waiting, 1)
        if max_files is not None:
            check_int("max_files", max_files, 1)
        self.path = Path(path)
        _check_folder(self.path)
        self._max_bytes, self._max_files, self._max_waiting = max_bytes, max_files, max_waiting
        self._recording: Recording | None = None
        self._header: tuple[StepContext, RunHeader] | None = None
        self._refused: Channel | None = None
        self._last_step = -1
        self._failed = False

    def __repr__(self) -> str:
        return f"RunLog({str(self.path)!r})"

    def __call__(self, step: PackedStep) -> None:
        """Record a step.

        Raises:
            OSError: before the first step: the folder cannot be written to.
            RuntimeError: the log is another scheduler's, which has not closed it.
        """
        if not step.is_writer:
            return
        header = self._header_of(step)
        self._last_step = step.stats.step
        if self._failed:
            return
        if self._recording is None:
            self._begin(header)
        assert self._recording is not None
        self._failed = not self._recording.add((step.stats, step.table, step.plan, header))

    def close(self) -> None:
        """Write what waits and close the file; may be called again, and before another scheduler takes the log."""
        recording, self._recording = self._recording, None
        self._header, self._refused, self._last_step, self._failed = None, None, -1, False
        if recording is not None:
            recording.close()

    def _header_of(self, step: PackedStep) -> RunHeader:
        """Return what a step was planned under; a new one only where the scheduler, or what it plans under, is another."""
        if self._header is not None and step.stats.step <= self._last_step:
            if step.context.channel is self._header[0].channel:
                self.close()  # back to an earlier state
            else:
                self._refused = step.context.channel
        if step.context.channel is self._refused:
            raise RuntimeError(
                f"{self!r} is another scheduler's, which has not closed it: give each scheduler a log of its own"
            )
        if self._header is None or self._header[0] is not step.context:
            self._header = step.context, RunHeader.of(step, time.time())
        return self._header[1]

    def _begin(self, header: RunHeader) -> None:
        self._failed = True  # until the file is there
        self.path.mkdir(parents=True, exist_ok=True)
        if header.first_step == 0 and any(self.path.glob(f"*{SUFFIX}")):
            warnings.warn(
                f"{self!r}: a run begins anew where another is recorded: the folder is read as the new one, and the files "
                "before it one by one",
                RuntimeWarning,
                stacklevel=4,
            )
        self._recording = Recording(
            self.path,
            header,
            name=repr(self),
            max_bytes=self._max_bytes,
            max_files=self._max_files,
            max_waiting=self._max_waiting,
        )
        self._failed = False


def _check_folder(path: Path) -> None:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(f"the run log {path} cannot be a folder: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"the run log {path} cannot be written: {existing} is not writable")

"""`RunLog`: a callback that records every step of a run."""

import os
import threading
import time
import warnings
from collections import deque
from pathlib import Path

from ...comm.channel import Channel
from ...plan import SampleTable, StepPlan
from ...plan.settings import check_int
from ...stats import StepStats
from ...step import PackedStep, StepContext
from .record import RunHeader
from .store import StepWriter

#: Seconds that `close` waits for a disk that does not answer.
_PATIENCE = 30.0
#: Seconds between two looks at the steps that wait.
_PAUSE = 0.05


class RunLog:
    """Records every step: the lengths of all samples, the plan, bytes, times. Pass it as a callback of the scheduler.

    The first rank of the group writes, the others do nothing. A step takes 12 to 18 bytes a sample, and little of the
    training thread's time: a thread of its own encodes and writes to a sqlite database, which `read_run` and
    `evenpack report` may read meanwhile. If the process is killed, the steps of its last tenth of a second may be missing.
    A run that resumes from a checkpoint takes the same folder: steps that it trains again replace those before. So does a
    scheduler that takes the log after another has closed it, as in a second `train()` of a Trainer; one that begins at step 0
    replaces the steps before it for readers, and a warning says so.

    If recording fails, training continues: when the disk is full, or gone, a warning says so once and nothing more is
    recorded; when the disk is too slow, a warning says so once and the steps that find no room are left out.

    Args:
        path: folder of the run, one for each scheduler at a time; it is made if it does not exist.
        max_steps: steps that are kept, the oldest removed; None keeps all.
        max_waiting: steps that may wait for the disk.

    Raises:
        ValueError: a setting out of range.
        OSError: the path cannot be a folder, or cannot be written to.

    Example:
        >>> PackingScheduler(loader, ..., callbacks=[RunLog("runs/first")])                # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, max_steps: int | None = None, max_waiting: int = 64) -> None:
        check_int("max_waiting", max_waiting, 1)
        if max_steps is not None:
            check_int("max_steps", max_steps, 1)
        self.path = Path(path)
        _check_folder(self.path)
        self._max_steps, self._max_waiting = max_steps, max_waiting
        self._recording: _Recording | None = None
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
            ValueError: before the first step: it holds a run log of another version.
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
        """Write the steps that wait and close the file; may be called again, and before another scheduler takes the log."""
        recording, self._recording = self._recording, None
        self._header, self._refused, self._last_step, self._failed = None, None, -1, False
        if recording is not None:
            recording.close()

    def _header_of(self, step: PackedStep) -> RunHeader:
        """Return the settings a step was planned under; a new header only if the scheduler or its settings changed."""
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
        writer = StepWriter(self.path, header, self._max_steps)
        if header.first_step == 0 and writer.run:
            warnings.warn(
                f"{self!r} already holds a run; reading it returns only the new one, "
                f"and `read_run(path, run={writer.run - 1})` the one before",
                RuntimeWarning,
                stacklevel=4,
            )
        self._recording = _Recording(writer, repr(self), self._max_waiting)
        self._failed = False


class _Recording:
    """Takes steps on the training thread, and writes them on another."""

    def __init__(self, writer: StepWriter, name: str, max_waiting: int) -> None:
        self._writer, self._name, self._max_waiting = writer, name, max_waiting
        self._waiting: deque[tuple[StepStats, SampleTable, StepPlan, RunHeader]] = deque()
        self._ending = threading.Event()
        self._error: Exception | None = None
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="evenpack-run-log", daemon=True)
        self._thread.start()

    def add(self, item: tuple[StepStats, SampleTable, StepPlan, RunHeader]) -> bool:
        """Take a step; return whether recording continues."""
        if self._report_error():
            return False
        if len(self._waiting) < self._max_waiting:
            self._waiting.append(item)
            return True
        self._num_left_out += 1
        if self._num_left_out == 1:
            self._warn(
                f"the disk does not keep up, {self._max_waiting} steps wait: step {item[0].step} is not recorded, nor are "
                "others that find no room"
            )
        return True

    def close(self) -> None:
        self._ending.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warn(f"the disk did not answer within {_PATIENCE:g} s")
        self._report_error()
        if self._num_left_out:
            self._warn(f"{self._num_left_out} steps were not recorded")

    def _report_error(self) -> bool:
        error, self._error = self._error, None
        if error is not None:
            self._warn(f"recording stops, training continues: {error}")
        return error is not None

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self._name}: {text}", RuntimeWarning, stacklevel=4)

    def _run(self) -> None:
        """Write what waits, now and then. The training thread never wakes this one: that would delay its hand-out."""
        try:
            ending = False
            while not ending:
                ending = self._ending.wait(_PAUSE)
                if steps := list(self._waiting):
                    self._writer.write(steps)
                    for _ in steps:
                        self._waiting.popleft()
        except Exception as error:
            self._error = error
            self._waiting.clear()
        finally:
            self._writer.close()


def _check_folder(path: Path) -> None:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(f"the run log {path} cannot be a folder: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"the run log {path} cannot be written: {existing} is not writable")

"""`RunLog`: a callback that records every step of a run, on a thread of its own."""

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from ..plan import SampleTable, StepPlan
from ..plan.config import check_int
from ..stats import StepStats
from ..step import PackedStep, StepContext
from .frames import PREAMBLE, frame
from .header import RunHeader
from .reader import SUFFIX
from .record import encode_header, encode_step

_Item = tuple[StepStats, SampleTable, StepPlan, RunHeader]
#: Seconds that `close` waits for a disk that does not answer.
_PATIENCE = 30.0
#: Seconds between two looks at what waits.
_PAUSE = 0.05


class RunLog:
    """Records every step: the lengths of all samples, the plan, bytes, times. Pass it as a callback of the scheduler.

    The first rank of the group writes, the others do nothing. A step takes 12 to 18 bytes a sample, and little of the
    training thread's time: a thread of its own encodes and writes. Each record is handed to the operating system as it is
    made; where the process is killed, the steps of its last tenth of a second may be missing, and `read_run` reads all
    others. A run that goes on from a checkpoint takes the same folder, in which it begins a new file.

    Training goes on where recording cannot: where the disk is full, or gone, a warning says so once and nothing more is
    recorded; where the disk is too slow, a warning says so once and the steps that find no room are left out.

    Args:
        path: folder of the run, one for each scheduler; it is made where it does not exist.
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
        self._max_bytes, self._max_files = max_bytes, max_files
        self._waiting: deque[_Item] = deque()
        self._max_waiting = max_waiting
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: _File | None = None
        self._header: tuple[StepContext, RunHeader] | None = None
        self._error: Exception | None = None
        self._num_left_out = 0
        self._failed = self._closed = False

    def __repr__(self) -> str:
        return f"RunLog({str(self.path)!r})"

    def __call__(self, step: PackedStep) -> None:
        """Record a step.

        Raises:
            OSError: before the first step: the folder cannot be written to.
            RuntimeError: the log is closed.
        """
        if self._closed:
            raise RuntimeError(f"{self!r} is closed: give each scheduler a log of its own")
        if not step.is_writer or self._has_failed():
            return
        header = self._header_of(step)
        if self._thread is None:
            self._start(header)
        if len(self._waiting) < self._max_waiting:
            self._waiting.append((step.stats, step.table, step.plan, header))
            return
        self._num_left_out += 1
        if self._num_left_out == 1:
            warnings.warn(
                f"{self!r}: the disk does not keep up, {self._max_waiting} steps wait: step {step.stats.step} is not "
                "recorded, nor are others that find no room",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Write what waits and close the file; may be called again."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._end_thread()
        self._has_failed()
        if self._num_left_out:
            warnings.warn(f"{self!r}: {self._num_left_out} steps were not recorded", RuntimeWarning, stacklevel=2)

    def _end_thread(self) -> None:
        assert self._thread is not None
        self._ending.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            warnings.warn(f"{self!r}: the disk did not answer within {_PATIENCE:g} s", RuntimeWarning, stacklevel=3)

    def _header_of(self, step: PackedStep) -> RunHeader:
        """Return what a step was planned under; a new one only where the scheduler, or what it plans under, is another."""
        if self._header is None or self._header[0] is not step.context:
            self._header = step.context, RunHeader.of(step, time.time())
        return self._header[1]

    def _start(self, header: RunHeader) -> None:
        self._failed = True  # until the file is there
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = _File(self.path, header)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="evenpack-run-log", daemon=True)
        self._thread.start()

    def _has_failed(self) -> bool:
        error, self._error = self._error, None
        if error is not None:
            self._failed = True
            warnings.warn(f"{self!r}: recording stops, training goes on: {error}", RuntimeWarning, stacklevel=3)
        return self._failed

    def _run(self) -> None:
        """Write what waits, now and then. Nobody wakes this thread: it would delay the one that hands out a step."""
        try:
            ending = False
            while not ending:
                ending = self._ending.wait(_PAUSE)
                while self._waiting:
                    self._write(*self._waiting[0])
                    self._waiting.popleft()
        except Exception as error:
            self._error = error
            self._waiting.clear()
        finally:
            assert self._file is not None
            self._file.close()

    def _write(self, stats: StepStats, table: SampleTable, plan: StepPlan, header: RunHeader) -> None:
        assert self._file is not None
        self._file.use(header)
        record = frame(encode_step(stats, table, plan, self._file.header.number))
        if self._file.num_steps and self._file.size + len(record) > self._max_bytes:
            self._file.close()
            self._file = self._file.next(stats.step)
            record = frame(encode_step(stats, table, plan))
            self._remove_old()
        self._file.append(record)

    def _remove_old(self) -> None:
        if self._max_files is not None:
            for file in sorted(self.path.glob(f"*{SUFFIX}"))[: -self._max_files]:
                file.unlink(missing_ok=True)


class _File:
    """One file of a log: always whole records, unless the process dies while it writes one."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        self._folder, self.header = folder, msgspec.structs.replace(header, number=0)
        self._file = _open_next(folder)
        self.size = self.num_steps = 0
        try:
            self._write(PREAMBLE + frame(encode_header(self.header)))
        except BaseException:
            self._file.close()
            raise

    def next(self, first_step: int) -> "_File":
        """Begin the file after this one."""
        return _File(self._folder, msgspec.structs.replace(self.header, first_step=first_step, started=time.time()))

    def use(self, header: RunHeader) -> None:
        """Begin steps that were planned under a header, which is written where it says something new."""
        if not self.header.says_the_same(header):
            self.header = msgspec.structs.replace(header, number=self.header.number + 1)
            self._write(frame(encode_header(self.header)))

    def append(self, record: bytes) -> None:
        """Write a record; one that cannot be written whole is taken back."""
        self._write(record)
        self.num_steps += 1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError:
            with contextlib.suppress(OSError):  # where not even that works, readers leave out the half record
                self._file.truncate(self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        """Close it."""
        self._file.close()


def _open_next(folder: Path) -> IO[bytes]:
    """Open the file after the last one, unbuffered; never one that exists."""
    numbers = [int(file.stem) for file in folder.glob(f"*{SUFFIX}") if file.stem.isdigit()]
    number = max(numbers, default=-1) + 1
    while True:
        try:
            return open(folder / f"{number:06d}{SUFFIX}", "xb", buffering=0)
        except FileExistsError:
            number += 1


def _check_folder(path: Path) -> None:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(f"the run log {path} cannot be a folder: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"the run log {path} cannot be written: {existing} is not writable")

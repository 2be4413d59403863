"""What is written between the opening of a run log and its end: files one after the other, by a thread of its own."""

import contextlib
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from ..plan import SampleTable, StepPlan
from ..stats import StepStats
from .frames import PREAMBLE, frame
from .header import RunHeader
from .reader import SUFFIX
from .record import encode_header, encode_step

Item = tuple[StepStats, SampleTable, StepPlan, RunHeader]
#: Seconds that `close` waits for a disk that does not answer.
_PATIENCE = 30.0
#: Seconds between two looks at what waits.
_PAUSE = 0.05


class Recording:
    """Takes steps, and writes them on a thread.

    Args:
        folder: of the files; it exists.
        header: of the first step.
        name: whose recording it is, for warnings.
        max_bytes: a file above it is closed, and the next begun.
        max_files: files that are kept, the oldest removed; None keeps all.
        max_waiting: steps that may wait for the disk.

    Raises:
        OSError: the first file cannot be written.
    """

    def __init__(
        self, folder: Path, header: RunHeader, *, name: str, max_bytes: int, max_files: int | None, max_waiting: int
    ) -> None:
        self._folder, self._name = folder, name
        self._max_bytes, self._max_files, self._max_waiting = max_bytes, max_files, max_waiting
        self._waiting: deque[Item] = deque()
        self._ending = threading.Event()
        self._error: Exception | None = None
        self._num_left_out = 0
        self._file = RunFile(folder, header)
        self._thread = threading.Thread(target=self._run, name="evenpack-run-log", daemon=True)
        self._thread.start()

    def add(self, item: Item) -> bool:
        """Take a step; return whether recording goes on."""
        if not self._goes_on():
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
        """Write what waits and close the file."""
        self._ending.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warn(f"the disk did not answer within {_PATIENCE:g} s")
        self._goes_on()
        if self._num_left_out:
            self._warn(f"{self._num_left_out} steps were not recorded")

    def _goes_on(self) -> bool:
        error, self._error = self._error, None
        if error is not None:
            self._warn(f"recording stops, training goes on: {error}")
        return error is None

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self._name}: {text}", RuntimeWarning, stacklevel=4)

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
            self._file.close()

    def _write(self, stats: StepStats, table: SampleTable, plan: StepPlan, header: RunHeader) -> None:
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
            for file in sorted(self._folder.glob(f"*{SUFFIX}"))[: -self._max_files]:
                file.unlink(missing_ok=True)


class RunFile:
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

    def next(self, first_step: int) -> "RunFile":
        """Begin the file after this one."""
        return RunFile(self._folder, msgspec.structs.replace(self.header, first_step=first_step, started=time.time()))

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

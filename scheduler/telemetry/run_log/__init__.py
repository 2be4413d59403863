"""The run log: every step of a run on disk, to be read and planned again."""

from .record import RecordedStep, RunHeader
from .replay import replay, replay_differences
from .store import read_run
from .writer import RunLog

__all__ = ["RecordedStep", "RunHeader", "RunLog", "read_run", "replay", "replay_differences"]

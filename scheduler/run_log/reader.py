"""Read a run log, across its files, cut-off tails and resumes."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from .frames import read_frames
from .header import RunHeader
from .record import LostHeaderError, RecordedStep, decode

SUFFIX = ".steps"


def read_run(path: str | Path) -> Iterator[RecordedStep]:
    """Return the recorded steps of a run, in order.

    Steps that a resume from a checkpoint trained again come once, as they were trained last. A record that was cut off or
    damaged is left out, with a warning that says where.

    Args:
        path: folder of a `RunLog`, or one of its files.

    Raises:
        ValueError: no run log, or one of another version.
        OSError: a file that cannot be read.

    Example:
        >>> steps = list(read_run("runs/first"))                                           # doctest: +SKIP
        >>> steps[0].stats.imbalance, len(steps[0].table)                                  # doctest: +SKIP
    """
    files = run_files(path)
    headers = [_header_of(file) for file in files]
    return _read(files, headers)


def run_files(path: str | Path) -> list[Path]:
    """Return the files of a run log, oldest first.

    Raises:
        ValueError: there are none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: name the folder of a RunLog")
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(f"{path} holds no run log (no file *{SUFFIX})")
    return files


def _header_of(file: Path) -> RunHeader | None:
    for payload in read_frames(file, []):
        found = _decoded(file, payload, None)
        if isinstance(found, RunHeader):
            return found
    return None


def _read(files: Sequence[Path], headers: Sequence[RunHeader | None]) -> Iterator[RecordedStep]:
    for position, file in enumerate(files):
        later = [header.first_step for header in headers[position + 1 :] if header is not None]
        limit = min(later, default=None)
        header: RunHeader | None = headers[position]
        damage: list[str] = []
        num_lost = 0
        for payload in read_frames(file, damage):
            found = _decoded(file, payload, header)
            if found is None:
                num_lost += 1
            elif isinstance(found, RunHeader):
                header = found
            elif limit is None or found.stats.step < limit:
                yield found
        if num_lost:
            damage.append(f"{file}: {num_lost} steps are not read: the settings they were planned under are lost")
        for line in damage:
            warnings.warn(line, RuntimeWarning, stacklevel=2)


def _decoded(file: Path, payload: bytes, header: RunHeader | None) -> RunHeader | RecordedStep | None:
    """Return what a payload holds; None for a step whose header was lost."""
    try:
        return decode(payload, header)
    except LostHeaderError:
        return None
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: a record of another version: {error}") from error

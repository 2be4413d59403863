"""The file of a run log: one sqlite database, a crash leaves a readable file, and a reader may look while it is written.

The rollback journal is sqlite's default, and the only one that works on network file systems. While a reader holds its lock,
the writer waits, so readers take a few rows at a time.
"""

import os
import sqlite3
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...plan import SampleTable, StepPlan
from ...stats import StepStats
from .record import RecordedStep, RunHeader, decode_step, encode_step

FILE = "run.sqlite"
#: Version of the tables and of the records in them.
_FORMAT_VERSION = 2
_APPLICATION_ID = 0x45565041
_SCHEMA = f"""
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {_FORMAT_VERSION};
    CREATE TABLE headers (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, first_step INTEGER NOT NULL, content BLOB NOT NULL);
    CREATE TABLE steps (
        id INTEGER PRIMARY KEY, step INTEGER NOT NULL, header INTEGER NOT NULL, checksum INTEGER NOT NULL, record BLOB NOT NULL
    );
"""
#: A later run that began earlier trained these steps again.
_ROWS = """
    SELECT s.id, s.step, s.header, s.checksum, s.record FROM steps s JOIN headers h ON h.id = s.header
    WHERE s.id > :after AND h.run <= :run AND NOT EXISTS (
        SELECT * FROM headers later WHERE later.run > h.run AND later.run <= :run AND later.first_step <= s.step
    ) ORDER BY s.id LIMIT 64
"""
#: Seconds that one side waits while the other holds the file.
_PATIENCE = 30.0


class StepWriter:
    """Appends steps to the file of a folder, as a run that follows those in it.

    Args:
        folder: it exists.
        header: of the first step.
        max_steps: steps that are kept, the oldest removed; None keeps all.

    Raises:
        ValueError: the file is no run log, or one of another version.
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, header: RunHeader, max_steps: int | None = None) -> None:
        file, self._max_steps = folder / FILE, max_steps
        is_new = not file.exists() or not file.stat().st_size
        try:
            # Opened here, so that an error comes at once, and used on the thread that writes.
            self.connection = sqlite3.connect(file, timeout=_PATIENCE, check_same_thread=False, isolation_level=None)
            try:
                if not is_new:
                    _check_version(self.connection, file)
                self.connection.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA.split(";") if is_new else ():
                    self.connection.execute(statement)
                query = "SELECT coalesce(max(run), -1) + 1 FROM headers"
                self.run: int = self.connection.execute(query).fetchone()[0]
                self._use(header)
                self.connection.execute("COMMIT")
            except BaseException:
                self.connection.close()
                raise
        except sqlite3.OperationalError as error:
            raise OSError(f"{file}: {error}") from error

    def write(self, steps: list[tuple[StepStats, SampleTable, StepPlan, RunHeader]]) -> None:
        """Append steps, all of them or none.

        Raises:
            sqlite3.Error: the disk is full, or gone.
        """
        rows = []
        with self.connection:  # commits, or takes back
            self.connection.execute("BEGIN IMMEDIATE")
            for stats, table, plan, header in steps:
                if not header.says_the_same(self.header):
                    self._use(header)
                record = encode_step(stats, table, plan)
                rows.append((stats.step, self._number, zlib.crc32(record), record))
            self.connection.executemany("INSERT INTO steps (step, header, checksum, record) VALUES (?, ?, ?, ?)", rows)
            if self._max_steps is not None:
                self.connection.execute("DELETE FROM steps WHERE id <= (SELECT max(id) FROM steps) - ?", (self._max_steps,))

    def _use(self, header: RunHeader) -> None:
        row = self.run, header.first_step, msgspec.msgpack.encode(header)
        query = "INSERT INTO headers (run, first_step, content) VALUES (?, ?, ?)"
        self.header, self._number = header, self.connection.execute(query, row).lastrowid

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def read_run(path: str | Path, *, run: int | None = None) -> Iterator[RecordedStep]:
    """Return the recorded steps of a run, in order.

    Steps that a resume from a checkpoint trained again come once, as they were trained last. A record that was damaged is left
    out, with a warning that names the step.

    Args:
        path: folder of a `RunLog`, or the file in it.
        run: number of the last run to read, from 0, where a later one in the same folder took its place; None reads all.

    Raises:
        ValueError: no run log, or one of another version.
        OSError: a file that cannot be read.

    Example:
        >>> steps = list(read_run("runs/first"))                                           # doctest: +SKIP
        >>> steps[0].stats.imbalance, len(steps[0].table)                                  # doctest: +SKIP
    """
    file = log_file(path)
    # Writable where that is possible: what a writer that was killed left half done is taken back.
    mode = "rw" if os.access(file, os.W_OK) and os.access(file.parent, os.W_OK) else "ro"
    try:
        connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode={mode}", timeout=_PATIENCE, uri=True)
        _check_version(connection, file)
    except sqlite3.OperationalError as error:
        raise OSError(f"{file}: {error}") from error
    return _read(connection, file, run)


def log_file(path: str | Path) -> Path:
    """Return the file of a run log, named itself or by its folder.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: name the folder of a RunLog")
    if not (path / FILE).is_file():
        raise ValueError(f"{path} holds no run log (no file {FILE})")
    return path / FILE


def _read(connection: sqlite3.Connection, file: Path, run: int | None) -> Iterator[RecordedStep]:
    headers: dict[int, RunHeader] = {}
    last = 2**62 if run is None else run
    try:
        after = 0
        while rows := connection.execute(_ROWS, {"after": after, "run": last}).fetchall():
            for after, step, number, checksum, record in rows:  # noqa: B007
                if zlib.crc32(record) != checksum:
                    warnings.warn(f"{file}: step {step} is damaged and not read", RuntimeWarning, stacklevel=2)
                    continue
                if number not in headers:
                    query = "SELECT content FROM headers WHERE id = ?"
                    headers[number] = RunHeader.decode(connection.execute(query, (number,)).fetchone()[0])
                yield decode_step(record, headers[number])
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    finally:
        connection.close()


def _check_version(connection: sqlite3.Connection, file: Path) -> None:
    try:
        pragmas = ("PRAGMA application_id", "PRAGMA user_version")
        application, version = (connection.execute(pragma).fetchone()[0] for pragma in pragmas)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{file} is not a run log: {error}") from None
    if application != _APPLICATION_ID:
        raise ValueError(f"{file} is not a run log")
    if version != _FORMAT_VERSION:
        raise ValueError(f"{file} is a run log of version {version}, this evenpack reads version {_FORMAT_VERSION}")

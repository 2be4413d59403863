"""Files and folders as columns: each format by its own library, read no further than it is asked for."""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

#: Rows of an Arrow table that are looked at together.
_CHUNK = 20_000


class Source:
    """Rows of one format.

    Args:
        names: its columns; none for bare numbers.
        count: rows.
        column: from a column's name (None for bare numbers) to its `count` values, and whether it is about media: those
            may be missing (None) and are given as they are, while lists of others may come as their lengths.
        where: from a row to its place, for people.
    """

    def __init__(
        self, names: Sequence[str], count: int, column: Callable[[str | None, bool], Any], where: Callable[[int], str]
    ) -> None:
        self.names = tuple(names)
        self.column = column
        self.where = where
        self._count = count

    def __len__(self) -> int:
        return self._count


def open_source(path: Path) -> Source:
    """Open a file or folder by its name and content.

    Raises:
        ValueError: it does not exist, or is of no known format.
    """
    if path.is_dir():
        return _open_dataset_folder(path)
    if not path.is_file():
        raise ValueError(f"no file or folder {path}; a built-in workload is written workload:NAME, for example workload:sft")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _open_csv(path, "\t" if suffix == ".tsv" else ",")
    if suffix in (".parquet", ".pq"):
        return _open_parquet(path)
    if suffix in (".jsonl", ".ndjson", ".json", ".txt"):
        return _open_json(path)
    raise ValueError(
        f"{path}: of no known format; lengths come as .jsonl, .json, .txt (a number a line), .csv, .tsv, .parquet, "
        "or a folder that `datasets` or `evenpack index` wrote"
    )


def _open_json(path: Path) -> Source:
    """Lines of JSON, or one JSON list: numbers, or objects."""
    text = path.read_bytes()
    whole = text.lstrip()[:1] == b"["
    try:
        rows = msgspec.json.decode(text) if whole else msgspec.json.Decoder().decode_lines(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        number, line = (0, "") if whole else _broken_line(text)
        place = f"{path}, line {number}" if number else str(path)
        if line and line[0] not in '{["':
            raise ValueError(f"{place}: a length is a whole number, got {line!r:.60}") from None
        raise ValueError(f"{place}: no JSON: {error}") from None
    lines: list[int] = []

    def where(row: int) -> str:
        if whole:
            return f"{path}, entry {row}"
        if not lines:
            lines.extend(number for number, line in enumerate(text.splitlines(), 1) if line.strip())
        return f"{path}, line {lines[row]}"

    objects = bool(rows) and isinstance(rows[0], dict)

    def column(name: str | None, media: bool) -> Any:
        if not objects:
            return rows
        values = []
        for row, value in enumerate(rows):
            if not isinstance(value, dict) or (name not in value and not media):
                raise ValueError(f"{where(row)}: no {name!r}")
            values.append(value.get(name))
        return values

    names = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    return Source(tuple(names), len(rows), column, where)


def _broken_line(text: bytes) -> tuple[int, str]:
    """Return number and text of the first line that is no JSON; 0 and nothing where none is."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return number, line.strip().decode(errors="replace")
    return 0, ""


def _open_csv(path: Path, delimiter: str) -> Source:
    """Comma- or tab-separated values, with a header; or one column of numbers without."""
    rows: list[list[str]] = []
    lines: list[int] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter)
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    bare = bool(rows) and len(rows[0]) == 1 and _is_number(rows[0][0])
    names = () if bare or not rows else tuple(name.strip() for name in rows[0])
    body, places = (rows, lines) if bare else (rows[1:], lines[1:])

    def where(row: int) -> str:
        return f"{path}, line {places[row]}"

    def column(name: str | None, media: bool) -> list[str]:
        index = 0 if name is None else names.index(name)
        for row, values in enumerate(body):
            if index >= len(values):
                raise ValueError(f"{where(row)}: {len(values)} values, and the header has {len(names)}")
        return [values[index] for values in body]

    return Source(names, len(body), column, where)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _open_parquet(path: Path) -> Source:
    """A Parquet file; only the columns that are asked for are read."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
        from pyarrow import ArrowInvalid
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    return Source(
        file.schema_arrow.names,
        file.metadata.num_rows,
        lambda name, media: _arrow_values((batch.column(0) for batch in file.iter_batches(_CHUNK, columns=[name])), media),
        lambda row: f"{path}, row {row}",
    )


def _open_dataset_folder(path: Path) -> Source:
    """A folder that `datasets.Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = msgspec.json.decode((path / "dataset_dict.json").read_bytes())["splits"]
        raise ValueError(f"{path} holds several splits: name the folder of one, for example {path / splits[0]}")
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is a folder, and neither a saved `datasets` dataset nor an offline index")
    try:
        from datasets import load_from_disk  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"{path} needs datasets: pip install datasets") from None
    table: Any = load_from_disk(str(path))

    def column(name: str | None, media: bool) -> Any:
        chosen = table.select_columns([name]).with_format("arrow")
        return _arrow_values((chunk for part in chosen.iter(_CHUNK) for chunk in part.column(0).chunks), media)

    return Source(table.column_names, len(table), column, lambda row: f"{path}, row {row}")


def _arrow_values(chunks: Iterator[Any], media: bool) -> Any:
    """Return an Arrow column as numbers where it has some, else as a list; lists by their lengths unless it is of media."""
    import pyarrow as pa
    import pyarrow.compute  # type: ignore[import-untyped]

    compute: Any = pyarrow.compute  # its functions are made while it is imported
    parts: list[Any] = []
    for chunk in chunks:
        kind = chunk.type
        if isinstance(chunk, pa.ExtensionArray):
            chunk, kind = chunk.storage, chunk.storage.type
        if not media and (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            chunk, kind = compute.list_value_length(chunk), pa.int64()
        if chunk.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            parts.append(chunk.to_pylist())
        else:
            parts.append(chunk.to_numpy(zero_copy_only=False))
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return [value.item() if isinstance(value, np.generic) else value for part in parts for value in part]

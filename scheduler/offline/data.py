"""Datasets in files, by number: lines of JSON, tables of Hugging Face."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, overload

import numpy as np


class JsonLines(Sequence[dict[str, Any]]):
    """A file with one example as JSON per line, read by number; only the places of the lines are kept.

    Args:
        path: the file.

    Raises:
        ValueError: no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise ValueError(f"no file {path}")
        places, at = [], 0
        with self._path.open("rb") as file:
            for line in file:
                if line.strip():
                    places.append(at)
                at += len(line)
        self._places = np.array(places, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(int(self._places[number]))
            line = file.readline()
        try:
            found: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path}, example {number}: {error}") from error
        return found


def open_dataset(path: str | Path) -> Sequence[Any]:
    """Open a dataset of files: lines of JSON, or a folder that `datasets` saved.

    Raises:
        ValueError: neither of them.
    """
    path = Path(path)
    if path.is_dir():
        from datasets import Dataset, Features, Image, List, load_from_disk  # type: ignore[import-untyped]

        table = load_from_disk(str(path))
        if not isinstance(table, Dataset):
            raise ValueError(f"{path} holds several splits: name the folder of one")
        features: Features = table.features
        for name, feature in features.items():  # images stay files in memory: their pixels are not needed
            if isinstance(feature, Image):
                table = table.cast_column(name, Image(decode=False))
            elif isinstance(feature, List) and isinstance(feature.feature, Image):
                table = table.cast_column(name, List(Image(decode=False)))
        rows: Any = table
        return cast(Sequence[Any], rows)
    return JsonLines(path)

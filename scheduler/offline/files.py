"""The files of an offline index: columns that are mapped into memory, and a header that says what they were made from."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
HEADER = "index.json"
#: Column to its file and dtype. Grids are laid end to end, sample i's from `grid_starts[i]` to `grid_starts[i + 1]`.
COLUMNS: dict[str, str] = {"tokens": "int32", "grid_starts": "int64", "grids": "int32"}
#: Examples that a dataset's fingerprint is taken from.
PROBES = 64


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(part, path)


def read_header(folder: Path) -> dict[str, Any]:
    """Return an index's header.

    Raises:
        ValueError: no index, an index of another version, or one that was not finished.
    """
    path = folder / HEADER
    if not path.is_file():
        raise ValueError(f"no offline index in {folder}")
    header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if header.get("version") != VERSION:
        raise ValueError(f"the index in {folder} has version {header.get('version')}, this is version {VERSION}")
    if not header.get("complete"):
        raise ValueError(f"the index in {folder} is not finished: build it again, it continues where it stopped")
    return header


def open_columns(folder: Path, header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the columns, mapped into memory, read-only.

    Raises:
        ValueError: a file whose size is not what the header says.
    """
    count, grids = header["num_samples"], header["num_grids"]
    shapes = {"tokens": (count,), "grid_starts": (count + 1,), "grids": (grids, 3)}
    columns: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        path = folder / f"{name}.npy"
        column = np.load(path, mmap_mode="r") if np.prod(shape) else np.zeros(shape, COLUMNS[name])
        if column.shape != shape:
            raise ValueError(f"{path} has shape {column.shape}, the header says {shape}")
        columns[name] = column
    return columns


def dataset_record(dataset: Sequence[Any]) -> dict[str, Any]:
    """Return a dataset's length, and a fingerprint of examples spread over it."""
    count = len(dataset)
    digest = hashlib.blake2b(digest_size=8)
    for place in sorted({count * probe // PROBES for probe in range(PROBES)} | {count - 1} if count else set()):
        digest.update(_fingerprint(dataset[place]).encode())
    return {"num_examples": count, "fingerprint": digest.hexdigest()}


def _fingerprint(value: Any) -> str:
    """Return a text that tells one example from another; images in memory count by their size."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_fingerprint(value[key])}" for key in sorted(value) if value[key] is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_fingerprint, value)) + "]"
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    size = getattr(value, "size", None) or getattr(value, "shape", None)
    return f"{type(value).__name__}{size}"

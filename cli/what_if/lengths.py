"""Lengths of samples from files: lines of JSON, CSV, Parquet, a saved Hugging Face dataset, an offline index."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...scheduler.plan.table import Ints
from .columns import Source, open_source

Grid = tuple[int, int, int]
#: Columns that are taken for the length where none is named, the first that is there.
_LENGTH_NAMES = ("num_tokens", "tokens", "length", "lengths", "seq_len", "seqlen", "input_ids")
#: Columns that are taken for (t, h, w) patch grids, and for numbers of media tokens.
_GRID_NAMES = ("image_grid_thw", "video_grid_thw")
_VISION_NAMES = ("vision_tokens", "num_vision_tokens", "image_tokens")
_MOST_TOKENS = 2**31 - 1


class Samples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Samples as far as a plan needs them.

    Attributes:
        source: where they come from, for people.
        tokens: `[N]` int64, at least 1; 0 for an example that an index left out.
        grids: per sample the (t, h, w) patch grids of its media; None where no sample has media.
        vision_tokens: `[N]` int64, tokens of media whose grids are not known; None likewise.
        notes: what was left out or assumed while reading.
        adapter: the family that an index was built for; None for other sources.
    """

    source: str
    tokens: Ints
    grids: Sequence[Sequence[Grid]] | None = None
    vision_tokens: Ints | None = None
    notes: tuple[str, ...] = ()
    adapter: str | None = None


def read_samples(
    path: str | Path, *, column: str | None = None, grids: str | None = None, vision_tokens: str | None = None
) -> Samples:
    """Read the lengths of a file or folder.

    Args:
        path: lines of JSON (numbers or objects), JSON, CSV, Parquet, a folder of `datasets` or of an offline index.
        column: column of the lengths; a list in it counts by its elements. Default: the first of the usual names.
        grids: column of lists of (t, h, w) patch grids; default: `image_grid_thw` and `video_grid_thw` where they are there.
        vision_tokens: column of the number of media tokens, where no grids are known.

    Raises:
        ValueError: no such file, no such column, nothing in it, or a value that is no length; the message names it.
    """
    path = Path(path)
    if (path / "index.json").is_file():
        for option, name in (("--column", column), ("--grids", grids), ("--vision-tokens", vision_tokens)):
            if name is not None:
                raise ValueError(f"{option} {name}: an offline index has no columns to choose from")
        return _read_index(path)
    source = open_source(path)
    if not len(source):
        raise ValueError(f"{path} holds no samples")
    tokens = _lengths_of(source, _choose(source, column, _LENGTH_NAMES, path))
    found = _read_grids(source, [grids] if grids else [name for name in _GRID_NAMES if name in source.names])
    vision = vision_tokens or next((name for name in _VISION_NAMES if name in source.names), None)
    if vision is not None and found is not None:
        if vision_tokens is not None:
            raise ValueError(f"{path} has grids too: give either grids or --vision-tokens")
        vision = None
    media = None if vision is None else _lengths_of(source, vision, media=True)
    if media is not None and (media > tokens).any():
        row = int(np.argmax(media > tokens))
        raise ValueError(f"{source.where(row)}: {media[row]} vision tokens in a sample of {tokens[row]} tokens")
    return Samples(source=str(path), tokens=tokens, grids=found, vision_tokens=media)


def _read_index(path: Path) -> Samples:
    """Read the lengths and grids of an offline index; an example that it left out has the length 0."""
    from ...scheduler import OfflineIndex

    index = OfflineIndex(path)
    tokens = index.tokens(np.arange(len(index)))
    left = int((tokens == 0).sum())
    if left == len(tokens):
        raise ValueError(f"the index in {path} holds no samples")
    return Samples(
        source=f"index {path}",
        tokens=tokens,
        grids=[index.grids(number) for number in range(len(index))] if index.num_media else None,
        notes=(f"{left:,} of {len(tokens):,} examples were left out when the index was built",) if left else (),
        adapter=index.settings["adapter"],
    )


def _choose(source: Source, wanted: str | None, usual: Sequence[str], path: Path) -> str | None:
    """Return the column of the lengths, None for a source of bare numbers."""
    if wanted is not None and wanted not in source.names:
        known = ", ".join(source.names) if source.names else "bare numbers, no columns"
        raise ValueError(f"{path} has no column {wanted!r}; it has {known}")
    if wanted is not None or not source.names:
        return wanted
    for name in usual:
        if name in source.names:
            return name
    raise ValueError(f"{path} has no column of lengths among {', '.join(source.names)}: name one with --column")


def _lengths_of(source: Source, name: str | None, *, media: bool = False) -> Ints:
    """Return a column as checked lengths.

    Raises:
        ValueError: a value that is no whole number from 1 (of media: 0) to `_MOST_TOKENS`; the message names it and its place.
    """
    least = 0 if media else 1
    values = source.column(name, media)
    array = _as_array(values)
    if array is None:
        return np.array([_length(value, row, source.where, least) for row, value in enumerate(values)], np.int64)
    if array.dtype.kind == "f":
        wrong = ~np.isfinite(array) | (array != np.floor(array)) | (array < least) | (array > _MOST_TOKENS)
    else:
        wrong = (array < least) | (array > _MOST_TOKENS)
    if wrong.any():
        row = int(np.argmax(wrong))
        _refuse(array[row].item(), row, source.where, least)
    return array.astype(np.int64)


def _as_array(values: Any) -> np.ndarray | None:
    """Return values as an array of numbers, or None where they are anything else."""
    if isinstance(values, np.ndarray):
        return values if values.dtype.kind in "iuf" else None
    kinds = set(map(type, values))
    return np.array(values) if kinds <= {int, float} else None


def _length(value: Any, row: int, where: Callable[[int], str], least: int) -> int:
    """Return one length: a number, a number as text, or a list, which counts by its elements."""
    if isinstance(value, (list, tuple, np.ndarray)):
        number: Any = len(value)
    elif value is None and not least:
        number = 0
    elif isinstance(value, str):
        try:
            number = float(value) if not value.strip().lstrip("-").isdigit() else int(value)
        except ValueError:
            number = None
    else:
        number = value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:
        _refuse(value, row, where, least)
    if not least <= number <= _MOST_TOKENS or int(number) != number:
        _refuse(value, row, where, least)
    return int(number)


def _refuse(value: Any, row: int, where: Callable[[int], str], least: int) -> None:
    shown = f"{value!r:.60}"
    raise ValueError(f"{where(row)}: a length is a whole number from {least} to {_MOST_TOKENS:,}, got {shown}")


def _read_grids(source: Source, names: Sequence[str]) -> list[list[Grid]] | None:
    """Return the grids of each sample from all columns that have some; None without any."""
    found: list[list[Grid]] = [[] for _ in range(len(source))]
    for name in names:
        if name not in source.names:
            raise ValueError(f"no column {name!r} for grids; there are {', '.join(source.names) or 'bare numbers only'}")
        for row, value in enumerate(source.column(name, True)):
            found[row] += _grids(value, row, source.where)
    return found if any(found) else None


def _grids(value: Any, row: int, where: Callable[[int], str]) -> list[Grid]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else None
        except msgspec.DecodeError:
            value = [value]
    if value is None:
        return []
    try:
        grids = np.asarray(list(value), np.int64).reshape(-1, 3)
    except (ValueError, TypeError, OverflowError):
        grids = np.zeros((1, 3), np.int64)
    if len(grids) and grids.min() < 1:
        raise ValueError(f"{where(row)}: grids are lists of three whole numbers (t, h, w) of at least 1, got {value!r:.60}")
    return [(int(t), int(h), int(w)) for t, h, w in grids]

"""Building an offline index: parts by worker processes, put together at the end; a build that broke off can be continued."""

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from ...collate import SampleEncoder
from ...core import OversizeSampleError, SampleError
from .files import COLUMNS, HEADER, VERSION, write_json

OnError = Literal["error", "skip"]
PARTS = "parts"
#: What workers read; set before they are started, so that nothing large travels to them.
_work: dict[str, Any] = {}


def build(
    folder: Path, dataset: Sequence[Mapping[str, Any]], encoder: SampleEncoder, header: dict[str, Any], *,
    workers: int, chunk: int, on_error: OnError, progress: bool,
) -> None:  # fmt: skip
    """Measure every example of a dataset and write the index.

    Args:
        folder: where to write; parts that a build with the same header has left are taken up.
        dataset: examples by number.
        encoder: measures them.
        header: settings and dataset; a folder with parts of another header is refused.
        workers: processes; 0 measures in this one.
        chunk: examples per part.
        on_error: an example that cannot be encoded is an error, or skipped and counted.
        progress: whether to show a progress bar.

    Raises:
        ValueError: parts that were made with other settings.
        SampleError: the first example that cannot be encoded.
    """
    parts = folder / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    count = len(dataset)
    starts = [start for start in range(0, count, chunk) if not _part_path(folder, start).is_file()]
    done = count - sum(min(chunk, count - start) for start in starts)
    _work.update(dataset=dataset, encoder=encoder, folder=folder, chunk=chunk, on_error=on_error)
    try:
        with (
            tqdm(total=count, initial=done, unit="sample", desc="index", disable=not progress) as bar,
            _pool(workers) as mapped,
        ):
            for written in mapped(starts):
                bar.update(written)
    finally:
        _work.clear()
    totals = merge(folder, count, chunk)
    write_json(folder / HEADER, {"version": VERSION, "complete": True, **header, "num_samples": count, **totals})
    for path in parts.iterdir():
        path.unlink()
    parts.rmdir()


@contextmanager
def _pool(workers: int) -> Iterator[Any]:
    """Give a function that measures parts, in this process or in several, and yields the examples in each."""
    if workers < 1:
        yield lambda starts: map(_measure_part, starts)
        return
    # Forked workers see the dataset and the encoder as they are; the tokenizer's own threads would not survive the fork.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with multiprocessing.get_context("fork").Pool(workers) as processes:
            yield lambda starts: processes.imap_unordered(_measure_part, starts)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _measure_part(start: int) -> int:
    """Measure one part and write it; return how many examples it has."""
    dataset, encoder = _work["dataset"], _work["encoder"]
    stop: int = min(start + _work["chunk"], len(dataset))
    measured = encoder.measure([dataset[place] for place in range(start, stop)], start)
    tokens = np.zeros(stop - start, np.int32)
    counts = np.zeros(stop - start, np.int64)
    grids: list[Sequence[int]] = []
    totals, limit = {"num_skipped": 0, "num_dropped": 0}, encoder.config.max_length
    for row, one in enumerate(measured):
        if isinstance(one, SampleError):
            if _work["on_error"] == "error":
                raise one
            totals["num_skipped"] += 1
        elif limit is not None and one.tokens > limit:
            if encoder.config.on_oversize == "error":
                raise OversizeSampleError(f"example {start + row}: {one.tokens} tokens exceed max_length={limit}")
            totals["num_dropped"] += 1
        else:
            tokens[row], counts[row] = one.tokens, len(one.grids)
            grids.extend(one.grids)
    path = _part_path(_work["folder"], start)
    part = path.with_suffix(f".{os.getpid()}")
    with part.open("wb") as file:
        np.savez(file, tokens=tokens, counts=counts, grids=np.array(grids, np.int32).reshape(-1, 3), totals=[*totals.values()])
    os.replace(part, path)
    return stop - start


def _part_path(folder: Path, start: int) -> Path:
    """Return the file of the part that begins with an example."""
    return folder / PARTS / f"{start:012d}.npz"


def merge(folder: Path, count: int, chunk: int) -> dict[str, int]:
    """Put the parts together, one at a time, and return the totals of the index."""
    tokens = np.lib.format.open_memmap(folder / "tokens.npy", "w+", COLUMNS["tokens"], (count,))
    starts = np.lib.format.open_memmap(folder / "grid_starts.npy", "w+", COLUMNS["grid_starts"], (count + 1,))
    num_grids, skipped, dropped = 0, 0, 0
    for start in range(0, count, chunk):
        with np.load(_part_path(folder, start)) as part:
            stop = start + len(part["tokens"])
            tokens[start:stop] = part["tokens"]
            starts[start + 1 : stop + 1] = num_grids + np.cumsum(part["counts"])
            num_grids += len(part["grids"])
            skipped, dropped = skipped + int(part["totals"][0]), dropped + int(part["totals"][1])
    if num_grids:
        grids = np.lib.format.open_memmap(folder / "grids.npy", "w+", COLUMNS["grids"], (num_grids, 3))
        at = 0
        for start in range(0, count, chunk):
            with np.load(_part_path(folder, start)) as part:
                grids[at : at + len(part["grids"])] = part["grids"]
                at += len(part["grids"])
        grids.flush()
    tokens.flush()
    starts.flush()
    return {"num_grids": num_grids, "num_skipped": skipped, "num_dropped": dropped}

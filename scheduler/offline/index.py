"""`OfflineIndex`: token counts of a whole dataset, from which epochs are planned before anything is encoded."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...collate import SampleEncoder
from ...core import differences, plain
from ...models import ModelAdapter
from ..plan.settings import check_int
from ..plan.table import Ints
from ..stages.describe import SampleCost
from .build import PARTS, OnError, build
from .files import dataset_record, open_columns, read_header, write_json
from .plan import EpochPlanner, OfflineConfig
from .source import OfflineSource


class OfflineIndex:
    """Length and media grids of every example of a dataset, mapped from disk; built once, read by any rank.

    Args:
        folder: the folder of a finished index; see `build` and `open`.

    Attributes:
        settings: what the counts depend on: pixel limits, chat template, tokenizer, image processor.
        dataset: length and fingerprint of the dataset.
        num_skipped: examples that could not be encoded, left out by `on_error="skip"`.
        num_dropped: examples above the encoder's `max_length`, left out.

    Example:
        >>> index = OfflineIndex.build("index", dataset, encoder, workers=2)                        # doctest: +SKIP
        >>> config = OfflineConfig(max_tokens=8192, samples_per_step=64, num_microbatches=4)        # doctest: +SKIP
        >>> source = index.source(dataset, encoder, config, rank=rank, num_ranks=8)                 # doctest: +SKIP
        >>> for pack in source: ...          # lists of samples, num_microbatches of them a step    # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        header = read_header(self.folder)
        columns = open_columns(self.folder, header)
        self._tokens, self._starts, self._grids = columns["tokens"], columns["grid_starts"], columns["grids"]
        self.settings: dict[str, Any] = header["settings"]
        self.dataset: dict[str, Any] = header["dataset"]
        self.num_skipped: int = header["num_skipped"]
        self.num_dropped: int = header["num_dropped"]

    @classmethod
    def build(
        cls,
        folder: str | Path,
        dataset: Sequence[Mapping[str, Any]],
        encoder: SampleEncoder,
        *,
        workers: int = 0,
        chunk: int = 1024,
        on_error: OnError = "error",
        progress: bool = True,
    ) -> Self:
        """Measure a dataset and write its index. A build that broke off continues where it stopped.

        Args:
            folder: where the index goes; created if need be. A finished index of the same settings and dataset is opened.
            dataset: examples by number, with a length: a list, a Hugging Face table, `JsonLines`.
            encoder: the encoder that will encode the examples.
            workers: processes that measure; 0 for this one.
            chunk: examples that are measured at a time, and lost when a build breaks off.
            on_error: an example that cannot be encoded is an error, or skipped and counted.
            progress: whether to show a progress bar.

        Raises:
            ValueError: a folder with an index, or parts of one, that were made from something else; what differs is named.
            SampleError: the first example that cannot be encoded.
        """
        if on_error not in ("error", "skip"):
            raise ValueError(f"on_error must be 'error' or 'skip', got {on_error!r}")
        check_int("chunk", chunk, 1)
        check_int("workers", workers, 0)
        path = Path(folder)
        header = {"settings": encoder.settings, "dataset": dataset_record(dataset)}
        if (path / "index.json").is_file():
            return cls.open(path, dataset=dataset, encoder=encoder)
        begun = {"version": 0, **header, "chunk": chunk, "on_error": on_error}
        _start_parts(path, begun)
        build(path, dataset, encoder, header, workers=workers, chunk=chunk, on_error=on_error, progress=progress)
        (path / "begun.json").unlink()
        return cls(path)

    @classmethod
    def open(
        cls, folder: str | Path, *, dataset: Sequence[Mapping[str, Any]] | None = None, encoder: SampleEncoder | None = None
    ) -> Self:
        """Open an index, and check that it fits a dataset and an encoder.

        Raises:
            ValueError: no finished index, or one made from something else; what differs is named.
        """
        index = cls(folder)
        changed = [] if encoder is None else differences(index.settings, encoder.settings)
        if dataset is not None:
            changed += [f"dataset: {one}" for one in differences(index.dataset, dataset_record(dataset))]
        if changed:
            raise ValueError(f"the index in {folder} was built from something else: {'; '.join(changed)}")
        return index

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole dataset."""
        return int(self._tokens.sum(dtype=np.int64))

    @property
    def num_media(self) -> int:
        """Images and videos of the whole dataset."""
        return len(self._grids)

    def tokens(self, numbers: Any) -> Ints:
        """Return the lengths of examples, int64; 0 for those that are left out."""
        return np.asarray(self._tokens[np.asarray(numbers, np.int64)], np.int64)

    def grids(self, number: int) -> list[tuple[int, int, int]]:
        """Return the (t, h, w) patch grids of an example's images, then of its videos."""
        found = self._grids[int(self._starts[number]) : int(self._starts[number + 1])]
        return [(int(t), int(h), int(w)) for t, h, w in found.tolist()]

    def planner(
        self, config: OfflineConfig, adapter: ModelAdapter, *, num_ranks: int, cp_size: int = 1, cost: SampleCost | None = None
    ) -> EpochPlanner:
        """Return what plans this index's epochs; see `EpochPlanner`."""
        return EpochPlanner(self, config, adapter, num_ranks=num_ranks, cp_size=cp_size, cost=cost)

    def source(
        self,
        dataset: Sequence[Mapping[str, Any]],
        encoder: SampleEncoder,
        config: OfflineConfig,
        *,
        rank: int,
        num_ranks: int,
        cp_size: int = 1,
        cost: SampleCost | None = None,
    ) -> OfflineSource:
        """Return a rank's packs of each epoch, as lists of encoded samples; see `OfflineSource`.

        Raises:
            ValueError: a dataset or an encoder that the index was not built from.
        """
        OfflineIndex.open(self.folder, dataset=dataset, encoder=encoder)
        planner = self.planner(config, encoder.adapter, num_ranks=num_ranks, cp_size=cp_size, cost=cost)
        return OfflineSource(planner, dataset, encoder, rank=rank)


def _start_parts(folder: Path, begun: Mapping[str, Any]) -> None:
    """Note what a build makes its parts from, or check that parts which are there were made from the same.

    Raises:
        ValueError: parts of another build; what differs is named.
    """
    note = folder / "begun.json"
    if note.is_file():
        before = json.loads(note.read_text(encoding="utf-8"))
        changed = [
            *differences(before["settings"], begun["settings"]),
            *(f"dataset: {one}" for one in differences(before["dataset"], begun["dataset"])),
            *differences(*({name: one[name] for name in ("chunk", "on_error")} for one in (before, begun))),
        ]
        if changed:
            raise ValueError(
                f"{folder} holds parts of another index ({'; '.join(changed)}): remove the folder, or build elsewhere"
            )
        return
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(note, plain(begun))

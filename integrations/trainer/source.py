"""A rank's share of a dataset, in the order that the stock Trainer reads it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset

from ...collate.encoding.encoder import SampleList
from ...scheduler.sources import CountingSource, as_source

#: What a dataset's rows are turned into samples with; None leaves a row out.
Encode = Callable[[Any], Mapping[str, Any] | None]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a dataset is read.

    Attributes:
        rank: this rank.
        num_ranks: ranks that share the dataset.
        seed: seed of the shuffle; None keeps the dataset's order.
        encode: from a row to a sample; None where rows are samples.
        loader: further arguments of the `DataLoader` (workers).
    """

    rank: int = 0
    num_ranks: int = 1
    seed: int | None = None
    encode: Encode | None = None
    loader: dict[str, Any] = {}


class SharedDataset:
    """A source over every `num_ranks`-th sample of a dataset with a length, that resumes without reading again.

    An optimizer step of B samples per rank holds the samples that the stock Trainer puts into it: ranks take turns in one
    order, which is shuffled with `seed` plus the number of the epoch, as accelerate's seedable sampler does.

    Args:
        dataset: has `__len__` and `__getitem__`.
        reading: how it is read.

    Example:
        >>> list(SharedDataset(["a", "b", "c"], Reading(rank=0, num_ranks=2)))
        ['a', 'c']
    """

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading
        self._epoch = self._count = self._skipped = 0
        self._is_open = self._is_loaded = False

    def __len__(self) -> int:
        """Samples of the longest rank in an epoch."""
        return -(-len(self._dataset) // self._reading.num_ranks)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: a position must move when the epoch begins, not when its first sample is read.
        if self._is_open and not self._is_loaded:
            self._begin(self._epoch + 1)
        self._is_open, self._is_loaded = True, False
        return self._samples()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the samples of it that another number of ranks took, and those that this rank took since."""
        reading = self._reading
        place = {"epoch": self._epoch, "skipped": self._skipped, "count": self._count}
        return {**place, "rank": reading.rank, "num_ranks": reading.num_ranks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position."""
        self._epoch, self._skipped, self._count = state["epoch"], state["skipped"], state["count"]
        self._is_loaded = True

    def load_state_dicts(self, states: Sequence[Mapping[str, int]]) -> None:
        """Go on from the positions of another number of ranks, without those that have read all of their share.

        Ranks take turns, so what they have read together is a prefix of the epoch's order.
        """
        epoch, skipped, num_ranks = (states[0][key] for key in ("epoch", "skipped", "num_ranks"))
        counts = {rank: len(range(skipped + rank, len(self._dataset), num_ranks)) for rank in range(num_ranks)}
        counts.update({state["rank"]: state["count"] for state in states})
        self.load_state_dict({"epoch": epoch, "skipped": skipped + sum(counts.values()), "count": 0})

    def _begin(self, epoch: int) -> None:
        self._epoch, self._count, self._skipped = epoch, 0, 0

    def _order(self) -> list[int]:
        size = len(self._dataset)
        if self._reading.seed is None:
            return list(range(size))
        generator = torch.Generator().manual_seed(self._reading.seed + self._epoch)
        return torch.randperm(size, generator=generator).tolist()

    def _samples(self) -> Iterator[Any]:
        reading = self._reading
        mine = self._order()[self._skipped :][reading.rank :: reading.num_ranks][self._count :]
        loader: DataLoader[Any] = DataLoader(
            _Encoded(self._dataset, reading.encode),
            sampler=mine,
            batch_size=None,
            collate_fn=_as_it_is,
            # The loader draws a seed: from the global state, it would race with the draws of the training thread.
            generator=torch.Generator().manual_seed(self._epoch),
            **reading.loader,
        )
        for sample in loader:
            self._count += 1
            yield sample
        self._begin(self._epoch + 1)
        self._is_open = False


class SharedStream:
    """Every `num_ranks`-th sample of an iterable that all ranks read alike.

    Args:
        stream: yields the same samples on every rank, whenever it is read.
        reading: how it is read.

    Example:
        >>> list(SharedStream("abcde", Reading(rank=1, num_ranks=2)))
        ['b', 'd']
    """

    def __init__(self, stream: Any, reading: Reading) -> None:
        self._stream, self._reading = stream, reading

    def __iter__(self) -> Iterator[Any]:
        reading = self._reading
        for index, row in enumerate(self._stream):
            if index % reading.num_ranks == reading.rank:
                yield encoded(row, reading.encode)


class OwnStream:
    """A source that is this rank's own and says where it stands, with its rows encoded.

    Args:
        source: has `__iter__`, `state_dict` and `load_state_dict`.
        encode: from a row to a sample.
    """

    def __init__(self, source: Any, encode: Encode) -> None:
        self._source, self._encode = source, encode
        self.state_dict = source.state_dict
        self.load_state_dict = source.load_state_dict
        if hasattr(source, "load_state_dicts"):
            self.load_state_dicts = source.load_state_dicts

    def __iter__(self) -> Iterator[Any]:
        return (encoded(row, self._encode) for row in iter(self._source))


def source_of(dataset: Any, reading: Reading) -> Any:
    """Return a rank's source over what the user gave the Trainer as a dataset.

    A dataset with a length is divided among the ranks, and so is an iterable that all of them read alike. What says where it
    stands (`state_dict`), or is an iterator, is this rank's own stream already; a streaming dataset of Hugging Face is split
    unless the user has split it.

    Args:
        dataset: the dataset.
        reading: how it is read.

    Raises:
        TypeError: no iterable.
    """
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SharedDataset(dataset, reading)
    if type(dataset).__module__.partition(".")[0] == "datasets" and reading.num_ranks > 1 and dataset._distributed is None:
        from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]

        dataset = split_dataset_by_node(dataset, rank=reading.rank, world_size=reading.num_ranks)
    source = as_source(dataset)
    if isinstance(source, CountingSource):
        return SharedStream(dataset, reading)
    return source if reading.encode is None else OwnStream(source, reading.encode)


def encoded(row: Any, encode: Encode | None) -> Any:
    """Return a row's sample; an empty list that counts it where `encode` leaves it out."""
    if encode is None:
        return row
    sample = encode(row)
    return sample if sample is not None else SampleList.left_out(1)


class _Encoded(Dataset[Any]):
    """A dataset whose rows are encoded where they are read: in the loader's workers, if it has any."""

    def __init__(self, dataset: Any, encode: Encode | None) -> None:
        self._dataset, self._encode = dataset, encode

    def __getitem__(self, index: int) -> Any:
        return encoded(self._dataset[index], self._encode)


def _as_it_is(sample: Any) -> Any:
    return sample

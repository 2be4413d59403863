"""The protocol of a resumable source, and the adapter that fits what the user brings."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Source(Protocol):
    """An iterable of samples, or of lists of samples, that can say where it stands.

    What a source yielded it must not change or use again: a sample is read until its step is over.

    A source of one's own needs these three methods, and is then used as it is. It may also have
    `load_state_dicts(states)`, which takes the states of another number of ranks and takes up this rank's share of what they
    had not read yet.
    """

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; the first time after `load_state_dict`, go on from the loaded position."""
        ...

    def state_dict(self) -> Any:
        """Return the position behind the last item that was yielded; None where the source cannot go back.

        Behind the last item of an epoch it is the beginning of the next.
        """
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go to a position that `state_dict` returned, in this process or in another."""
        ...


def as_source(source: Any) -> Source:
    """Return the adapter for what the user brings.

    Knows Megatron-Energon's savable loaders, streaming Hugging Face datasets, everything with `state_dict` and
    `load_state_dict` (torchdata's `StatefulDataLoader`), `torch.utils.data.DataLoader`, iterators (which cannot go back)
    and other iterables (which are read again from the start).

    Raises:
        TypeError: no iterable, or a loader that `accelerator.prepare` returned.

    Example:
        >>> type(as_source([1, 2])).__name__
        'CountingSource'
    """
    from .counting import CountingSource, IteratorSource
    from .energon import EnergonSource
    from .huggingface import HuggingFaceSource
    from .loader import LoaderSource

    if type(source).__module__ == "accelerate.data_loader":  # its `__class__` says DataLoader
        raise TypeError(
            f"a {type(source).__name__} of accelerate repeats samples, moves them to the device and talks to other ranks while "
            "it reads: leave the loader out of accelerator.prepare, and shard it with DistributedSampler(dataset, "
            "accelerator.num_processes, accelerator.process_index)"
        )
    if hasattr(source, "save_state_rank") and hasattr(source, "restore_state_rank"):
        return EnergonSource(source)
    if type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "load_state_dict"):
        return HuggingFaceSource(source)
    if isinstance(source, Source):
        return source
    if isinstance(source, torch.utils.data.DataLoader):
        return LoaderSource(source)
    if isinstance(source, Iterator):
        return IteratorSource(source)
    if isinstance(source, Iterable):
        return CountingSource(source)
    name = type(source).__name__
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        raise TypeError(
            f"a source must be iterable, got the map-style dataset {name}: wrap it, "
            "DataLoader(dataset, batch_size=None, sampler=DistributedSampler(dataset))"
        )
    raise TypeError(f"a source must be iterable, got {name}")


def skip(iterator: Iterator[Any], count: int) -> None:
    """Read and discard the items in front of a loaded position.

    Raises:
        ValueError: the source ends before it.
    """
    found = sum(1 for _ in itertools.islice(iterator, count))
    if found < count:
        raise ValueError(
            f"the state stands behind {count} items, and the source ended after {found}: it is not the one of then"
        )

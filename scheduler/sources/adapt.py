"""From what the user brings to a source."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .base import Source
from .counting import CountingSource, IteratorSource
from .energon import EnergonSource
from .huggingface import HuggingFaceSource
from .loader import LoaderSource


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

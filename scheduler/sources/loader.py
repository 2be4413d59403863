"""`torch.utils.data.DataLoader`, whose order depends on random states."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, default_collate

from .base import skip

#: What torch's default collation says of samples that make no batch, and the remedy.
UNSTACKED = ("stack expects each tensor", "each element in list of batch", "default_collate: batch must")
HINT = (
    "samples are not to be stacked into a batch: give the DataLoader batch_size=None, or a collate_fn that leaves lists as "
    "they are (collate_fn=list)"
)


class LoaderSource:
    """A `DataLoader`: its position is the random states at the start of the epoch, and the number of items read since.

    Resuming starts the same epoch again and discards that many items; torchdata's `StatefulDataLoader` resumes faster. The
    loader's order must follow from its generator, its sampler's generator or epoch, or torch's global random state.

    Where the indices that a rank reads are known beforehand (a map-style dataset with a `DistributedSampler`, or a sequence
    of indices as its sampler), another number of ranks can go on: see `divide`.

    Args:
        loader: the loader, with `batch_size=None` or a `collate_fn` that leaves lists of samples as they are.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._start: dict[str, Any] = {}  # empty between epochs
        self._count = 0
        self._resume = False
        self._opened = False
        self._last_epoch: int | None = None  # of the DistributedSampler; -1 once a warning was given
        self._order: dict[str, Any] | None = None  # of the epoch that is being read
        self._share: bytes | None = None  # int64 indices that take the place of the sampler's, until the epoch ends

    def __iter__(self) -> Iterator[Any]:
        outside = torch.get_rng_state()
        resumed, self._resume = self._resume, False
        if resumed:
            self._restore(self._start)
        else:
            self._start, self._count = self._record(), 0
        self._note_epoch(resumed)
        self._opened = True
        self._order = order_of(self._loader) if self._share is None else {"indices": self._share}
        iterator = self._read()
        # A sampler draws its seed at the first item. Reading that one here keeps the draw on the calling thread, in order
        # with the training loop's own draws.
        head = list(itertools.islice(iterator, 1))
        if resumed:
            torch.set_rng_state(outside)
        return self._items(itertools.chain(head, iterator), self._count)

    def state_dict(self) -> dict[str, Any]:
        """Return the random states at the start of the epoch, the number of items read, and which indices are read."""
        return {
            "count": self._count,
            "in_epoch": bool(self._start),
            "start": self._start or self._record(),
            "order": self._order,
            "share": self._share,
            "num_examples": _num_examples(self._loader.dataset),
            "batch_size": self._loader.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin that epoch again when next read, or, between epochs, restore the generators."""
        self._count, self._resume = state["count"], state["in_epoch"]
        self._start = state["start"] if self._resume else {}
        self._share = state.get("share")
        if not self._resume:
            self._restore({key: value for key, value in state["start"].items() if key != "global"})

    def divide(self, states: Sequence[dict[str, Any]], *, rank: int, num_ranks: int) -> None:
        """Take up this rank's share of what the ranks of another number had not read of their epoch.

        Each index that is left is read once, on one rank. The next epoch is read in the order of the loader's own sampler.

        Args:
            states: of all ranks that had not come to the end of their epoch, in rank order.
            rank: this rank.
            num_ranks: R of this job.

        Raises:
            ValueError: the order of those ranks is not known, or ranks read the same indices; a dataset of another length.
        """
        self._restore({"opened": False, "epochs": states[0]["start"]["epochs"]})
        if not all(state["in_epoch"] for state in states):
            return  # between epochs: nothing of this one is read
        left = unread(states, len(self._loader.dataset) if order_of(self._loader) is not None else None)  # type: ignore[arg-type]
        self._share = left[rank::num_ranks].tobytes()

    def _items(self, iterator: Iterator[Any], num_read: int) -> Iterator[Any]:
        skip(iterator, num_read)
        for item in iterator:
            self._count += 1
            yield item
        self._count, self._start, self._order, self._share = 0, {}, None, None

    def _read(self) -> Iterator[Any]:
        """Read the loader; where its own collation cannot stack samples, say that it need not.

        The error keeps its class and its text: workers' errors come with the traceback in it.
        """
        try:
            yield from self._loader if self._share is None else over_indices(self._loader, self._share)
        except (RuntimeError, TypeError) as error:
            if self._loader.collate_fn is not default_collate or not any(text in str(error) for text in UNSTACKED):
                raise
            raise type(error)(f"{error}; {HINT}") from error

    def _note_epoch(self, resumed: bool) -> None:
        """Warn once, on one rank, where two epochs have one order because `set_epoch` was left out."""
        sampler: Any = next((one for one in self._owners().values() if isinstance(one, DistributedSampler)), None)
        if sampler is None or not sampler.shuffle or self._last_epoch == -1:
            return
        if sampler.epoch == self._last_epoch and not resumed:
            self._last_epoch = -1
            if sampler.rank == 0:
                text = f"the DistributedSampler's epoch is still {sampler.epoch}, so this epoch has the order of the one before"
                warnings.warn(f"{text}: call sampler.set_epoch(epoch) before each epoch", RuntimeWarning, stacklevel=3)
        else:
            self._last_epoch = sampler.epoch

    def _generators(self) -> dict[str, torch.Generator]:
        found = {name: getattr(owner, "generator", None) for name, owner in self._owners().items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}

    def _owners(self) -> dict[str, Any]:
        """Return everything that may decide the order; a batch sampler of the user's own has a sampler inside."""
        batches = self._loader.batch_sampler
        owners = {"loader": self._loader, "sampler": self._loader.sampler, "batches": batches}
        return {**owners, "inner": getattr(batches, "sampler", None)}

    def _record(self) -> dict[str, Any]:
        states: dict[str, Any] = {"global": torch.get_rng_state(), "opened": self._opened}
        states.update({name: generator.get_state() for name, generator in self._generators().items()})
        epochs = {name: getattr(owner, "epoch", None) for name, owner in self._owners().items()}
        states["epochs"] = {name: epoch for name, epoch in epochs.items() if epoch is not None}
        return states

    def _restore(self, states: dict[str, Any]) -> None:
        if states["opened"] and not self._opened and self._loader.persistent_workers:
            # Persistent workers draw from the generator when they start, not in later epochs: start them before it is set.
            iter(self._loader)
            self._opened = True
        if "global" in states:
            torch.set_rng_state(states["global"])
        for name, generator in self._generators().items():
            if name in states:
                generator.set_state(states[name])
        for name, owner in self._owners().items():
            if name in states["epochs"]:
                owner.epoch = states["epochs"][name]


def _num_examples(dataset: Any) -> int | None:
    """Return the length of a map-style dataset, None where it has none."""
    return None if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") else len(dataset)


def order_of(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Return which indices a loader reads in the epoch that begins, as plain data; None where that cannot be known.

    Example:
        >>> order_of(DataLoader(list("abcd"), batch_size=None, sampler=range(1, 4, 2)))
        {'range': [1, 4, 2]}
    """
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or (loader.batch_size is None and loader.batch_sampler is not None):
        return None
    if type(sampler) is DistributedSampler:
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch")
        return {"distributed": {name: getattr(sampler, name) for name in names}}
    if type(sampler) is SequentialSampler:
        return {"range": [0, len(sampler), 1]}
    if isinstance(sampler, range):
        return {"range": [sampler.start, sampler.stop, sampler.step]}
    if isinstance(sampler, list | tuple | np.ndarray | torch.Tensor):
        return {"indices": np.asarray(sampler, np.int64).tobytes()}  # bytes: a copy of a state does not copy them
    return None


def indices_of(order: dict[str, Any], num_examples: int) -> np.ndarray:
    """Return int64 [n], the indices that `order_of` described, in order."""
    if "indices" in order:
        return np.frombuffer(order["indices"], np.int64)
    if "range" in order:
        return np.arange(*order["range"], dtype=np.int64)
    settings = dict(order["distributed"])
    epoch = settings.pop("epoch")
    sampler: DistributedSampler[Any] = DistributedSampler(range(num_examples), **settings)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, np.int64)


def unread(states: Sequence[dict[str, Any]], num_examples: int | None) -> np.ndarray:
    """Return int64 [n], the indices that ranks had not read, each once, in (round, rank) order.

    Args:
        states: of `LoaderSource`, in rank order, all inside an epoch.
        num_examples: length of the dataset of this job; None where this job's loader reads no indices that are known.

    Raises:
        ValueError: as `LoaderSource.divide`.
    """
    if num_examples is None or any(state["order"] is None for state in states):
        raise ValueError(
            f"another number of ranks cannot go on inside this epoch: which examples the {len(states)} ranks had not read is "
            "known only of a DataLoader over a map-style dataset whose sampler is a DistributedSampler or a sequence of "
            "indices (sampler=range(rank, len(data), num_ranks)); resume on as many ranks, or at the end of an epoch"
        )
    for state in states:
        if state["num_examples"] != num_examples:
            raise ValueError(
                f"the dataset has {num_examples} examples, it had {state['num_examples']} when the state was saved"
            )
    orders = [indices_of(state["order"], num_examples) for state in states]
    counts = [state["count"] * (state["batch_size"] or 1) for state in states]
    every = np.concatenate(orders)
    # A DistributedSampler repeats examples so that all ranks have as many; beyond it, an index means another example on
    # every rank, or all ranks read the same.
    if not all("distributed" in state["order"] for state in states) and len(np.unique(every)) < len(every):
        raise ValueError(
            "the ranks read the same indices, each of a dataset of its own perhaps: which examples are left cannot be divided; "
            "give every rank the whole dataset and a DistributedSampler, or resume on as many ranks"
        )
    read = np.concatenate([order[:count] for order, count in zip(orders, counts, strict=True)])
    rest = [order[count:] for order, count in zip(orders, counts, strict=True)]
    rounds = np.concatenate([np.arange(len(part)) for part in rest])
    left = np.concatenate(rest)[np.argsort(rounds, kind="stable")]
    _, first = np.unique(left, return_index=True)
    left = left[np.sort(first)]
    return left[~np.isin(left, read)]


def over_indices(loader: DataLoader[Any], share: bytes) -> DataLoader[Any]:
    """Return a loader like this one that reads the given int64 indices."""
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(loader, name) for name in (*names, "generator", "prefetch_factor")}
    if loader.batch_size is not None:
        settings["drop_last"] = loader.drop_last
    return DataLoader(loader.dataset, sampler=np.frombuffer(share, np.int64).tolist(), **settings)


def num_samples(loader: DataLoader[Any]) -> int:
    """Return the number of samples, not of batches, that a loader yields in an epoch.

    Raises:
        TypeError: a loader whose samplers have no length.
    """
    if loader.batch_size is not None:
        total = len(loader.sampler)  # type: ignore[arg-type]
        return total // loader.batch_size * loader.batch_size if loader.drop_last else total
    if loader.batch_sampler is None:
        return len(loader)
    batches: Any = loader.batch_sampler
    if not hasattr(batches, "sampler"):
        raise TypeError("a loader with a batch sampler of its own does not say how many samples it yields")
    total = len(batches.sampler)
    size = getattr(batches, "batch_size", 1)
    return total // size * size if getattr(batches, "drop_last", False) else total

"""`torch.utils.data.DataLoader`, whose order depends on random states."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, default_collate

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

    def __iter__(self) -> Iterator[Any]:
        outside = torch.get_rng_state()
        resumed, self._resume = self._resume, False
        if resumed:
            self._restore(self._start)
        else:
            self._start, self._count = self._record(), 0
        self._note_epoch(resumed)
        self._opened = True
        iterator = self._read()
        # A sampler draws its seed at the first item. Reading that one here keeps the draw on the calling thread, in order
        # with the training loop's own draws.
        head = list(itertools.islice(iterator, 1))
        if resumed:
            torch.set_rng_state(outside)
        return self._items(itertools.chain(head, iterator), self._count)

    def state_dict(self) -> dict[str, Any]:
        """Return the random states at the start of the epoch and the number of items read."""
        return {"count": self._count, "in_epoch": bool(self._start), "start": self._start or self._record()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin that epoch again when next read, or, between epochs, restore the generators."""
        self._count, self._resume = state["count"], state["in_epoch"]
        self._start = state["start"] if self._resume else {}
        if not self._resume:
            self._restore({key: value for key, value in state["start"].items() if key != "global"})

    def _items(self, iterator: Iterator[Any], num_read: int) -> Iterator[Any]:
        skip(iterator, num_read)
        for item in iterator:
            self._count += 1
            yield item
        self._count, self._start = 0, {}

    def _read(self) -> Iterator[Any]:
        """Read the loader; where its own collation cannot stack samples, say that it need not.

        The error keeps its class and its text: workers' errors come with the traceback in it.
        """
        try:
            yield from self._loader
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

"""Streaming datasets of Hugging Face `datasets`."""

from collections.abc import Iterator
from typing import Any

from .base import skip


class HuggingFaceSource:
    """A `datasets.IterableDataset`, with two of its habits corrected.

    Its state leaves out the content of a shuffle buffer, so samples would be lost: with a shuffle buffer, the dataset is read
    again from the start of the epoch instead. And a loaded state would apply to every later epoch, not to the first alone.

    Args:
        dataset: the streaming dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._count = 0
        self._skip = 0
        self._in_epoch = False
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self._dataset.load_state_dict(None)
        self._count, self._skip = self._skip, 0
        self._in_epoch = True
        iterator = iter(self._dataset)
        if self._count and has_shuffle_buffer(self._dataset):
            skip(iterator, self._count)
        for item in iterator:
            self._count += 1
            yield item
        self._count, self._in_epoch = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items read, and the dataset's own state where that is complete."""
        own = None
        if self._in_epoch and self._count and not has_shuffle_buffer(self._dataset):
            own = self._dataset.state_dict()
        return {"count": self._count, "epoch": self._dataset.epoch, "dataset": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position when next read."""
        self._count = self._skip = state["count"]
        self._resumed = True
        self._dataset.set_epoch(state["epoch"])
        self._dataset.load_state_dict(state["dataset"])


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a dataset shuffles in a buffer, whose content its state does not hold."""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        stage = pending.pop()
        if stage is None:
            continue
        if "Buffer" in type(stage).__name__:
            return True
        pending += [getattr(stage, "ex_iterable", None), *(getattr(stage, "ex_iterables", None) or ())]
    return False

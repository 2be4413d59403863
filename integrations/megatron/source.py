"""A data iterator of Megatron-Core as a source: items are `next()` calls, and what was read ahead is not lost."""

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...core import FieldShapeError, MissingFieldError

_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class PulledSource:
    """Yields one list of samples per `next()` call on a data iterator.

    The iterator is referred to weakly: once the trainer drops it, the source ends. Lists read ahead of the step that is
    training are kept until `forget`, so that a scheduler may be opened again, with another number of items per step, and go
    on where the old one was. The position is the number of items; in another process the trainer brings an iterator that
    stands there, as Megatron-Core's samplers do from the number of consumed samples.

    Args:
        iterator: yields a sample, a list of samples, or rows that hold several samples behind one another.
    """

    def __init__(self, iterator: Any) -> None:
        self._find = _reference(iterator)
        self._lock = threading.Lock()
        self._log: deque[list[Mapping[str, Any]]] = deque()
        self._first = 0
        self._needless = 0
        self._position = 0
        self._turn = 0
        self._ended = False

    def __iter__(self) -> Iterator[list[Mapping[str, Any]]]:
        self._turn += 1
        return self._read(self._turn)

    def _read(self, turn: int) -> Iterator[list[Mapping[str, Any]]]:
        while True:
            with self._lock:
                if turn != self._turn:  # an earlier scheduler's worker, which read on while it was being closed
                    return
                while self._position >= self._first + len(self._log):
                    if not self._pull():
                        return
                item = self._log[self._position - self._first]
                self._position += 1
                self._release()
            yield item

    def _pull(self) -> bool:
        iterator = None if self._ended else self._find()
        if iterator is None:
            return False
        try:
            self._log.append(_samples_of(next(_unrecorded(iterator))))
        except StopIteration:
            self._ended = True
            return False
        return True

    @property
    def position(self) -> int:
        """Number of items read so far."""
        return self._position

    def forget(self, position: int) -> None:
        """Release the items before a position: their step was handed out.

        Whoever reads at this moment does it in our place: a wait for a thread that is busy lasts until the interpreter makes
        it give way, which is much longer than a whole call takes.
        """
        self._needless = position
        if self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._lock.release()

    def _release(self) -> None:
        while self._log and self._first < self._needless:
            self._log.popleft()
            self._first += 1

    def stand_at(self, position: int) -> None:
        """Take it that the iterator stands at an item: that of the first step that was not trained, where a trainer resumes.

        Items from there on may have been read before, into a window of several steps; they are passed over.
        """
        with self._lock:
            self._log.clear()
            self._first = self._needless = position

    def state_dict(self) -> dict[str, int]:
        """Return the number of items read."""
        return {"items": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position: back among the items that are kept, or where another process was."""
        with self._lock:
            self._turn += 1
            self._position = state["items"]
            self._needless = min(self._needless, self._position)
            if self._position < self._first:
                self._log.clear()
                self._first = self._position


def _samples_of(item: Any) -> list[Mapping[str, Any]]:
    """Return the samples in what one `next()` gave.

    Raises:
        FieldShapeError: neither a mapping nor a list of mappings, or a row whose boundaries do not fit it.
        MissingFieldError: a sample without token ids.

    Example:
        >>> row = {"tokens": torch.tensor([1, 2, 3]), "labels": torch.tensor([2, 9, 4]), "cu_seqlens": torch.tensor([0, 2, 3])}
        >>> [(part["tokens"].tolist(), part["original_seq_len"]) for part in _samples_of(row)]
        [([1, 2], 2), ([3], 1)]
    """
    items = item if isinstance(item, list | tuple) else [item]
    samples: list[Mapping[str, Any]] = []
    for one in items:
        if not isinstance(one, Mapping):
            raise FieldShapeError(f"the data iterator yielded a {type(one).__name__}, not samples (mappings) or lists of them")
        if "tokens" not in one and "input_ids" not in one:
            raise MissingFieldError(f"a sample needs 'tokens' (Megatron-Core's keys) or 'input_ids', it has {sorted(one)}")
        samples += _segments(one) if "tokens" in one and "cu_seqlens" in one else [one]
    return samples


def _segments(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the samples of a row that comes packed: boundaries instead of lengths, nothing padded."""
    if "padded_seq_len" in row or "original_seq_len" in row:
        raise FieldShapeError("a sample has cu_seqlens or original_seq_len and padded_seq_len, not both")
    tensors = {name: torch.as_tensor(row[name]).reshape(-1) for name in _TOKEN_KEYS if row.get(name) is not None}
    bounds = torch.as_tensor(row["cu_seqlens"]).reshape(-1).tolist()
    width = len(tensors["tokens"])
    if not bounds or bounds[0] != 0 or bounds[-1] != width or sorted(bounds) != bounds:
        raise FieldShapeError(f"cu_seqlens must rise from 0 to the row's {width} tokens, got {bounds[:16]}")
    return [
        {**{name: tensor[start:stop] for name, tensor in tensors.items()}, "original_seq_len": stop - start}
        for start, stop in itertools.pairwise(bounds)
        if stop > start
    ]


def _unrecorded(iterator: Any) -> Any:
    """Return the iterator under Megatron-Core's replay wrapper, which would keep every sample it hands out.

    Replay is the business of the iterator that `wrap_data_iterator` returns: it keeps the packs of the step that trains.
    """
    return iterator.iterable if isinstance(iterator, _replay_wrapper()) else iterator


@functools.cache
def _replay_wrapper() -> Any:
    from megatron.core.rerun_state_machine import RerunDataIterator

    return RerunDataIterator


def _reference(iterator: Any) -> Any:
    """Return a function that gives the iterator, as long as it lives."""
    try:
        return weakref.ref(iterator)
    except TypeError:  # iterators of built-in types cannot be referred to weakly
        return lambda: iterator

"""Pull this rank's samples from its source, and say how that went."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core import FieldShapeError, Sample
from .describe import Described, Describer


class Reader:
    """Reads a source sample by sample and keeps what waits for a step.

    An error of the source, or of a sample, is kept for the next gather: raising it here would leave the other ranks waiting.

    Args:
        source: iterable of samples, or of lists of samples; read anew in every epoch.
        describer: checks and describes each sample.

    Attributes:
        waiting: described samples, in source order.
        exhausted: whether the source has ended.
        error: what the source or a sample raised.
        dropped: samples dropped by the oversize policy since `take_dropped`.
    """

    def __init__(self, source: Iterable[Any], describer: Describer) -> None:
        self._source = source
        self._describer = describer
        self._iterator: Iterator[Any] | None = None
        self._index = 0
        self.waiting: list[Described] = []
        self.exhausted = False
        self.error: BaseException | None = None
        self.dropped = 0

    def start(self) -> None:
        """Begin an epoch; opening the source may fail like any later read."""
        self._index, self.exhausted = 0, False
        self.waiting = []
        try:
            self._iterator = iter(self._source)
        except Exception as error:
            self.error = error

    def fill(self, count: int) -> None:
        """Read until `count` samples wait, or the source has ended or failed."""
        while len(self.waiting) < count and self._ready():
            self._read()

    def fill_tokens(self, tokens: int) -> None:
        """Read until samples of more than `tokens` tokens wait, or the source has ended or failed."""
        waiting = sum(item.block.sample.num_tokens for item in self.waiting)
        while waiting <= tokens and self._ready():
            before = len(self.waiting)
            self._read()
            waiting += sum(item.block.sample.num_tokens for item in self.waiting[before:])

    def read_list(self) -> list[Described] | None:
        """Read one item of the source as a list of its own; None where the source has ended or failed."""
        if not self._ready():
            return None
        before = len(self.waiting)
        self._read()
        if not self._ready():
            return None
        items, self.waiting = self.waiting[before:], self.waiting[:before]
        return items

    def take(self, count: int) -> list[Described]:
        """Remove and return the first `count` waiting samples."""
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def take_dropped(self) -> int:
        """Return the number of dropped samples since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def _ready(self) -> bool:
        return self.error is None and not self.exhausted

    def _read(self) -> None:
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            return
        except Exception as error:
            self.error = error
            return
        try:
            for raw in self._samples(item):
                described = self._describer(raw, self._index)
                self._index += 1
                if described is None:
                    self.dropped += 1
                else:
                    self.waiting.append(described)
        except Exception as error:
            self.error = error

    def _samples(self, item: Any) -> Sequence[Mapping[str, Any] | Sample]:
        if isinstance(item, Mapping | Sample):
            return [item]
        if isinstance(item, list | tuple):
            return item
        raise FieldShapeError(
            f"the source yielded a {type(item).__name__} at sample {self._index}; it must yield samples (mappings) or "
            "lists of samples: a DataLoader needs an identity collate_fn or batch_size=None"
        )

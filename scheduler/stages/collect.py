"""Collect: read this rank's samples from its source, and keep those that wait for a step."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...core import FieldShapeError, Sample, SampleGroup, members_of, num_groups_of
from ..config import SchedulerConfig
from ..sources import Source
from .describe import Described, Describer


class Position(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where a reader stands: enough to read on from here, in another process too.

    Attributes:
        source: the source's state; None where it cannot go back.
        waiting: samples that were read and belong to no step yet.
        carried: samples that a step before had in view, and that belong to a later one.
        index: number of samples read in this epoch.
        exhausted: whether the source has ended.
        started: whether the source was opened at all.
    """

    source: Any
    waiting: tuple[Described, ...] = ()
    carried: tuple[Described, ...] = ()
    index: int = 0
    exhausted: bool = False
    started: bool = False


class Reader:
    """Reads a source sample by sample and keeps what waits for a step.

    An error of the source, or of a sample, is kept for the next gather: raising it here would leave the other ranks waiting.

    Args:
        source: yields samples, or lists of samples; read again in every epoch.
        describer: checks and describes each sample.
        config: settings; they say in which unit a step is counted.
        count_items: `samples_per_step` counts items of the source, however many samples each of them holds.

    Attributes:
        waiting: described samples, in source order.
        carried: samples that a step before had in view, and that belong to a later one.
        exhausted: whether the source has ended.
        error: what the source or a sample raised.
    """

    def __init__(self, source: Source, describer: Describer, *, config: SchedulerConfig, count_items: bool = False) -> None:
        self._source = source
        self._describer = describer
        self._config = config
        self._count_items = count_items
        self._per_step = config.samples_per_step or 1
        self._num_items = 0
        self._iterator: Iterator[Any] | None = None
        self._index = 0
        self._dropped = 0
        self._resumed = False
        self._started = False
        self.waiting: list[Described] = []
        self.carried: list[Described] = []
        self.exhausted = False
        self.error: BaseException | None = None
        self._abandoned = False
        self._open: list[Sample] = []  # members of a group whose end was not read yet

    @property
    def can_go_back(self) -> bool:
        """Whether the source can read again what it has read."""
        return self._source.state_dict() is not None

    def start(self) -> None:
        """Begin an epoch, or continue the one that was loaded; opening the source may fail like any later read."""
        if not self._resumed:
            self.waiting, self.carried, self._open, self._index, self.exhausted = [], [], [], 0, False
        self._num_items = 0
        self._resumed, self._started = False, True
        if self.exhausted:
            return
        try:
            self._iterator = iter(self._source)
        except Exception as error:
            self.error = error

    @property
    def unused(self) -> list[Described]:
        """What was read and belongs to no step yet; last the members of a group whose end was not read."""
        return [*self.waiting, *(self._describer.described(member, "a member of a group") for member in self._open)]

    def position(self) -> Position:
        """Return where the reader stands."""
        return Position(
            source=copy.deepcopy(self._source.state_dict()),  # it may be the source's own, which changes as it is read
            waiting=tuple(self.unused),
            carried=tuple(self.carried),
            index=self._index,
            exhausted=self.exhausted,
            started=self._started,
        )

    def load(self, position: Position, *, in_epoch: bool) -> None:
        """Go to a position, before `start`.

        Args:
            position: from `position`, here or in another process.
            in_epoch: whether the epoch continues from there; otherwise `start` begins the next one.
        """
        if position.source is not None:
            self._source.load_state_dict(position.source)
            if not in_epoch and position.started and not position.exhausted:
                # The epoch ended before the source did: leave it behind. A generator moves only when it is read.
                next(iter(self._source), None)
        self._resumed = in_epoch
        if in_epoch:
            self.waiting, self.carried = list(position.waiting), list(position.carried)
            self._index, self.exhausted = position.index, position.exhausted
            self._reopen()

    def collect(self, quota: int) -> list[Described]:
        """Read until a quota waits, or the source has ended or failed; return the candidates for the step, none of them taken.

        Args:
            quota: of this rank: samples, or lists with `scope="microbatch"`, or tokens with `tokens_per_step`.

        Returns:
            Carried samples first, then fresh ones in source order.
        """
        if self._config.scope == "microbatch":
            self._fill_lists(quota)
        elif self._config.tokens_per_step is not None:
            self._fill_tokens(quota)
        else:
            self.fill(quota)
            if not self._count_items:
                return [*self.carried, *self._fresh(quota)]
        return [*self.carried, *self.waiting]

    def fill(self, count: int) -> None:
        """Read until `count` samples wait (with `count_items`, items read since `take`), or the source has ended or failed."""
        while (self._num_items if self._count_items else self._num_waiting) < count and self._ready():
            self._read()

    @property
    def _num_waiting(self) -> int:
        """Samples that wait; a group counts as one, however many parts it was taken apart into."""
        if self._config.groups == "split":
            return len(self.waiting)
        return sum(num_groups_of(item.block.sample) for item in self.waiting)

    def _fresh(self, quota: int) -> list[Described]:
        """Return the first units that wait, each with the step in which it has its turn, of those that are read together."""
        fresh = self.waiting[: self._units_of(quota)]
        if self._config.lookahead == 1:
            return fresh
        counts = itertools.accumulate(num_groups_of(item.block.sample) for item in fresh)
        turns = [(count - 1) // self._per_step for count in counts]
        return [item.marked(list_index=turn) for item, turn in zip(fresh, turns, strict=True)]

    def _units_of(self, quota: int) -> int:
        """Return how many of the first units that wait make a quota of samples, all parts of a group among them."""
        if self._config.groups == "split":
            return quota
        counts = itertools.accumulate(num_groups_of(item.block.sample) for item in self.waiting)
        return sum(1 for count in counts if count <= quota)

    def _fill_tokens(self, tokens: int) -> None:
        waiting = sum(item.block.sample.num_tokens for item in self.waiting)
        while waiting <= tokens and self._ready():
            before = len(self.waiting)
            self._read()
            waiting += sum(item.block.sample.num_tokens for item in self.waiting[before:])

    def _fill_lists(self, count: int) -> None:
        for index in range(count):
            before = len(self.waiting)
            if self._ready():
                self._read()
            self.waiting[before:] = [item.marked(list_index=index) for item in self.waiting[before:]]

    def take(self, count: int, carried: Sequence[Described] = ()) -> list[Described]:
        """Remove and return the first `count` fresh samples, which the step had in view; others wait on, beside the carried."""
        self._num_items, self.carried = 0, list(carried)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def describe_again(self) -> None:
        """Describe the samples that wait under the describer's present cost model: a rank that resumes here does it then."""
        where = "a sample that waits for its step"
        self.waiting = [self._describer.described(item.block.sample, where) for item in self.waiting]
        self.carried = [self._describer.described(item.block.sample, where).marked(age=item.age) for item in self.carried]

    def take_dropped(self) -> int:
        """Return the number of samples that policies of the scheduler or the encoder dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def abandon(self) -> None:
        """Read no further item, even if a step lacks samples; from any thread."""
        self._abandoned = True

    def _ready(self) -> bool:
        return self.error is None and not self.exhausted and not self._abandoned

    def _read(self) -> None:
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            self._close_group()
            return
        except (Exception, SystemExit) as error:  # on a worker thread, an exit would end the thread alone
            self.error = error
            return
        self._num_items += 1
        try:
            for raw in self._samples(item):
                described = self._describer(raw, self._index)
                self._index += 1
                if described is None:
                    self._dropped += 1
                else:
                    self._add(described)
        except Exception as error:
            self.error = error

    def _add(self, described: Described) -> None:
        """Let a sample wait for its step; a member of a group when the whole group was read."""
        sample = described.block.sample
        group = None if self._config.groups == "split" else _group_of(sample)
        if self._open and _group_of(self._open[0]) != group:
            self._close_group()
        if group is None:
            self.waiting.append(self._at_turn(described))
            return
        if not self._open and any(_group_of(item.block.sample) == group for item in self.waiting):
            raise FieldShapeError(
                f"group_id {group!r} comes back at sample {self._index - 1}, after other samples: the members of a group must "
                "follow one another in the source"
            )
        assert isinstance(sample, Sample)
        self._open.append(sample)

    def _at_turn(self, described: Described) -> Described:
        """Mark a sample with the step in which its item has its turn, of those that are read together."""
        if not self._count_items or self._config.lookahead == 1:
            return described
        return described.marked(list_index=(self._num_items - 1) // self._per_step)

    def _close_group(self) -> None:
        members, self._open = self._open, []
        if not members:
            return
        try:
            self.waiting += [self._at_turn(described) for described in self._describer.described_group(members)]
        except Exception as error:
            self.error = error

    def _reopen(self) -> None:
        """Take the members of a group that was being read out of the samples that wait; whole groups are `SampleGroup`s."""
        self._open = []
        if self._config.groups == "split" or self.exhausted:
            return
        while self.waiting:
            sample = self.waiting[-1].block.sample
            if not isinstance(sample, Sample) or _group_of(sample) is None:
                break
            if self._open and _group_of(self._open[0]) != _group_of(sample):
                break
            self._open.insert(0, sample)
            self.waiting.pop()

    def _samples(self, item: Any) -> Sequence[Mapping[str, Any] | Sample]:
        if isinstance(item, Mapping | Sample | list | tuple):
            self._dropped += getattr(item, "num_dropped", 0)  # what the encoder's policies left out
            return [item] if isinstance(item, Mapping | Sample) else item
        raise FieldShapeError(
            f"the source yielded a {type(item).__name__} at sample {self._index}; it must yield samples (mappings) or "
            "lists of samples: a DataLoader needs an identity collate_fn or batch_size=None"
        )


def _group_of(sample: Sample | SampleGroup) -> Any:
    """Return the name of the group that a sample belongs to, None for none."""
    return members_of(sample)[0].values.get("group_id")

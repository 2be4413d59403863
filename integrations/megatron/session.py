"""One scheduler per data iterator, for as long as the iterator lives."""

import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from ...core import Field
from ...models import ModelAdapter
from ...scheduler import PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig, StepCallback, plan_step
from ...scheduler.stages.describe import SampleCost
from ...scheduler.stages.planning import Planner
from ...scheduler.telemetry.callbacks import close_callbacks
from .ranks import Ranks
from .source import PulledSource


class SessionArguments(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a scheduler is opened with, besides its settings: the same at every call for one iterator.

    Attributes:
        adapter: the model family.
        fields: further fields of the samples.
        cost: cost of a sample, None for a typical model's.
        planner: a function with `plan_step`'s signature.
        callbacks: of the scheduler.
    """

    adapter: ModelAdapter
    fields: tuple[Field, ...] = ()
    cost: SampleCost | None = None
    planner: Planner = plan_step
    callbacks: tuple[StepCallback, ...] = ()


class IteratorSession:
    """The scheduler of one data iterator on the reader of a replica, and what it has handed out.

    Args:
        iterator: the trainer's data iterator.
        ranks: this rank's groups.

    Attributes:
        consumed_items: `next()` calls that went into the steps handed out.
        consumed_samples: samples of the whole group in the steps handed out.
    """

    def __init__(self, iterator: Any, ranks: Ranks) -> None:
        self._source = PulledSource(iterator)
        self._ranks = ranks
        self._scheduler: PackingScheduler | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._callbacks: tuple[StepCallback, ...] | None = None
        self.consumed_items = 0
        self.consumed_samples = 0

    @property
    def scheduler(self) -> PackingScheduler | None:
        """The scheduler; None before the first step."""
        return self._scheduler

    def step(self, config: SchedulerConfig, arguments: SessionArguments) -> PackedStep:
        """Return the next step, of `config.samples_per_step` items.

        Where that number changes, the scheduler is opened again after the last step: what was prepared ahead had another
        size. Its samples are read again from what the source keeps.

        Raises:
            StopIteration: the data has ended.
            EvenpackError: bad input, the same on every reader.
        """
        if self._scheduler is not None and self._scheduler.config.samples_per_step != config.samples_per_step:
            self._loaded = self._scheduler.state_dict()
            self.close()
        if self._scheduler is None:
            self._scheduler = self._open(config, arguments)
        step = next(self._scheduler)
        assert config.samples_per_step is not None
        # The last step of the data may hold fewer.
        self.consumed_items = min(self.consumed_items + config.samples_per_step, self._source.position)
        self.consumed_samples += int((step.plan.rank >= 0).sum())
        self._source.forget(self.consumed_items)
        return step

    def _open(self, config: SchedulerConfig, arguments: SessionArguments) -> PackingScheduler:
        ranks = self._ranks
        groups = ProcessGroups(dp=ranks.dp, rank=ranks.dp.rank(), num_ranks=ranks.dp.size(), cp_size=ranks.cp_size)
        if self._callbacks is None:
            self._callbacks = arguments.callbacks
        scheduler = PackingScheduler(
            self._source,
            config=config,
            adapter=arguments.adapter,
            groups=groups,
            fields=arguments.fields,
            cost=arguments.cost,
            planner=arguments.planner,
            count_items=True,
            # Without their `close`: they outlive a scheduler that is opened again.
            callbacks=[callback.__call__ for callback in self._callbacks],
        )
        if self._loaded is not None:
            scheduler.load_state_dict(self._loaded)
            self._loaded = None
        return scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last step handed out: plain data, rank-local."""
        scheduler = self._loaded if self._scheduler is None else self._scheduler.state_dict()
        return {
            "scheduler": scheduler,
            "consumed_items": self.consumed_items,
            "consumed_samples": self.consumed_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state, before the first step.

        Raises:
            ValueError: a step was taken already.
        """
        if self._scheduler is not None:
            raise ValueError("load the state before the first step of this data iterator")
        self._loaded = state["scheduler"]
        self.consumed_items, self.consumed_samples = state["consumed_items"], state["consumed_samples"]
        self._source.stand_at(self.consumed_items)

    def close(self) -> None:
        """End the scheduler."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def end(self) -> None:
        """End the scheduler, and close its callbacks."""
        self.close()
        close_callbacks(self._callbacks or ())
        self._callbacks = None


_SESSIONS: dict[int, tuple[Any, IteratorSession]] = {}


def session_of(iterator: Any, ranks: Ranks) -> IteratorSession:
    """Return the session of a data iterator, begun at the first call.

    It ends with the iterator. An iterator of a built-in type cannot be watched, and lives as long as the process.
    """
    key = id(iterator)
    if key not in _SESSIONS:
        session = IteratorSession(iterator, ranks)
        try:
            weakref.finalize(iterator, _end, key)
            _SESSIONS[key] = (None, session)
        except TypeError:
            _SESSIONS[key] = (iterator, session)
    return _SESSIONS[key][1]


def state_of(data_iterator: Any, pg_collection: Any = None) -> dict[str, Any] | None:
    """Return the state of the scheduler over a data iterator, for a checkpoint: each data-parallel rank's reader has its own.

    Args:
        data_iterator: as it was given to `wrap_data_iterator`.
        pg_collection: as it was given to `wrap_data_iterator`.

    Returns:
        Plain data; None on ranks that do not read.
    """
    iterator, ranks = own_iterator(data_iterator), Ranks.of(pg_collection)
    return session_of(iterator, ranks).state_dict() if ranks.is_reader and iterator is not None else None


def load_state(data_iterator: Any, state: Mapping[str, Any] | None, pg_collection: Any = None) -> None:
    """Go to a state that `state_of` returned, before the first call of `wrap_data_iterator` for this iterator.

    The iterator must stand behind the samples of the steps that were trained, as it does when the trainer builds it from the
    number of consumed samples. Samples that wait for a later step (`lookahead`) are part of the state.

    Args:
        data_iterator: as it will be given to `wrap_data_iterator`.
        state: this rank's; None on ranks that do not read.
        pg_collection: as it will be given to `wrap_data_iterator`.

    Raises:
        ValueError: a reader without a state, or a step was taken already.
    """
    iterator, ranks = own_iterator(data_iterator), Ranks.of(pg_collection)
    if not ranks.is_reader:
        return
    if state is None or iterator is None:
        raise ValueError(f"{ranks.where()} reads for its replica: it needs a data iterator and its state")
    session_of(iterator, ranks).load_state_dict(state)


def own_iterator(data_iterator: Any) -> Any:
    """Return the iterator to read from: of a list (virtual pipeline), the first that is there."""
    if isinstance(data_iterator, list):
        return next((one for one in data_iterator if one is not None), None)
    return data_iterator


def _end(key: int) -> None:
    entry = _SESSIONS.pop(key, None)
    if entry is not None:
        entry[1].end()

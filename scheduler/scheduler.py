"""`PackingScheduler`: wraps a training loop's data source."""

import atexit
import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from ..collate.samples.group import shares_prefixes
from ..core import Field, UnsafeModelError
from ..models import ModelAdapter
from ..models.attention.blocks import check_cp
from ..models.setup.call_check import note_missing_sync
from .comm.channel import OpenTransport, open_channel
from .comm.groups import ProcessGroups
from .comm.transports import TransportError
from .config import SchedulerConfig
from .cost.calibrate import Costs, fit_across_ranks
from .cost.model import CostFit, Observation, default_cost
from .pipeline import Prepared
from .plan import plan_step
from .prefetch import MainThreadExecutor, Prefetcher
from .setup import adapter_of, build_pipeline, check_capacity, check_types, fields_of
from .sources import as_source
from .sources.loader import num_samples
from .stages.describe import Describer, SampleCost
from .stages.planning import Planner
from .stages.select import why_no_step
from .state import Checkpoint, check_is_state, check_same_ranks, divide_source, from_state, reshard, to_state, with_in_flight
from .stats import StepClock, StepStats
from .step import PackedStep
from .telemetry.callbacks import StepCallback, call, check_callbacks, close_callbacks
from .warm import warm_up_once

#: Schedulers that are still open: a worker that still waits in a collective when the interpreter ends would abort it.
_OPEN: "weakref.WeakSet[PackingScheduler]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as stack:  # all of them, even where a callback's close() raises
        for scheduler in list(_OPEN):
            stack.callback(scheduler.close)


class PackingScheduler(Iterator[PackedStep]):
    """Yields one `PackedStep` per optimizer step, balanced over the ranks of a data-parallel group.

    Every rank builds one, with its own source, and takes the same number of steps. While a step trains, the next one is
    collected, planned and exchanged by a worker thread. Iterating to the end ends an epoch; iterating again begins the next.
    A loop that broke off continues where it stopped.

    Args:
        source: iterable of samples, or of lists of samples (a loader, a dataset): see `collate.prepare_sample`.
        config: settings, equal on all ranks.
        adapter: the model family, or its name.
        groups: process groups; default: every rank of the job.
        cost: cost of a sample; default: that of a typical model of 7 billion parameters.
        fields: further fields of the samples.
        planner: a function with `plan_step`'s signature.
        transport: opens a `Transport` for gather and exchange, called as `transport(groups, timeout)` on every rank at once;
            default: what `config.transport` says.
        count_items: `samples_per_step` counts items of the source, however many samples each of them holds.
        callbacks: each is called with every step as it is handed out: see `StepCallback`.

    Raises:
        ValueError: a setting of the wrong type or range, or packs in which no sample has room.
        TypeError: an argument of the wrong type.
        FieldMismatchError: ranks with different settings, fields or versions; raised on every rank.
        PeerLostError: ranks that open no scheduler.

    Example:
        >>> from evenpack.models import adapter_for
        >>> source = [{"input_ids": [1] * length} for length in (5, 3, 2, 6)]
        >>> config = SchedulerConfig(max_tokens=8, samples_per_step=4)
        >>> with PackingScheduler(source, config=config, adapter=adapter_for("text")) as scheduler:
        ...     [[batch.total_tokens for batch in step] for step in scheduler]
        [[8, 8]]
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        config: SchedulerConfig,
        adapter: ModelAdapter | str,
        groups: ProcessGroups | None = None,
        cost: SampleCost | None = None,
        fields: Iterable[Field] = (),
        planner: Planner = plan_step,
        transport: OpenTransport | None = None,
        count_items: bool = False,
        callbacks: Iterable[StepCallback] = (),
    ) -> None:
        adapter, fields = adapter_of(adapter), fields_of(fields)
        check_types(config=config, groups=groups, cost=cost, planner=planner, callbacks=callbacks)
        self._callbacks = check_callbacks(callbacks)
        if count_items and (config.samples_per_step is None or config.on_exhausted != "drain"):
            raise ValueError(
                "count_items needs samples_per_step and on_exhausted='drain', got "
                f"samples_per_step={config.samples_per_step}, on_exhausted={config.on_exhausted!r}"
            )
        if count_items and config.groups != "split":
            raise ValueError(
                f"count_items counts items of the source, and groups={config.groups!r} makes samples of several one"
            )
        if config.groups in ("prompt", "prefix") and not shares_prefixes(adapter):
            raise UnsafeModelError(
                f"{adapter.name} has tokens that see each other both ways, so a prefix is not the same in every sample of a "
                f"group: groups must be 'split' or 'together', got {config.groups!r}"
            )
        self._adapter = adapter = msgspec.structs.replace(adapter, fields=adapter.fields.extended(fields))
        groups = ProcessGroups.from_world() if groups is None else groups
        check_capacity(config, groups.cp_size)
        check_cp(adapter, groups.cp_size)
        if config.groups != "split" and groups.cp_size > 1:
            raise ValueError(f"groups={config.groups!r} excludes context parallelism, got cp_size={groups.cp_size}")
        config = config.resolved(groups.cp_size)
        cost = default_cost(adapter) if cost is None else cost
        self._costs = Costs(adapter, cost)
        self._config = config
        warm_up_once(groups.rank, config, num_phases=len(cost.phases))
        self._clock = StepClock()
        self._notified_step: PackedStep | None = None
        self._not_called: deque[StepCallback] = deque()  # callbacks that the step to be handed out was not shown yet
        self._groups = groups
        self._source = as_source(source)
        self._original = source
        self._count_items = count_items
        self._channel = open_channel(groups, config, open_transport=transport)
        self._describer = Describer(adapter=adapter, cost=cost, config=config, cp_size=groups.cp_size, rank=groups.rank)
        self._executor = MainThreadExecutor() if config.prefetch and self._channel.gathers_on_device else None
        try:
            self._pipeline = build_pipeline(
                self._source,
                adapter=adapter,
                config=config,
                costs=self._costs,
                groups=groups,
                channel=self._channel,
                describer=self._describer,
                phases=cost.phases,
                planner=planner,
                executor=self._executor,
                count_items=count_items,
            )
        except BaseException as error:
            lost = (
                self._channel.heartbeat.lost(error, "the start of the scheduler") if isinstance(error, TransportError) else None
            )
            self._channel.close()
            if lost is not None:
                raise lost from error
            raise
        self._prefetcher: Prefetcher[Prepared] | None = None
        self._stats: StepStats | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._inside: dict[str, int] = {}  # the thread that waits for a step
        self._ended = False
        self._may_be_empty = False
        self._empty_since: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._in_flight: deque[Prepared] = deque()
        _OPEN.add(self)

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step that was handed out, None before the first."""
        return self._stats

    @property
    def config(self) -> SchedulerConfig:
        """The settings."""
        return self._config

    @property
    def num_dropped(self) -> int:
        """Samples that the oversize policy dropped so far on all ranks, those after the last step of an epoch included."""
        return self._pipeline.num_dropped

    @property
    def buffer_bytes(self) -> int:
        """Host memory that this rank holds for the exchange, in bytes: its outgoing buffers and a few received ones.

        What ranks of a node share counts on the rank that sent it.
        """
        return self._channel.blocks.buffer_bytes

    def __repr__(self) -> str:
        groups, step = self._groups, 0 if self._checkpoint is None else self._checkpoint.step
        where = f"rank {groups.rank} of {groups.num_ranks}, before step {step}{', closed' if self._closed else ''}"
        return f"<PackingScheduler: {self._adapter.name!r}, {where}>"

    def __iter__(self) -> Self:
        self._ended = False
        return self

    def __next__(self) -> PackedStep:
        mine = threading.get_ident()
        try:
            # Atomic, and inside the `try`: an interrupt at any point leaves nothing behind.
            if self._inside.setdefault("thread", mine) != mine:
                raise RuntimeError("next(scheduler) is running in another thread: let one thread take the steps")
            return self._next()
        finally:
            if self._inside.get("thread") == mine:
                self._inside.clear()

    def _next(self) -> PackedStep:
        if self._closed:
            raise RuntimeError("the scheduler is closed")
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise StopIteration
        self._clock.asked()
        if self._prefetcher is None:
            self._begin_epoch()
        assert self._prefetcher is not None
        try:
            prepared = self._prefetcher.get()
        except Exception as error:
            self._failure = error
            raise
        except BaseException as error:
            if not self._config.prefetch:  # interrupted while it was made: what was read for it is gone
                self._failure = RuntimeError(f"the scheduler was interrupted inside a step ({type(error).__name__})")
            raise
        while prepared.warnings:  # taken out first: a filter may turn a warning into an error
            warnings.warn(prepared.warnings.pop(), RuntimeWarning, stacklevel=3)
        if prepared.step is None:
            self._checkpoint = prepared.checkpoint
            self._ended = True  # until `iter` is called again
            self._clock.epoch_ended()
            self._end_epoch()
            self._warn_if_empty()
            raise StopIteration
        self._notify(prepared.step)
        self._checkpoint = prepared.checkpoint
        self._stats = prepared.step.stats
        self._in_flight.popleft()
        self._prefetcher.used()
        self._notified_step = self._empty_since = None
        return prepared.step

    def _notify(self, step: PackedStep) -> None:
        """Time the step and call the callbacks; a step that comes a second time, since one of them raised, is timed already."""
        if self._notified_step is not step:
            stats = self._clock.handed_out(step.stats)
            step.stats = msgspec.structs.replace(stats, silent_ranks=self._channel.heartbeat.silent)
            self._notified_step = step
            self._not_called = deque(self._callbacks)
        while self._not_called:
            call(self._not_called.popleft(), step)

    def _warn_if_empty(self) -> None:
        """Warn of an epoch without a step, unless it had them before the state that was loaded."""
        if self._empty_since is not None and self._groups.is_writer:
            dropped = self.num_dropped - self._empty_since
            text = why_no_step(self._config, num_ranks=self._groups.num_ranks, num_dropped=dropped)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def __len__(self) -> int:
        """Number of steps of an epoch, if every rank's source is as long as this one's; no collective.

        Raises:
            TypeError: the source has no length, or steps are not counted in samples.
        """
        per_step = self._config.samples_per_step
        if per_step is None:
            raise TypeError("steps that are not counted in samples per rank have no length known beforehand")
        original: Any = self._original
        samples = num_samples(original) if isinstance(original, torch.utils.data.DataLoader) else len(original)
        return -(-samples // per_step) if self._config.on_exhausted == "drain" else samples // per_step

    def calibrate(self, observations: Sequence[Observation]) -> CostFit:
        """Fit the cost model to measured micro-batches of all ranks, and plan further steps with it; collective.

        Every rank changes at the same step: the first that no rank has begun to prepare. The cost of dummy media follows.

        Args:
            observations: what this rank measured: lengths, media grids and seconds of micro-batches.

        Returns:
            The fit, equal on every rank.

        Raises:
            ValueError: too few observations, or none with media for a model that has a tower.
        """
        ahead = 0 if self._prefetcher is None else self._prefetcher.num_ahead
        checkpoint = self._checkpoint or self._pipeline.checkpoint(in_epoch=False)
        try:
            found, from_step = fit_across_ranks(self._channel.control, observations, checkpoint.step + ahead)
        except TransportError as error:
            raise self._channel.heartbeat.lost(error, "calibrate") from error
        self._costs.check(found.model)
        self._costs.change(found.model, from_step)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state after the last step that was handed out; every rank saves its own.

        The samples of prepared steps are read again after a resume, where the source can go back; where it cannot, they are
        part of the state, and this call waits until the worker is done with what it reads.

        Returns:
            Plain data and the source's own state, to be saved with `torch.save` or the like.
        """
        rank, num_ranks = self._groups.rank, self._groups.num_ranks
        checkpoint = self._checkpoint or self._pipeline.checkpoint(in_epoch=False)
        if self._prefetcher is not None and checkpoint.position.source is None:
            if self._config.scope == "microbatch" or self._count_items:
                what = "count_items" if self._count_items else "scope='microbatch'"
                raise ValueError(f"with {what}, a source that cannot go back has no state")
            self._prefetcher.settle()
            fresh = [item for prepared in self._in_flight for item in prepared.fresh]
            checkpoint = with_in_flight(checkpoint, fresh, self._pipeline.reader.unused)
        state = to_state(checkpoint, rank=rank, num_ranks=num_ranks, adapter=self._adapter)
        return {**state, **self._costs.state(checkpoint.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state that this rank saved, in a job of as many ranks; every rank does, before its next step.

        Raises:
            ValueError: no state of this version, one of other fields, of another rank, or of a job of another size.
        """
        check_is_state(state, self._adapter)
        check_same_ranks(state, self._groups.rank, self._groups.num_ranks)
        self._load(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to the states of all ranks of a job of any size; every rank passes the same.

        Samples in flight are dealt out again, each to one rank. What the sources had not read yet is split too: that of a
        `DataLoader` over a map-style dataset whose sampler is a `DistributedSampler` or a sequence of indices, as it is; any
        other source needs `load_state_dicts`, unless it is an iterator, which stands where the user left it.

        Raises:
            ValueError: states that do not belong together, or a source that cannot divide them.
        """
        rank, num_ranks = self._groups.rank, self._groups.num_ranks
        for state in states:
            check_is_state(state, self._adapter)
        if len(states) == num_ranks and {state.get("num_ranks") for state in states} == {num_ranks}:
            return self.load_state_dict(next(state for state in states if state.get("rank") == rank))
        mine = reshard(states, rank, num_ranks)
        divide_source(self._source, states, rank, num_ranks, name=type(self._original).__name__)
        self._load(mine)

    def _load(self, state: Mapping[str, Any]) -> None:
        checkpoint = from_state(state, self._describer)
        if self._prefetcher is not None:
            raise ValueError("load the state before the first step, or between epochs")
        self._costs.load(state)
        self._pipeline.load(checkpoint)
        self._checkpoint, self._may_be_empty = checkpoint, checkpoint.in_epoch

    def close(self) -> None:
        """Stop preparing steps, end the threads and leave the group; may be called at any time, and again."""
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        self._channel.abort()
        self._pipeline.reader.abandon()
        if self._executor is not None:
            self._executor.close()
        try:
            close_callbacks(self._callbacks)
        finally:
            if self._end_epoch():
                self._channel.close()
            self._in_flight.clear()  # steps that are never asked for hold what was received for them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        note_missing_sync(error)
        self.close()

    def _begin_epoch(self) -> None:
        if self._checkpoint is None:  # a state that is asked for before the first step is handed out, by a callback say
            self._checkpoint = self._pipeline.checkpoint(in_epoch=False)
        self._empty_since, self._may_be_empty = None if self._may_be_empty else self.num_dropped, False
        self._pipeline.start_epoch()
        self._in_flight.clear()
        self._prefetcher = Prefetcher(
            self._prepare,
            depth=self._config.prefetch,
            name="evenpack-prefetch",
            executor=self._executor,
            ahead=self._pipeline.read_ahead if self._executor is not None else None,
        )

    def _prepare(self) -> Prepared:
        prepared = self._pipeline.next_step()
        self._in_flight.append(prepared)
        return prepared

    def _end_epoch(self) -> bool:
        """End the worker; return whether it ended."""
        if self._prefetcher is None:
            return True
        patience = min(5.0, self._config.timeout)
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher.close(patience):
            return True
        warnings.warn(
            f"the source did not return within {patience:g} s: its thread keeps running", RuntimeWarning, stacklevel=3
        )
        return False

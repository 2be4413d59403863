"""One step, top to bottom: collect, describe, gather, select, plan, exchange; its packs are built when they are asked for."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from ..core import CorruptBlockError, EvenpackError, Sample
from ..core.fields import dtype_of
from .comm.channel import Channel
from .comm.transports import TransportError
from .cost.calibrate import CostChange
from .data_checks import DataChecks
from .plan import SampleTable, StepPlan
from .prefetch import MainThreadExecutor
from .stages.collect import Reader
from .stages.describe import Described, Describer
from .stages.exchange import Exchanger, plan_number
from .stages.gather import Gathered, Gatherer, RankState
from .stages.planning import Planner, plan_samples
from .stages.select import StepSamples, first_quota, select
from .state import Checkpoint
from .stats import step_stats
from .step import PackedStep, StepContext

T = TypeVar("T")


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A step, and what a resume after it needs.

    Attributes:
        step: the step; None where the epoch has ended.
        checkpoint: where the next step begins.
        fresh: what this rank took from its source for it, in order.
        warnings: what looks wrong in its data, on the rank that writes logs.
    """

    step: PackedStep | None
    checkpoint: Checkpoint
    fresh: tuple[Described, ...] = ()
    warnings: list[str] = []


class Pipeline:
    """Makes the steps of one scheduler, one after the other; on the worker thread, if there is one.

    Args:
        reader: collects this rank's samples.
        describer: describes them.
        channel: connection to the other ranks.
        gatherer: gathers their metadata.
        planner: a function with `plan_step`'s signature.
        context: what all steps share.
        executor: runs collectives on the training thread; None if they may run on this one.

    Attributes:
        step: number of the next step.
        num_dropped: samples that the oversize policy dropped so far on all ranks, after the last step of an epoch too.
    """

    def __init__(
        self,
        *,
        reader: Reader,
        describer: Describer,
        channel: Channel,
        gatherer: Gatherer,
        planner: Planner,
        context: StepContext,
        executor: MainThreadExecutor | None = None,
    ) -> None:
        self._reader = reader
        self._describer = describer
        self._channel = channel
        self._gatherer = gatherer
        self._planner = planner
        self._context = context
        self._executor = executor
        self._exchanger = Exchanger(channel.steps)
        self._changes: deque[CostChange] = deque()
        defers = context.config.defer is not None
        self._checks = DataChecks(channel.steps.num_ranks, defers=defers) if context.is_writer else None
        self._digest = 0
        self._ended = False
        self.num_dropped = 0
        self.step = 0

    def next_step(self) -> Prepared:
        """Return the next step.

        Raises:
            EvenpackError: the same error on every rank, unless this rank alone is cut off.
        """
        try:
            prepared = None if self._ended else self._make()
        except TransportError as error:
            raise self._channel.lost(error, f"step {self.step}") from error
        if prepared is None:
            self._ended = True
            warnings = self._checks.epoch_ended() if self._checks else []
            return Prepared(None, self.checkpoint(in_epoch=False), warnings=warnings)
        return prepared

    def _make(self) -> Prepared | None:
        """Call the stages in order; None where the epoch has ended."""
        started = time.monotonic()
        self._change_cost()
        context, quota, dropped, truncated = self._context, first_quota(self._context.config, self._num_ranks), 0, 0
        while True:
            self._channel.heartbeat.stage = f"collecting step {self.step}"
            candidates = self._reader.collect(quota)  # and describe each sample as it comes
            gathered = self._gather(candidates)
            dropped, truncated = dropped + gathered.dropped, truncated + gathered.truncated
            chosen = select(candidates, gathered, config=context.config, rank=context.rank, num_ranks=self._num_ranks)
            if chosen is None:
                quota *= 2  # some rank ran out of candidates before the token budget was spent: all look further ahead
                continue
            fresh = self._reader.take(chosen.num_fresh, chosen.deferred)
            # Where every list of the step was empty or dropped, and the sources go on, collect again.
            if len(chosen.gathered) or gathered.exhausted.all() or chosen.is_last:
                break
        self.num_dropped += dropped
        self._ended = chosen.is_last
        if not len(chosen.gathered):
            return None
        table = chosen.gathered.table(context.config.segment_align(context.cp_size))
        self._channel.heartbeat.stage = f"planning step {self.step}"
        plan = self._plan(table, chosen.gathered)
        self._digest = plan_number(plan)
        samples = self._exchange(table, plan, chosen)
        warnings = self._checks.step(self.step, chosen.mine, chosen.gathered) if self._checks else []
        stats = step_stats(
            table,
            plan,
            step=self.step,
            dropped=dropped,
            truncated=truncated,
            waits=chosen.waits,
            seconds=time.monotonic() - started,
        )
        self.step += 1
        step = PackedStep(
            context,
            table=table,
            plan=plan,
            weights=chosen.gathered.records["weight"].astype(np.float64),
            samples=samples,
            stats=stats,
            media_dtype=dtype_of(gathered.media_dtype),
            home_ids=[item.block.sample.sample_id for item in chosen.mine],
        )
        return Prepared(step, self.checkpoint(in_epoch=True), tuple(fresh), warnings)

    def _gather(self, candidates: Sequence[Described], error: BaseException | None = None) -> Gathered:
        self._channel.heartbeat.stage = f"gathering step {self.step}"
        state = RankState(
            step=self.step,
            records=np.stack([item.record for item in candidates]) if candidates else self._describer.empty_records(),
            exhausted=self._reader.exhausted,
            dropped=self._reader.take_dropped(),
            truncated=self._describer.take_truncated(),
            error=error or self._reader.error,
            plan_digest=self._digest,
            dtypes=self._describer.dtypes,
            free_fields=tuple(self._describer.free_fields),
        )
        return self._run(lambda: self._gatherer(state), on_device=self._channel.gathers_on_device, is_gather=True)

    def _plan(self, table: SampleTable, gathered: Gathered) -> StepPlan:
        return plan_samples(
            table,
            gathered.records["list_index"].astype(np.int64),
            planner=self._planner,
            config=self._context.config,
            towers=self._context.towers,
            cp_size=self._context.cp_size,
            channel=self._channel,
        )

    def _exchange(self, table: SampleTable, plan: StepPlan, chosen: StepSamples) -> dict[int, Sample]:
        self._channel.heartbeat.stage = f"exchanging step {self.step}"
        on_device = bool(self._channel.exchanges_on_device and plan.moved_bytes)
        try:
            return self._run(lambda: self._exchanger(table, plan, chosen.mine), on_device=on_device)
        except CorruptBlockError as error:
            with contextlib.suppress(EvenpackError, TransportError):
                self._gather([], error)  # tells the other ranks, which are a step ahead, why this one stops
            raise

    def _run(self, operation: Callable[[], T], *, on_device: bool, is_gather: bool = False) -> T:
        """Run a collective, on the training thread where NCCL needs it there."""
        if self._executor is None or not on_device:
            return operation()
        return self._executor.run(operation, is_gather=is_gather)

    @property
    def _num_ranks(self) -> int:
        return self._channel.steps.num_ranks

    # Between steps.

    def start_epoch(self) -> None:
        """Begin to read the source, or continue from a loaded checkpoint."""
        self._ended = False
        self._reader.start()

    def read_ahead(self) -> None:
        """Read what the next step will likely need, without a collective."""
        # What an iterator yields cannot be read again: it is read only when a step is due, so that its state is certain.
        if not self._ended and self._context.config.samples_per_step is not None and self._reader.can_go_back:
            self._reader.fill(self._context.config.samples_per_step)

    def abandon(self) -> None:
        """Leave the step that is being prepared; from any thread, with the channel's `abort`."""
        self._reader.abandon()

    def checkpoint(self, *, in_epoch: bool) -> Checkpoint:
        """Return where the next step begins."""
        position, dtypes = self._reader.position(), self._describer.dtypes
        return Checkpoint(step=self.step, plan=self._digest, dtypes=dtypes, in_epoch=in_epoch, position=position)

    def load(self, checkpoint: Checkpoint, changes: Sequence[CostChange]) -> None:
        """Go to a checkpoint and the cost models from there on, before `start_epoch`."""
        self._changes = deque(changes)
        self.step, self._digest = checkpoint.step, checkpoint.plan
        self._describer.load_dtypes(checkpoint.dtypes)
        self._reader.load(checkpoint.position, in_epoch=checkpoint.in_epoch)

    @property
    def waiting(self) -> list[Described]:
        """Samples that were read and belong to no step yet."""
        return list(self._reader.waiting)

    def use_cost(self, change: CostChange) -> None:
        """Plan with another cost model from a step on that is not begun yet; from any thread."""
        self._changes.append(change)

    def _change_cost(self) -> None:
        """Plan the step that begins, and those after it, with the cost model that is due."""
        due: CostChange | None = None
        while self._changes and self._changes[0].from_step <= self.step:
            due = self._changes.popleft()
        if due is not None:
            self._describer.use_cost(due.cost)
            self._gatherer.amend(due.fingerprint)
            self._context = msgspec.structs.replace(self._context, towers=due.towers)
            self._reader.describe_again()

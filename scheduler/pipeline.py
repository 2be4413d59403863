"""One step, top to bottom: collect, describe, gather, select, plan, exchange; its packs are built when they are asked for."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from ..core import CorruptBlockError, EvenpackError, Sample, SampleGroup, members_of
from ..core.fields import dtype_of
from .comm.channel import Channel
from .comm.transports import TransportError
from .cost.calibrate import Costs
from .data_checks import DataChecks
from .plan import SampleTable, StepPlan
from .prefetch import MainThreadExecutor
from .stages.collect import Reader
from .stages.describe import Described, Describer
from .stages.exchange import Exchanger, plan_number
from .stages.gather import Gathered, Gatherer, RankState
from .stages.planning import Planner, heaviest_part, plan_samples
from .stages.select import NO_VIEW, View, first_quota, select
from .state import Checkpoint, without_view
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
        reader: collects this rank's samples, and has each described as it comes.
        describer: describes them.
        channel: connection to the other ranks.
        gatherer: gathers their metadata.
        planner: a function with `plan_step`'s signature.
        costs: cost models, of which another may be due with any step.
        context: what all steps share.
        executor: runs collectives on the training thread; None if the gather may run on this one.

    Attributes:
        reader: as given.
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
        costs: Costs,
        context: StepContext,
        executor: MainThreadExecutor | None = None,
    ) -> None:
        self.reader = reader
        self._describer = describer
        self._channel = channel
        self._gatherer = gatherer
        self._planner = planner
        self._costs = costs
        self._context = context
        self._executor = executor
        self._exchanger = Exchanger(channel.blocks)
        self._view = NO_VIEW
        self._checks = DataChecks(channel.steps.num_ranks, context.config) if context.is_writer else None
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
            raise self._channel.heartbeat.lost(error, f"step {self.step}") from error
        if prepared is None:
            self._ended, self._view = True, NO_VIEW
            warnings = self._checks.epoch_ended() if self._checks else []
            return Prepared(None, self.checkpoint(in_epoch=False), warnings=warnings)
        return prepared

    def _make(self) -> Prepared | None:
        """Call the stages in order; None where the epoch has ended."""
        started = time.monotonic()
        self._change_cost()
        context, config, num_ranks = self._context, self._context.config, self._channel.steps.num_ranks
        quota, dropped, truncated = first_quota(config, num_ranks, self._view), 0, 0
        while True:
            self._enter("collecting")
            candidates = self.reader.collect(quota)  # and describe each sample as it comes
            self._enter("gathering")
            gathered = self._gather_in_view(candidates)
            dropped, truncated = dropped + gathered.dropped, truncated + gathered.truncated
            chosen = select(
                candidates,
                gathered,
                config=config,
                rank=context.rank,
                num_ranks=num_ranks,
                cp_size=context.cp_size,
                view=self._view,
            )
            if chosen is None:
                quota *= 2  # some rank ran out of candidates before the token budget was spent: all look further ahead
                continue
            fresh, self._view = self.reader.take(chosen.num_fresh, chosen.carried), chosen.view
            # Where every list of the step was empty or dropped, and the sources go on, collect again.
            if len(chosen.gathered) or gathered.exhausted.all() or chosen.is_last:
                break
        self.num_dropped += dropped
        self._ended = chosen.is_last
        if not len(chosen.gathered):
            return None
        self._enter("planning")
        table, plan = plan_samples(
            chosen.gathered,
            planner=self._planner,
            config=config,
            towers=context.towers,
            cp_size=context.cp_size,
            channel=self._channel,
        )
        self._digest = plan_number(plan)
        if config.groups in ("prompt", "prefix"):
            self._describer.heavy = heaviest_part(table, num_ranks, config)
        self._enter("exchanging")
        samples = self._exchange(table, plan, chosen.mine)
        warnings = self._checks.step(self.step, chosen) if self._checks else []
        seconds = time.monotonic() - started
        stats = step_stats(
            table,
            plan,
            members=chosen.gathered.group_column("num_members"),
            config=config,
            cp_size=context.cp_size,
            step=self.step,
            dropped=dropped,
            truncated=truncated,
            delays=chosen.delays,
            num_carried=chosen.num_carried,
            tokens_over_mean=chosen.tokens_over_mean,
            samples_over_mean=chosen.samples_over_mean,
            seconds=seconds,
        )
        step = PackedStep(
            context,
            table=table,
            plan=plan,
            gathered=chosen.gathered,
            samples=samples,
            stats=stats,
            media_dtype=dtype_of(gathered.media_dtype),
            home_ids=[[member.sample_id for member in members_of(item.block.sample)] for item in chosen.mine],
        )
        self.step += 1
        return Prepared(step, self.checkpoint(in_epoch=True), tuple(fresh), warnings)

    def _enter(self, stage: str) -> None:
        """Say where this rank is, to the ranks that may wait for it."""
        self._channel.heartbeat.stage = f"{stage} step {self.step}"

    def _gather_in_view(self, candidates: Sequence[Described]) -> Gathered:
        """Gather the metadata of all that is in view; what is known of carried samples does not travel again."""
        carried = self._view.carried
        if carried is None:
            return self._gather(candidates)
        return self._gather(candidates[len(self.reader.carried) :]).after(carried)

    def _gather(self, candidates: Sequence[Described], error: BaseException | None = None) -> Gathered:
        config = self._context.config
        state = RankState(
            step=self.step,
            records=np.stack([item.record for item in candidates]) if candidates else self._describer.empty_records(),
            exhausted=self.reader.exhausted,
            dropped=self.reader.take_dropped(),
            truncated=self._describer.take_truncated(),
            error=error or self.reader.error,
            plan_digest=self._digest,
            dtypes=self._describer.dtypes,
            free_fields=tuple(self._describer.free_fields),
            slots=None if config.lookahead == 1 else (config.samples_per_step or 1) * self._view.wanted(config),
        )
        return self._run(lambda: self._gatherer(state), self._executor, is_gather=True)

    def _exchange(self, table: SampleTable, plan: StepPlan, mine: Sequence[Described]) -> dict[int, Sample | SampleGroup]:
        executor = self._executor
        if executor is not None and not (plan.moved_bytes and self._channel.exchanges_on_device):
            executor = None
        try:
            return self._run(lambda: self._exchanger(table, plan, mine), executor)
        except CorruptBlockError as error:
            with contextlib.suppress(EvenpackError, TransportError):
                self._gather([], error)  # tells the other ranks, which are a step ahead, why this one stops
            raise

    @staticmethod
    def _run(operation: Callable[[], T], executor: MainThreadExecutor | None, *, is_gather: bool = False) -> T:
        """Run a collective, on the training thread where NCCL needs it there."""
        return operation() if executor is None else executor.run(operation, is_gather=is_gather)

    def _change_cost(self) -> None:
        """Plan the step that begins, and those after it, with the cost model that is due."""
        due = self._costs.due(self.step) if self._costs.ahead else None
        if due is not None:
            self._describer.use_cost(due.cost)
            self._gatherer.amend(due.fingerprint)
            self._context = msgspec.structs.replace(self._context, towers=due.towers)
            self.reader.describe_again()
            self._view = msgspec.structs.replace(self._view, carried=None)

    # Between steps.

    def start_epoch(self) -> None:
        """Begin to read the source, or continue from a loaded checkpoint."""
        self._ended = False
        self.reader.start()

    def read_ahead(self) -> None:
        """Read what the next step will likely need, without a collective."""
        # What an iterator yields cannot be read again: it is read only when a step is due, so that its state is certain.
        if not self._ended and self._context.config.samples_per_step is not None and self.reader.can_go_back:
            self.reader.fill(self._context.config.samples_per_step * self._view.wanted(self._context.config))

    def checkpoint(self, *, in_epoch: bool) -> Checkpoint:
        """Return where the next step begins."""
        position, dtypes = self.reader.position(), self._describer.dtypes
        return Checkpoint(
            step=self.step,
            plan=self._digest,
            dtypes=dtypes,
            in_epoch=in_epoch,
            position=position,
            heavy=self._describer.heavy,
            lookahead=self._context.config.lookahead,
            ahead=self._view.ahead,
            closing=self._view.closing,
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Go to a checkpoint, before `start_epoch`."""
        self.step, self._digest = checkpoint.step, checkpoint.plan
        self._describer.load_dtypes(checkpoint.dtypes)
        self._describer.heavy = checkpoint.heavy
        if checkpoint.in_epoch and checkpoint.lookahead != self._context.config.lookahead:
            checkpoint = without_view(checkpoint)
        self._view = View(ahead=checkpoint.ahead, closing=checkpoint.closing) if checkpoint.in_epoch else NO_VIEW
        self.reader.load(checkpoint.position, in_epoch=checkpoint.in_epoch)

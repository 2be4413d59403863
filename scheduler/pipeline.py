"""One step, from the source to packs that wait to be built: collect, describe, gather, plan, exchange."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ..core import CorruptBlockError, EvenpackError, Sample
from ..core.fields import dtype_of
from .comm.channel import Channel
from .comm.transports import TransportError
from .cost.calibrate import CostChange
from .plan import SampleTable, StepPlan, Team, plan_in_pods, plan_step, planner_for
from .relay import Relay
from .stages.collect import Reader
from .stages.describe import Described, Describer
from .stages.exchange import Exchanger, plan_number
from .stages.gather import Gatherer, RankState
from .stages.lists import plan_lists
from .stages.metadata import Gathered, note_of
from .stages.select import Bringer, Brought
from .state import Checkpoint
from .step import PackedStep, StepContext
from .telemetry.stats import step_stats

Planner = Callable[..., StepPlan]


class Preparer:
    """Makes the steps of one scheduler, one after the other.

    Args:
        reader: this rank's samples.
        describer: their declaration, for rows of the right shape.
        channel: connection to the peers.
        gatherer: the gather.
        planner: a function with `plan_step`'s signature.
        context: what all steps share.
        relay: takes operations that belong on the training thread; None where this is the training thread.

    Attributes:
        step: number of the next step.
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
        relay: Relay | None = None,
    ) -> None:
        self._reader = reader
        self._describer = describer
        self._channel = channel
        self._gatherer = gatherer
        self._planner = planner
        self._context = context
        self._relay = relay
        self._exchanger = Exchanger(channel.steps)
        self._bring = Bringer(
            reader, config=context.config, rank=context.rank, num_ranks=channel.steps.num_ranks, gather=self._gather
        )
        self._changes: deque[CostChange] = deque()
        self._digest = 0
        self._ended = False
        self._dropped = 0
        self.step = 0

    def start_epoch(self) -> None:
        """Begin to read the source anew, or go on where a loaded checkpoint stands."""
        self._ended = False
        self._reader.start()

    def abandon(self) -> None:
        """Leave the step that is being prepared; from any thread, with the channel's `abort`."""
        self._reader.abandon()

    def checkpoint(self, *, in_epoch: bool) -> Checkpoint:
        """Return where the next step begins."""
        return Checkpoint(
            step=self.step,
            plan=self._digest,
            dtypes=self._describer.dtypes,
            in_epoch=in_epoch,
            position=self._reader.position(),
        )

    @property
    def num_dropped(self) -> int:
        """Samples that the oversize policy dropped so far on all ranks, behind the last step of an epoch too."""
        return self._dropped

    @property
    def buffer_bytes(self) -> int:
        """Memory held for the exchange, in bytes."""
        return self._channel.steps.buffer_bytes

    @property
    def waiting(self) -> list[Described]:
        """Samples that were read and belong to no step yet."""
        return list(self._reader.waiting)

    def use_cost(self, change: CostChange) -> None:
        """Plan with another cost model from a step on that is not begun yet; from any thread."""
        self._changes.append(change)

    def _take_changes(self) -> None:
        """Plan the step that begins, and those behind it, with the cost model that is due.

        What was read already is costed anew: a rank that resumes here reads it then.
        """
        due: CostChange | None = None
        while self._changes and self._changes[0].from_step <= self.step:
            due = self._changes.popleft()
        if due is None:
            return
        self._describer.use_cost(due.cost)
        self._gatherer.amend(due.told)
        self._context = msgspec.structs.replace(self._context, towers=due.towers)
        reader, where = self._reader, f"rank {self._context.rank}, a sample that waits"
        reader.waiting = [self._describer.described(item.block.sample, where) for item in reader.waiting]
        reader.deferred = [(self._describer.described(item.block.sample, where), waited) for item, waited in reader.deferred]

    def load(self, checkpoint: Checkpoint, changes: Sequence[CostChange]) -> None:
        """Go to a checkpoint and the cost models from there on, before `start_epoch`."""
        self._changes = deque(changes)
        self.step, self._digest = checkpoint.step, checkpoint.plan
        self._describer.load_dtypes(checkpoint.dtypes)
        self._reader.load(checkpoint.position, in_epoch=checkpoint.in_epoch)

    def ahead(self) -> None:
        """Read what the next step will likely need, without a word to the others."""
        # What an iterator yields cannot be read again: it is read only when a step is due, so that its state is certain.
        if not self._ended and self._context.config.samples_per_step is not None and self._reader.can_go_back:
            self._reader.fill(self._context.config.samples_per_step)

    def __call__(self) -> "Prepared":
        """Return the next step.

        Raises:
            EvenpackError: the same error on every rank, unless this rank alone is cut off.
        """
        if self._ended:
            return Prepared(None, self.checkpoint(in_epoch=False), ())
        try:
            return self._make()
        except TransportError as error:
            raise self._channel.lost(error, f"step {self.step}") from error

    def _make(self) -> "Prepared":
        started = time.monotonic()
        self._take_changes()
        self._channel.heartbeat.at(f"collecting step {self.step}")
        brought = self._brought()
        if brought is None:
            self._ended = True
            return Prepared(None, self.checkpoint(in_epoch=False), ())
        mine, gathered, waits, fresh, _ = brought
        table = gathered.table(self._context.config.segment_align(self._context.cp_size))
        self._channel.heartbeat.at(f"planning step {self.step}")
        plan = self._plan(table, gathered)
        self._digest = plan_number(plan)
        samples = self._exchanged(table, plan, mine)
        stats = step_stats(
            table,
            plan,
            step=self.step,
            dropped=gathered.dropped,
            truncated=gathered.truncated,
            waits=waits,
            seconds=time.monotonic() - started,
        )
        self.step += 1
        pixels = gathered.dtypes.get("pixel_values") or gathered.dtypes.get("pixel_values_videos") or "float32"
        step = PackedStep(
            self._context,
            table=table,
            plan=plan,
            weights=gathered.rows["weight"].astype(np.float64),
            samples=samples,
            stats=stats,
            media_dtype=dtype_of(pixels),
            home_ids=[item.block.sample.sample_id for item in mine],
        )
        return Prepared(step, self.checkpoint(in_epoch=True), tuple(fresh))

    def _gather(self, mine: list[Described], error: BaseException | None = None) -> Gathered:
        self._channel.heartbeat.at(f"gathering step {self.step}")
        reader = self._reader
        rows = np.stack([item.row for item in mine]) if mine else self._describer.empty_rows()
        state = RankState(
            step=self.step,
            rows=rows,
            exhausted=reader.exhausted,
            dropped=reader.take_dropped(),
            truncated=self._describer.take_truncated(),
            error=error or reader.error,
            plan_digest=self._digest,
            dtypes=self._describer.dtypes,
            free_fields=tuple(self._describer.free_fields),
        )
        if self._relay is not None and self._channel.gathers_on_device:
            return self._relay.call(lambda: self._gatherer(state), is_gather=True)
        return self._gatherer(state)

    def _exchanged(self, table: SampleTable, plan: StepPlan, mine: list[Described]) -> dict[int, Sample]:
        self._channel.heartbeat.at(f"exchanging step {self.step}")

        def operation() -> dict[int, Sample]:
            return self._exchanger(table, plan, mine)

        try:
            if self._relay is not None and self._channel.exchanges_on_device and plan.moved_bytes:
                return self._relay.call(operation)
            return operation()
        except CorruptBlockError as error:
            self._announce(error)
            raise

    def _brought(self) -> Brought | None:
        """Return what goes into the next step; None where the epoch has ended."""
        dropped = truncated = 0
        while True:
            brought = self._bring()
            gathered = brought.gathered
            dropped, truncated = dropped + gathered.dropped, truncated + gathered.truncated
            if not brought.full and self._context.config.on_exhausted == "stop" and gathered.exhausted.any():
                self._ended = True
                brought = self._left_over(brought)
                gathered = brought.gathered
            if len(gathered) or gathered.exhausted.all() or self._ended:
                self._dropped += dropped
                counted = msgspec.structs.replace(gathered, dropped=dropped, truncated=truncated)
                return brought._replace(gathered=counted) if len(gathered) else None
            # Every list of the step was empty or dropped, and the sources go on.

    def _left_over(self, brought: Brought) -> Brought:
        """Return a last step of the outliers that full steps left waiting; what an incomplete step brought is not trained."""
        keep = note_of(brought.gathered.rows) > 0
        if self._context.config.defer is None:
            keep[:] = False
        mine = [
            item for item, kept in zip(brought.mine, keep[brought.gathered.home == self._context.rank], strict=True) if kept
        ]
        return brought._replace(mine=mine, gathered=brought.gathered.select(keep))

    def _plan(self, table: SampleTable, gathered: Gathered) -> StepPlan:
        config, num_ranks, cp_size = self._context.config, self._channel.steps.num_ranks, self._context.cp_size
        if config.scope == "microbatch":
            return plan_lists(
                table, note_of(gathered.rows), num_ranks=num_ranks, config=config, towers=self._context.towers, cp_size=cp_size
            )
        peers = [[rank] for rank in range(num_ranks)] if config.scope == "rank" else self._channel.peers
        nodes = self._channel.node_of_rank
        settings: dict[str, Any] = {
            "num_ranks": num_ranks,
            "config": config,
            "towers": self._context.towers,
            "cp_size": cp_size,
            "node_of_rank": nodes,
            "peers": peers,
        }
        planner = planner_for(len(table)) if self._planner is plan_step else self._planner
        if planner is plan_in_pods:
            # Over a device transport alone a gather belongs on the training thread; there peers are fixed, and no pods planned.
            settings["team"] = Team(rank=self._context.rank, gather=self._channel.aside.gather)
        return planner(table, **settings)

    def _announce(self, error: EvenpackError) -> None:
        """Tell the other ranks, who are a step ahead, why this one stops."""
        try:
            self._gather([], error)
        except (EvenpackError, TransportError):
            return  # the caller raises the error itself


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A step, and what a resume behind it needs.

    Attributes:
        step: the step; None where the epoch has ended.
        behind: where the next step begins.
        fresh: what this rank took from its source for it, in order.
    """

    step: PackedStep | None
    behind: Checkpoint
    fresh: tuple[Described, ...]

"""One step, from the source to packs that wait to be built: collect, describe, gather, plan, exchange."""

import time
from collections.abc import Callable

import numpy as np

from ..core import CorruptBlockError, EvenpackError, PeerLostError
from ..core.fields import dtype_of
from .budget import rounds_within
from .collect import Reader
from .describe import Described, Describer
from .exchange import exchange, plan_number
from .gather import Gatherer, RankState
from .groups import Channel
from .lists import pack_of_rows, plan_lists, stamp_list
from .plan import SampleTable, StepPlan
from .rows import Gathered
from .stats import step_stats
from .step import PackedStep, StepContext
from .transports import TransportError

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
    ) -> None:
        self._reader = reader
        self._describer = describer
        self._channel = channel
        self._gatherer = gatherer
        self._planner = planner
        self._context = context
        self._digest = 0
        self._ended = False
        self.step = 0

    def start_epoch(self) -> None:
        """Begin to read the source anew."""
        self._ended = False
        self._reader.start()

    def __call__(self) -> PackedStep | None:
        """Return the next step, or None where the epoch has ended on all ranks.

        Raises:
            EvenpackError: the same error on every rank, unless this rank alone is cut off.
        """
        if self._ended:
            return None
        try:
            return self._make()
        except TransportError as error:
            raise self._lost(error) from error

    def _make(self) -> PackedStep | None:
        started = time.monotonic()
        self._channel.heartbeat.at(f"collecting step {self.step}")
        mine, gathered = self._brought()
        if not len(gathered) or self._stops(gathered):
            self._ended = True
            return None
        table = gathered.table(self._context.config.segment_align(self._context.cp_size))
        self._channel.heartbeat.at(f"planning step {self.step}")
        plan = self._plan(table, gathered)
        self._digest = plan_number(plan)
        self._channel.heartbeat.at(f"exchanging step {self.step}")
        try:
            samples = exchange(self._channel.steps, table, plan, mine, pin=self._context.pin)
        except CorruptBlockError as error:
            self._announce(error)
            raise
        seconds = time.monotonic() - started
        stats = step_stats(table, plan, step=self.step, dropped=gathered.dropped, seconds=seconds)
        pixels = gathered.dtypes.get("pixel_values") or gathered.dtypes.get("pixel_values_videos") or "float32"
        self.step += 1
        return PackedStep(
            self._context,
            table=table,
            plan=plan,
            weights=gathered.rows["weight"].astype(np.float64),
            samples=samples,
            stats=stats,
            media_dtype=dtype_of(pixels),
        )

    def _brought(self) -> tuple[list[Described], Gathered]:
        """Return this rank's samples of the step, and everyone's rows."""
        config = self._context.config
        if config.scope == "microbatch":
            mine = self._read_lists(config.num_microbatches or 1)
        elif config.tokens_per_step is not None:
            return self._brought_by_tokens(config.tokens_per_step)
        else:
            assert config.samples_per_step is not None
            self._reader.fill(config.samples_per_step)
            mine = self._reader.take(config.samples_per_step)
        return mine, self._gather(mine)

    def _read_lists(self, count: int) -> list[Described]:
        mine: list[Described] = []
        for index in range(count):
            items = self._reader.read_list()
            if items is None:
                break
            mine.extend(stamp_list(item, index) for item in items)
        return mine

    def _brought_by_tokens(self, budget: int) -> tuple[list[Described], Gathered]:
        reader, num_ranks = self._reader, self._channel.steps.num_ranks
        wanted = -(-budget // num_ranks)
        while True:
            reader.fill_tokens(wanted)
            gathered = self._gather(reader.waiting)
            taken, enough = rounds_within(gathered, budget=budget, num_ranks=num_ranks)
            if enough:
                chosen = gathered.select(taken)
                return reader.take(int(chosen.counts(num_ranks)[self._context.rank])), chosen
            wanted *= 2  # some rank ran out of waiting samples before the budget did: all look further ahead

    def _gather(self, mine: list[Described], error: BaseException | None = None) -> Gathered:
        self._channel.heartbeat.at(f"gathering step {self.step}")
        reader = self._reader
        rows = np.stack([item.row for item in mine]) if mine else self._describer.empty_rows()
        return self._gatherer(
            RankState(
                step=self.step,
                rows=rows,
                exhausted=reader.exhausted,
                dropped=reader.take_dropped(),
                error=error or reader.error,
                plan_digest=self._digest,
                dtypes=self._describer.dtypes,
                free_fields=tuple(self._describer.free_fields),
            )
        )

    def _stops(self, gathered: Gathered) -> bool:
        config = self._context.config
        if config.on_exhausted == "drain" or not gathered.exhausted.any():
            return False
        if config.samples_per_step is None:
            return True
        counts = gathered.counts(self._channel.steps.num_ranks)
        return bool((counts < config.samples_per_step).any())

    def _plan(self, table: SampleTable, gathered: Gathered) -> StepPlan:
        config, num_ranks = self._context.config, self._channel.steps.num_ranks
        common = {"num_ranks": num_ranks, "config": config, "cp_size": self._context.cp_size}
        if config.scope == "microbatch":
            return plan_lists(table, pack_of_rows(gathered.rows), **common)  # type: ignore[arg-type]
        peers = [[rank] for rank in range(num_ranks)] if config.scope == "rank" else None
        return self._planner(table, node_of_rank=self._channel.node_of_rank, peers=peers, **common)

    def _announce(self, error: EvenpackError) -> None:
        """Tell the other ranks, who are a step ahead, why this one stops."""
        try:
            self._gather([], error)
        except (EvenpackError, TransportError):
            return  # the caller raises the error itself

    def _lost(self, error: TransportError) -> EvenpackError:
        missing = self._channel.heartbeat.missing()
        if missing:
            names = ", ".join(f"rank {rank} (last: {sign})" for rank, sign in missing)
            return PeerLostError(f"{names} stopped answering at step {self.step}: {error}")
        others = ", ".join(f"rank {rank}: {sign}" for rank, sign in self._channel.heartbeat.stages())
        return PeerLostError(f"a rank did not come to step {self.step}, all are alive ({others or 'no heartbeat'}): {error}")

"""Epochs planned from an index: which samples make a step, and where each of them is computed."""

from collections.abc import Iterator
from typing import Protocol

import msgspec
import numpy as np

from ...models import ModelAdapter
from ..cost.model import default_cost
from ..plan import PlanConfig, SampleTable, StepPlan, planner_for
from ..plan.settings import check_int
from ..plan.table import Ints
from ..stages.describe import SampleCost, grid_bits, media_towers
from .permutation import Permutation


class OfflineConfig(PlanConfig, frozen=True, kw_only=True):
    """How epochs are planned from an index; the planner's settings, and how many samples a step has.

    Attributes:
        samples_per_step: samples of each rank in a step.
        tokens_per_step: tokens of the whole group in a step, instead: the longest run of the epoch's order that does not
            exceed it.
        seed: which order; every epoch has another one that follows from it.
        shuffle: False for the dataset's own order.

    Raises:
        ValueError: a setting of the wrong type or range, or not exactly one of the two sizes.
    """

    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("samples_per_step", "tokens_per_step") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of samples_per_step and tokens_per_step, got {given or 'neither'}")
        check_int(given[0], getattr(self, given[0]), 1)
        check_int("seed", self.seed, 0)


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step of an epoch.

    Attributes:
        start: place in the epoch's order at which the step begins.
        stop: place at which the next one begins.
        samples: numbers of the step's samples, in the epoch's order; those that the index left out are not among them.
        plan: the plan; its rows are `samples`.
    """

    start: int
    stop: int
    samples: Ints
    plan: StepPlan

    def pack(self, rank: int, microbatch: int) -> Ints:
        """Return the numbers of the samples in one pack, in pack order; none in a dummy pack."""
        ids = self.plan.ids(rank, microbatch)
        return self.samples[ids[ids < len(self.samples)]]


class Sizes(Protocol):
    """What planning needs of an index."""

    def __len__(self) -> int: ...

    def tokens(self, numbers: Ints) -> Ints:
        """Return the lengths of examples."""
        ...

    def grids(self, number: int) -> list[tuple[int, int, int]]:
        """Return the grids of an example's images and videos."""
        ...


class EpochPlanner:
    """Plans epochs, step by step, the same on every rank; nothing is kept, so memory does not grow with the dataset.

    Args:
        index: sizes of the examples.
        config: settings.
        adapter: the family: which towers are trained, and what a dummy item costs.
        num_ranks: R.
        cp_size: context-parallel size.
        cost: cost of a sample; default: a typical model of 7 billion parameters, as for `PackingScheduler`.
    """

    def __init__(
        self,
        index: Sizes,
        config: OfflineConfig,
        adapter: ModelAdapter,
        *,
        num_ranks: int,
        cp_size: int = 1,
        cost: SampleCost | None = None,
    ) -> None:
        check_int("num_ranks", num_ranks, 1)
        self.index = index
        self.config = config
        self.num_ranks = num_ranks
        self._adapter = adapter
        self._cp_size = cp_size
        self._cost: SampleCost = default_cost(adapter) if cost is None else cost
        # Nothing has a home yet, so movement is free.
        settings = {name: getattr(config, name) for name in PlanConfig.__struct_fields__}
        self._plan_config = PlanConfig(**{**settings, "movement": "free"})
        self._towers = media_towers(adapter, self._cost)

    def steps(self, epoch: int, start: int = 0) -> Iterator[PlannedStep]:
        """Yield the steps of an epoch.

        Args:
            epoch: its number, from 0.
            start: place in the epoch's order to begin at.

        Raises:
            PlanError: a step that no plan can serve; a sample above the capacity, under `oversize="error"`.
        """
        order = Permutation(len(self.index), self.config.seed * 1_000_003 + epoch, self.config.shuffle)
        while start < len(self.index):
            stop = self._stop(order, start)
            samples = order(start, stop)
            samples = samples[self.index.tokens(samples) > 0]
            if len(samples):
                yield PlannedStep(start=start, stop=stop, samples=samples, plan=self._plan(samples))
            start = stop

    def _stop(self, order: Permutation, start: int) -> int:
        """Return where the step that begins at a place of the order ends."""
        config, count = self.config, len(self.index)
        if config.samples_per_step is not None:
            return min(count, start + config.samples_per_step * self.num_ranks)
        assert config.tokens_per_step is not None
        width = 256
        while True:
            stop = min(count, start + width)
            total = np.cumsum(self.index.tokens(order(start, stop)))
            fits = int(np.searchsorted(total, config.tokens_per_step, "right"))
            if fits < stop - start or stop == count:
                return start + max(fits, 1)  # a sample above the budget is a step of its own
            width *= 2

    def _plan(self, samples: Ints) -> StepPlan:
        tokens = self.index.tokens(samples)
        grids = [self.index.grids(int(number)) for number in samples]
        table = SampleTable.from_lengths(
            tokens,
            align=self._plan_config.segment_align(self._cp_size),
            cost=[self._cost.sample_cost(int(length), items) for length, items in zip(tokens, grids, strict=True)],
            home=np.arange(len(samples)) % self.num_ranks,
            media=[grid_bits(items) for items in grids],
        )
        return planner_for(len(table))(
            table, num_ranks=self.num_ranks, config=self._plan_config, towers=self._towers, cp_size=self._cp_size
        )

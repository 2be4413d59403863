"""Epochs planned from an index: which samples make a step, and where each of them is computed."""

from collections.abc import Callable, Iterator
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

    As in training, samples that the index left out or that `oversize="drop"` drops count for no step: the next ones of the
    epoch's order take their places, so that only the last step can have fewer.

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


class EpochStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of one step of an epoch.

    Attributes:
        start: place in the epoch's order at which the step begins.
        stop: place at which the next one begins.
        samples: numbers of the step's samples, in the epoch's order; those that are left out are not among them.
        num_oversize: examples between `start` and `stop` that `oversize="drop"` dropped.
        is_partial: whether the data ended before the step was full.
    """

    start: int
    stop: int
    samples: Ints
    num_oversize: int
    is_partial: bool


class PlannedStep(EpochStep, frozen=True, kw_only=True, eq=False):
    """One step of an epoch, planned.

    Attributes:
        plan: the plan; its rows are `samples`.
    """

    plan: StepPlan

    @property
    def num_dropped(self) -> int:
        """Samples that are too long, and those for which a fixed `num_microbatches` has no room."""
        return self.num_oversize + self.plan.num_dropped

    def pack(self, rank: int, microbatch: int) -> Ints:
        """Return the numbers of the samples in one pack, in pack order; none in a dummy pack."""
        ids = self.plan.ids(rank, microbatch)
        return self.samples[ids[ids < len(self.samples)]]


def cut_epoch(
    lengths: Callable[[Ints], Ints],
    count: int,
    config: OfflineConfig,
    *,
    num_ranks: int,
    epoch: int,
    cp_size: int = 1,
    start: int = 0,
) -> Iterator[EpochStep]:
    """Yield the samples of each step of an epoch, the last one partial if the data end before it is full.

    Args:
        lengths: from numbers of examples to their lengths, int64; 0 for those that are left out.
        count: number of examples.
        config: settings.
        num_ranks: R.
        epoch: its number, from 0.
        cp_size: context-parallel size.
        start: place in the epoch's order to begin at.
    """
    order = Permutation(count, config.seed * 1_000_003 + epoch, config.shuffle)
    by_tokens = config.samples_per_step is None
    budget = config.tokens_per_step or (config.samples_per_step or 0) * num_ranks
    longest = config.capacity(cp_size) if config.oversize == "drop" else np.iinfo(np.int64).max
    while start < count:
        width = 256 if by_tokens else budget + 1
        while True:  # until the first sample of the next step is in sight
            numbers = order(start, min(count, start + width))
            tokens = lengths(numbers)
            counts = (tokens > 0) & (tokens <= longest)
            used = np.cumsum(np.where(counts, tokens, 0) if by_tokens else counts)
            first = np.flatnonzero(counts)[:1]
            # A sample above a budget of tokens is a step by itself.
            size = int(np.searchsorted(used, max(budget, *used[first].tolist()) if len(first) else budget, "right"))
            if size < width or start + width >= count:
                break
            width *= 2
        stop = start + size
        if len(first):
            yield EpochStep(
                start=start,
                stop=stop,
                samples=numbers[:size][counts[:size]],
                num_oversize=int((tokens[:size] > longest).sum()),
                is_partial=stop == count and int(used[-1]) < budget,
            )
        start = stop


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
        steps = cut_epoch(
            self.index.tokens,
            len(self.index),
            self.config,
            num_ranks=self.num_ranks,
            epoch=epoch,
            cp_size=self._cp_size,
            start=start,
        )
        for step in steps:
            yield PlannedStep(**msgspec.structs.asdict(step), plan=self._plan(step.samples))

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

"""Steps, planned one after the other by evenpack and by others, on the same samples."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice

import msgspec
import numpy as np

from ...integrations.megatron.next_fit import next_fit_planner
from ...scheduler.config import SchedulerConfig
from ...scheduler.offline.plan import OfflineConfig, cut_epoch
from ...scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan, planner_for
from ...scheduler.plan.settings import NO_TOWERS
from ...scheduler.plan.table import Ints
from ...scheduler.plan.window import WindowBounds, roll
from ...scheduler.stats import StepStats, step_stats
from ...scheduler.telemetry.advice import Advice, advise
from ...scheduler.telemetry.advice.what_if import Steps
from .opponents.alone import packed_alone, padded_alone
from .opponents.karmarkar_karp import karmarkar_karp_equal
from .pool import Pool

Planner = Callable[..., StepPlan]
OURS = "evenpack"
#: Name to planner, in the order of the table.
METHODS: dict[str, Planner] = {
    OURS: lambda table, **settings: planner_for(len(table))(table, **settings),
    "padded batches": padded_alone,
    "in-batch packing": packed_alone,
    "next-fit (Megatron-Core)": next_fit_planner,
    "Karmarkar-Karp (verl)": karmarkar_karp_equal,
}
#: Settings that gain less are not worth a change.
WORTH = 0.01


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated.

    Attributes:
        num_ranks: R.
        samples_per_step: of each rank.
        steps: how many.
        seed: of the order in which samples come.
        towers: media towers of the model.
        lookahead: steps in view of each, in a method of its own beside single steps.
        config: the planner's, with a pack's whole capacity (all context-parallel ranks together) as `max_tokens`.
    """

    num_ranks: int
    samples_per_step: int
    steps: int
    config: PlanConfig
    towers: MediaTowers = NO_TOWERS
    seed: int = 0
    lookahead: int = 1

    @property
    def batch(self) -> int:
        """Samples of all ranks in a step."""
        return self.num_ranks * self.samples_per_step


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One method over all steps; means over the steps unless said otherwise.

    Attributes:
        name: of the method.
        step_cost: the objective in cost units: what the slowest rank works, or waits for.
        efficiency: of each step: cost of the samples over what all ranks together could have done in that time.
        above_bound: mean step cost over the mean lower bound, less 1.
        padding_share: share of all computed tokens that is padding.
        imbalance: as `StepPlan.imbalance`.
        num_microbatches: packs of a rank.
        moved_bytes: bytes that cross ranks in a step.
        moved_share: their share of all bytes.
    """

    name: str
    step_cost: float
    efficiency: tuple[float, ...]
    above_bound: float
    padding_share: float
    imbalance: float
    num_microbatches: float
    moved_bytes: float
    moved_share: float

    @property
    def mean_efficiency(self) -> float:
        """Mean over the steps."""
        return float(np.mean(self.efficiency))


class Simulation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All methods, and the steps as the first of them planned them.

    Attributes:
        figures: by name, in the order of the methods.
        tables: samples of each step.
        plans: their plans.
        stats: figures of the plans.
        rows: `[B]`, rows in the pool of the first step's samples.
    """

    figures: dict[str, Figures]
    tables: list[SampleTable]
    plans: list[StepPlan]
    stats: list[StepStats]
    rows: Ints


def epoch_steps(pool: Pool, setting: Setting, epoch: int) -> Iterator[tuple[Ints, bool]]:
    """Yield the pool's rows of each step of an epoch, cut as an index's epoch is, and whether the step is partial."""
    config = OfflineConfig(
        **msgspec.structs.asdict(setting.config), samples_per_step=setting.samples_per_step, seed=setting.seed
    )
    lengths = np.zeros(len(pool.samples.tokens), np.int64)
    lengths[pool.row] = pool.tokens
    for step in cut_epoch(lengths.__getitem__, len(lengths), config, num_ranks=setting.num_ranks, epoch=epoch):
        yield np.searchsorted(pool.row, step.samples), step.is_partial


def draw_steps(pool: Pool, setting: Setting) -> Iterator[Ints]:
    """Yield the rows of each step: full ones, of as many epochs as it takes.

    Raises:
        ValueError: fewer samples than one step takes.
    """
    if len(pool) < setting.batch:
        raise ValueError(
            f"{len(pool):,} samples, and one step of {setting.num_ranks:,} ranks x {setting.samples_per_step:,} samples takes "
            f"{setting.batch:,}: lower --ranks or --samples-per-step, or pass a longer file"
        )
    steps = (rows for epoch in count() for rows, is_partial in epoch_steps(pool, setting, epoch) if not is_partial)
    return islice(steps, setting.steps)


def simulate(
    pool: Pool,
    setting: Setting,
    *,
    methods: Mapping[str, Planner] = METHODS,
    progress: Callable[[int], object] = lambda done: None,
) -> Simulation:
    """Plan every step with every method.

    Args:
        pool: samples that all fit a pack.
        setting: what to simulate.
        methods: planners by name; the first is the one that the others are measured against, and must be `plan_step`-like.
        progress: called after each plan, with 1.

    Raises:
        ValueError: fewer samples than one step takes, or a step that cannot be planned.
    """
    seen: dict[str, list[tuple[StepStats, int, float]]] = {name: [] for name in methods}
    bounds: list[int] = []
    nbytes = 0
    tables: list[SampleTable] = []
    plans: list[StepPlan] = []
    align = setting.config.align or 1
    drawn = list(draw_steps(pool, setting))
    for number, rows in enumerate(drawn):
        table = pool.table(rows, num_ranks=setting.num_ranks, align=align)
        work = int(table.cost.sum())
        nbytes += int(table.nbytes.sum())
        for name, planner in methods.items():
            plan = planner(table, num_ranks=setting.num_ranks, config=setting.config, towers=setting.towers)
            stats = step_stats(table, plan, config=setting.config, step=number)
            seen[name].append((stats, plan.value, work / (setting.num_ranks * plan.value)))
            if len(bounds) == number:
                bounds.append(plan.lower_bound)
                tables.append(table)
                plans.append(plan)
            progress(1)
    if setting.lookahead > 1:
        seen = _with_window(seen, tables, setting, progress)
    bound, mean_bytes = float(np.mean(bounds)), nbytes / setting.steps
    return Simulation(
        figures={name: _figures(name, steps, bound, mean_bytes) for name, steps in seen.items()},
        tables=tables,
        plans=plans,
        stats=[stats for stats, _, _ in next(iter(seen.values()))],
        rows=drawn[0],
    )


def _with_window(
    seen: dict[str, list[tuple[StepStats, int, float]]],
    tables: list[SampleTable],
    setting: Setting,
    progress: Callable[[int], object],
) -> dict[str, list[tuple[StepStats, int, float]]]:
    """Add the steps that a window chooses, behind the first method, whose planner plans them."""
    default = SchedulerConfig(max_tokens=1, samples_per_step=1)
    rolled = roll(
        tables,
        num_ranks=setting.num_ranks,
        config=setting.config,
        capacity=setting.config.capacity(1),
        bounds=WindowBounds(
            lookahead=setting.lookahead, tokens=default.step_tokens_tolerance, samples=default.step_samples_tolerance
        ),
    )
    steps = []
    for number, (table, _) in enumerate(rolled):
        plan = METHODS[OURS](table, num_ranks=setting.num_ranks, config=setting.config, towers=setting.towers)
        stats = step_stats(table, plan, config=setting.config, step=number)
        steps.append((stats, plan.value, int(table.cost.sum()) / (setting.num_ranks * plan.value)))
        progress(1)
    first, *others = seen.items()
    return dict([first, (f"{OURS}, {setting.lookahead} steps in view", steps), *others])


def advice_on(simulation: Simulation, setting: Setting, cp_size: int = 1) -> list[Advice]:
    """Return the settings that would gain on the simulated steps, the best first, as for the steps of a run."""
    planner = msgspec.structs.asdict(setting.config) | {"max_tokens": setting.config.max_tokens // cp_size}
    steps = Steps(
        tables=simulation.tables,
        plans=simulation.plans,
        stats=simulation.stats,
        config=SchedulerConfig(**planner, samples_per_step=setting.samples_per_step, lookahead=setting.lookahead),
        num_ranks=setting.num_ranks,
        cp_size=cp_size,
        towers=setting.towers,
    )
    return advise(steps, min_gain=WORTH)


def _figures(name: str, steps: list[tuple[StepStats, int, float]], bound: float, nbytes: float) -> Figures:
    stats = [entry[0] for entry in steps]
    cost = float(np.mean([entry[1] for entry in steps]))
    moved = float(np.mean([one.moved_bytes for one in stats]))
    return Figures(
        name=name,
        step_cost=cost,
        efficiency=tuple(entry[2] for entry in steps),
        above_bound=cost / bound - 1,
        padding_share=1 - sum(one.tokens for one in stats) / sum(one.padded_tokens for one in stats),
        imbalance=float(np.mean([one.imbalance for one in stats])),
        num_microbatches=float(np.mean([one.num_microbatches for one in stats])),
        moved_bytes=moved,
        moved_share=moved / nbytes,
    )

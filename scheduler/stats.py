"""What a step gained, in numbers; every rank computes the same."""

import time
from typing import Any

import msgspec
import numpy as np

from .plan import PlanConfig, SampleTable, StepPlan
from .plan.window import window_bound

#: Part of a step's time that no plan of its samples gains, from which on it is worked out what a window would.
_WORTH_A_LOOK = 0.01


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, over the whole data-parallel group.

    Attributes:
        step: number of the step, from 0.
        num_samples: samples that are computed.
        num_dropped: samples that the policy `oversize` left out.
        num_truncated: samples that `oversize="truncate"` cut since the last step.
        num_microbatches: packs per rank.
        num_dummy_packs: packs without a sample.
        tokens: real tokens.
        padded_tokens: tokens that the packs occupy, tails and dummies included.
        padded_batch_tokens: tokens if each rank padded the samples that it brought to its longest.
        efficiency: cost of the samples over what all ranks could do in the plan's time: 1 where no rank waits. Padding costs
            nothing here, if the cost model says so; fixed costs of micro-batches, dummies and the fill of a pipeline count as
            waiting.
        phase_efficiency: the same for each phase of the cost on its own.
        lost_to_step: share of the ranks' time that no plan of these samples gains: often one heavy sample decides it.
        lost_to_plan: share that this plan leaves against the bound, at most. `efficiency`, `lost_to_step` and `lost_to_plan`
            add up to 1.
        lost_to_window: the part of `lost_to_step` that up to eight steps like this, planned as one, would gain at most: what
            a larger `lookahead` is worth.
        imbalance: of the plan, as `StepPlan.imbalance`.
        imbalance_home: largest over mean of the ranks' cost, had every sample stayed at home.
        gap: how far the plan's objective may be from the best, as `StepPlan.gap`.
        moved_bytes: bytes that crossed ranks.
        moved_bytes_lower_bound: bytes that any plan this good must move.
        shuffle_bytes: bytes that a full shuffle would move.
        num_carried: samples that wait for a later step of a window (`lookahead`).
        longest_delay: most steps that a sample is trained after its turn.
        mean_delay: mean steps between a sample's turn and this one, before or after.
        tokens_over_mean: real tokens of the step over the mean of the steps in view; 1 with `lookahead=1`.
        samples_over_mean: the same, of its samples.
        prepare_seconds: time that this rank took to plan, exchange and wait for its peers.
        exposed_seconds: time that the training thread waited for the step inside `next(scheduler)`: what was not hidden.
        step_seconds: time from the hand-out of the step before to this one's: training that step, and waiting for this one;
            None for the first step of an epoch.
        tokens_per_second: real tokens of the step before, which were computed in `step_seconds`, over that time; of the whole
            group; None for the first step of an epoch.
        silent_ranks: ranks that showed no sign of life for half of `timeout` when the step was handed out, as this rank saw it.
    """

    step: int
    num_samples: int
    num_dropped: int
    num_truncated: int
    num_microbatches: int
    num_dummy_packs: int
    tokens: int
    padded_tokens: int
    padded_batch_tokens: int
    efficiency: float
    phase_efficiency: tuple[float, ...]
    lost_to_step: float
    lost_to_plan: float
    lost_to_window: float
    imbalance: float
    imbalance_home: float
    gap: float
    moved_bytes: int
    moved_bytes_lower_bound: int
    shuffle_bytes: int
    num_carried: int = 0
    longest_delay: int = 0
    mean_delay: float = 0.0
    tokens_over_mean: float = 1.0
    samples_over_mean: float = 1.0
    prepare_seconds: float = 0.0
    exposed_seconds: float = 0.0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    silent_ranks: tuple[int, ...] = ()

    @property
    def bubble(self) -> float:
        """Share of the group's compute that waits: `1 - mean / largest` load of the ranks, at the sync point of the settings.

        With `sync="step"` over the ranks' sums, with `sync="microbatch"` over every micro-batch and phase. Fixed costs of
        micro-batches and the fill of a pipeline are not in it.
        """
        return 1 - 1 / max(1.0, self.imbalance)

    @property
    def padding_share(self) -> float:
        """Share of the packs' tokens that is padding."""
        return 1 - self.tokens / max(1, self.padded_tokens)

    @property
    def padding_share_batched(self) -> float:
        """Share that would be padding in padded batches."""
        return 1 - self.tokens / max(1, self.padded_batch_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for a log."""
        return {**msgspec.to_builtins(self), "padding_share": self.padding_share, "bubble": self.bubble}


def step_stats(
    table: SampleTable,
    plan: StepPlan,
    *,
    config: PlanConfig,
    cp_size: int = 1,
    step: int = 0,
    dropped: int = 0,
    truncated: int = 0,
    delays: np.ndarray | None = None,
    num_carried: int = 0,
    tokens_over_mean: float = 1.0,
    samples_over_mean: float = 1.0,
    seconds: float = 0.0,
    members: np.ndarray | None = None,
) -> StepStats:
    """Compute the figures of a step.

    Args:
        table: the samples that were planned.
        plan: their plan.
        config: settings that it was made with.
        cp_size: context-parallel size.
        step: number of the step.
        dropped: samples dropped before planning.
        truncated: samples cut before planning.
        delays: of every sample, steps that it is trained after its turn; below 0, before it; None where each has its turn.
        num_carried: samples that wait for a later step.
        tokens_over_mean: as `StepStats.tokens_over_mean`.
        samples_over_mean: as `StepStats.samples_over_mean`.
        seconds: time that preparing the step took on this rank.
        members: int64 `[N]`, samples in each row of the table; None for one.
    """
    kept = plan.rank >= 0
    members = np.ones(len(table), np.int64) if members is None else members
    num_ranks = plan.num_ranks
    delays = np.zeros(0, np.int64) if delays is None else delays
    weight = table.cost.reshape(len(table), -1).sum(axis=1)
    home_cost = np.zeros(num_ranks, np.int64)
    longest = np.zeros(num_ranks, np.int64)
    np.add.at(home_cost, table.home[kept], weight[kept])
    np.maximum.at(longest, table.home[kept], table.tokens[kept])
    counts = np.bincount(table.home[kept], minlength=num_ranks)
    return StepStats(
        step=step,
        num_samples=int(members[kept].sum()),
        num_dropped=dropped + int(members[~kept].sum()),
        num_truncated=truncated,
        num_microbatches=plan.num_microbatches,
        num_dummy_packs=int(plan.is_dummy.sum()),
        tokens=int(table.tokens[kept].sum()),
        padded_tokens=int(plan.padded.sum()),
        padded_batch_tokens=int((counts * longest).sum()),
        **_efficiency(table, plan, config, cp_size),
        imbalance=float(plan.imbalance),
        imbalance_home=float(home_cost.max() / max(1.0, home_cost.mean())),
        gap=float(plan.gap),
        moved_bytes=int(plan.moved_bytes),
        moved_bytes_lower_bound=int(plan.moved_bytes_lower_bound),
        shuffle_bytes=int(table.nbytes[kept].sum()) * (num_ranks - 1) // num_ranks,
        num_carried=num_carried,
        longest_delay=max(int(delays.max(initial=0)), 0),
        mean_delay=float(np.abs(delays).mean()) if len(delays) else 0.0,
        tokens_over_mean=tokens_over_mean,
        samples_over_mean=samples_over_mean,
        prepare_seconds=seconds,
    )


def _efficiency(table: SampleTable, plan: StepPlan, config: PlanConfig, cp_size: int) -> dict[str, Any]:
    """Return how the ranks' time is spent, by field."""
    kept, ranks = plan.rank >= 0, plan.num_ranks
    work = table.cost.reshape(len(table), -1)[kept].sum(axis=0)
    mean = int(work.sum()) / ranks
    if not plan.value or not mean:
        whole = float(not plan.value)
        return {
            "efficiency": whole,
            "phase_efficiency": (whole,) * len(work),
            "lost_to_step": 1.0 - whole,
            "lost_to_plan": 0.0,
            "lost_to_window": 0.0,
        }
    by_index = config.sync == "microbatch"
    waited = plan.cost.max(axis=0).sum(axis=0) if by_index else plan.cost.sum(axis=1).max(axis=0)
    lost = max(plan.lower_bound - mean, 0.0)
    window = mean
    if lost > _WORTH_A_LOOK * plan.value:
        window = window_bound(table.select(kept), num_ranks=ranks, config=config, cp_size=cp_size)
    return {
        "efficiency": mean / plan.value,
        "phase_efficiency": tuple(
            min(float(done / ranks / time), 1.0) if time else 1.0 for done, time in zip(work, waited, strict=True)
        ),
        "lost_to_step": lost / plan.value,
        "lost_to_plan": 1 - (mean + lost) / plan.value,
        "lost_to_window": max(plan.lower_bound - max(window, mean), 0.0) / plan.value,
    }


class StepClock:
    """Times the hand-outs of one scheduler.

    The interval that ends with a step's hand-out began with the hand-out before it: it holds the training of the step before,
    and the wait for this one. The first step of an epoch has none, so what is done between epochs counts nowhere.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._asked = 0.0

    def asked(self) -> None:
        """The training thread begins to wait for a step."""
        self._asked = time.monotonic()

    def handed_out(self, stats: StepStats) -> StepStats:
        """Return the figures of a step that came just now, with its times."""
        now = time.monotonic()
        seconds = rate = None
        if self._last is not None:
            before, tokens = self._last
            seconds = max(now - before, 1e-9)
            rate = tokens / seconds
        self._last = (now, stats.tokens)
        return msgspec.structs.replace(stats, exposed_seconds=now - self._asked, step_seconds=seconds, tokens_per_second=rate)

    def epoch_ended(self) -> None:
        """The time until the next step belongs to none."""
        self._last = None

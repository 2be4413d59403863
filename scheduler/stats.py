"""What a step gained, in numbers; every rank computes the same."""

import time
from typing import Any

import msgspec
import numpy as np

from .plan import SampleTable, StepPlan


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, over the whole data-parallel group.

    Attributes:
        step: number of the step, from 0.
        num_samples: samples that are computed.
        num_dropped: samples that the policy `oversize` left out.
        num_truncated: samples that `oversize="truncate"` cut since the last step.
        num_deferred: outliers that wait for a later step.
        longest_wait: most steps that one of them has waited.
        num_microbatches: packs per rank.
        num_dummy_packs: packs without a sample.
        tokens: real tokens.
        padded_tokens: tokens that the packs occupy, tails and dummies included.
        padded_batch_tokens: tokens if each rank padded the samples that it brought to its longest.
        imbalance: of the plan, as `StepPlan.imbalance`.
        imbalance_home: largest over mean of the ranks' cost, had every sample stayed at home.
        gap: how far the plan's objective may be from the best, as `StepPlan.gap`.
        moved_bytes: bytes that crossed ranks.
        moved_bytes_lower_bound: bytes that any plan this good must move.
        shuffle_bytes: bytes that a full shuffle would move.
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
    num_deferred: int
    longest_wait: int
    num_microbatches: int
    num_dummy_packs: int
    tokens: int
    padded_tokens: int
    padded_batch_tokens: int
    imbalance: float
    imbalance_home: float
    gap: float
    moved_bytes: int
    moved_bytes_lower_bound: int
    shuffle_bytes: int
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
    step: int,
    dropped: int,
    truncated: int,
    waits: np.ndarray,
    seconds: float = 0.0,
    members: np.ndarray | None = None,
) -> StepStats:
    """Compute the figures of a step.

    Args:
        table: the samples that were planned.
        plan: their plan.
        step: number of the step.
        dropped: samples dropped before planning.
        truncated: samples cut before planning.
        waits: for every deferred sample, the steps it has waited.
        seconds: time that preparing the step took on this rank.
        members: int64 `[N]`, samples in each row of the table; None for one.
    """
    kept = plan.rank >= 0
    members = np.ones(len(table), np.int64) if members is None else members
    num_ranks = plan.num_ranks
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
        num_deferred=len(waits),
        longest_wait=int(waits.max(initial=0)),
        num_microbatches=plan.num_microbatches,
        num_dummy_packs=int(plan.is_dummy.sum()),
        tokens=int(table.tokens[kept].sum()),
        padded_tokens=int(plan.padded.sum()),
        padded_batch_tokens=int((counts * longest).sum()),
        imbalance=float(plan.imbalance),
        imbalance_home=float(home_cost.max() / max(1.0, home_cost.mean())),
        gap=float(plan.gap),
        moved_bytes=int(plan.moved_bytes),
        moved_bytes_lower_bound=int(plan.moved_bytes_lower_bound),
        shuffle_bytes=int(table.nbytes[kept].sum()) * (num_ranks - 1) // num_ranks,
        prepare_seconds=seconds,
    )


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

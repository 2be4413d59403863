"""Figures of many steps as one: of a whole run, or of the steps between two lines of a log."""

from collections.abc import Iterable
from typing import Any, Self

import msgspec

from .stats import StepStats


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Steps taken together; the names are those that metrics are logged under.

    Attributes:
        steps: number of steps.
        samples: samples that were computed.
        tokens: real tokens.
        tokens_per_second: of the whole group, over the intervals between hand-outs; None where there is none.
        step_seconds: mean interval between two hand-outs; None where there is none.
        padding_share: share of the packs' tokens that is padding.
        padding_share_batched: share that would be padding in padded batches.
        num_microbatches: mean packs per rank and step.
        imbalance: mean of the steps.
        imbalance_home: mean of the steps, had every sample stayed at home.
        bubble: share of the group's compute that waits, at the mean imbalance.
        gap_to_bound: mean of the steps: how far the plans may be from the best.
        moved_bytes: bytes that crossed ranks.
        moved_bytes_lower_bound: bytes that any plans this good must move.
        shuffle_bytes: bytes that full shuffles would have moved.
        moved_share: `moved_bytes / shuffle_bytes`.
        num_dropped: samples that a policy left out.
        num_truncated: samples that a policy cut.
        num_deferred: mean number of outliers that waited for a later step.
        longest_wait: most steps that one of them has waited.
        exposed_seconds: time that the training thread waited for steps.
        exposed_share: that wait over the intervals between hand-outs; None where there is none.
        prepare_seconds: mean time to prepare a step.

    Example:
        >>> Summary.of([]).steps
        0
    """

    steps: int
    samples: int
    tokens: int
    tokens_per_second: float | None
    step_seconds: float | None
    padding_share: float
    padding_share_batched: float
    num_microbatches: float
    imbalance: float
    imbalance_home: float
    bubble: float
    gap_to_bound: float
    moved_bytes: int
    moved_bytes_lower_bound: int
    shuffle_bytes: int
    moved_share: float
    num_dropped: int
    num_truncated: int
    num_deferred: float
    longest_wait: int
    exposed_seconds: float
    exposed_share: float | None
    prepare_seconds: float

    @classmethod
    def of(cls, steps: Iterable[StepStats]) -> Self:
        """Take steps together; each is looked at once and not kept."""
        sums = _Sums()
        for stats in steps:
            sums.add(stats)
        return cls(**sums.figures())

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return dict(msgspec.to_builtins(self))


class _Sums:
    """Sums over the steps of every number in their figures, and of what the times need."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(StepStats.__struct_fields__, 0)
        self._count = self._timed = self._longest_wait = 0
        self._tokens_timed = self._exposed_timed = 0.0

    def add(self, stats: StepStats) -> None:
        for name in StepStats.__struct_fields__:
            self._sums[name] += getattr(stats, name) or 0
        self._count += 1
        self._longest_wait = max(self._longest_wait, stats.longest_wait)
        if stats.step_seconds is not None and stats.tokens_per_second is not None:
            self._timed += 1
            self._tokens_timed += stats.tokens_per_second * stats.step_seconds
            self._exposed_timed += stats.exposed_seconds

    def figures(self) -> dict[str, Any]:
        sums, seconds = self._sums, self._sums["step_seconds"]
        count = max(1, self._count)
        imbalance = sums["imbalance"] / count
        return {
            "steps": self._count,
            "samples": sums["num_samples"],
            "tokens": sums["tokens"],
            "tokens_per_second": self._tokens_timed / seconds if seconds else None,
            "step_seconds": seconds / self._timed if self._timed else None,
            "padding_share": 1 - sums["tokens"] / sums["padded_tokens"] if sums["padded_tokens"] else 0.0,
            "padding_share_batched": 1 - sums["tokens"] / sums["padded_batch_tokens"] if sums["padded_batch_tokens"] else 0.0,
            "num_microbatches": sums["num_microbatches"] / count,
            "imbalance": imbalance,
            "imbalance_home": sums["imbalance_home"] / count,
            "bubble": 1 - 1 / max(1.0, imbalance),
            "gap_to_bound": sums["gap"] / count,
            "moved_bytes": sums["moved_bytes"],
            "moved_bytes_lower_bound": sums["moved_bytes_lower_bound"],
            "shuffle_bytes": sums["shuffle_bytes"],
            "moved_share": sums["moved_bytes"] / max(1, sums["shuffle_bytes"]),
            "num_dropped": sums["num_dropped"],
            "num_truncated": sums["num_truncated"],
            "num_deferred": sums["num_deferred"] / count,
            "longest_wait": self._longest_wait,
            "exposed_seconds": sums["exposed_seconds"],
            "exposed_share": self._exposed_timed / seconds if seconds else None,
            "prepare_seconds": sums["prepare_seconds"] / count,
        }

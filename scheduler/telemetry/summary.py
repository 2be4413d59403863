"""Figures of many steps as one: of a whole run, or of the steps between two lines of a log."""

from collections.abc import Iterable
from typing import Any, Self

import msgspec

from ..stats import StepStats


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
        efficiency: share of the ranks' time, as planned, that is work: mean of the steps.
        lost_to_step: share that no plan of each step's samples gains.
        lost_to_plan: share that the plans leave against their bounds, at most.
        lost_to_window: part of `lost_to_step` that longer windows would gain, at most.
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
        num_carried: mean number of samples that waited for a later step of a window.
        longest_delay: most steps that a sample was trained after its turn.
        mean_delay: mean steps between the samples' turns and their steps.
        tokens_over_mean: largest of the steps.
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
    efficiency: float
    lost_to_step: float
    lost_to_plan: float
    lost_to_window: float
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
    num_carried: float
    longest_delay: int
    mean_delay: float
    tokens_over_mean: float
    exposed_seconds: float
    exposed_share: float | None
    prepare_seconds: float

    @classmethod
    def of(cls, steps: Iterable[StepStats]) -> Self:
        """Take steps together."""
        steps = list(steps)
        timed = [one for one in steps if one.step_seconds is not None and one.tokens_per_second is not None]

        def total(name: str) -> Any:
            return sum(getattr(one, name) or 0 for one in steps)

        def mean(name: str) -> float:
            return float(total(name)) / max(1, len(steps))

        def padding(name: str) -> float:
            return 1 - float(total("tokens")) / total(name) if total(name) else 0.0

        seconds, imbalance = total("step_seconds"), mean("imbalance")
        tokens_timed = sum((one.tokens_per_second or 0) * (one.step_seconds or 0) for one in timed)
        return cls(
            steps=len(steps),
            samples=total("num_samples"),
            tokens=total("tokens"),
            tokens_per_second=tokens_timed / seconds if seconds else None,
            step_seconds=seconds / len(timed) if timed else None,
            padding_share=padding("padded_tokens"),
            padding_share_batched=padding("padded_batch_tokens"),
            num_microbatches=mean("num_microbatches"),
            efficiency=mean("efficiency"),
            lost_to_step=mean("lost_to_step"),
            lost_to_plan=mean("lost_to_plan"),
            lost_to_window=mean("lost_to_window"),
            imbalance=imbalance,
            imbalance_home=mean("imbalance_home"),
            bubble=1 - 1 / max(1.0, imbalance),
            gap_to_bound=mean("gap"),
            moved_bytes=total("moved_bytes"),
            moved_bytes_lower_bound=total("moved_bytes_lower_bound"),
            shuffle_bytes=total("shuffle_bytes"),
            moved_share=total("moved_bytes") / max(1, total("shuffle_bytes")),
            num_dropped=total("num_dropped"),
            num_truncated=total("num_truncated"),
            num_carried=mean("num_carried"),
            longest_delay=max((one.longest_delay for one in steps), default=0),
            mean_delay=mean("mean_delay"),
            tokens_over_mean=max((one.tokens_over_mean for one in steps), default=0.0),
            exposed_seconds=total("exposed_seconds"),
            exposed_share=sum(one.exposed_seconds for one in timed) / seconds if seconds else None,
            prepare_seconds=mean("prepare_seconds"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return dict(msgspec.to_builtins(self))

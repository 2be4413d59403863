"""Which setting would gain, by how much, in words."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ....core import EvenpackError
from ...plan import StepPlan
from ...stats import StepStats
from ..summary import Summary
from .what_if import DEFER, Steps, merged, time_per_work, with_context_parallelism, with_deferral

#: Share of a step's time below which waiting for the scheduler is no matter.
_EXPOSED = 0.02
#: A larger batch must gain this much more than a smaller one to be named in its place.
_WORTH_DOUBLING = 0.02


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that would gain.

    Attributes:
        kind: the setting.
        text: what it would gain, and why.
        gain: share of the time per unit of work that it would save.
    """

    kind: str
    text: str
    gain: float


class Situation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Recent steps.

    Attributes:
        steps: their tables and settings.
        plans: their plans.
        stats: their figures, times among them.
        deadline: on `time.monotonic`: from there on, nothing more is planned.
    """

    steps: Steps
    plans: Sequence[StepPlan]
    stats: Sequence[StepStats]
    deadline: float = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


def advise(situation: Situation, *, min_gain: float = 0.03) -> list[Advice]:
    """Plan the steps under other settings and return those that gain, the best first.

    Args:
        situation: recent steps, planned by `plan_step` over the whole group.
        min_gain: gains below are not named.

    Returns:
        At most one for each setting.
    """
    pairs = zip(situation.steps.tables, situation.plans, strict=True)
    work = sum(int(table.cost[plan.rank >= 0].sum()) for table, plan in pairs)
    now = sum(plan.value for plan in situation.plans) / max(1, work)
    found: list[Advice] = []
    for rule in _RULES:
        if situation.is_late:
            break
        with contextlib.suppress(EvenpackError, ValueError):  # under that setting, the steps cannot be planned at all
            advice = rule(situation, now)
            if advice is not None and advice.gain >= min_gain:
                found.append(advice)
    return sorted(found, key=lambda advice: -advice.gain)


def _larger_batch(situation: Situation, now: float) -> Advice | None:
    """More samples a step: fuller packs, and more to balance with."""
    steps, config = situation.steps, situation.steps.config
    name = "samples_per_step" if config.samples_per_step is not None else "tokens_per_step"
    if config.num_microbatches is not None:
        return None  # their number would have to grow as well
    best, best_factor = 0.0, 0
    for factor in (2, 4):
        larger = None if situation.is_late else merged(steps, factor)
        gain = 0.0 if larger is None else 1 - time_per_work(larger) / now
        if gain > best + (_WORTH_DOUBLING if best else 0.0):
            best, best_factor = gain, factor
    if not best_factor:
        return None
    figures = Summary.of(situation.stats)
    text = (
        f"max_tokens={config.max_tokens} leaves packs {_fill(situation):.0%} full and ranks wait {figures.bubble:.0%} of the "
        f"step: {name}={getattr(config, name) * best_factor} (a batch {best_factor} times as large) would cut the cost per "
        f"token by {best:.0%}"
    )
    return Advice(kind=name, text=text, gain=best)


def _larger_packs(situation: Situation, now: float) -> Advice | None:
    """More memory for a pack: fewer micro-batches."""
    config = situation.steps.config
    larger = msgspec.structs.replace(config, max_tokens=2 * config.max_tokens)
    gain = 1 - time_per_work(situation.steps, larger) / now
    count = np.mean([plan.num_microbatches for plan in situation.plans])
    text = (
        f"max_tokens={config.max_tokens} makes {count:.1f} micro-batches "
        f"a step: max_tokens={larger.max_tokens}, where memory allows it, would cut the step's cost per token by {gain:.0%}"
    )
    return Advice(kind="max_tokens", text=text, gain=gain)


def _chosen_count(situation: Situation, now: float) -> Advice | None:
    """More micro-batches than the step needs."""
    config = situation.steps.config
    if config.num_microbatches is None:
        return None
    gain = 1 - time_per_work(situation.steps, msgspec.structs.replace(config, num_microbatches=None)) / now
    text = (
        f"num_microbatches={config.num_microbatches} is not the best for these steps: num_microbatches=None (chosen for each "
        f"step) would cut the step's cost per token by {gain:.0%}"
    )
    return Advice(kind="num_microbatches", text=text, gain=gain)


def _heavy_samples(situation: Situation, now: float) -> Advice | None:
    """Samples heavier than a rank's mean load: they are deferred, or split."""
    steps, config = situation.steps, situation.steps.config
    bound, longest, most = 0, 0, 0.0
    for table in steps.tables:
        weight = table.cost.reshape(len(table), -1).sum(axis=1)
        share = weight * steps.num_ranks / max(1, int(weight.sum()))
        if len(table) and share.max() > 1 + config.tolerance:
            bound += 1
            most = max(most, float(share.max()))
            longest = max(longest, int(table.tokens[np.argmax(share)]))
    if not bound:
        return None
    gains = []
    if config.defer is None and config.samples_per_step is not None and len(steps.tables) > 1:
        gains.append((1 - with_deferral(steps) / now, f"defer={DEFER} would cut the step's cost per token by {{:.0%}}"))
    split = with_context_parallelism(steps)
    if split is not None:
        gains.append(
            (
                1 - split / now,
                f"context parallelism of {2 * steps.cp_size} on the same GPUs by {{:.0%}}, its communication aside",
            )
        )
    named = [words.format(gain) for gain, words in gains if gain > 0]
    if not named:
        return None
    text = (
        f"{bound} of {len(steps.tables)} steps are bound by one sample, of up to {longest} tokens and {most:.2f} times a "
        f"rank's mean load: {'; '.join(named)}"
    )
    return Advice(kind="heavy samples", text=text, gain=max(gain for gain, _ in gains))


def _prefetch(situation: Situation, now: float) -> Advice | None:
    """Waiting for the scheduler that prefetch would hide."""
    del now  # a matter of seconds, not of plans
    figures, prefetch = Summary.of(situation.stats), situation.steps.config.prefetch
    share, seconds = figures.exposed_share, figures.step_seconds
    if share is None or seconds is None or share < _EXPOSED:
        return None
    training = seconds * (1 - share)
    hidden = 1 - max(training, figures.prepare_seconds) / seconds
    text = f"the training thread waits {share:.1%} of the step for the scheduler: "
    if figures.prepare_seconds > training:
        text += (
            f"preparing a step takes {figures.prepare_seconds:.3f} s and training one {training:.3f} s, so the data source "
            "needs to be faster (more workers in the loader)"
        )
        return Advice(kind="source", text=text, gain=share)
    text += f"prefetch={prefetch + 1} would save up to {hidden:.1%}"
    return Advice(kind="prefetch", text=text, gain=hidden)


#: The quickest to look at first.
_RULES: tuple[Callable[[Situation, float], Advice | None], ...] = (
    _prefetch,
    _chosen_count,
    _larger_packs,
    _heavy_samples,
    _larger_batch,
)


def _fill(situation: Situation) -> float:
    """Share of the packs' room that real tokens take."""
    steps = situation.steps
    room = sum(plan.tokens.size for plan in situation.plans) * steps.config.max_tokens * steps.cp_size
    return sum(int(plan.tokens.sum()) for plan in situation.plans) / max(1, room)

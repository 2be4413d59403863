"""Which setting would gain, by how much, in words."""

import contextlib
import math
import time
from collections.abc import Callable

import msgspec
import numpy as np

from ....core import EvenpackError
from ..summary import Summary
from .what_if import LOOKAHEAD, Steps, cost_per_work, merged, time_per_work, with_context_parallelism, with_lookahead

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


def advise(steps: Steps, *, min_gain: float = 0.03, deadline: float = math.inf) -> list[Advice]:
    """Plan recent steps under other settings and return those that gain, the best first, at most one for each setting.

    Args:
        steps: with their plans and figures.
        min_gain: gains below are not named.
        deadline: on `time.monotonic`: from there on, no further setting is tried.
    """
    now = cost_per_work(list(zip(steps.tables, steps.plans, strict=True)))
    found: list[Advice] = []
    for rule in _RULES:
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(EvenpackError, ValueError):  # under that setting, the steps cannot be planned at all
            advice = rule(steps, now)
            if advice is not None and advice.gain >= min_gain:
                found.append(advice)
    return sorted(found, key=lambda advice: -advice.gain)


def _larger_batch(steps: Steps, now: float) -> Advice | None:
    """More samples a step: fuller packs, and more to balance with."""
    config = steps.config
    name = "samples_per_step" if config.samples_per_step is not None else "tokens_per_step"
    if config.num_microbatches is not None:
        return None  # their number would have to grow as well
    best, best_factor = 0.0, 0
    for factor in (2, 4):
        larger = merged(steps, factor)
        gain = 0.0 if larger is None else 1 - time_per_work(larger) / now
        if gain > best + (_WORTH_DOUBLING if best else 0.0):
            best, best_factor = gain, factor
    if not best_factor:
        return None
    room = sum(plan.tokens.size for plan in steps.plans) * config.max_tokens * steps.cp_size
    fill = sum(int(plan.tokens.sum()) for plan in steps.plans) / max(1, room)
    text = (
        f"max_tokens={config.max_tokens} leaves packs {fill:.0%} full and ranks wait {Summary.of(steps.stats).bubble:.0%} of "
        f"the step: {name}={getattr(config, name) * best_factor} (a batch {best_factor} times as large) would cut the cost per "
        f"token by {best:.0%}"
    )
    return Advice(kind=name, text=text, gain=best)


def _larger_packs(steps: Steps, now: float) -> Advice:
    """More memory for a pack: fewer micro-batches."""
    larger = msgspec.structs.replace(steps.config, max_tokens=2 * steps.config.max_tokens)
    gain = 1 - time_per_work(steps, larger) / now
    count = np.mean([plan.num_microbatches for plan in steps.plans])
    text = (
        f"max_tokens={steps.config.max_tokens} makes {count:.1f} micro-batches "
        f"a step: max_tokens={larger.max_tokens}, where memory allows it, would cut the step's cost per token by {gain:.0%}"
    )
    return Advice(kind="max_tokens", text=text, gain=gain)


def _chosen_count(steps: Steps, now: float) -> Advice | None:
    """More micro-batches than the step needs."""
    if steps.config.num_microbatches is None:
        return None
    gain = 1 - time_per_work(steps, msgspec.structs.replace(steps.config, num_microbatches=None)) / now
    text = (
        f"num_microbatches={steps.config.num_microbatches} is not the best for these steps: num_microbatches=None (chosen for "
        f"each step) would cut the step's cost per token by {gain:.0%}"
    )
    return Advice(kind="num_microbatches", text=text, gain=gain)


def _heavy_samples(steps: Steps, now: float) -> Advice | None:
    """Samples heavier than a rank's mean load: they run together in a window of steps, or are split."""
    config = steps.config
    bound, longest, most = 0, 0, 0.0
    for table in steps.tables:
        weight = table.cost.reshape(len(table), -1).sum(axis=1)
        share = weight * steps.num_ranks / max(1, int(weight.sum()))
        if len(table) and share.max() > 1 + config.tolerance:
            bound += 1
            most = max(most, float(share.max()))
            longest = max(longest, int(table.tokens[np.argmax(share)]))
    wait = Summary.of(steps.stats).lost_to_window
    if not bound and wait < config.tolerance:
        return None
    gains = []
    if (
        config.lookahead == 1
        and config.samples_per_step is not None
        and config.num_microbatches is None
        and len(steps.tables) > 1
    ):
        words = f"lookahead={LOOKAHEAD} would cut the step's cost per token by {{:.0%}}"
        gains.append((1 - with_lookahead(steps) / now, words))
    if (split := with_context_parallelism(steps)) is not None:
        words = f"context parallelism of {2 * steps.cp_size} on the same GPUs by {{:.0%}}, its communication aside"
        gains.append((1 - split / now, words))
    named = [words.format(gain) for gain, words in gains if gain > 0]
    if not named:
        return None
    text = (
        f"{bound} of {len(steps.tables)} steps are bound by one sample, of up to {longest} tokens and {most:.2f} times a "
        f"rank's mean load: {'; '.join(named)}"
        if bound
        else f"ranks wait {wait:.0%} of the step for heavy samples, which no plan of single steps gains: {'; '.join(named)}"
    )
    return Advice(kind="heavy samples", text=text, gain=max(gain for gain, _ in gains))


def _prefetch(steps: Steps, now: float) -> Advice | None:
    """Waiting for the scheduler that prefetch would hide."""
    del now  # a matter of seconds, not of plans
    figures = Summary.of(steps.stats)
    share, seconds = figures.exposed_share, figures.step_seconds
    if share is None or seconds is None or share < _EXPOSED:
        return None
    training = seconds * (1 - share)
    text = f"the training thread waits {share:.1%} of the step for the scheduler: "
    if figures.prepare_seconds > training:
        text += (
            f"preparing a step takes {figures.prepare_seconds:.3f} s and training one {training:.3f} s, so the data source "
            "needs to be faster (more workers in the loader)"
        )
        return Advice(kind="source", text=text, gain=share)
    hidden = 1 - training / seconds
    text += f"prefetch={steps.config.prefetch + 1} would save up to {hidden:.1%}"
    return Advice(kind="prefetch", text=text, gain=hidden)


#: The quickest to look at first.
_RULES: tuple[Callable[[Steps, float], Advice | None], ...] = (
    _prefetch,
    _chosen_count,
    _larger_packs,
    _heavy_samples,
    _larger_batch,
)

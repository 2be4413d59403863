"""Select: which of the gathered samples make the step. Pure functions of the gathered metadata, the same on every rank."""

from collections.abc import Sequence

import msgspec
import numpy as np

from ..config import SchedulerConfig
from .describe import Described
from .gather import Gathered


class StepSamples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of a step.

    Attributes:
        mine: this rank's samples, in table order.
        gathered: the metadata of all ranks' samples.
        num_fresh: number of this rank's samples that were not deferred before, those deferred now among them.
        deferred: this rank's samples that wait for a later step.
        waits: of every sample of the group that waits for a later step, the steps that it will have waited by then.
        is_last: whether the epoch ends with this step.
    """

    mine: list[Described]
    gathered: Gathered
    num_fresh: int
    deferred: Sequence[Described] = ()
    waits: np.ndarray = np.zeros(0, np.int64)
    is_last: bool = False


def first_quota(config: SchedulerConfig, num_ranks: int) -> int:
    """Return how much every rank collects for a step: lists, samples, or tokens of the budget."""
    if config.scope == "microbatch":
        return config.num_microbatches or 1
    if config.tokens_per_step is not None:
        return -(-config.tokens_per_step // num_ranks)
    return config.samples_per_step or 1


def select(
    candidates: Sequence[Described], gathered: Gathered, *, config: SchedulerConfig, rank: int, num_ranks: int
) -> StepSamples | None:
    """Select the samples of a step.

    Args:
        candidates: what this rank collected: deferred samples first, then fresh ones.
        gathered: the metadata of every rank's candidates.
        config: settings.
        rank: this rank.
        num_ranks: R.

    Returns:
        The samples; None where a rank ran out of candidates before the token budget was spent: all ranks collect more.
    """
    fresh = gathered.records["steps_waited"] == 0
    num_fresh = int(fresh[gathered.home == rank].sum())
    chosen, waits = np.ones(len(gathered), bool), np.zeros(len(gathered), bool)
    if config.scope == "microbatch":
        full = not gathered.exhausted.any()
    elif config.tokens_per_step is not None:
        chosen, enough, full = rounds_within(gathered, budget=config.tokens_per_step, num_ranks=num_ranks)
        if not enough:
            return None
        num_fresh = int(chosen[gathered.home == rank].sum())
    else:
        counts = np.bincount(gathered.home[fresh], gathered.group_column("num_groups")[fresh], minlength=num_ranks)
        full = bool((counts >= (config.samples_per_step or 0)).all())
        if config.defer is not None:
            ending = bool(gathered.exhausted.all()) or (not full and config.on_exhausted == "stop")
            waits = waiting_outliers(gathered, num_ranks=num_ranks, limit=config.defer, ending=ending)
            chosen = ~waits
    is_last = not full and config.on_exhausted == "stop" and bool(gathered.exhausted.any())
    if is_last:  # outliers that full steps left waiting are trained; the fresh samples of an incomplete step are not
        chosen &= ~fresh
    own = gathered.home == rank
    deferred = [item for item, wait in zip(candidates, waits[own].tolist(), strict=True) if wait]
    return StepSamples(
        mine=[item for item, kept in zip(candidates, chosen[own].tolist(), strict=True) if kept],
        gathered=gathered.select(chosen),
        num_fresh=num_fresh,
        deferred=[item.marked(steps_waited=item.steps_waited + 1) for item in deferred],
        waits=gathered.records["steps_waited"][waits].astype(np.int64) + 1,
        is_last=is_last,
    )


def rounds_within(gathered: Gathered, *, budget: int, num_ranks: int) -> tuple[np.ndarray, bool, bool]:
    """Take the longest prefix in (round, rank) order whose real tokens do not exceed a budget.

    Round i holds the i-th waiting sample of every rank. If a rank has no i-th sample and its source has not
    ended, the prefix is uncertain from there.

    Args:
        gathered: every rank's waiting samples, in order.
        budget: most real tokens.
        num_ranks: R.

    Returns:
        Mask `[N]` of the samples taken; whether it is certain (if not, ranks collect more samples); and whether the budget
        ended it, not the end of the samples.
    """
    counts = gathered.counts(num_ranks)
    starts = np.cumsum(counts) - counts
    rounds = np.arange(len(gathered)) - starts[gathered.home]
    order = np.lexsort((gathered.home, rounds))
    total = np.cumsum(gathered.records["tokens"][order].astype(np.int64))
    taken = np.zeros(len(gathered), bool)
    prefix = int(np.searchsorted(total, budget, side="right"))
    open_ranks = np.flatnonzero(~gathered.exhausted)
    # The first place where a sample may be missing: rank r has none in round counts[r].
    unknown = min(((int(counts[rank]), int(rank)) for rank in open_ranks), default=None)
    if prefix == len(order):
        certain = unknown is None
    else:
        stop = order[prefix]
        certain = unknown is None or (int(rounds[stop]), int(gathered.home[stop])) < unknown
    taken[order[:prefix]] = True
    full = prefix < len(order) or (prefix > 0 and int(total[-1]) == budget)
    return taken, certain, full


def waiting_outliers(gathered: Gathered, *, num_ranks: int, limit: int, ending: bool) -> np.ndarray:
    """Choose the samples that wait for a later step.

    A sample heavier than the mean rank load makes every other rank wait, whichever rank computes it; R of them in one step do
    not. So such samples are deferred, first in first out, until there are R of them, or for `limit` steps. None is deferred
    at the end of the epoch, or if nothing else would be left to train on.

    Args:
        gathered: the metadata of the step's candidates, those deferred before included.
        num_ranks: R.
        limit: most steps that a sample may wait.
        ending: whether this is the epoch's last step.

    Returns:
        bool `[N]`, True where the sample waits.
    """
    cost = gathered.records["cost"].astype(np.int64).sum(axis=1)
    waited = gathered.records["steps_waited"].astype(np.int64)
    waits: np.ndarray = cost * num_ranks > cost.sum()
    outliers = np.flatnonzero(waits)
    oldest_first = outliers[np.argsort(-waited[outliers], kind="stable")]
    waits[oldest_first[: len(outliers) // num_ranks * num_ranks]] = False
    waits[waited >= limit] = False
    if ending or waits.all():
        waits[:] = False
    return waits


def why_no_step(config: SchedulerConfig, *, num_ranks: int, num_dropped: int) -> str:
    """Return what to tell about an epoch without a step.

    Args:
        config: settings.
        num_ranks: R.
        num_dropped: samples that policies of the scheduler or the encoder dropped in the epoch, on all ranks.

    Example:
        >>> why_no_step(SchedulerConfig(max_tokens=8, samples_per_step=1), num_ranks=1, num_dropped=3)
        'the epoch had no step: the source yielded 0 samples that fit: 3 were dropped (too long, or unreadable)'
    """
    sources = "the source" if num_ranks == 1 else f"the sources of all {num_ranks} ranks"
    dropped = f": {num_dropped} were dropped (too long, or unreadable)"
    if config.on_exhausted == "stop":
        return (
            f"the epoch had no step: {sources} yielded no full step, and on_exhausted='stop' leaves out the rest"
            f"{dropped if num_dropped else ''}"
        )
    if num_dropped:
        return f"the epoch had no step: {sources} yielded 0 samples that fit{dropped}"
    return (
        f"the epoch had no step: {sources} yielded 0 samples; an iterator can be read once, a list, a data set or a loader "
        "in every epoch"
    )

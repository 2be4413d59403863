"""Select: which of the gathered samples make the step. Pure functions of the gathered metadata, the same on every rank."""

from collections.abc import Sequence

import msgspec
import numpy as np

from ..config import SchedulerConfig
from ..plan.window import WindowBounds, choose_step, merged_rows
from .describe import Described
from .gather import Gathered


class View(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is known between steps of the samples that wait for a later one, the same on every rank.

    Attributes:
        carried: their metadata; None where the ranks must gather it, after a resume or with another cost model.
        ahead: steps that they are for.
        closing: whether only these steps are left of the epoch, though some sources go on.
    """

    carried: Gathered | None = None
    ahead: int = 0
    closing: bool = False

    def wanted(self, config: SchedulerConfig) -> int:
        """Further steps of which samples are collected."""
        return 0 if self.closing else max(config.lookahead - self.ahead, 0)


#: Nothing is known, and nothing waits.
NO_VIEW = View()


class StepSamples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of a step.

    Attributes:
        mine: this rank's samples, in table order.
        gathered: the metadata of all ranks' samples.
        num_fresh: number of this rank's samples that no step before had in view.
        delays: of every sample of the group, steps that it is trained after its turn; below 0, before it.
        carried: this rank's samples that wait for a later step.
        view: what is known of all that wait.
        tokens_over_mean: real tokens over the mean of the steps in view.
        samples_over_mean: number of samples over the mean of the steps in view.
        is_last: whether the epoch ends with this step.
    """

    mine: list[Described]
    gathered: Gathered
    num_fresh: int
    delays: np.ndarray = np.zeros(0, np.int64)
    carried: Sequence[Described] = ()
    view: View = NO_VIEW
    tokens_over_mean: float = 1.0
    samples_over_mean: float = 1.0
    is_last: bool = False

    @property
    def num_carried(self) -> int:
        """Samples of the group that wait for a later step."""
        return 0 if self.view.carried is None else len(self.view.carried)


def first_quota(config: SchedulerConfig, num_ranks: int, view: View) -> int:
    """Return how much every rank collects for a step: lists, samples, or tokens of the budget."""
    if config.scope == "microbatch":
        return config.num_microbatches or 1
    if config.tokens_per_step is not None:
        return -(-config.tokens_per_step // num_ranks)
    return (config.samples_per_step or 1) * view.wanted(config)


def select(
    candidates: Sequence[Described],
    gathered: Gathered,
    *,
    config: SchedulerConfig,
    rank: int,
    num_ranks: int,
    cp_size: int = 1,
    view: View = NO_VIEW,
) -> StepSamples | None:
    """Select the samples of a step.

    Args:
        candidates: what this rank collected: carried samples first, then fresh ones.
        gathered: the metadata of every rank's candidates.
        config: settings.
        rank: this rank.
        num_ranks: R.
        cp_size: context-parallel size.
        view: what is known of the carried samples.

    Returns:
        The samples; None where a rank ran out of candidates before the token budget was spent: all ranks collect more.
    """
    if config.scope != "microbatch" and config.tokens_per_step is None:
        return _select_in_view(candidates, gathered, config=config, rank=rank, num_ranks=num_ranks, cp_size=cp_size, view=view)
    own = gathered.home == rank
    chosen, full = np.ones(len(gathered), bool), not gathered.exhausted.any()
    if config.tokens_per_step is not None:
        chosen, enough, full = rounds_within(gathered, budget=config.tokens_per_step, num_ranks=num_ranks)
        if not enough:
            return None
    num_fresh = int(chosen[own].sum())
    is_last = not full and config.on_exhausted == "stop" and bool(gathered.exhausted.any())
    if is_last:  # an incomplete step is not trained
        chosen[:] = False
    return StepSamples(
        mine=[item for item, kept in zip(candidates, chosen[own].tolist(), strict=True) if kept],
        gathered=gathered.select(chosen),
        num_fresh=num_fresh,
        delays=np.zeros(int(chosen.sum()), np.int64),
        is_last=is_last,
    )


def _select_in_view(
    candidates: Sequence[Described],
    gathered: Gathered,
    *,
    config: SchedulerConfig,
    rank: int,
    num_ranks: int,
    cp_size: int,
    view: View,
) -> StepSamples:
    """Select one step's samples out of those of the steps in view."""
    records, own = gathered.records, gathered.home == rank
    fresh = records["age"] == 0
    turn = records["list_index"].astype(np.int64)
    kept, closing = np.ones(len(gathered), bool), view.closing
    per_step = config.samples_per_step or 1
    steps_read = int(turn[fresh].max(initial=-1)) + 1
    if config.on_exhausted == "stop" and gathered.exhausted.any():
        counts = np.bincount(gathered.home[fresh], gathered.group_column("num_groups")[fresh], minlength=num_ranks)
        full = int(counts.min()) // per_step
        if full < view.wanted(config):  # an incomplete step is not trained, nor what other ranks have for later ones
            kept, steps_read, closing = ~fresh | (turn < full), full, True
    steps = view.ahead + steps_read
    age = np.where(fresh, config.lookahead - view.ahead - turn, records["age"])
    chosen = kept.copy()
    tokens_over_mean = samples_over_mean = 1.0
    if steps > 1 and kept.any():
        table = gathered.select(kept).table(config.segment_align(cp_size))
        first = np.flatnonzero(gathered.group_column("num_groups")[kept])  # parts of a group follow its first, in one step
        units = table if len(first) == len(table) else merged_rows(table, first)
        now = choose_step(
            units,
            age[kept][first],
            num_ranks=num_ranks,
            steps=steps,
            config=config,
            capacity=config.capacity(cp_size),
            bounds=WindowBounds(
                lookahead=config.lookahead, tokens=config.step_tokens_tolerance, samples=config.step_samples_tolerance
            ),
        )
        chosen[kept] = np.repeat(now, np.diff(np.append(first, len(table))))
        tokens = records["tokens"].astype(np.int64)
        tokens_over_mean = int(tokens[chosen].sum()) * steps / int(tokens[kept].sum())
        samples_over_mean = int(chosen.sum()) * steps / int(kept.sum())
    waits = kept & ~chosen
    carried = gathered.select(waits)
    carried.records["age"] = age[waits] + 1
    return StepSamples(
        mine=[item for item, now in zip(candidates, chosen[own].tolist(), strict=True) if now],
        gathered=gathered.select(chosen),
        num_fresh=int((fresh & own).sum()),
        delays=age[chosen] - config.lookahead,
        carried=[
            item.marked(age=then + 1)
            for item, later, then in zip(candidates, waits[own].tolist(), age[own].tolist(), strict=True)
            if later
        ],
        view=View(carried=carried, ahead=max(steps - 1, 0), closing=closing),
        tokens_over_mean=tokens_over_mean,
        samples_over_mean=samples_over_mean,
        is_last=closing and steps <= 1,
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

"""How many waiting samples a token budget takes."""

import numpy as np

from .metadata import Gathered


def rounds_within(gathered: Gathered, *, budget: int, num_ranks: int) -> tuple[np.ndarray, bool, bool]:
    """Take the longest prefix in (round, rank) order whose real tokens do not exceed a budget.

    Round i holds the i-th waiting sample of every rank. A rank that has no i-th sample but whose source goes on makes the
    prefix uncertain from there.

    Args:
        gathered: every rank's waiting samples, in order.
        budget: most real tokens.
        num_ranks: R.

    Returns:
        Mask `[N]` of the rows taken; whether it is certain: False asks for more waiting samples; and whether the budget, not
        the end of the samples, ended it.
    """
    counts = gathered.counts(num_ranks)
    starts = np.cumsum(counts) - counts
    rounds = np.arange(len(gathered)) - starts[gathered.home]
    order = np.lexsort((gathered.home, rounds))
    total = np.cumsum(gathered.rows["tokens"][order].astype(np.int64))
    taken = np.zeros(len(gathered), bool)
    prefix = int(np.searchsorted(total, budget, side="right"))
    open_ranks = np.flatnonzero(~gathered.exhausted)
    # The first place where a row may be missing: rank r has none in round counts[r].
    unknown = min(((int(counts[rank]), int(rank)) for rank in open_ranks), default=None)
    if prefix == len(order):
        certain = unknown is None
    else:
        stop = order[prefix]
        certain = unknown is None or (int(rounds[stop]), int(gathered.home[stop])) < unknown
    taken[order[:prefix]] = True
    full = prefix < len(order) or (prefix > 0 and int(total[-1]) == budget)
    return taken, certain, full

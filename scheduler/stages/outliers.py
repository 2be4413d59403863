"""`defer`: samples heavier than the mean rank load wait until enough of them fill a micro-batch index."""

import numpy as np

from .metadata import Gathered, note_of


def waiting_outliers(gathered: Gathered, *, num_ranks: int, limit: int, ending: bool) -> np.ndarray:
    """Choose the samples that wait for a later step.

    A sample heavier than the mean rank load keeps every other rank waiting, wherever it is put. R of them beside one another
    do not. So they wait, first in first out, until R of them are there; one that has waited `limit` steps goes on. Nothing
    waits at the end of the epoch, or where nothing else would be left to train on.

    Args:
        gathered: the step's rows, those that waited before among them; a row's note is the number of steps it has waited.
        num_ranks: R.
        limit: most steps that a sample may wait.
        ending: whether this is the epoch's last step.

    Returns:
        bool `[N]`, True where the sample waits.
    """
    cost = gathered.rows["cost"].astype(np.int64).sum(axis=1)
    waited = note_of(gathered.rows)
    waits: np.ndarray = cost * num_ranks > cost.sum()
    outliers = np.flatnonzero(waits)
    oldest_first = outliers[np.argsort(-waited[outliers], kind="stable")]
    waits[oldest_first[: len(outliers) // num_ranks * num_ranks]] = False
    waits[waited >= limit] = False
    if ending or waits.all():
        waits[:] = False
    return waits

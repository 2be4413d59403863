"""Dummy media: every rank runs a tower in the same micro-batch, or none does."""

import numpy as np
import numpy.typing as npt

from ...core import round_up
from ...core.errors import PlanError
from .config import MEDIA_BITS
from .problem import Problem
from .table import Ints


def needed(problem: Problem, flags: Ints) -> Ints:
    """`[R, M]` bit flags of the dummies that packs with these media need.

    Micro-batch sync: what any rank carries at an index, all ranks carry there, kind by kind: models run a tower once for
    each kind of media, and FSDP gathers its weights each time. Step sync: the last micro-batch of every rank runs each
    trained tower, since the gradient reduction waits for its parameters.
    """
    if problem.config.sync == "microbatch":
        everywhere: Ints = np.bitwise_or.reduce(flags, axis=0, initial=problem.media_elsewhere)[None, :] & ~flags
        return everywhere
    dummies = np.zeros_like(flags)
    dummies[:, -1] = missing_towers(problem, flags[:, -1])
    return dummies


def missing_towers(problem: Problem, flags: Ints) -> Ints:
    """Bit flags of the dummies that run the trained towers which packs with these media leave out; shaped like `flags`."""
    missing = np.zeros_like(flags)
    for members, dummy in problem.trained_towers:
        missing |= np.where(flags & members, 0, dummy)
    return missing


def check_known(problem: Problem, dummies: Ints) -> None:
    """Raise `PlanError` where a plan needs a dummy item that the settings do not describe."""
    missing = int(np.bitwise_or.reduce(dummies, axis=None)) & ~problem.dummy_known
    for name, bit in MEDIA_BITS.items():
        if missing & bit:
            rank, index = np.argwhere(dummies & bit)[0]
            raise PlanError(
                f"rank {rank}, micro-batch {index} needs a dummy {name}, and dummy_tokens has no entry for {name!r}: "
                f"name the padded tokens of its smallest legal item (known: {sorted(problem.towers.dummy_tokens)})"
            )


def occupied(problem: Problem, sums: Ints, counts: Ints, dummies: Ints) -> tuple[Ints, Ints]:
    """Padded tokens and segments of packs, with dummies and tails.

    Args:
        sums: `[R, M]` padded tokens of the samples.
        counts: `[R, M]` number of samples.
        dummies: `[R, M]` bit flags.

    Returns:
        Two `[R, M]` arrays. A pack with nothing in it still holds one token that is not padding.
    """
    tokens = sums + problem.dummy_size[dummies]
    segments = counts + problem.dummy_count[dummies]
    empty = segments == 0
    tokens = np.where(empty, problem.align, tokens)
    padded = round_up(tokens, problem.pack_align)
    return padded, segments + empty + (padded > tokens)


def overfull(problem: Problem, sums: Ints, counts: Ints, dummies: Ints) -> npt.NDArray[np.bool_]:
    """`[R, M]` packs above the capacity or the segment limit."""
    padded, segments = occupied(problem, sums, counts, dummies)
    broken: npt.NDArray[np.bool_] = padded > problem.capacity
    if problem.config.max_segments is not None:
        broken |= segments > problem.config.max_segments
    return broken

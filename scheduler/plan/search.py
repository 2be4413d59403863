"""Choose the number of micro-batches, and fall back where the first way does not fit.

Few micro-batches waste the least padding and fixed cost, more leave room to balance. The search starts from the fewest that
the bounds allow, goes up in growing steps until a plan exists, tries a few more, and stops as soon as the best plan is so
near the bound that no other number can gain. With a pipeline the numbers up to four per stage are tried, since its term
falls with M.
"""

import itertools
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from ...core import round_up
from ...core.errors import InfeasiblePlanError
from . import bounds
from .assignment import Assignment, finish
from .limits import (
    FAR_ABOVE_TOLERANCE,
    FEW_BYTES_COUNTS,
    GOOD_GAP,
    GOOD_GAP_LARGE,
    MAX_COUNTS,
    MAX_HOMEWARD_COUNTS,
    MAX_SEARCH,
)
from .packs import Packs
from .problem import Problem, bound_with_tolerance, limit_plus_slack
from .solvers.free import fit, free_microbatch, free_step
from .solvers.minimal_microbatch import homeward_microbatch, minimal_microbatch
from .solvers.minimal_step import minimal_step

Builder = Callable[[Problem, int, bool, int], Packs | None]


def solve(problem: Problem, bound: int) -> Assignment:
    """Find a plan with a low objective.

    Args:
        bound: lower bound of the objective without `microbatch_cost` and pipeline term.

    Raises:
        InfeasiblePlanError: no assignment was found that meets the constraints.
    """
    config = problem.config
    if config.num_microbatches is not None:
        return _fixed(problem, bound, config.num_microbatches)

    best = search(problem, bound, lambda count: attempt(problem, count, bound))
    if _needs_other_homes(problem, best, bound):
        # Homes ask for more room in the packs than a plan that ignores them.
        first = 0 if best is None else best.num_microbatches - MAX_HOMEWARD_COUNTS * config.microbatch_multiple
        counts = itertools.dropwhile(lambda count: count < first, _counts(problem))
        for count in itertools.islice(counts, 1 if problem.is_large else MAX_HOMEWARD_COUNTS):
            best = _better(problem, bound, best, attempt(problem, count, bound, homeward_microbatch))
    if best is None:
        raise InfeasiblePlanError(
            f"no number of micro-batches holds {len(problem.size)} samples on {problem.num_ranks} ranks with capacity "
            f"{problem.capacity}, max_segments={config.max_segments} and the dummy media that the packs need "
            f"(padded tokens by bit flags: {problem.dummy_size.tolist()})"
        )
    return best


def search(problem: Problem, bound: int, plan: Callable[[int], Assignment | None]) -> Assignment | None:
    """The best of what `plan` finds for the numbers of micro-batches that are worth a try; None where it finds nothing."""
    best: Assignment | None = None
    for count in _promising(problem):
        best = _better(problem, bound, best, plan(count))
    # Numbers that find no plan are cheap to try; once one does, each further one is a whole plan.
    tried = 0
    for count in _counts(problem) if best is None else ():
        if best is not None and (tried >= MAX_COUNTS or _settled(problem, best, bound, count)):
            break
        best = _better(problem, bound, best, plan(count))
        tried += best is not None
    return best


def _needs_other_homes(problem: Problem, best: Assignment | None, bound: int) -> bool:
    """Whether samples that stay home as they are leave a plan too far from the tolerance."""
    config = problem.config
    if config.movement == "free" or config.sync == "step" or problem.allowed is not None:
        return False
    limit = bound_with_tolerance(problem, bound)
    return best is None or best.value - config.microbatch_cost * best.num_microbatches > limit + int(
        limit * config.tolerance * FAR_ABOVE_TOLERANCE
    )


def _better(problem: Problem, bound: int, best: Assignment | None, found: Assignment | None) -> Assignment | None:
    if found is None or best is None:
        return found or best
    return best if _score(problem, bound, best) <= _score(problem, bound, found) else found


def _score(problem: Problem, bound: int, found: Assignment) -> tuple[int, ...]:
    """Smaller is better: the objective; with minimal movement, bytes once it is within the tolerance."""
    config = problem.config
    if config.movement == "free":
        return found.score
    limit = limit_plus_slack(problem, bound_with_tolerance(problem, bound)) + config.microbatch_cost * _fewest(problem)
    moved = int(problem.nbytes[found.rank != problem.home].sum())
    # What is within the limit is good enough: there bytes decide, else the objective.
    return max(found.value, limit), moved, *found.score


def _fewest(problem: Problem) -> int:
    multiple = problem.config.microbatch_multiple
    return round_up(bounds.fewest_microbatches(problem), multiple)


def _promising(problem: Problem) -> list[int]:
    """Numbers of micro-batches for a pipeline, up to 4 P: all of them, or the best by a guess where that is too many."""
    config = problem.config
    if problem.stages == 1 or not len(problem.size):
        return []
    fewest = _fewest(problem)
    counts = range(fewest, max(fewest, 4 * config.pipeline_stages) + 1, config.microbatch_multiple)
    if len(counts) * len(problem.size) <= MAX_SEARCH:
        return list(counts)
    mean = int(problem.weight.sum()) // problem.num_ranks
    # The pipeline term is (P - 1) times the largest micro-batch: of an even share, or of one heavy sample.
    heavy = int(np.quantile(problem.weight, 0.99))

    def guess(count: int) -> int:
        return (config.pipeline_stages - 1) * max(mean // count, heavy) + config.microbatch_cost * count

    return sorted({*sorted(counts, key=guess)[: MAX_COUNTS - 1], fewest})


def _counts(problem: Problem) -> Iterator[int]:
    """Numbers of micro-batches from the fewest upwards, in growing steps."""
    multiple = problem.config.microbatch_multiple
    fewest = count = _fewest(problem)
    # Every sample alone, and every set of media on its own: enough for any table that can be planned at all.
    most = fewest + (len(problem.size) + 2 * len(problem.dummy_size)) * multiple
    while count <= most:
        yield count
        count += multiple * max(1, (count - fewest) // (8 * multiple))


def _settled(problem: Problem, best: Assignment, bound: int, count: int) -> bool:
    """Whether a plan with `count` micro-batches or more is not worth a try."""
    config = problem.config
    near = GOOD_GAP if config.movement == "free" else config.tolerance
    if problem.is_large:
        near = max(near, GOOD_GAP_LARGE)
    value = best.value - config.microbatch_cost * best.num_microbatches
    # More micro-batches cost more each; no plan with so many can be better than the best one.
    if bound + config.microbatch_cost * count >= best.value:
        return True
    if value > bound + int(bound * near):
        return False
    if config.movement == "free" or problem.is_large:
        return True
    # More room in the packs may leave more samples at home.
    moved = int(problem.nbytes[best.rank != problem.home].sum())
    return moved <= FEW_BYTES_COUNTS * bounds.moved_bytes(problem, bound_with_tolerance(problem, bound), best.num_microbatches)


def _fixed(problem: Problem, bound: int, count: int) -> Assignment:
    found = attempt(problem, count, bound)
    if found is None and problem.config.oversize == "drop":
        found = _drop(problem, bound, count)
    if found is None:
        raise InfeasiblePlanError(
            f"{len(problem.size)} samples of {int(problem.size.sum())} padded tokens do not fit num_microbatches={count} "
            f"on {problem.num_ranks} ranks with a capacity of {problem.capacity} tokens each "
            f"(max_segments={problem.config.max_segments})"
        )
    return found


def _drop(problem: Problem, bound: int, count: int) -> Assignment | None:
    """Keep what first fit by tokens places, largest first; with room for dummies where they are needed."""
    # Long samples first: they carry the most tokens, and short ones find room later.
    for reserve in (False, True):
        packs = Packs.empty(problem, count, reserve)
        fit(problem, packs, problem.by_size)
        kept = np.flatnonzero(packs.bin_of >= 0)
        part = problem.subset(kept)
        found = attempt(part, count, min(bound, bounds.objective(part)))
        if found is not None:
            rank, microbatch = np.full(len(problem.size), -1), np.full(len(problem.size), -1)
            rank[kept], microbatch[kept] = found.rank, found.microbatch
            return msgspec.structs.replace(found, rank=rank, microbatch=microbatch)
    return None


def attempt(problem: Problem, count: int, bound: int, build: Builder | None = None) -> Assignment | None:
    """A plan with `count` micro-batches, made by `build` (by the settings), or None where none was found."""
    step, free = problem.config.sync == "step", problem.config.movement == "free" and problem.allowed is None
    build = build or ((free_step if step else free_microbatch) if free else minimal_step if step else minimal_microbatch)
    # Most plans fit with their dummies as they are; only if one does not, packs keep room for them from the start.
    flags = problem.trained if step else problem.modalities
    for reserve in (False, True) if flags else (False,):
        packs = build(problem, count, reserve, bound)
        found = None if packs is None else finish(problem, packs)
        if found is not None:
            return found
    # A part alone cannot say which micro-batch carries what on all ranks.
    return None if step or not flags or problem.media_elsewhere else _segregate(problem, count)


def _segregate(problem: Problem, count: int) -> Assignment | None:
    """Micro-batches of one set of media each: dummies only fill packs that are empty. The last resort."""
    whole = Packs.empty(problem, count, False)
    free = problem.config.movement == "free" and problem.allowed is None
    build = free_microbatch if free else minimal_microbatch
    used = 0
    for flags in np.unique(problem.media):
        index = np.flatnonzero(problem.media == flags)
        part = problem.subset(index)
        bound, need = bounds.objective(part), bounds.fewest_microbatches(part)
        # Micro-batches of one set of media need dummies only in empty packs, which have the most room.
        while used + need <= count:
            packs = build(part, need, False, bound)
            if packs is not None:
                whole.bin_of[index] = packs.bin_of // need * count + packs.bin_of % need + used
                break
            need += 1
        used += need
    return None if used > count else finish(problem, whole)

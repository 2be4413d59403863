"""From an assignment to a `StepPlan`: sums, moves, and the certificate."""

import hashlib
from pathlib import Path

import numpy as np

from ...core import round_up
from . import bounds
from .assignment import Assignment, check_known, evaluate, occupied, pack_sums
from .kernels import scan
from .packs import Packs
from .problem import Problem, bound_with_tolerance
from .result import StepPlan
from .table import Ints, SampleTable, as_ints


def _code_version() -> str:
    """Hash of this package's sources: ranks with other code plan differently and must find out."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_VERSION = _code_version()


def certify(table: SampleTable, problem: Problem, found: Assignment, bound: int) -> StepPlan:
    """Complete the plan of an assignment; `bound` is `bounds.objective(problem)`."""
    ranks, count = problem.num_ranks, found.num_microbatches
    packs = Packs.empty(problem, count, False)
    packs.bin_of[:] = np.where(found.rank < 0, -1, found.rank * count + found.microbatch)
    sums, dummies = pack_sums(problem, packs), found.dummies
    check_known(problem, dummies)
    padded, _ = occupied(problem, sums.size, sums.count, dummies)
    cost = sums.cost + problem.dummy_cost[dummies]
    value, imbalance = evaluate(problem, cost)
    # Solvers work with sums of their own making; these are made from the assignment alone.
    assert value == found.value, "the plan is not what the solver meant"
    rank, microbatch = (_spread(values, problem.kept, len(table)) for values in (found.rank, found.microbatch))
    real, whole = as_ints(table.tokens, copy=False), len(problem.kept) == len(table)
    tokens = scan.sums(packs.bin_of, real if whole else real[problem.kept], ranks * count).reshape(ranks, count)
    digest = _digest(packs.bin_of, problem.kept, len(table), dummies)
    moved = (found.rank != problem.home) & (found.rank >= 0)
    num_pairs = len(np.unique(problem.home[moved] * ranks + found.rank[moved]))
    moved_bytes = int(problem.nbytes[moved].sum())
    order, starts = scan.group(packs.bin_of + 1, ranks * count + 1)  # what is left over comes first
    order, starts = (order if whole else problem.kept[order])[starts[1] :], starts[1:] - starts[1]
    # The bound of a plan that left samples over is that of the samples it kept.
    if len(order) < len(problem.kept):
        problem = problem.subset(found.rank >= 0)
        bound = bounds.objective(problem)
    lower_bound, limit = _lower_bound(problem, found, bound)
    plan = StepPlan(
        rank=rank,
        microbatch=microbatch,
        num_microbatches=count,
        tokens=tokens,
        padded=padded,
        cost=cost,
        value=value,
        lower_bound=lower_bound,
        gap=value / lower_bound - 1 if lower_bound else float(value > 0),
        imbalance=imbalance,
        moved_bytes=moved_bytes,
        moved_bytes_lower_bound=bounds.moved_bytes(problem, limit, count),
        num_pairs=num_pairs,
        dummy_media=dummies,
        is_dummy=sums.count == 0,
        digest=digest,
        _order=order,
        _starts=starts,
    )
    for name in ("rank", "microbatch", "tokens", "padded", "cost", "dummy_media", "is_dummy", "_order", "_starts"):
        getattr(plan, name).flags.writeable = False
    return plan


def _spread(values: Ints, kept: Ints, count: int) -> Ints:
    """Values of the samples that were planned, -1 for those that were dropped before."""
    if len(kept) == count:
        return values
    out = np.full(count, -1, np.int64)
    out[kept] = values
    return out


def _lower_bound(problem: Problem, found: Assignment, bound: int) -> tuple[int, int]:
    """Lower bound of the objective, and the most load that a rank has in any plan this good with the same M."""
    config, count = problem.config, found.num_microbatches
    counts = range(count, count + 1)
    # A plan may have chosen another number: the bound is that of the best one.
    if config.num_microbatches is None:
        multiple = config.microbatch_multiple
        fewest = round_up(bounds.fewest_microbatches(problem), multiple)
        counts = range(fewest, max(count, 4 * config.pipeline_stages) + 1, multiple)
    lower_bound = bounds.with_terms(problem, bound, counts)
    limit = max(bound_with_tolerance(problem, bound), found.value - config.microbatch_cost * count)
    if problem.stages > 1:
        # The largest micro-batch is at least the mean of M.
        limit = max(limit, bound_with_tolerance(problem, lower_bound)) * count
        # Times are rounded up already, by less than one: rounded down again they would allow too little cost.
        limit += 0 if problem.speed is None else count + problem.stages - 2
        limit //= count + problem.stages - 1
    return lower_bound, limit


def _digest(packs: Ints, kept: Ints, count: int, dummies: Ints) -> bytes:
    digest = hashlib.blake2b(CODE_VERSION.encode(), digest_size=8)
    # Lengths first, so that two different pairs of arrays never give the same bytes; fixed width and order of bytes.
    digest.update(np.array([count, *dummies.shape], "<i8").tobytes())
    for array in (_spread(packs, kept, count), dummies):
        digest.update(np.ascontiguousarray(array, "<i4").tobytes())
    return digest.digest()

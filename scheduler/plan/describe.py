"""From an assignment to a `StepPlan`: sums, moves, and the certificate."""

import hashlib
from pathlib import Path

import numpy as np

from . import bounds, kernels, media
from .finish import Assignment, evaluate
from .minimal import loosened
from .problem import Problem
from .result import StepPlan
from .table import Ints, SampleTable

#: Up to so many ranks, pairs are marked in a table of all pairs (16 MiB): faster than sorting.
MOST_FOR_BITMAP = 4096


def _code_version() -> str:
    """Hash of this package's sources: ranks with other code plan differently and must find out."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_VERSION = _code_version()


def describe(table: SampleTable, problem: Problem, found: Assignment, bound: int) -> StepPlan:
    """Complete the plan of an assignment; `bound` is `bounds.objective(problem)`."""
    ranks, count = problem.num_ranks, found.num_microbatches
    rank, microbatch = np.full(len(table), -1, np.int64), np.full(len(table), -1, np.int64)
    rank[problem.kept], microbatch[problem.kept] = found.rank, found.microbatch
    placed = np.flatnonzero(rank >= 0)
    packs = rank[placed] * count + microbatch[placed]

    def sums(values: Ints) -> Ints:
        """Exact: every sum stays below 2**53."""
        return np.bincount(packs, values, minlength=ranks * count).astype(np.int64).reshape(ranks, count)

    cost_table = table.cost if table.cost.ndim == 2 else table.cost[:, None]
    counts = sums(np.ones(len(placed), np.int64))
    dummies = found.dummies
    media.check_known(problem, dummies)
    padded, _ = media.occupied(problem, sums(table.padded[placed]), counts, dummies)
    cost = np.stack([sums(cost_table[placed, k]) for k in range(problem.num_phases)], axis=2)
    cost += problem.dummy_cost[dummies]
    value, imbalance = evaluate(problem, cost)
    assert value == found.value, "the plan is not what the solver meant"
    if len(placed) < len(problem.kept):
        problem = problem.subset(found.rank >= 0)
        bound = bounds.objective(problem)
    lower_bound, limit = _certify(problem, found, bound)
    moved = placed[rank[placed] != table.home[placed]]
    order, starts = kernels.group(packs, ranks * count)
    plan = StepPlan(
        rank=rank,
        microbatch=microbatch,
        num_microbatches=count,
        tokens=sums(table.tokens[placed]),
        padded=padded,
        cost=cost,
        value=value,
        lower_bound=lower_bound,
        gap=value / lower_bound - 1 if lower_bound else float(value > 0),
        imbalance=imbalance,
        moved_bytes=int(table.nbytes[moved].sum()),
        moved_bytes_lower_bound=bounds.moved_bytes(problem, limit, count),
        num_pairs=_count_pairs(table.home[moved], rank[moved], ranks),
        dummy_media=dummies,
        is_dummy=counts == 0,
        digest=_digest(rank, microbatch, dummies),
        _order=placed[order],
        _starts=starts,
    )
    for name in ("rank", "microbatch", "tokens", "padded", "cost", "dummy_media", "is_dummy", "_order", "_starts"):
        getattr(plan, name).flags.writeable = False
    return plan


def _count_pairs(source: Ints, target: Ints, num_ranks: int) -> int:
    """Number of different (source, target)."""
    keys = source * num_ranks + target
    if num_ranks > MOST_FOR_BITMAP:
        return len(np.unique(keys))
    seen = np.zeros(num_ranks * num_ranks, np.bool_)
    seen[keys] = True
    return int(np.count_nonzero(seen))


def _certify(problem: Problem, found: Assignment, bound: int) -> tuple[int, int]:
    """Lower bound of the objective, and the most load that a rank has in any plan this good with the same M."""
    config, count = problem.config, found.num_microbatches
    counts = range(count, count + 1)
    if config.num_microbatches is None:
        multiple = config.microbatch_multiple
        fewest = -(-bounds.fewest_microbatches(problem) // multiple) * multiple
        counts = range(fewest, max(count, 4 * config.pipeline_stages) + 1, multiple)
    lower_bound = bounds.with_terms(problem, bound, counts)
    limit = max(loosened(problem, bound), found.value - config.microbatch_cost * count)
    if config.sync == "step" and config.pipeline_stages > 1:
        # The largest micro-batch is at least the mean of M.
        limit = max(limit, loosened(problem, lower_bound)) * count // (count + config.pipeline_stages - 1)
    return lower_bound, limit


def _digest(rank: Ints, microbatch: Ints, dummies: Ints) -> bytes:
    digest = hashlib.blake2b(CODE_VERSION.encode(), digest_size=8)
    digest.update(np.array([len(rank), *dummies.shape], "<i8").tobytes())
    for array in (rank, microbatch, dummies):
        digest.update(array.astype("<i4").tobytes())
    return digest.digest()

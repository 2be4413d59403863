"""`plan_step`: one global assignment of a step's samples, the same on every rank."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import media
from .config import PlanConfig
from .problem import Problem, build_problem
from .result import StepPlan
from .solve import Assignment, solve
from .table import Ints, SampleTable


def _code_version() -> str:
    """Hash of this package's sources: ranks with other code plan differently and must find out."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_VERSION = _code_version()


def plan_step(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
) -> StepPlan:
    """Assign every sample of a step to a rank and a micro-batch.

    A pure function in integers: the same input gives the same plan, bit for bit, on every rank and machine.

    Args:
        table: the samples of all ranks.
        num_ranks: R, data-parallel ranks.
        config: what to respect and what to optimise.
        cp_size: context-parallel size; a pack holds `max_tokens * cp_size` padded tokens.
        node_of_rank: `[R]`, node of each rank; moves inside a node come first.
        peers: ranks that each rank may send samples to (sequence or mapping of ranks, or `[R, R]` bool); None for all.

    Returns:
        The plan, with its certificate.

    Raises:
        ValueError: arguments that make no sense.
        PlanError: values of the table out of range, or a dummy media item that the settings do not describe.
        OversizeSampleError: a sample above the capacity, unless the policy is "drop".
        InfeasiblePlanError: constraints that no assignment was found for.

    Example:
        >>> table = SampleTable.from_lengths([8, 8, 8, 8, 1, 1, 1, 1], home=[0, 0, 0, 0, 1, 1, 1, 1])
        >>> plan = plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=10, sync="microbatch"))
        >>> plan.num_microbatches, plan.value, plan.padded.tolist()
        (2, 18, [[9, 9], [9, 9]])
    """
    problem = build_problem(table, num_ranks=num_ranks, config=config, cp_size=cp_size, node_of_rank=node_of_rank, peers=peers)
    return _finish(table, problem, solve(problem))


def _finish(table: SampleTable, problem: Problem, found: Assignment) -> StepPlan:
    ranks, count = problem.num_ranks, found.num_microbatches
    rank, microbatch = np.full(len(table), -1, np.int64), np.full(len(table), -1, np.int64)
    rank[problem.kept], microbatch[problem.kept] = found.rank, found.microbatch
    placed = np.flatnonzero(rank >= 0)
    packs = rank[placed] * count + microbatch[placed]

    def sums(values: Ints) -> Ints:
        """Exact: every sum stays below 2**53."""
        return np.bincount(packs, values, minlength=ranks * count).astype(np.int64).reshape(ranks, count)

    cost_table = table.cost.reshape(len(table), -1)
    counts = sums(np.ones(len(placed), np.int64))
    dummies = found.dummies
    media.check_known(problem, dummies)
    padded, _ = media.occupied(problem, sums(table.padded[placed]), counts, dummies)
    cost = np.stack([sums(cost_table[placed, k]) for k in range(problem.num_phases)], axis=2)
    cost += problem.dummy_cost[dummies]
    value, imbalance = evaluate(problem, cost)
    moved = placed[rank[placed] != table.home[placed]]
    pairs = np.unique(table.home[moved] * ranks + rank[moved])
    order = placed[np.argsort(packs, kind="stable")]
    plan = StepPlan(
        rank=rank,
        microbatch=microbatch,
        num_microbatches=count,
        tokens=sums(table.tokens[placed]),
        padded=padded,
        cost=cost,
        value=value,
        lower_bound=found.lower_bound,
        gap=value / found.lower_bound - 1 if found.lower_bound else 0.0 if value == 0 else float("inf"),
        imbalance=imbalance,
        moved_bytes=int(table.nbytes[moved].sum()),
        moved_bytes_lower_bound=0,
        num_pairs=len(pairs),
        dummy_media=dummies,
        is_dummy=counts == 0,
        digest=_digest(rank, microbatch, dummies),
        _order=order,
        _starts=np.concatenate([[0], np.cumsum(counts.ravel())]),
    )
    for name in ("rank", "microbatch", "tokens", "padded", "cost", "dummy_media", "is_dummy", "_order", "_starts"):
        getattr(plan, name).flags.writeable = False
    return plan


def evaluate(problem: Problem, cost: Ints) -> tuple[int, float]:
    """Objective and imbalance of packs with these costs `[R, M, K]`."""
    config, count = problem.config, cost.shape[1]
    per_pack = cost.sum(axis=2)
    total = int(per_pack.sum())
    if config.sync == "microbatch":
        value = int(cost.max(axis=0).sum())
        return value + config.microbatch_cost * count, value * problem.num_ranks / total if total else 1.0
    sums = per_pack.sum(axis=1)
    value = int((sums + (config.pipeline_stages - 1) * per_pack.max(axis=1)).max())
    imbalance = int(sums.max()) * problem.num_ranks / total if total else 1.0
    return value + config.microbatch_cost * count, imbalance


def _digest(rank: Ints, microbatch: Ints, dummies: Ints) -> bytes:
    digest = hashlib.blake2b(CODE_VERSION.encode(), digest_size=8)
    digest.update(np.array([len(rank), *dummies.shape], "<i8").tobytes())
    for array in (rank, microbatch, dummies):
        digest.update(array.astype("<i4").tobytes())
    return digest.digest()


def warm_up() -> None:
    """Compile or load every kernel, so that the first step pays nothing."""
    table = SampleTable.from_lengths([5, 4, 3, 2, 1, 1], home=[0, 0, 0, 1, 1, 1])
    for sync in ("step", "microbatch"):
        for movement in ("minimal", "free"):
            for cost in (table.cost, np.stack([table.cost, table.cost[::-1]], axis=1)):
                rows = SampleTable.from_lengths(table.tokens, home=table.home, cost=cost)
                for stages in (1, 2):
                    config = PlanConfig(max_tokens=6, sync=sync, movement=movement, pipeline_stages=stages)  # type: ignore[arg-type]
                    plan_step(rows, num_ranks=2, config=config)

"""A plan that somebody else made: completed with dummies, costs and its certificate."""

from . import media
from .config import PlanConfig
from .problem import build_problem
from .result import StepPlan
from .solve import Assignment
from .step import _finish
from .table import Ints, SampleTable


def plan_fixed(
    table: SampleTable, rank: Ints, microbatch: Ints, *, num_ranks: int, config: PlanConfig, cp_size: int = 1
) -> StepPlan:
    """Return the plan of a given assignment.

    Args:
        table: the samples.
        rank: `[N]`, rank of each sample.
        microbatch: `[N]`, micro-batch of each sample, below `config.num_microbatches`.
        num_ranks: R.
        config: settings; `num_microbatches` must be set.
        cp_size: context-parallel size.
    """
    assert config.num_microbatches is not None
    problem = build_problem(table, num_ranks=num_ranks, config=config, cp_size=cp_size, node_of_rank=None, peers=None)
    kept = problem.kept
    carried = media.carried(problem, rank[kept], microbatch[kept], config.num_microbatches)
    total = int(problem.weight.sum())
    found = Assignment(
        rank=rank[kept],
        microbatch=microbatch[kept],
        num_microbatches=config.num_microbatches,
        dummies=media.needed(problem, carried),
        lower_bound=-(-total // num_ranks) + config.microbatch_cost * config.num_microbatches,
    )
    return _finish(table, problem, found)

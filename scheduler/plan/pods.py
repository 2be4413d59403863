"""Plans of very many ranks in two levels: samples are shared out to pods of ranks, and each pod is planned alone.

Every rank computes the coarse level, which takes time in proportion to the samples; the rest is planned once per pod. Ranks
that can talk plan their own pod only and gather the result; the plan is the same as that of one process, bit for bit.
"""

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from ...core.errors import PlanMismatchError
from .bins import Bins
from .deal import Pods, Share, deal, part
from .finish import Assignment, finish
from .minimal import loosened
from .problem import Problem
from .solve import attempt, search
from .table import Ints

#: A pod has at least so many ranks and samples where the planner chooses.
RANKS, SAMPLES = 256, 16_384
#: Steps of fewer samples than this are planned in one piece: that takes less time than to talk about it.
FROM = 131_072
#: Numbers of micro-batches that may fail before the step is planned in one piece.
FAILURES = 3
#: A plan by pods this near its aim is not worth another round, with one phase and with several.
NEAR = (0.01, 0.03)
#: A plan by pods this far above the bound and the tolerance is given up for one in one piece.
FAR = 0.05

Gather = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]


class Team(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The other ranks, to share the work of a plan with; all of them plan the same step.

    Attributes:
        rank: this rank.
        gather: all-gathers uint8 `[n]` into `[R, n]`.
    """

    rank: int
    gather: Gather


def num_pods(problem: Problem) -> int:
    """Number of pods that a step is planned in; 1 for all in one piece."""
    wanted = problem.config.pods
    if problem.allowed is not None or not len(problem.size):
        return 1
    if wanted is None:
        wanted = min(problem.num_ranks // RANKS, len(problem.size) // SAMPLES) if len(problem.size) >= FROM else 1
    return max(1, min(wanted, problem.num_ranks))


def is_near(problem: Problem, bound: int, found: Assignment) -> bool:
    """Whether a plan by pods is as good as one may expect; not where pipelines make the bound a loose one anyway."""
    config = problem.config
    return (config.sync == "step" and config.pipeline_stages > 1) or _is_within(problem, bound, found, FAR)


def _is_within(problem: Problem, bound: int, found: Assignment, part: float) -> bool:
    limit = bound if problem.config.movement == "free" else loosened(problem, bound)
    return found.value - problem.config.microbatch_cost * found.num_microbatches <= limit + int(limit * part)


def solve_in_pods(problem: Problem, bound: int, team: Team | None = None) -> Assignment | None:
    """Find a plan by pods; None where that does not work, on every rank alike.

    Args:
        bound: lower bound of the objective without `microbatch_cost` and pipeline term.
        team: plan the own pod only, and gather the others'; None plans all of them.

    Raises:
        PlanMismatchError: ranks of one pod planned it differently.
    """
    pods = Pods.of(problem.node, num_pods(problem))
    whole = msgspec.structs.replace(problem, brief=True)
    near = NEAR[problem.num_phases > 1]
    pipelines = problem.config.sync == "step" and problem.config.pipeline_stages > 1
    failures, enough = 0, False

    def plan(count: int) -> Assignment | None:
        nonlocal failures, enough
        if failures >= FAILURES or enough:
            return None
        share = deal(whole, pods, count, bound)
        found = _planned(whole, pods, share, count, bound, team)
        failures += found is None
        enough = found is not None and not pipelines and _is_within(whole, bound, found, near)
        return found

    if problem.config.num_microbatches is not None:
        return plan(problem.config.num_microbatches)
    return search(whole, bound, plan)


def _planned(problem: Problem, pods: Pods, share: Share, count: int, bound: int, team: Team | None) -> Assignment | None:
    if team is None:
        parts = [_plan_pod(problem, pods, share, pod, count, bound) for pod in range(len(pods))]
    else:
        parts = _gathered(problem, pods, share, count, bound, team)
    bins = Bins.empty(problem, count, False)
    for pod, local in enumerate(parts):
        if local is None:
            return None
        bins.bin_of[share.samples(pod)] = local + pods.first[pod] * count
    return finish(problem, bins)


def _plan_pod(problem: Problem, pods: Pods, share: Share, pod: int, count: int, bound: int) -> Ints | None:
    """`[n]` pack of each of the pod's samples, counted from its first; None where there is none."""
    found = attempt(part(problem, pods, share, pod), count, bound)
    return None if found is None else found.rank * count + found.microbatch


def _gathered(problem: Problem, pods: Pods, share: Share, count: int, bound: int, team: Team) -> list[Ints | None]:
    """Plan the own pod; every rank tells an equal part of its pod's plan."""
    pod = int(pods.pod[team.rank])
    own = _plan_pod(problem, pods, share, pod, count, bound)
    numbers = np.diff(share.starts)
    each = -(-numbers // pods.sizes)
    row = np.zeros(2 + int(each.max()), "<i4")
    if own is not None:
        at = (team.rank - int(pods.first[pod])) * int(each[pod])
        some = own[at : at + int(each[pod])]
        row[:2] = np.frombuffer(hashlib.blake2b(own.astype("<i4").tobytes(), digest_size=8).digest(), "<i4")
        row[0] |= 1  # never 0, which says that there is no plan
        row[2 : 2 + len(some)] = some
    rows = team.gather(row.view(np.uint8)).view("<i4")
    parts: list[Ints | None] = []
    for index in range(len(pods)):
        first, last = int(pods.first[index]), int(pods.first[index + 1])
        heads = rows[first:last, :2]
        different = np.flatnonzero((heads != heads[0]).any(axis=1))
        if len(different):
            raise PlanMismatchError(
                f"ranks {first} and {first + int(different[0])} planned their part of the step differently; "
                "versions or machines differ"
            )
        some = rows[first:last, 2 : 2 + int(each[index])].reshape(-1)[: numbers[index]]
        parts.append(some.astype(np.int64) if heads[0].any() else None)
    return parts

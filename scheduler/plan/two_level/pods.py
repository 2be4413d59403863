"""Plans of very many ranks in two levels: samples are shared out to pods of ranks, and each pod is planned alone.

Every rank computes the coarse level, which takes time in proportion to the samples; the rest is planned once per pod. Ranks
that can talk plan their own pod only and gather the result; the plan is the same as that of one process, bit for bit.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ....core.errors import PlanMismatchError
from .. import bounds
from ..assignment import Assignment, finish
from ..certificate import certify
from ..limits import (
    MAX_POD_FAILURES,
    POD_RANKS,
    POD_SAMPLES,
    PODS_GOOD_ENOUGH,
    PODS_TOO_FAR,
    VERY_LARGE_STEP,
)
from ..packs import Packs
from ..planner import plan_step
from ..problem import Problem, bound_with_tolerance, build_problem
from ..result import StepPlan
from ..search import attempt, search, solve
from ..settings import NO_TOWERS, MediaTowers, PlanConfig, check_int
from ..table import Ints, SampleTable
from .sharing import PodProblem, Pods, Share, assign_to_pods, pod_problem

Gather = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]


class Team(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The other ranks, to share the work of a plan with; all of them plan the same step.

    Attributes:
        rank: this rank.
        gather: all-gathers uint8 `[n]` into `[R, n]`.
    """

    rank: int
    gather: Gather


def plan_in_pods(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
    speeds: Sequence[int] | None = None,
    team: Team | None = None,
    pods: int | None = None,
) -> StepPlan:
    """Assign every sample of a very large step, pod by pod; in one piece where that is faster or plans by pods end too far off.

    Arguments as in `plan_step`, and these; the certificate is that of the whole step.

    Args:
        team: ranks that plan the same step at the same time, to share the work. The plan is the same as without.
        pods: number of pods; None for pods of about 256 ranks, from 131,072 samples on.

    Returns:
        The plan, with its certificate.

    Raises:
        ValueError: `pods` below 1, and as `plan_step`.
        PlanMismatchError: ranks of the team did not plan the same step.

    Example:
        >>> table = SampleTable.from_lengths([8, 8, 4, 4], home=[0, 1, 2, 3])
        >>> plan_in_pods(table, num_ranks=4, config=PlanConfig(max_tokens=16), pods=2).cost[:, 0, 0].tolist()
        [8, 8, 4, 4]
    """
    if pods is not None:
        check_int("pods", pods, 1)
    problem = build_problem(table, num_ranks, config, towers, cp_size, node_of_rank, peers, speeds)
    bound = bounds.objective(problem)
    aim, number = bounds.aim(problem, bound), num_pods(problem, pods)
    found = solve_in_pods(problem, aim, number, team) if number > 1 else None
    # Every rank decides alike, since value and bound are those of the whole step. Pipelines make the bound a loose one.
    if found is None or not (problem.stages > 1 or _is_within(problem, aim, found, PODS_TOO_FAR)):
        found = solve(problem, aim)
    return certify(table, problem, found, bound)


def planner_for(num_samples: int) -> Callable[..., StepPlan]:
    """The scheduler's planner for a step of so many samples: `plan_in_pods` for a very large one, else `plan_step`."""
    return plan_in_pods if num_samples >= VERY_LARGE_STEP else plan_step


def num_pods(problem: Problem, wanted: int | None = None) -> int:
    """Number of pods that a step is planned in; 1 for all in one piece."""
    if problem.allowed is not None or not len(problem.size):
        return 1
    if wanted is None and len(problem.size) >= VERY_LARGE_STEP:
        wanted = min(problem.num_ranks // POD_RANKS, len(problem.size) // POD_SAMPLES)
    return max(1, min(wanted or 1, problem.num_ranks))


def _is_within(problem: Problem, bound: int, found: Assignment, thousandths: int) -> bool:
    """Whether the objective ends at most so many thousandths above the bound, and the tolerance with minimal movement."""
    limit = bound if problem.config.movement == "free" else bound_with_tolerance(problem, bound)
    value = found.value - problem.config.microbatch_cost * found.num_microbatches
    return value <= limit + limit * thousandths // 1000


def solve_in_pods(problem: Problem, bound: int, number: int, team: Team | None = None) -> Assignment | None:
    """Find a plan by pods; None where that does not work, on every rank alike.

    Args:
        bound: lower bound of the objective without `microbatch_cost` and pipeline term.
        number: of pods.
        team: plan the own pod only, and gather the others'; None plans all of them.

    Raises:
        PlanMismatchError: ranks shared the samples out differently, or ranks of one pod planned it differently.
    """
    pods = Pods.of(problem.node, number)
    whole = PodProblem.of(problem)
    near = PODS_GOOD_ENOUGH[problem.num_phases > 1]
    failures, enough = 0, False

    def plan(count: int) -> Assignment | None:
        nonlocal failures, enough
        if failures >= MAX_POD_FAILURES or enough:
            return None
        share = assign_to_pods(whole, pods, count, bound)
        found = _planned(whole, pods, share, count, bound, team)
        failures += found is None
        enough = found is not None and problem.stages == 1 and _is_within(whole, bound, found, near)
        return found

    if problem.config.num_microbatches is not None:
        return plan(problem.config.num_microbatches)
    return search(whole, bound, plan)


def _planned(problem: PodProblem, pods: Pods, share: Share, count: int, bound: int, team: Team | None) -> Assignment | None:
    """The plan of all pods with `count` micro-batches; None where a pod has none."""
    parts: Sequence[Ints | None]
    if team is None:
        parts = [_plan_pod(problem, pods, share, pod, count, bound) for pod in range(len(pods))]
    else:
        parts = _gathered(problem, pods, share, count, bound, team)
    # Pods are consecutive ranks, so their packs are consecutive bins.
    packs = Packs.empty(problem, count, False)
    for pod, local in enumerate(parts):
        if local is None:
            return None
        packs.bin_of[share.samples(pod)] = local + pods.first[pod] * count
    return finish(problem, packs)


def _plan_pod(problem: PodProblem, pods: Pods, share: Share, pod: int, count: int, bound: int) -> Ints | None:
    """`[n]` pack of each of the pod's samples, counted from its first; None where there is none."""
    found = attempt(pod_problem(problem, pods, share, pod), count, bound)
    return None if found is None else found.rank * count + found.microbatch


def _gathered(problem: PodProblem, pods: Pods, share: Share, count: int, bound: int, team: Team) -> Sequence[Ints | None]:
    """Plan the own pod; every rank tells an equal part of its pod's plan."""
    pod = int(pods.pod[team.rank])
    own = _plan_pod(problem, pods, share, pod, count, bound)
    # Digests first: the length of the parts follows from how the samples were shared out, which must be the same on all ranks.
    head = np.zeros(4, "<i4")
    head[:2] = _digest(np.array([count]), share.starts, share.order)
    if own is not None:
        head[2:] = _digest(own)
        head[2] |= 1  # never 0, which says that there is no plan
    heads = team.gather(head.view(np.uint8)).view("<i4")
    _check_same(heads[:, :2], 0, "shared the step out to pods")
    for first, last in itertools.pairwise(pods.first.tolist()):
        _check_same(heads[first:last, 2:], first, "planned their part of the step")
    # Known to all ranks from the same bytes: either all gather plans, or none does.
    if own is None or not heads[:, 2].all():
        return [None]
    numbers = np.diff(share.starts)
    each = -(-numbers // pods.sizes)
    some = own[(team.rank - int(pods.first[pod])) * int(each[pod]) :][: int(each[pod])]
    rows = team.gather(np.pad(some, (0, int(each.max()) - len(some))).astype("<i4").view(np.uint8)).view("<i4")
    return [
        rows[first:last, :part].reshape(-1)[:number].astype(np.int64)
        for (first, last), part, number in zip(itertools.pairwise(pods.first), each, numbers, strict=True)
    ]


def _digest(*arrays: Ints) -> npt.NDArray[np.int32]:
    """`[2]` int32 of integers below 2**31."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<i4").data)
    return np.frombuffer(digest.digest(), "<i4")


def _check_same(heads: npt.NDArray[np.int32], first: int, what: str) -> None:
    different = np.flatnonzero((heads != heads[0]).any(axis=1))
    if len(different):
        raise PlanMismatchError(
            f"ranks {first} and {first + int(different[0])} {what} differently; versions or machines differ"
        )

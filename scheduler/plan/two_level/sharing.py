"""The coarse level of a plan by pods: which pod plans which sample. Every rank computes it, in O(N), in integers.

Only orders by a quotient (cost per token, cost over the phase's sum) compare floats: see `limits.MAX_SUM`.
"""

import msgspec
import numpy as np

from ..integers import floor_scale, scaled
from ..kernels import scan
from ..kernels.jit import Gifts, PodLoads
from ..limits import (
    LEVEL_SLOPE,
    MAX_SUM,
    MINIATURE_RANKS,
    POD_LOAD_SHARE,
    POD_PAIRS_PER_SAMPLE,
    POD_TOKEN_SHARE,
)
from ..problem import Problem, bound_with_tolerance
from ..solvers.free import free_microbatch
from ..table import Bools, Ints
from . import pod_kernels


class PodProblem(Problem, frozen=True, kw_only=True, eq=False, dict=True):
    """A step that is planned by pods, or one pod's part of it, which knows of the rest.

    Attributes:
        elsewhere: bit flags of the media that other pods may carry in any micro-batch.
        floor: `[m, K]` what the first micro-batches cost in another pod anyway; None for nothing.
        level: `[M, K]` what every micro-batch may cost; None where no level was set.
    """

    elsewhere: int = 0
    floor: Ints | None = None
    level: Ints | None = None

    @classmethod
    def of(cls, problem: Problem) -> "PodProblem":
        """The whole step, to be planned by pods."""
        return cls(**{name: getattr(problem, name) for name in Problem.__struct_fields__})

    @property
    def is_large(self) -> bool:
        return True

    @property
    def work(self) -> int:
        return POD_PAIRS_PER_SAMPLE * len(self.size)

    @property
    def media_elsewhere(self) -> int:
        return self.elsewhere

    def cost_elsewhere(self, index: int) -> Ints | int:
        return self.floor[index] if self.floor is not None and index < len(self.floor) else 0

    def raised(self, largest: Ints) -> Ints:
        return largest if self.level is None else np.maximum(largest, self.level)


class Pods(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Groups of consecutive ranks.

    Attributes:
        first: `[P + 1]` first rank of each pod, and R.
        pod: `[R]` pod of each rank.
    """

    first: Ints
    pod: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def sizes(self) -> Ints:
        """`[P]` ranks of each pod."""
        return np.diff(self.first)

    @classmethod
    def of(cls, node: Ints, number: int) -> "Pods":
        """Cut ranks into about `number` pods of like size, between nodes where a border is near.

        Example:
            >>> Pods.of(np.array([0, 0, 0, 1, 1, 1, 2, 2]), 2).first.tolist()
            [0, 3, 8]
        """
        ranks = len(node)
        borders = np.flatnonzero(np.diff(node)) + 1
        cuts = {0, ranks}
        for index in range(1, number):
            ideal = ranks * index // number
            # Within a quarter of a pod: ranks of one node then stay together, and pods stay alike.
            near = borders[np.abs(borders - ideal) * 4 <= ranks // number]
            cuts.add(int(near[np.argmin(np.abs(near - ideal))]) if len(near) else ideal)
        first = np.array(sorted(cuts), np.int64)
        return cls(first=first, pod=np.repeat(np.arange(len(first) - 1), np.diff(first)))


class Share(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of every pod.

    Attributes:
        order: `[N]` samples, pod after pod, ascending in each; starts: `[P + 1]`.
        rank_of: `[N]` rank that a sample starts from: its home, or another where it changed pods; None where homes do not
            count.
        floor: `[m, K]` what the first micro-batches cost on some rank anyway.
        level: `[M, K]` what every micro-batch may cost; None where that does not count.
    """

    order: Ints
    starts: Ints
    rank_of: Ints | None
    floor: Ints
    level: Ints | None

    def samples(self, pod: int) -> Ints:
        """Samples of one pod, ascending."""
        return self.order[self.starts[pod] : self.starts[pod + 1]]


def assign_to_pods(problem: PodProblem, pods: Pods, count: int, bound: int) -> Share:
    """Share the samples out so that every pod can be planned alone."""
    floor, level = np.zeros((0, problem.num_phases), np.int64), None
    if problem.config.sync == "microbatch":
        if problem.num_phases == 1:
            floor, rest = floors(problem, count)
            level = _levels(problem, floor, rest, count, bound)
        elif problem.config.movement == "minimal":
            level = _profile(problem, count, bound)
    if problem.config.movement == "free":
        pod_of, rank_of = _deal_out(problem, pods, len(floor)), None
    else:
        rank_of = _relieve(problem, pods, count, bound, floor)
        pod_of = pods.pod[rank_of]
    order, starts = scan.group(pod_of, len(pods))
    return Share(order=order, starts=starts, rank_of=rank_of, floor=floor, level=level)


def pod_problem(problem: PodProblem, pods: Pods, share: Share, pod: int) -> PodProblem:
    """One pod's problem; its ranks count from 0. Samples that came from elsewhere move for nothing: they move anyway."""
    first, last = int(pods.first[pod]), int(pods.first[pod + 1])
    index = share.samples(pod)
    sub = problem.subset(index)
    home, nbytes = np.zeros(len(index), np.int64), sub.nbytes
    if share.rank_of is not None:
        home = share.rank_of[index] - first
        nbytes = np.where(share.rank_of[index] == sub.home, nbytes, 0)
    return msgspec.structs.replace(
        sub,
        home=home,
        nbytes=nbytes,
        num_ranks=last - first,
        node=np.unique(problem.node[first:last], return_inverse=True)[1].astype(np.int64),
        speed=None if problem.speed is None else problem.speed[first:last],
        elsewhere=problem.modalities if problem.config.sync == "microbatch" else 0,
        floor=share.floor,
        level=share.level,
    )


def floors(problem: Problem, count: int) -> tuple[Ints, int]:
    """`[m, 1]` cost of the micro-batches that one heavy sample makes costly, by `free.fill_costly`'s rule, and what is left.

    Pods without such a sample may fill these micro-batches as far, since some rank takes that long anyway.
    """
    ranks, order = problem.num_ranks, problem.by_weight
    total = rest = int(problem.weight.sum())
    found: list[int] = []
    while len(found) < count - 1 and len(found) * ranks < len(order):
        heads = order[len(found) * ranks : (len(found) + 1) * ranks]
        heaviest = int(problem.one_each(problem.weight[heads, None])[0])
        if heaviest <= problem.evenly(rest, count - len(found)):
            break
        found.append(heaviest)
        # Packs reach what they may cost only where the capacity holds that much.
        room = np.array([len(found) * ranks * problem.capacity])
        most = scan.knapsacks(problem.weight, problem.size, room)
        rest = max(total - min(int(problem.within(sum(found)).sum()), int(most[0])), 0)
    return np.array(found, np.int64).reshape(-1, 1), rest


def _levels(problem: Problem, floor: Ints, rest: int, count: int, bound: int) -> Ints:
    """`[M, 1]` what micro-batches may cost so that all together end at the limit: the rest is nearly even."""
    others = count - len(floor)
    mean = max(problem.evenly(rest, others), (bound_with_tolerance(problem, bound) - int(floor.sum())) // others)
    steps = max(others - 1, 1)
    level = [mean + mean * LEVEL_SLOPE * (others - 1 - 2 * index) // (100 * steps) for index in range(others)]
    return np.concatenate([floor, np.array(level, np.int64)[:, None]])


def _profile(problem: PodProblem, count: int, bound: int) -> Ints | None:
    """`[M, K]` what micro-batches cost in a plan of a miniature of the step; None where there is none."""
    every = max(problem.num_ranks // MINIATURE_RANKS, 1)
    small = msgspec.structs.replace(
        problem.subset(problem.by_share[::every]),
        num_ranks=-(-problem.num_ranks // every),
        config=msgspec.structs.replace(problem.config, movement="free"),
        node=problem.node[: -(-problem.num_ranks // every)],
        speed=None if problem.speed is None else problem.speed[::every],
    )
    packs = free_microbatch(small, count, False, bound)
    if packs is None:
        return None
    level = small.times(packs.loads(small)).max(axis=0)
    level = level[np.argsort(-level.sum(axis=1), kind="stable")]
    limit = bound_with_tolerance(problem, bound)
    spare = max(limit - int(level.sum()), 0)
    profile: Ints = level + scaled(level, spare, max(int(level.sum()), 1))
    return profile


def _deal_out(problem: Problem, pods: Pods, costly: int) -> Ints:
    """`[N]` pod of each sample: in turn, heaviest first, so that all pods are alike, `costly` micro-batches included."""
    pod_of = np.empty(len(problem.size), np.int64)
    order, equal = problem.by_share, problem.speed is None
    power = pods.sizes if equal else np.add.reduceat(problem.speeds, pods.first[:-1])
    heads = order[:0]
    if not equal:
        # The heaviest samples go to the fastest ranks, those of equal speed from all pods in turn.
        place = np.arange(problem.num_ranks) - pods.first[pods.pod]
        heads, fastest_first = order[: costly * problem.num_ranks], np.lexsort((place, -problem.speeds))
        pod_of[heads] = np.resize(pods.pod[fastest_first], len(heads))
    for phase in range(problem.num_phases):
        some = order[problem.main_phase[order] == phase]
        # The lightest quarter evens out what rounds left; it cannot make up for pods of other speeds.
        in_rounds = -(-3 * len(some) // 4) if equal else 0
        weight, load = (
            np.ascontiguousarray(problem.cost[:, phase]),
            scan.sums(pod_of[heads], problem.cost[heads, phase], len(pods)),
        )
        pod_kernels.deal_out(some[len(heads) :], weight, pods.sizes, power, load, in_rounds, pod_of)
    return pod_of


def _relieve(problem: Problem, pods: Pods, count: int, bound: int, floor: Ints) -> Ints:
    """`[N]` rank that each sample starts from: its home, unless its pod has too much."""
    rank_of, movable = problem.home.copy(), np.ones(len(problem.home), np.bool_)
    if len(floor):
        _share_heads(problem, pods, rank_of, movable, problem.by_weight[: problem.num_ranks])
    ranks = problem.num_ranks
    mean = problem.evenly(int(problem.weight.sum()))
    above = (
        bound_with_tolerance(problem, bound) - mean
        if problem.config.sync == "step"
        else floor_scale(mean, problem.config.tolerance)
    )
    limit = _most(pods, problem.within(mean), problem.within(above), POD_LOAD_SHARE[problem.config.sync])
    tokens, fits = -(-int(problem.size.sum()) // ranks), np.full(ranks, count * problem.capacity)
    most_tokens = _most(pods, np.full(ranks, tokens), np.maximum(fits - tokens, 0), POD_TOKEN_SHARE)
    # Tokens first: a pod that cannot hold its samples has no plan, one with too much cost has a poor one.
    for gain, other, most, most_other, rank_limit in (
        (problem.size, problem.weight, most_tokens, limit, fits),
        (problem.weight, problem.size, limit, most_tokens, problem.within(mean + max(above, 0))),
    ):
        load, load_other = scan.sums(rank_of, gain, ranks), scan.sums(rank_of, other, ranks)
        pod_load, pod_other = np.add.reduceat(load, pods.first[:-1]), np.add.reduceat(load_other, pods.first[:-1])
        if (pod_load > most).any():
            by_home, starts = scan.group(rank_of, ranks)
            gifts, loads = Gifts(by_home, starts, movable, rank_of), PodLoads(pod_load, pod_other, most, most_other)
            pod_kernels.relieve(pods.pod, gifts, gain, other, problem.nbytes, load, loads, rank_limit)
    return rank_of


def _most(pods: Pods, share: Ints, above: Ints, hundredths: int) -> Ints:
    """`[P]` most that pods may hold: the shares of their ranks `[R]`, and a part of what these may hold above them."""
    sums = (np.add.reduceat(each.astype(object), pods.first[:-1]) for each in (share, above))
    return np.array([min(own + more * hundredths // 100, MAX_SUM) for own, more in zip(*sums, strict=True)], np.int64)


def _share_heads(problem: Problem, pods: Pods, rank_of: Ints, movable: Bools, heads: Ints) -> None:
    """Every pod gets as many of the heaviest samples as it has ranks: those that are not alone at home go first."""
    by_bytes = heads[np.argsort(-problem.nbytes[heads], kind="stable")]
    held = np.bincount(pods.pod[problem.home[heads]], minlength=len(pods))
    _, first = np.unique(problem.home[by_bytes], return_index=True)
    alone = np.zeros(len(heads), np.bool_)
    alone[first] = True
    surplus = np.maximum(held - pods.sizes, 0)
    movers = by_bytes[~alone][::-1]
    movers = movers[_first_of_each(pods.pod[problem.home[movers]], surplus)]
    without = np.setdiff1d(np.arange(problem.num_ranks), problem.home[heads])
    takers = without[_first_of_each(pods.pod[without], np.maximum(pods.sizes - held, 0))]
    number = min(len(movers), len(takers))
    rank_of[movers[:number]] = takers[:number]
    movable[heads] = False


def _first_of_each(keys: Ints, most: Ints) -> Ints:
    """Positions of the first `most[k]` entries with each key k, key after key."""
    order, starts = scan.group(keys, len(most))
    place = np.arange(len(keys)) - starts[keys[order]]
    found: Ints = order[place < most[keys[order]]]
    return found

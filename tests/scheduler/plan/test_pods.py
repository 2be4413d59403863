"""Plans in two levels: what holds for every plan holds for them, and ranks that share the work get the same plan."""

import ast
import inspect
import math
import threading
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import WORKLOADS, image_text_phases
from evenpack.core.errors import InfeasiblePlanError, PlanMismatchError
from evenpack.scheduler.comm.transports import MemoryHub
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, Team, bounds, plan_in_pods, plan_step
from evenpack.scheduler.plan.integers import floor_scale
from evenpack.scheduler.plan.problem import build_problem
from evenpack.scheduler.plan.two_level import pod_kernels, pods, sharing
from evenpack.scheduler.plan.two_level.sharing import PodProblem, Pods, assign_to_pods, pod_problem
from evenpack.scheduler.testing import run_ranks

from .test_properties import check, instances

MODES = [(sync, movement) for sync in ("step", "microbatch") for movement in ("minimal", "free")]


def same(one, other) -> bool:
    return one.digest == other.digest and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("rank", "microbatch", "padded", "cost", "dummy_media", "value", "lower_bound", "moved_bytes_lower_bound")
    )


def together(table, num_ranks, **settings):
    """The plan of every rank, in a group of threads."""
    hub = MemoryHub(num_ranks)

    def plan(rank, _):
        team = Team(rank=rank, gather=hub.transport(rank).gather)
        return plan_in_pods(table, num_ranks=num_ranks, team=team, **settings)

    return run_ranks(plan, num_ranks)


def workload(name: str, num_ranks: int, **settings):
    make = image_text_phases if name == "phases" else WORKLOADS[name]
    made = make(np.random.default_rng(3), num_ranks, 64)
    return made.table, PlanConfig(max_tokens=made.capacity, **settings), made.towers


@given(instances(), st.integers(2, 3))
def test_every_plan_keeps_its_promises(instance, number):
    table, ranks, cp_size, config, towers, peers, speeds = instance
    settings = {"num_ranks": ranks, "config": config, "towers": towers, "cp_size": cp_size, "peers": peers, "speeds": speeds}
    try:
        plan = plan_in_pods(table, pods=number, **settings)
    except InfeasiblePlanError:
        with pytest.raises(InfeasiblePlanError):  # what pods cannot plan, one piece cannot either
            plan_step(table, **settings)
        return
    check(plan, table, ranks, cp_size, config, towers, peers, speeds)
    assert same(plan, plan_in_pods(table, pods=number, **settings))


@pytest.mark.parametrize(("sync", "movement"), MODES)
@pytest.mark.parametrize("name", ["sft", "phases"])
def test_ranks_that_share_the_work_get_the_plan_of_one_process(name, sync, movement):
    table, config, towers = workload(name, 12, sync=sync, movement=movement)
    nodes = np.arange(12) // 2
    alone = plan_in_pods(table, num_ranks=12, config=config, towers=towers, node_of_rank=nodes, pods=3)
    assert all(same(alone, plan) for plan in together(table, 12, config=config, towers=towers, node_of_rank=nodes, pods=3))


@pytest.mark.parametrize("seed", range(6))
def test_any_table_is_planned_alike_by_one_and_by_many(seed):
    rng = np.random.default_rng(seed)
    ranks, count = int(rng.integers(3, 8)), int(rng.integers(1, 60))
    lengths = np.minimum(np.exp(rng.normal(2, 1.3, count)).astype(int) + 1, 60)
    table = SampleTable.from_lengths(
        lengths, cost=lengths[:, None] * rng.integers(0, 8, (count, 2)), home=rng.integers(0, ranks, count),
        media=rng.integers(0, 4, count),
    )  # fmt: skip
    for sync, movement in MODES:
        towers = MediaTowers(dummy_tokens={"image": 4, "video": 6})
        config, number = PlanConfig(max_tokens=60, sync=sync, movement=movement), int(rng.integers(2, 4))
        for speeds in (None, rng.integers(600, 1100, ranks).tolist()):
            settings = {"config": config, "towers": towers, "speeds": speeds, "pods": number}
            alone = plan_in_pods(table, num_ranks=ranks, **settings)
            assert all(same(alone, plan) for plan in together(table, ranks, **settings))


@pytest.mark.parametrize(("sync", "movement"), MODES)
@pytest.mark.parametrize("slow", [0, 70])
@pytest.mark.parametrize("name", ["sft", "image-text"])
def test_objective_is_near_that_of_the_plan_in_one_piece(name, slow, sync, movement):
    """Also where a whole pod is slow."""
    table, config, towers = workload(name, 256, sync=sync, movement=movement)
    speeds = np.where(np.arange(256) < slow, 900, 1024)
    flat = plan_step(table, num_ranks=256, config=config, towers=towers, speeds=speeds)
    found = plan_in_pods(table, num_ranks=256, config=config, towers=towers, speeds=speeds, pods=4)
    assert slow or not same(flat, found)  # it is another plan; slow ranks may leave too little choice
    assert found.lower_bound == flat.lower_bound
    assert found.value <= flat.value * (1.02 if slow else 1.01)


def test_pods_end_between_nodes():
    assert Pods.of(np.arange(16) // 4, 3).first.tolist() == [0, 4, 10, 16]  # the border near 5 is taken, 10 has none near
    assert Pods.of(np.zeros(10, np.int64), 3).first.tolist() == [0, 3, 6, 10]
    assert Pods.of(np.zeros(2, np.int64), 2).pod.tolist() == [0, 1]


@pytest.mark.parametrize("movement", ["minimal", "free"])
@pytest.mark.parametrize("skew", [1.0, 1.3])
def test_pods_get_alike_shares(movement, skew):
    """Even where one half of the ranks brings much more than the other."""
    table, config, towers = workload("sft", 64, sync="step", movement=movement)
    table = msgspec.structs.replace(table, cost=np.where(table.home < 32, (table.cost * skew).astype(np.int64), table.cost))
    problem = PodProblem.of(
        build_problem(table, num_ranks=64, config=config, towers=towers, cp_size=1, node_of_rank=None, peers=None)
    )
    bound, groups = bounds.objective(problem), Pods.of(problem.node, 4)
    share = assign_to_pods(problem, groups, bounds.fewest_microbatches(problem), bound)
    assert np.array_equal(np.sort(share.order), np.arange(len(table)))
    loads = [int(pod_problem(problem, groups, share, pod).weight.sum()) for pod in range(4)]
    assert max(loads) <= 16 * bound * 1.01
    away = 0 if share.rank_of is None else int(table.nbytes[share.rank_of != table.home].sum())
    assert away <= plan_step(table, num_ranks=64, config=config, towers=towers).moved_bytes


@pytest.mark.parametrize(
    "settings",
    [{"pods": 1}, {"pods": 2, "peers": [[1], [0], [3], [2]]}, {}],
    ids=["one pod asked for", "fixed peers", "few samples"],
)
def test_planned_in_one_piece(settings, monkeypatch):
    monkeypatch.setattr(pods, "solve_in_pods", None)  # would be called, and raise
    table, config, towers = workload("sft", 4)
    found = plan_in_pods(table, num_ranks=4, config=config, towers=towers, **settings)
    assert same(found, plan_step(table, num_ranks=4, config=config, towers=towers, peers=settings.get("peers")))


def test_a_pod_without_a_plan_sends_every_rank_to_the_plan_in_one_piece(monkeypatch):
    table, config, towers = workload("sft", 6)
    flat = plan_step(table, num_ranks=6, config=config, towers=towers)
    original = pods._plan_pod

    def failing(problem, groups, share, pod, count, bound):
        return None if pod == 1 else original(problem, groups, share, pod, count, bound)

    monkeypatch.setattr(pods, "_plan_pod", failing)
    assert same(plan_in_pods(table, num_ranks=6, config=config, towers=towers, pods=3), flat)
    assert all(same(plan, flat) for plan in together(table, 6, config=config, towers=towers, pods=3))


def test_a_plan_far_above_the_bound_is_given_up(monkeypatch):
    table, config, towers = workload("sft", 6)
    flat = plan_step(table, num_ranks=6, config=config, towers=towers)
    assert not same(plan_in_pods(table, num_ranks=6, config=config, towers=towers, pods=3), flat)
    monkeypatch.setattr(pods, "PODS_TOO_FAR", -1000)
    assert all(same(plan, flat) for plan in together(table, 6, config=config, towers=towers, pods=3))


def test_ranks_of_one_pod_that_plan_differently_are_named(monkeypatch):
    table, config, towers = workload("sft", 4)
    original, calls = pods._plan_pod, []

    def wavering(problem, groups, share, pod, count, bound):
        found = original(problem, groups, share, pod, count, bound)
        calls.append(pod)
        return found[::-1].copy() if pod == 1 and calls.count(1) == 2 else found

    monkeypatch.setattr(pods, "_plan_pod", wavering)
    with pytest.raises(PlanMismatchError, match="ranks 2 and 3 planned their part of the step differently"):
        together(table, 4, config=config, towers=towers, pods=2)


def test_ranks_that_share_a_step_out_differently_are_named(monkeypatch):
    """Rank 2 gives its pod a sample less, so it would send rows of another length: every rank says who, and none waits."""
    table, config, towers = workload("sft", 4, movement="free")
    original, this = pods.assign_to_pods, threading.local()

    def wavering(problem, groups, count, bound):
        share = original(problem, groups, count, bound)
        if this.rank != 2:
            return share
        return msgspec.structs.replace(share, starts=share.starts + np.array([0, 40, 0]))

    monkeypatch.setattr(pods, "assign_to_pods", wavering)
    hub = MemoryHub(4)

    def plan(rank, _):
        this.rank = rank
        with pytest.raises(PlanMismatchError, match="ranks 0 and 2 shared the step out to pods differently"):
            plan_in_pods(
                table,
                num_ranks=4,
                config=config,
                towers=towers,
                team=Team(rank=rank, gather=hub.transport(rank).gather),
                pods=2,
            )

    run_ranks(plan, 4, timeout=30)


def test_pods_of_very_different_sizes_tell_their_plans():
    """Two ranks of eight hold nine samples of ten, all light, and the others the work: samples stay where they are."""
    home = np.repeat(np.arange(8), [90, 90, 4, 4, 4, 4, 4, 4])
    cost = np.where(home < 2, 10, 225)
    table = SampleTable.from_lengths(np.ones(len(home), np.int64), cost=cost, home=home)
    config, towers = PlanConfig(max_tokens=128), MediaTowers()
    alone = plan_in_pods(table, num_ranks=8, config=config, towers=towers, pods=4)
    assert alone.moved_bytes == 0
    assert all(same(alone, plan) for plan in together(table, 8, config=config, towers=towers, pods=4))


@pytest.mark.parametrize("module", [sharing, pods, pod_kernels])
def test_the_coarse_level_is_written_in_integers(module):
    """No float, no quotient that is one, and none of numpy's functions that make them."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), ast.unparse(node)
        assert not (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)), ast.unparse(node)
        assert not (isinstance(node, ast.Attribute) and node.attr in {"float64", "linspace", "mean", "divide"}), node.attr


@pytest.mark.parametrize(("sync", "movement"), MODES)
@pytest.mark.parametrize("name", ["sft", "phases"])
def test_a_share_holds_integers(name, sync, movement):
    table, config, towers = workload(name, 64, sync=sync, movement=movement)
    problem = PodProblem.of(
        build_problem(table, num_ranks=64, config=config, towers=towers, cp_size=1, node_of_rank=None, peers=None)
    )
    share = assign_to_pods(problem, Pods.of(problem.node, 4), 8, bounds.objective(problem))
    for field in share.__struct_fields__:
        value = getattr(share, field)
        assert value is None or value.dtype == np.int64, field


def dealt(order, weight, sizes, power, in_rounds):
    """`pod_kernels.deal_out`, one sample after the other, in exact fractions of 512ths."""
    load, out = [0] * len(power), {}
    left = list(order)

    def shares():
        return [512 * total // size for total, size in zip(load, power, strict=True)]

    def give(pod):
        out[left[0]] = pod
        load[pod] += weight[left.pop(0)]

    while len(order) - len(left) < in_rounds:
        ranked = sorted(range(len(sizes)), key=shares().__getitem__)
        for turn in range(max(sizes)):
            for pod in ranked:
                if turn < sizes[pod] and left:
                    give(pod)
    while left:
        give(min(range(len(sizes)), key=shares().__getitem__))
    return [out[index] for index in range(len(order))]


@pytest.mark.parametrize("most", [20, 2**44])
def test_dealing_out_is_exact(most):
    """Against a loop in Python's integers, also where 64 bits of a float would round: sums near the limit of 2**53."""
    rng = np.random.default_rng(most % 97)
    for _ in range(20):
        sizes = rng.integers(1, 5, rng.integers(2, 6))
        weight = np.sort(rng.integers(1, most, 4 * sizes.sum() + 3))[::-1].copy()
        order = np.arange(len(weight))
        out = np.empty(len(weight), np.int64)
        for power, in_rounds in ((sizes, len(order) * 3 // 4), (sizes * rng.integers(500, 1100, len(sizes)), 0)):
            pod_kernels.deal_out(order, weight, sizes, power, np.zeros(len(sizes), np.int64), in_rounds, out)
            assert out.tolist() == dealt(order.tolist(), weight.tolist(), sizes.tolist(), power.tolist(), in_rounds)


@pytest.mark.parametrize(("value", "part"), [(100, 0.29), (2**53 - 1, 0.01), (2**80 + 1, 0.5), (7, 0), (7, 1)])
def test_a_portion_is_exact(value, part):
    assert floor_scale(value, part) == math.floor(value * Fraction(part))


def test_large_steps_are_planned_in_pods_unasked():
    config, towers = PlanConfig(max_tokens=64), MediaTowers()
    for ranks, count, number in ((1024, 131_072, 4), (1024, 131_071, 1), (255, 200_000, 1), (16_384, 1_048_576, 64)):
        table = SampleTable.from_lengths(np.ones(count, np.int64), home=np.arange(count) % ranks)
        problem = build_problem(table, num_ranks=ranks, config=config, towers=towers, cp_size=1, node_of_rank=None, peers=None)
        assert pods.num_pods(problem) == number


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_setting(value):
    with pytest.raises(ValueError, match="pods must be an integer of at least 1"):
        plan_in_pods(SampleTable.from_lengths([1]), num_ranks=1, config=PlanConfig(max_tokens=8), pods=value)

"""Samples come home where that costs nothing: against the same thing written plainly, and on whole plans."""

from functools import partial

import msgspec
import numpy as np
import pytest

from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_in_pods, plan_step
from evenpack.scheduler.plan.kernels.jit import Bins, Items
from evenpack.scheduler.plan.kernels.swap import return_home
from evenpack.scheduler.plan.packs import Packs
from evenpack.scheduler.plan.problem import build_problem
from evenpack.scheduler.plan.solvers.homeward import bring_home, packs_to_homes


def instance(seed, ranks=3, count=2, phases=1):
    """Random packs of random samples: nothing is full, some media, some room."""
    rng = np.random.default_rng(seed)
    samples = 24
    size = rng.integers(1, 12, samples)
    bin_of = rng.integers(0, ranks * count, samples)
    cost = rng.integers(1, 30, (samples, phases))
    load = np.zeros((ranks * count, phases), np.int64)
    np.add.at(load, bin_of, cost)
    used = np.bincount(bin_of, size, ranks * count).astype(np.int64)
    places = 9 - np.bincount(bin_of, minlength=ranks * count)
    goals = load.reshape(ranks, count, phases).max(axis=0) + rng.integers(0, 6, (ranks, count, phases))
    return {
        "order": rng.permutation(samples), "cost": cost, "size": size, "nbytes": rng.integers(1, 50, samples),
        "home": rng.integers(0, ranks, samples), "media": rng.integers(0, 2, samples), "load": load,
        "goals": goals.reshape(-1, phases),
        "room": used.max() + 3 - used, "places": places, "bin_of": bin_of, "count": count, "passes": 3,
    }  # fmt: skip


def plain(order, cost, size, nbytes, home, media, load, goals, room, places, bin_of, count, passes):
    """Every sample takes the change with the most bytes; of equals the first pack, alone before in exchange."""
    away = lambda where, i: nbytes[i] * (where[i] // count != home[i])  # noqa: E731
    newest = {b: [i for i in range(len(size) - 1, -1, -1) if bin_of[i] == b] for b in range(len(room))}
    for _ in range(passes):
        for item in order.tolist():
            here = bin_of[item]
            if here // count == home[item]:
                continue
            best, chosen = 0, None
            for there in range(home[item] * count, (home[item] + 1) * count):
                for other in [None, *newest[there]]:
                    trial = bin_of.copy()
                    trial[item] = there
                    if other is not None:
                        trial[other] = here
                        if media[other] != media[item]:
                            continue
                    elif media[item]:
                        continue
                    pair = [item] if other is None else [item, other]
                    gain = sum(away(bin_of, i) - away(trial, i) for i in pair)
                    packs = [here, there]
                    sums = np.stack([cost[trial == b].sum(axis=0) for b in packs])
                    fits = all(size[trial == b].sum() <= room[b] + size[bin_of == b].sum() for b in packs)
                    fits &= other is not None or places[there] > 0
                    if gain > best and fits and (sums <= goals[packs]).all():
                        best, chosen = gain, (pair, packs)
            if chosen is None:
                continue
            (pair, packs), old = chosen, bin_of.copy()
            for i, (source, target) in zip(pair, (packs, packs[::-1]), strict=False):
                bin_of[i] = target
                newest[source].remove(i)
                newest[target].insert(0, i)
            for b in packs:
                room[b] += size[old == b].sum() - size[bin_of == b].sum()
                places[b] += (old == b).sum() - (bin_of == b).sum()
    return bin_of


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_return_home_equals_the_plain_search(seed, phases):
    fast, slow = instance(seed, phases=phases), instance(seed, phases=phases)
    cost = fast["cost"]
    items = Items(cost.sum(axis=1), cost, fast["size"], fast["nbytes"], fast["home"])
    bins = Bins(fast["room"], fast["places"], fast["bin_of"])
    return_home(fast["order"], items, fast["media"], bins, fast["load"], fast["goals"], fast["count"], fast["passes"])
    assert fast["bin_of"].tolist() == plain(**slow).tolist()
    assert fast["room"].tolist() == slow["room"].tolist() and fast["places"].tolist() == slow["places"].tolist()
    sums = np.zeros_like(fast["load"])
    np.add.at(sums, fast["bin_of"], fast["cost"])
    assert (fast["load"] == sums).all()


def problem_of(tokens, home, ranks):
    table = SampleTable.from_lengths(tokens, home=home, cost=tokens)
    config = PlanConfig(max_tokens=100, sync="microbatch")
    return build_problem(table, num_ranks=ranks, config=config, cp_size=1, node_of_rank=None, peers=None)


@pytest.mark.parametrize("seed", range(10))
def test_packs_go_to_the_ranks_that_brought_them(seed):
    rng = np.random.default_rng(seed)
    tokens, home = rng.integers(1, 20, 40), np.sort(rng.integers(0, 4, 40))
    problem = problem_of(tokens, home, 4)
    # Whole packs at home, then dealt out wrongly within their index: all come back.
    packs = Packs(
        count=2, bin_of=home * 2 + rng.integers(0, 2, 40), free_tokens=np.zeros(8, np.int64), free_slots=np.zeros(8, np.int64)
    )
    expected = packs.bin_of.copy()
    shuffled = np.concatenate([rng.permutation(4) * 2 + index for index in range(2)]).reshape(2, 4).T.reshape(-1)
    packs.relabel(shuffled)
    packs_to_homes(problem, packs)
    assert packs.bin_of.tolist() == expected.tolist()


@pytest.mark.parametrize(("limit", "away"), [(9, 2), (10, 0)])
def test_bring_home_keeps_to_the_limit(limit, away):
    """Two samples of 3 and 4 are in each other's place: at home one pack costs 10, the other 8, instead of 9 each."""
    problem = problem_of([6, 3, 5, 4], [0, 1, 1, 0], 2)
    packs = Packs(count=1, bin_of=np.array([0, 0, 1, 1]), free_tokens=np.array([91, 91]), free_slots=np.array([9, 9]))
    bring_home(problem, packs, limit)
    assert (packs.bin_of != problem.home).sum() == away
    assert packs.loads(problem).max() == limit
    assert packs.free_tokens.tolist() == (100 - packs.loads(problem).reshape(-1)).tolist()


def test_few_samples_a_pack_still_reach_the_tolerance():
    """Long samples, one or two to a pack: homes leave no choice, so a plan that ignores them is brought home."""
    rng = np.random.default_rng(0)
    tokens = np.clip(np.exp(rng.normal(10.35, 0.5, 16 * 32)), 16, 65_536).astype(np.int64)
    home = np.arange(len(tokens)) // 32
    table = SampleTable.from_lengths(tokens, home=home, cost=tokens, nbytes=tokens)
    plan = plan_step(table, num_ranks=16, config=PlanConfig(max_tokens=65_536, sync="microbatch"))
    assert plan.gap <= 0.015
    assert plan.moved_bytes <= 0.4 * tokens.sum()


def test_large_costs_come_home_like_small_ones():
    """Costs up to 2**52 a step: what a micro-batch may cost is worked out beyond int64."""
    rng = np.random.default_rng(3)
    cost, homes = rng.integers(40, 60, 48), rng.integers(0, 4, 48)
    found = []
    for shift in (0, 40):
        problem = msgspec.structs.replace(problem_of(cost, homes, 4), cost=cost[:, None] << shift, weight=cost << shift)
        packs = Packs(count=3, bin_of=np.arange(48) % 12, free_tokens=np.full(12, 10**17), free_slots=np.full(12, 99))
        bring_home(problem, packs, int(packs.loads(problem).max(axis=0).sum()) * 11 // 10)
        found.append(packs.bin_of.tolist())
    assert found[0] == found[1] != list(np.arange(48) % 12)


def test_ranks_with_several_heavy_samples_part_with_them():
    """Heavy samples find no rank with as much of a deficit while every rank has its light ones: they are dealt out first."""
    rng = np.random.default_rng(0)
    mean = np.where(rng.random(512 * 64) < 0.975, 5.79, 8.92)
    tokens = np.clip(np.exp(rng.normal(mean, 0.8)), 16, 16_384).astype(np.int64)
    cost = 1024 * tokens + tokens * tokens * 305 // 1000
    table = SampleTable.from_lengths(tokens, cost=cost, home=np.arange(len(tokens)) // 64, nbytes=16 * tokens)
    plan = plan_step(table, num_ranks=512, config=PlanConfig(max_tokens=16_384))
    assert plan.gap <= 0.0101


@pytest.mark.parametrize("pods", [1, 2])
def test_a_finer_unit_of_costs_leaves_a_plan_as_it_is(pods):
    """Two phases, costs of 2**35 and of 2**51 a step: no product of them may leave int64 unnoticed."""
    rng = np.random.default_rng(0)
    tokens, home = np.minimum(rng.lognormal(6, 1, 400).astype(int) + 1, 8192), np.sort(rng.integers(0, 8, 400))
    cost = np.stack([tokens, tokens[::-1] // 2], axis=1)
    config = PlanConfig(max_tokens=8192, sync="microbatch")
    planner = plan_step if pods == 1 else partial(plan_in_pods, pods=pods)
    coarse, fine = (
        planner(SampleTable.from_lengths(tokens, home=home, cost=cost << shift), num_ranks=8, config=config)
        for shift in (16, 32)
    )
    assert fine.moved_bytes == coarse.moved_bytes
    assert fine.value >> 16 == pytest.approx(coarse.value, rel=1e-3)

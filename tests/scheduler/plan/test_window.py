"""Windows of several steps: every sample once, delays and bounds kept or the breach known, order where nothing is gained."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.cli.what_if.workloads import WORKLOADS, image_text
from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_step
from evenpack.scheduler.plan.window import WindowBounds, choose_step, roll, window_bound


def bounds_of(lookahead, tokens=0.1, samples=0.5):
    return WindowBounds(lookahead=lookahead, tokens=tokens, samples=samples)


@st.composite
def streams(draw):
    """Tables of a run in order, with ranks that bring different numbers of samples, and what they are planned with."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_ranks, phases = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2]))
    heavy = draw(st.sampled_from([0.0, 0.02, 0.2]))
    tables = []
    for _ in range(draw(st.integers(1, 9))):
        counts = rng.integers(0, 8, num_ranks)
        counts[rng.integers(num_ranks)] += 1
        tokens = np.where(
            rng.random(counts.sum()) < heavy, rng.integers(60, 129, counts.sum()), rng.integers(1, 30, counts.sum())
        )
        share = rng.integers(0, 3, (len(tokens), phases))
        cost = tokens if phases == 1 else tokens[:, None] * share
        tables.append(SampleTable.from_lengths(tokens, cost=cost, home=np.repeat(np.arange(num_ranks), counts)))
    sync = draw(st.sampled_from(["step", "microbatch"]))
    return tables, num_ranks, PlanConfig(max_tokens=128, sync=sync)


@given(stream=streams(), lookahead=st.integers(1, 9))
def test_every_sample_once_within_the_delay_in_as_many_steps(stream, lookahead):
    tables, num_ranks, config = stream
    steps = list(roll(tables, num_ranks=num_ranks, config=config, capacity=128, bounds=bounds_of(lookahead)))
    assert len(steps) == len(tables)
    rows = []
    for number, (table, turn) in enumerate(steps):
        assert (np.abs(number - turn) < lookahead).all()
        assert (np.diff(table.home) >= 0).all()
        rows += list(zip(turn.tolist(), table.home.tolist(), table.tokens.tolist(), strict=True))
        if len(table):
            plan = plan_step(table, num_ranks=num_ranks, config=config)
            assert plan.num_dropped == 0
    had = [
        (number, home, length)
        for number, table in enumerate(tables)
        for home, length in zip(table.home.tolist(), table.tokens.tolist(), strict=True)
    ]
    assert sorted(rows) == sorted(had)


@given(stream=streams(), lookahead=st.integers(2, 9), tokens=st.sampled_from([0.1, 0.3]), samples=st.sampled_from([0.2, 0.5]))
def test_bounds_hold_unless_a_sample_weighs_more_than_a_step(stream, lookahead, tokens, samples):
    """To a sample, where it does not: what a step holds is chosen sample by sample."""
    tables, num_ranks, config = stream
    view = SampleTable.concatenate(tables[:lookahead])
    turn = np.repeat(np.arange(len(tables[:lookahead])), [len(table) for table in tables[:lookahead]])
    order = np.lexsort((turn, view.home))
    view, turn, steps = view.select(order), turn[order], len(tables[:lookahead])
    limits = bounds_of(lookahead, tokens, samples)
    chosen = choose_step(view, lookahead - turn, num_ranks=num_ranks, steps=steps, config=config, capacity=128, bounds=limits)
    assert chosen.any()
    cost = view.cost.reshape(len(view), -1)
    cost = cost if config.sync == "microbatch" else cost.sum(axis=1, keepdims=True)
    if steps == 1 or (cost * num_ranks * steps > cost.sum(axis=0)).any():
        return
    mean_tokens, mean_samples, longest = view.tokens.sum() / steps, len(view) / steps, view.tokens.max()
    heavy = (cost * num_ranks * steps * max(-(-view.padded.sum() // (steps * num_ranks * 128)), 1) > cost.sum(axis=0)).any(
        axis=1
    )
    # Where one bound asks for more samples and the other for fewer, a step holds what the first asks for.
    held, few = view.tokens[chosen].sum(), chosen.sum() <= mean_samples * (1 - samples) + 1
    assert few or held <= max(mean_tokens * (1 + tokens), view.tokens[chosen & heavy].sum()) + longest
    light = held <= mean_tokens * (1 - tokens) + longest
    assert light or chosen.sum() <= max(mean_samples * (1 + samples), (chosen & heavy).sum()) + 1


@given(stream=streams(), lookahead=st.integers(2, 5))
def test_the_choice_follows_from_the_samples_alone(stream, lookahead):
    """Units of cost and of bytes change nothing, nor do dead copies of the arrays."""
    tables, num_ranks, config = stream
    scaled = [
        SampleTable.from_lengths(table.tokens, cost=table.cost * 1024, home=table.home, nbytes=table.nbytes * 3)
        for table in tables
    ]
    settings = {"num_ranks": num_ranks, "config": config, "capacity": 128, "bounds": bounds_of(lookahead)}
    one, other = (list(roll(each, **settings)) for each in (tables, scaled))
    assert [turn.tolist() for _, turn in one] == [turn.tolist() for _, turn in other]
    assert [table.tokens.tolist() for table, _ in one] == [table.tokens.tolist() for table, _ in other]


def test_alike_samples_keep_their_order():
    tables = [SampleTable.from_lengths([7] * 12, home=np.repeat(np.arange(3), 4)) for _ in range(6)]
    for config in (PlanConfig(max_tokens=32), PlanConfig(max_tokens=32, sync="microbatch")):
        steps = roll(tables, num_ranks=3, config=config, capacity=32, bounds=bounds_of(4))
        assert all((turn == number).all() for number, (_, turn) in enumerate(steps))


def test_heavy_samples_wait_for_each_other_and_for_no_more_than_the_delay():
    """Two ranks: the heavy samples of steps 1 and 3 meet; that of step 7, alone, runs as late as it may."""
    heavy = {1: 0, 3: 1, 7: 0}
    tables = [
        SampleTable.from_lengths([100 if heavy.get(number) == 0 else 8, 8, 8, 100 if heavy.get(number) == 1 else 8, 8, 8],
                                 home=[0, 0, 0, 1, 1, 1])
        for number in range(14)
    ]  # fmt: skip
    config = PlanConfig(max_tokens=128, sync="microbatch")
    found = {}
    for number, (table, turn) in enumerate(roll(tables, num_ranks=2, config=config, capacity=128, bounds=bounds_of(4))):
        for then in turn[table.tokens == 100].tolist():
            found[then] = number
    assert found[1] == found[3] and abs(found[1] - 1) < 4 and found[7] == 10


@pytest.mark.parametrize(
    ("name", "sync", "most"),
    [("sft", "step", 1.03), ("sft", "microbatch", 1.06), ("rl", "microbatch", 1.03), ("long tail", "microbatch", 1.08)],
)
def test_less_waiting_on_published_lengths(name, sync, most):
    """Value over mean load, 16 ranks x 16 samples, in 24 steps; without a window it is 1.3 to 2."""
    works = [WORKLOADS[name](np.random.default_rng(seed), 16, 16) for seed in range(24)]
    config = PlanConfig(max_tokens=works[0].capacity, sync=sync)

    def waiting(tables):
        return sum(plan_step(table, num_ranks=16, config=config).value for table in tables) * 16 / total

    total = sum(int(work.table.cost.sum()) for work in works)
    rolled = roll([work.table for work in works], num_ranks=16, config=config, capacity=works[0].capacity, bounds=bounds_of(8))
    found, alone = waiting(table for table, _ in rolled), waiting(work.table for work in works)
    assert found < most and found < alone


def test_window_bound_is_below_what_windows_reach():
    work = image_text(np.random.default_rng(1), 8, 8, phases=2)
    config = PlanConfig(max_tokens=work.capacity, sync="microbatch", movement="free")
    eight = plan_step(SampleTable.concatenate([work.table] * 8), num_ranks=8, config=config, towers=work.towers)
    bound = window_bound(work.table, num_ranks=8, config=config)
    assert work.table.cost.sum() / 8 <= bound <= eight.value / 8
    assert bound < plan_step(work.table, num_ranks=8, config=config, towers=work.towers).lower_bound

"""Bad input is a named error that states both numbers; settings do what they say."""

import numpy as np
import pytest

from evenpack.core.errors import InfeasiblePlanError, PlanError
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.plan import (
    CODE_VERSION,
    MediaTowers,
    PlanConfig,
    SampleTable,
    certificate,
    plan_fixed,
    plan_step,
    warm_up,
)

GOOD = {"tokens": [5, 5], "align": 1}
TEXT = MediaTowers()


def plan(rows, num_ranks=2, cp_size=1, node_of_rank=None, peers=None, speeds=None, towers=TEXT, **config):
    table = SampleTable.from_lengths(**{**GOOD, **rows})
    settings = PlanConfig(**{"max_tokens": 10, **config})
    where = {"cp_size": cp_size, "node_of_rank": node_of_rank, "peers": peers, "speeds": speeds}
    return plan_step(table, num_ranks=num_ranks, config=settings, towers=towers, **where)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"tokens": [5, 0]}, r"sample 1: tokens must be at least 1, got 0"),
        ({"tokens": [-5, 1]}, r"sample 0: tokens must be at least 1, got -5"),
        ({"padded": [5, 4]}, r"sample 1: padded must be at least the sample's tokens, got 4"),
        ({"cost": [1, -2]}, r"sample 1: cost must be at least 0, got \[-2\]"),
        ({"nbytes": [1, -2]}, r"sample 1: nbytes must be at least 0, got -2"),
        ({"home": [0, 2]}, r"sample 1: home must be a rank from 0 to 1, got 2"),
        ({"media": [0, 8]}, r"sample 1: media must be bit flags below 8, got 8"),
        ({"cost": [2**60, 2**60]}, rf"costs of the step add up to {2**61}, above the limit of {2**53}"),
        ({"cost": [2**62, 2**62]}, rf"add up to {2**63}, above the limit"),
        ({"nbytes": [2**53, 1]}, rf"bytes of the step add up to {2**53 + 1}, above the limit"),
    ],
)
def test_values_out_of_range(rows, message):
    with pytest.raises(PlanError, match=message):
        plan(rows)


def test_costs_have_room_for_speeds():
    """Four times 3 * 2**50 on a rank that is half as fast as the other."""
    with pytest.raises(PlanError, match=rf"fastest and the slowest rank, add up to {3 * 2**53}, above the limit of {2**53}"):
        plan({"cost": [2**51, 2**50]}, speeds=[1024, 512])
    assert plan({"cost": [2**48, 2**47]}, speeds=[1024, 512]).value == 2**48


def test_padding_must_match_the_alignment():
    with pytest.raises(PlanError, match=r"sample 0: padded must be a multiple of align=4, got 5"):
        plan({}, cp_size=2)


@pytest.mark.parametrize(("column", "value"), [("cost", float("nan")), ("tokens", 1.5), ("nbytes", float("inf"))])
def test_fractions_are_refused(column, value):
    table = SampleTable.from_lengths([5, 5])
    broken = {name: getattr(table, name) for name in SampleTable.__struct_fields__}
    broken[column] = np.array([1.0, value])
    with pytest.raises(PlanError, match=rf"column '{column}'.*takes integers, got .*{value}"):
        plan_step(SampleTable(**broken), num_ranks=2, config=PlanConfig(max_tokens=10))


def test_columns_of_different_length():
    with pytest.raises(PlanError, match=r"column 'home' has shape \(3,\), expected \[2\]"):
        plan({"home": [0, 1, 0]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"cp_size": 0}, "cp_size must be at least 1, got 0"),
        ({"node_of_rank": [0]}, "node of each of 2 ranks"),
        ({"speeds": [1024]}, r"a positive integer for each of 2 ranks, in parts of 1024, got \[1024\]"),
        ({"speeds": [1024, 0]}, r"a positive integer for each of 2 ranks, in parts of 1024, got \[1024, 0\]"),
        ({"speeds": [1024, 0.5]}, "integer"),
        ({"peers": [[1], [2]]}, "peers name rank 1 and 2, there are 2 ranks"),
        ({"peers": np.ones((3, 3), bool)}, r"must be \[2, 2\], got \(3, 3\)"),
        ({"max_tokens": 3, "pack_align": 4}, "capacity 3 is below pack_align=4"),
        ({"towers": MediaTowers(dummy_cost={"image": (1, 2)})}, r"dummy_cost\['image'\] has 2 phases, the samples have 1"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan({}, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_microbatches": 3, "microbatch_multiple": 2}, "multiple of microbatch_multiple=2, got 3"),
        ({"sync": "never"}, "sync must be one of step, microbatch, got 'never'"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"tolerance": float("nan")}, "tolerance must be a number from 0.0 to 1.0, got nan"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        PlanConfig(**{"max_tokens": 10, **settings})


def test_settings_are_few_and_a_wrong_name_is_a_type_error_as_ever():
    beyond_the_step = {"lookahead", "step_tokens_tolerance", "step_samples_tolerance"}
    assert len(set(SchedulerConfig.__struct_fields__) - beyond_the_step) <= 23
    with pytest.raises(TypeError, match="max_token"):
        PlanConfig(max_token=8)
    for build in (SchedulerConfig.from_dict, lambda settings: SchedulerConfig(**settings)):
        with pytest.raises(ValueError, match=r"defer is gone: lookahead=8 keeps 8 steps in view"):
            build({"max_tokens": 8, "samples_per_step": 1, "defer": 16})
    with pytest.raises(ValueError, match=r"unknown settings \['max_token'\]; known ones are .*'max_tokens'"):
        SchedulerConfig.from_dict({"max_token": 8})


@pytest.mark.parametrize(
    ("towers", "message"),
    [
        ({"trained": ("smell",)}, "trained must be one of image, video, audio, got 'smell'"),
        ({"dummy_tokens": {"image": 0}}, r"dummy_tokens\['image'\] must be an integer of at least 1, got 0"),
        ({"dummy_cost": {"video": (1, -1)}}, r"dummy_cost\['video'\] must be an integer of at least 0, got -1"),
    ],
)
def test_towers_that_make_no_sense(towers, message):
    with pytest.raises(ValueError, match=message):
        MediaTowers(**towers)


def test_constraints_that_nothing_meets():
    """Two segments, a sample and a tail, where one is allowed."""
    with pytest.raises(InfeasiblePlanError, match="max_segments=1"):
        plan({"tokens": [5, 5]}, max_segments=1, pack_align=10)
    # No rank may send, and home has no room in one micro-batch.
    with pytest.raises(InfeasiblePlanError, match=r"3 samples of 24 padded tokens.*num_microbatches=1"):
        plan({"tokens": [8, 8, 8], "home": [0, 0, 0]}, num_ranks=3, num_microbatches=1, peers=[[], [], []])


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_samples_move_only_to_peers(sync):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 120)
    rows = {"tokens": lengths, "home": np.sort(rng.integers(0, 3, 120))}
    ring = [[1], [2], [3], [4], [5], [0]]
    found = plan(rows, num_ranks=6, peers=ring, max_tokens=100, sync=sync)
    for home, rank in zip(rows["home"], found.rank, strict=True):
        assert rank == home or rank in ring[home]
    assert found.moved_bytes > 0


def test_moves_inside_a_node_come_first():
    """Ranks 0 and 2 have too much, 1 and 3 too little; the node of rank 0 is {0, 3}."""
    rows = {"tokens": [5] * 12, "home": [0] * 5 + [1] + [2] * 5 + [3]}
    found = plan(rows, num_ranks=4, node_of_rank=[7, 9, 9, 7], max_tokens=100, tolerance=0.0)
    sent = {(int(h), int(r)) for h, r in zip(rows["home"], found.rank, strict=True) if h != r}
    assert sent == {(0, 3), (2, 1)}
    assert found.num_pairs == 2


@pytest.mark.parametrize(("stages", "expected"), [(1, [9, 8, 7, 6, 5]), (2, [5, 7, 9, 8, 6])])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_order_of_microbatches(sync, stages, expected):
    """Heaviest first; with a pipeline small ones come first and last."""
    found = plan({"tokens": [5, 9, 6, 8, 7]}, num_ranks=1, pipeline_stages=stages, num_microbatches=5, sync=sync)
    assert found.padded[0].tolist() == expected


def test_virtual_pipelines_get_a_multiple():
    assert plan({"tokens": [9, 9, 9]}, num_ranks=1, microbatch_multiple=2).num_microbatches == 4


def test_a_tail_takes_room_and_a_segment():
    found = plan({"tokens": [5, 5, 5]}, num_ranks=1, max_tokens=16, pack_align=8, max_segments=3)
    assert sorted(found.padded.ravel()) in ([8, 16], [16])
    assert found.num_microbatches == 2  # three samples and a tail would be four segments


def test_a_cost_per_microbatch_keeps_them_few():
    rows = {"tokens": [4] * 8, "home": [0] * 4 + [1] * 4}
    many = plan(rows, pipeline_stages=4)
    few = plan(rows, pipeline_stages=4, microbatch_cost=100)
    assert (many.num_microbatches, few.num_microbatches) == (4, 2)
    assert few.value == 2 * 100 + 16 + 3 * 8


def test_the_digest_covers_the_plan_and_the_code(monkeypatch):
    first, second = plan({"tokens": [5, 4]}), plan({"tokens": [5, 5]})
    assert len(first.digest) == 8
    assert first.digest == plan({"tokens": [5, 4]}).digest
    moved = plan({"tokens": [5, 4], "home": [0, 1]})
    assert moved.digest != first.digest or (moved.rank == first.rank).all()
    monkeypatch.setattr(certificate, "CODE_VERSION", CODE_VERSION + "x")
    assert plan({"tokens": [5, 4]}).digest != first.digest
    assert second.num_dropped == 0


def test_costs_of_zero_and_no_samples():
    assert plan({"tokens": [5, 5], "cost": [0, 0]}).gap == 0
    empty = plan({"tokens": np.zeros(0, int)}, sync="microbatch")
    assert empty.is_dummy.all() and empty.padded.tolist() == [[1], [1]]


def test_a_given_assignment_is_described_or_refused():
    table = SampleTable.from_lengths([6, 4, 3], home=[0, 1, 1])
    config = PlanConfig(max_tokens=6, num_microbatches=1)
    rank, first = table.home, np.zeros(3, np.int64)
    with pytest.raises(InfeasiblePlanError, match=r"rank 1, micro-batch 0 holds 7 padded tokens.*capacity of 6"):
        plan_fixed(table, rank, first, num_ranks=2, config=config, enforce=True)
    found = plan_fixed(table, rank, first, num_ranks=2, config=config)
    assert found.padded.tolist() == [[6], [7]] and found.moved_bytes == 0
    with pytest.raises(ValueError, match=r"needs config\.num_microbatches"):
        plan_fixed(table, rank, first, num_ranks=2, config=PlanConfig(max_tokens=6))


def test_warm_up_runs():
    warm_up()


def test_ids_outside_the_plan():
    with pytest.raises(IndexError, match="asked for rank 2, micro-batch 0"):
        plan({}).ids(2, 0)

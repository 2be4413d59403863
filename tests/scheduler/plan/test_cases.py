"""Small inputs that broke other packing systems, each with the value that is right."""

import numpy as np
import pytest

from evenpack.core.errors import InfeasiblePlanError, OversizeSampleError, PlanError
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan, plan_step

TEXT, IMAGE = MediaTowers(), MediaTowers(dummy_tokens={"image": 4})
TRAINED = MediaTowers(dummy_tokens={"image": 4}, trained=("image",))


def plan(lengths: list[int], num_ranks: int, *, cp_size: int = 1, table: dict | None = None, towers=TEXT, **config) -> StepPlan:
    rows = SampleTable.from_lengths(lengths, **(table or {}))
    return plan_step(rows, num_ranks=num_ranks, config=PlanConfig(**config), towers=towers, cp_size=cp_size)


def contents(found: StepPlan, table_lengths: list[int]) -> list[list[list[int]]]:
    return [
        [[table_lengths[i] for i in found.ids(rank, index)] for index in range(found.num_microbatches)]
        for rank in range(found.num_ranks)
    ]


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("movement", ["minimal", "free"])
class TestEverySync:
    def test_p1_balance_never_ignores_the_capacity(self, sync, movement):
        found = plan([7] * 8, 1, max_tokens=8, sync=sync, movement=movement)
        assert found.padded.tolist() == [[7] * 8]

    def test_p2_equal_counts_on_both_ranks(self, sync, movement):
        homes = {"home": [0] * 5 + [1] * 5}
        found = plan([95] * 5 + [20] * 5, 2, max_tokens=100, sync=sync, movement=movement, table=homes)
        assert found.num_microbatches == 3
        assert found.padded.max() <= 100

    def test_p6_too_few_samples_make_dummy_packs(self, sync, movement):
        found = plan([10], 2, max_tokens=10, sync=sync, movement=movement)
        assert found.num_microbatches == 1
        assert sorted(found.is_dummy.ravel()) == [False, True]
        assert sorted(found.padded.ravel()) == [1, 10]
        assert sorted(found.tokens.ravel()) == [0, 10]

    def test_p8_id_lists_are_not_shared(self, sync, movement):
        found = plan([3, 3, 3, 3], 2, max_tokens=6, sync=sync, movement=movement)
        before = found.ids(1, 0).tolist()
        found.ids(0, 0)[:] = 99
        assert found.ids(1, 0).tolist() == before
        assert 99 not in found.ids(0, 0)
        with pytest.raises(ValueError, match="read-only"):
            found.rank[0] = 1

    def test_p12_capacity_counts_padded_tokens(self, sync, movement):
        found = plan([1] * 8, 1, cp_size=4, max_tokens=2, sync=sync, movement=movement, table={"align": 8})
        assert found.padded.tolist() == [[8] * 8]
        assert found.tokens.tolist() == [[1] * 8]

    def test_p17_real_and_padded_sums_are_both_kept(self, sync, movement):
        found = plan([17], 1, cp_size=4, max_tokens=8, sync=sync, movement=movement, table={"align": 8})
        assert (found.tokens.tolist(), found.padded.tolist()) == ([[17]], [[24]])

    def test_p11_samples_without_loss_tokens_still_fill_a_pack(self, sync, movement):
        rows = {"loss_tokens": [0] * 5}
        found = plan([1000] * 5, 1, max_tokens=1500, sync=sync, movement=movement, table=rows)
        assert found.padded.max() <= 1500

    def test_p15_left_over_samples_are_counted(self, sync, movement):
        settings = {"max_tokens": 10, "num_microbatches": 1, "sync": sync, "movement": movement}
        found = plan([9, 9, 9], 2, oversize="drop", **settings)
        assert (found.tokens.sum(), found.num_dropped) == (18, 1)
        assert sorted(found.rank) == [-1, 0, 1]
        with pytest.raises(InfeasiblePlanError, match=r"3 samples of 27 padded tokens.*2 ranks.*capacity of 10"):
            plan([9, 9, 9], 2, **settings)


def test_p3_p5_oversize_is_a_policy():
    for lengths in ([12, 3], [12, 5, 5]):
        with pytest.raises(OversizeSampleError, match=r"sample 0 has 12 padded tokens, above the capacity of 10"):
            plan(lengths, 2, max_tokens=10)
    found = plan([12, 5, 5], 2, max_tokens=10, oversize="drop")
    assert contents(found, [12, 5, 5]) == [[[5]], [[5]]]
    assert found.rank[0] == -1 and found.microbatch[0] == -1


def test_p4_lengths_are_real_not_the_stored_width():
    assert plan([3, 4], 1, max_tokens=10).padded.tolist() == [[7]]


def test_p7_heavy_samples_meet_light_ones():
    found = plan([8, 8, 8, 8, 1, 1, 1, 1], 2, max_tokens=10, sync="microbatch")
    assert found.num_microbatches == 2
    assert found.padded.tolist() == [[9, 9], [9, 9]]
    assert (found.value, found.lower_bound) == (18, 18)


def test_p9_a_slot_without_image_gets_a_dummy_image():
    found = plan([10, 10, 10], 2, max_tokens=10, sync="microbatch", towers=IMAGE, table={"media": [1, 1, 1]})
    assert found.num_microbatches == 2
    assert sorted(found.dummy_media.ravel()) == [0, 0, 0, 1]
    assert found.is_dummy.sum() == 1 and found.padded[found.is_dummy].tolist() == [4]


def test_p9_a_dummy_that_the_settings_do_not_describe_is_named():
    with pytest.raises(PlanError, match="dummy_tokens has no entry for 'image'"):
        plan([10, 10, 10], 2, max_tokens=10, sync="microbatch", table={"media": [1, 1, 1]})


@pytest.mark.parametrize("movement", ["minimal", "free"])
def test_p10_images_meet_images(movement):
    rows = {"media": [1, 0, 0, 1], "home": [0, 0, 1, 1]}
    found = plan([10] * 4, 2, max_tokens=10, sync="microbatch", towers=IMAGE, table=rows, movement=movement)
    assert found.num_microbatches == 2
    assert found.microbatch[0] == found.microbatch[3] != found.microbatch[1] == found.microbatch[2]
    assert not found.dummy_media.any()


def test_p14_equal_tokens_are_not_equal_work():
    rows = {"cost": [1024 + 1024**2 // 512, 512 + 512**2 // 512, 512 + 512**2 // 512]}
    found = plan([1024, 512, 512], 2, max_tokens=1024, table=rows)
    assert sorted(found.cost.sum(axis=(1, 2))) == [2048, 3072]


@pytest.mark.parametrize(("movement", "others"), [("free", [10, 20, 20, 90]), ("minimal", [0, 0, 50, 90])])
def test_p16_one_heavy_sample_leaves_the_rest_balanced(movement, others):
    """The bound says that nothing helps; with minimal movement nothing moves that does not have to."""
    found = plan([90, 10, 10, 10, 10, 10], 4, max_tokens=100, movement=movement, table={"home": [0, 1, 1, 1, 1, 1]})
    assert (found.value, found.lower_bound, found.gap) == (90, 90, 0.0)
    assert sorted(found.cost.sum(axis=(1, 2))) == others


def test_p18_the_plan_leaves_room_for_the_dummy():
    rows = {"media": [0, 0, 0, 1], "home": [0, 0, 1, 1]}
    found = plan([5, 5, 5, 5], 2, max_tokens=10, sync="microbatch", towers=IMAGE, table=rows)
    assert found.padded.max() <= 10
    carried = np.zeros_like(found.dummy_media)
    carried[found.rank[3], found.microbatch[3]] = 1
    assert set((carried | found.dummy_media).sum(axis=0)) <= {0, 2}


def test_p19_the_last_microbatch_runs_every_trained_tower():
    rows = {"media": [1, 0, 0, 0], "home": [0, 0, 1, 1]}
    found = plan([5] * 4, 2, max_tokens=10, towers=TRAINED, table=rows)
    assert found.padded.max() <= 10
    carried = np.zeros_like(found.dummy_media)
    carried[found.rank[0], found.microbatch[0]] = 1
    assert ((carried | found.dummy_media)[:, -1] == 1).all()


def test_p19_a_text_only_step_too():
    found = plan([5] * 4, 2, max_tokens=10, towers=TRAINED)
    assert (found.dummy_media[:, -1] == 1).all() and found.padded.max() <= 10


@pytest.mark.parametrize(
    ("shared", "sync", "dummies"),
    [
        ((), "step", [2, 1, 3]),
        ((("image", "video"),), "step", [0, 0, 1]),
        ((("image", "video"),), "microbatch", [2, 1, 3]),  # a tower runs once for each kind, and FSDP gathers each time
    ],
)
def test_p19_media_that_share_a_tower_need_one_dummy(shared, sync, dummies):
    rows = {"media": [1, 2, 0], "home": [0, 1, 2]}
    towers = MediaTowers(trained=("image", "video"), shared=shared, dummy_tokens={"image": 1, "video": 1})
    found = plan([8] * 3, 3, max_tokens=10, num_microbatches=1, sync=sync, towers=towers, table=rows)
    assert found.dummy_media[found.rank, 0].tolist() == dummies


def test_p19_a_modality_in_two_shared_towers_is_refused():
    with pytest.raises(ValueError, match="at most once"):
        MediaTowers(shared=(("image", "video"), ("video", "audio")))


def test_p20_the_largest_of_each_phase_adds_up():
    rows = {"cost": [(8, 2), (2, 8)], "home": [0, 1]}
    found = plan([10, 10], 2, max_tokens=10, sync="microbatch", num_microbatches=1, table=rows)
    assert found.value == 16


def test_p21_pipelines_want_more_microbatches():
    rows = {"home": [0] * 8 + [1] * 8}
    found = plan([100] * 16, 2, max_tokens=1000, pipeline_stages=4, table=rows)
    assert found.num_microbatches == 8
    assert found.value / 800 == 1.375
    assert found.gap == 0


@pytest.mark.parametrize(
    ("sync", "movement"), [("step", "free"), ("step", "minimal"), ("microbatch", "free"), ("microbatch", "minimal")]
)
def test_work_follows_speed(sync, movement):
    """A rank at half speed gets half of what the other has, 20 of 60 samples, and takes as long; in packs, nearly."""
    table = SampleTable.from_lengths([1] * 60, home=np.arange(60) % 2)
    config = PlanConfig(max_tokens=20, sync=sync, movement=movement, tolerance=0.0)
    plan = plan_step(table, num_ranks=2, config=config, speeds=[1024, 512])
    assert plan.cost.sum(axis=(1, 2)).tolist() == [40, 20]
    assert plan.lower_bound == 40 <= plan.value <= (40 if sync == "step" else 42) and plan.imbalance == plan.value / 40


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_equal_speeds_plan_as_none(sync):
    table = SampleTable.from_lengths(np.arange(1, 41), home=np.arange(40) % 4)
    config = PlanConfig(max_tokens=100, sync=sync)
    plans = [plan_step(table, num_ranks=4, config=config, speeds=speeds) for speeds in (None, [1024] * 4, [7] * 4)]
    assert len({(plan.digest, plan.value, plan.lower_bound) for plan in plans}) == 1

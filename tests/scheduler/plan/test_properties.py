"""What holds for every plan, whatever the table and the settings."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenpack.core.errors import InfeasiblePlanError
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan, plan_step

DUMMY = {"image": 4, "video": 6, "audio": 2}
BITS = {"image": 1, "video": 2, "audio": 4}


@st.composite
def instances(draw):
    """A table, a number of ranks, settings, media towers, the peers, and the ranks' speeds."""
    ranks = draw(st.integers(1, 5))
    cp_size = draw(st.sampled_from([1, 1, 2]))
    align = 4 if cp_size == 2 else draw(st.sampled_from([1, 1, 2]))
    capacity = draw(st.integers(6, 40)) * align * 2
    samples = draw(st.integers(0, 40))
    phases = draw(st.sampled_from([1, 1, 2, 3]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shape = draw(st.sampled_from(["even", "heavy", "tight"]))
    lengths = {
        "even": rng.integers(1, max(capacity // 2, 2), samples),
        "heavy": np.exp(rng.normal(1.5, 1.2, samples)).astype(np.int64) + 1,
        "tight": rng.integers(max(capacity // 3, 1), capacity + 1, samples),
    }[shape]
    lengths = np.minimum(lengths, capacity)
    cost = lengths[:, None] * rng.integers(0, 8, (samples, phases)) + rng.integers(0, 3, (samples, phases))
    table = SampleTable.from_lengths(
        lengths,
        align=align,
        cost=cost,
        home=rng.integers(0, ranks, samples),
        media=rng.choice(8, samples) * rng.integers(0, 2, samples) * draw(st.integers(0, 1)),
        nbytes=rng.integers(1, 1000, samples),
    )
    multiple = draw(st.sampled_from([1, 1, 2, 3]))
    config = PlanConfig(
        max_tokens=capacity // cp_size,
        sync=draw(st.sampled_from(["step", "microbatch"])),
        movement=draw(st.sampled_from(["minimal", "free"])),
        align=align,
        pack_align=align * draw(st.sampled_from([1, 1, 2])),
        microbatch_multiple=multiple,
        microbatch_cost=draw(st.sampled_from([0, 0, 25])),
        pipeline_stages=draw(st.sampled_from([1, 1, 1, 4])),
        max_segments=draw(st.sampled_from([None, None, 7])),
        num_microbatches=draw(st.sampled_from([None, None, None, 3 * multiple])),
        oversize="drop",
    )
    towers = MediaTowers(
        trained=draw(st.sampled_from([(), ("image",), ("image", "video")])),
        shared=draw(st.sampled_from([(), (("image", "video"),)])),
        dummy_tokens=DUMMY,
        dummy_cost=draw(st.sampled_from([{}, {"image": (3,) * phases}])),
    )
    peers = draw(st.sampled_from([None, None, "ring"]))
    allowed = None if peers is None else [[(r + 1) % ranks, (r - 1) % ranks] for r in range(ranks)]
    speeds = draw(st.sampled_from([None, None, None, "near", "far"]))
    if speeds is not None:
        speeds = rng.integers(900 if speeds == "near" else 256, 1100, ranks).tolist()
    return table, ranks, cp_size, config, towers, allowed, speeds


def check(plan: StepPlan, table: SampleTable, ranks: int, cp_size: int, config: PlanConfig, towers, peers, speeds) -> None:
    count = plan.num_microbatches
    packs = [[plan.ids(r, m).tolist() for m in range(count)] for r in range(ranks)]
    seen = [i for row in packs for pack in row for i in pack]
    dropped = np.flatnonzero(plan.rank < 0).tolist()
    # Every sample once; only a fixed number of micro-batches drops any, as none is above the capacity.
    assert sorted(seen + dropped) == list(range(len(table)))
    assert not dropped or config.num_microbatches is not None
    assert all(plan.rank[i] == r and plan.microbatch[i] == m for r in range(ranks) for m in range(count) for i in packs[r][m])
    assert count % config.microbatch_multiple == 0
    assert config.num_microbatches in (None, count)
    flags = np.zeros((ranks, count), np.int64)
    for r in range(ranks):
        for m in range(count):
            pack, dummies = packs[r][m], int(plan.dummy_media[r, m])
            flags[r, m] = np.bitwise_or.reduce(table.media[pack]) if pack else 0
            assert not dummies & flags[r, m]
            sizes = [
                *table.padded[pack],
                *(-(-DUMMY[name] // config.align) * config.align for name in DUMMY if dummies & BITS[name]),
            ]
            sizes = sizes or [config.align]
            padded = -(-sum(sizes) // config.pack_align) * config.pack_align
            assert plan.padded[r, m] == padded <= config.max_tokens * cp_size
            assert plan.tokens[r, m] == table.tokens[pack].sum()
            assert plan.is_dummy[r, m] == (not pack)
            extra = np.array(towers.dummy_cost.get("image", 0)) * bool(dummies & 1)
            assert (plan.cost[r, m] == table.cost[pack].sum(axis=0) + extra).all()
            if config.max_segments is not None:
                assert len(sizes) + (padded > sum(sizes)) <= config.max_segments
    carried = flags | plan.dummy_media
    if config.sync == "microbatch":
        assert (carried == carried[0]).all()
    else:
        groups = towers.shared or (("image",), ("video",))
        for group in groups:
            own, members = set(group) & set(towers.trained), sum(BITS[name] for name in group)
            assert not own or (carried[:, -1] & members).all()
            dummies = [int(bits & members).bit_count() for bits in plan.dummy_media[:, -1]]
            needed = [bool(own) and not bits & members for bits in flags[:, -1]]
            assert dummies == needed, "one dummy for each tower that is missing"
        assert not plan.dummy_media[:, :-1].any()
    assert plan.lower_bound <= plan.value and plan.gap >= 0 and plan.imbalance >= 0.999
    assert plan.value == objective(plan, config, speeds)
    moved = (plan.rank != table.home) & (plan.rank >= 0)
    assert plan.moved_bytes == table.nbytes[moved].sum() >= 0
    assert 0 <= plan.moved_bytes_lower_bound <= max(plan.moved_bytes, 0)
    assert plan.num_pairs == len({(int(table.home[i]), int(plan.rank[i])) for i in np.flatnonzero(moved)})
    if peers is not None:
        assert all(plan.rank[i] in peers[table.home[i]] for i in np.flatnonzero(moved))


def objective(plan: StepPlan, config: PlanConfig, speeds: list[int] | None) -> int:
    """The definition, written out."""
    if speeds is None or len(set(speeds)) == 1:
        speeds = [1024] * plan.num_ranks

    def slowest(costs) -> int:
        return max(-(-int(cost) * 1024 // speed) for cost, speed in zip(costs, speeds, strict=True))

    if config.sync == "microbatch":
        value = sum(slowest(plan.cost[:, m, k]) for m in range(plan.num_microbatches) for k in range(plan.cost.shape[2]))
    else:
        value = slowest(row.sum() + (config.pipeline_stages - 1) * row.sum(axis=1).max() for row in plan.cost)
    return value + config.microbatch_cost * plan.num_microbatches


@given(instances())
def test_every_plan_keeps_its_promises(instance):
    table, ranks, cp_size, config, towers, peers, speeds = instance
    more = {"towers": towers, "cp_size": cp_size, "peers": peers, "speeds": speeds}
    try:
        plan = plan_step(table, num_ranks=ranks, config=config, **more)
    except InfeasiblePlanError:
        # Only hard limits may make a table unplannable: these can.
        hard = (config.max_segments, peers, config.num_microbatches)
        assert any(limit is not None for limit in hard) or towers.trained or table.media.any()
        return
    check(plan, table, ranks, cp_size, config, towers, peers, speeds)
    again = plan_step(table, num_ranks=ranks, config=config, **more)
    assert again.digest == plan.digest
    assert (again.rank == plan.rank).all() and (again.microbatch == plan.microbatch).all()

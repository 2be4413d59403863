"""Which ranks plan together: found by membership, whatever the order of ranks."""

import pytest
import torch.distributed as dist

from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from ..helpers import TEXT, names_of, random_source


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Import Megatron-Core before ranks are forked, not once in each of them."""
    from megatron.core import parallel_state

    assert parallel_state


def steps_of(groups, source):
    """Return names, capacity in padded tokens and digest of every step."""
    config = SchedulerConfig(max_tokens=64, samples_per_step=4, timeout=20.0)
    with PackingScheduler(source, config=config, adapter=TEXT, groups=groups) as scheduler:
        return [(names_of(step), int(step.plan.padded.max()), step.plan.digest) for step in scheduler]


def by_mesh(shape, names, **dims):
    def make(rank, num_ranks):
        from torch.distributed.device_mesh import init_device_mesh

        return ProcessGroups.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), **dims)

    return make


def by_megatron(rank, num_ranks):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    return ProcessGroups.from_megatron()


def by_collection(rank, num_ranks):
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    return ProcessGroups.from_megatron(ProcessGroupCollection.use_mpu_process_groups())


def by_hand(rank, num_ranks):
    """Data-parallel groups of ranks in no order: {3, 0} and {2, 1}."""
    pairs = {"dp": [[3, 0], [2, 1]], "cp": [[0, 1], [3, 2]]}
    made = {name: [(members, dist.new_group(members)) for members in groups] for name, groups in pairs.items()}
    mine = {name: next(group for members, group in groups if rank in members) for name, groups in made.items()}
    return ProcessGroups.of(mine["dp"], mine["cp"])


@pytest.mark.parametrize(
    "make",
    [
        by_mesh((2, 2), ("dp", "cp"), cp="cp"),
        by_mesh((2, 2), ("context", "data"), dp="data", cp="context"),
        by_megatron,
        by_collection,
        by_hand,
    ],
)
def test_peers_of_a_replica_get_the_same_packs(make):
    """Context-parallel peers read the same samples: their groups plan apart, and alike (D7)."""

    def fn(rank, num_ranks):
        groups = make(rank, num_ranks)
        assert (groups.num_ranks, groups.cp_size, groups.num_replicas) == (2, 2, 4)
        return groups.rank, groups.cp_rank, steps_of(groups, random_source(groups.rank, 30))

    outcomes = run_ranks(fn, 4, backend="gloo", timeout=120)
    assert sorted((dp, cp) for dp, cp, _ in outcomes) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for dp in range(2):
        peers = [steps for rank, _, steps in outcomes if rank == dp]
        assert peers[0] == peers[1]
    assert max(padded for _, _, steps in outcomes for _, padded, _ in steps) > 64  # two GPUs hold a pack together


def test_hybrid_sharding_is_one_group():
    def fn(rank, num_ranks):
        groups = by_mesh((2, 2), ("replicate", "shard"), dp=("replicate", "shard"))(rank, num_ranks)
        return groups.rank, groups.num_ranks, groups.cp_size

    assert run_ranks(fn, 4, backend="gloo") == [(rank, 4, 1) for rank in range(4)]


def test_a_dimension_that_the_mesh_lacks_is_named():
    def fn(rank, num_ranks):
        with pytest.raises(ValueError, match=r"no dimension 'data', its dimensions are \('dp',\)"):
            by_mesh((2,), ("dp",), dp="data")(rank, num_ranks)

    run_ranks(fn, 2, backend="gloo")


def test_two_schedulers_over_one_group_do_not_mix():
    """Training and evaluation, both with a worker thread; and one after the other, which must not meet an old address."""

    def fn(rank, num_ranks):
        config = SchedulerConfig(max_tokens=128, samples_per_step=4, prefetch=2, timeout=20.0)
        for _ in range(3):
            sources = [random_source(rank, 20, seed) for seed in range(2)]
            both = [PackingScheduler(source, config=config, adapter=TEXT) for source in sources]
            steps = [[names_of(step) for step in pair] for pair in zip(*both, strict=True)]
            for scheduler in both:
                scheduler.close()
            assert len(steps) == 5
        return True

    assert all(run_ranks(fn, 2, backend="gloo"))


@pytest.mark.parametrize(("names", "dims"), [(("dp", "tp"), {}), (("tp", "dp"), {}), (("dp", "cp"), {"cp": "cp"})])
def test_one_process_writes_whatever_the_mesh(names, dims):
    """The scheduler knows nothing of tensor parallelism, but the mesh does."""
    writers = run_ranks(lambda *ranks: by_mesh((2, 2), names, **dims)(*ranks).is_writer, 4, backend="gloo")
    assert writers == [True, False, False, False]

"""The same micro-batches as Megatron-Core's `dp_balanced`, from its documented algorithm written down once more, plainly."""

import itertools
import random

import numpy as np
import pytest
import torch

from evenpack.core import InfeasiblePlanError, OversizeSampleError
from evenpack.integrations.megatron import next_fit_planner
from evenpack.scheduler import PlanConfig, SampleTable, SchedulerConfig

from .helpers import Samples, megatron_sample, on_ranks, place, settings, wrap

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def dp_balanced(lengths, capacity, multiple):
    """Next fit in order of data-parallel rank; then single samples are split off from the end until the count fits."""
    bins = [[]]
    for index, length in enumerate(lengths):
        if sum(lengths[i] for i in bins[-1]) + length > capacity:
            bins.append([])
        bins[-1].append(index)
    last = len(bins) - 1
    while len(bins) % multiple:
        if len(bins[last]) > 1:
            bins.append([bins[last].pop()])
        else:
            last -= 1
    return bins


def expected_packs(samples, chosen):
    """Concatenate samples the way `dp_balanced` does, key by key."""
    rows = [samples[index] for index in chosen]
    real = [int(row["original_seq_len"]) for row in rows]
    padded = [int(row["padded_seq_len"]) for row in rows]
    packed = {key: torch.cat([row[key] for row in rows]).tolist() for key in KEYS}
    packed["cu_seqlens"] = [0, *np.cumsum(real).tolist()]
    packed["cu_seqlens_padded"] = [0, *np.cumsum(padded).tolist()]
    return packed | {"max_seqlen": max(padded)}


def described(pack):
    """Return dtypes and values, which travel between processes."""
    return {key: (value.dtype, value.tolist()) for key, value in pack.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "multiple", "config"),
    [
        (4, {}, 1, {}),
        (8, {"tp": 2}, 1, {}),
        (8, {"tp": 2, "cp": 2}, 4, {}),
        (
            8,
            {"pp": 2, "vpp": 2},
            1,
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2},
        ),
    ],
)
def test_with_next_fit_the_micro_batches_are_those_of_dp_balanced(num_ranks, sizes, multiple, config):
    rng = random.Random(num_ranks)
    replicas = num_ranks // (sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))
    cp, group = sizes.get("cp", 1), config.get("microbatch_group_size_per_vp_stage", 1)
    samples = [megatron_sample(rng.randrange(1, 60 * cp), n, multiple) for n in range(11 * replicas)]

    def body():
        here = place()
        mine = Samples(samples[11 * here.dp : 11 * (here.dp + 1)])
        iterator, count, _, _ = wrap(mine, 11, settings(**config), planner=next_fit_planner)
        chunk = iterator[0] if isinstance(iterator, list) else iterator
        packs = [next(chunk) for _ in range(count)]
        return vars(here), [
            {key: (value.dtype, value.tolist()) for key, value in pack.items() if isinstance(value, torch.Tensor)}
            for pack in packs
        ]

    bins = dp_balanced([int(s["padded_seq_len"]) for s in samples], 64 * cp, replicas * group)
    last = sizes.get("pp", 1) - 1
    for here, packs in on_ranks(body, num_ranks, **sizes):
        assert len(packs) == len(bins) // replicas
        for index, pack in enumerate(packs):
            expected = expected_packs(samples, bins[index * replicas + here["dp"]])
            for key, value in expected.items():
                if key in pack:
                    dtype, found = pack[key]
                    # Padding holds no target: -100 instead of what the dataset wrote there.
                    real = [not padding for padding in pack["padding_mask"][1]]
                    if key == "labels":
                        assert [v for v, r in zip(found, real, strict=True) if r] == [
                            v for v, r in zip(value, real, strict=True) if r
                        ]
                    else:
                        assert found == value, key
                    floating = key == "loss_mask"
                    assert dtype == (torch.float32 if floating else torch.int64 if key in KEYS else torch.int32)
            assert ("tokens" in pack) == (here["pp"] == 0) and ("labels" in pack) == (here["pp"] == last)


@pytest.mark.parametrize(("lengths", "ranks", "error"), [([12, 5, 5], 2, OversizeSampleError), ([5], 2, InfeasiblePlanError)])
def test_what_next_fit_cannot_place_is_named(lengths, ranks, error):
    table = SampleTable.from_lengths(lengths, home=[0] * len(lengths))
    with pytest.raises(error, match=str(lengths[0]) if lengths[0] > 10 else "single sample"):
        next_fit_planner(table, num_ranks=ranks, config=PlanConfig(max_tokens=10))


class TokenCost:
    """A sample costs its tokens."""

    phases = ("decoder",)

    def sample_cost(self, tokens, grids):
        return (tokens,)


#: Lengths per rank, capacity and policy; packs per rank, and real tokens of the ranks, sorted.
PLANS = [
    ("one rank's samples are long", [[95] * 5, [20] * 5], 100, {}, 3, [285, 290]),
    ("a sample above the capacity is dropped", [[12, 5], [5]], 10, {"oversize": "drop"}, 1, [5, 5]),
    ("one sample, two ranks: a dummy fills", [[10], []], 10, {}, 1, [0, 10]),
    ("as few packs as fit", [[8, 8, 8, 8], [1, 1, 1, 1]], 10, {}, 2, [18, 18]),
]


@pytest.mark.parametrize(
    ("lengths", "capacity", "policy", "packs", "loads"), [row[1:] for row in PLANS], ids=[r[0] for r in PLANS]
)
def test_plans_through_this_interface(lengths, capacity, policy, packs, loads):
    def body():
        items = Samples([megatron_sample(n, i) | {"sample_id": i} for i, n in enumerate(lengths[place().dp])])
        config = SchedulerConfig(max_tokens=capacity, samples_per_step=1, **policy)
        iterator, count, total, _ = wrap(items, 5, settings=config, cost=TokenCost())
        found = [next(iterator) for _ in range(count)]
        assert all(int(pack["cu_seqlens_padded"][-1]) <= capacity for pack in found)
        assert all(not pack["padding_mask"].all() for pack in found)
        loads = [
            stop - start
            for pack in found
            for name, (start, stop) in zip(pack["sample_ids"], itertools.pairwise(pack["cu_seqlens"].tolist()), strict=True)
            if name is not None
        ]
        return count, total, sum(loads)

    results = on_ranks(body, 2)
    assert [found[:2] for found in results] == [(packs, sum(loads))] * 2
    assert sorted(load for _, _, load in results) == loads


def test_a_sample_above_the_capacity_is_named_on_every_rank():
    def body():
        items = Samples([megatron_sample(n, i) for i, n in enumerate([[12, 5], [5, 5]][place().dp])])
        config = SchedulerConfig(max_tokens=10, samples_per_step=1)
        with pytest.raises(OversizeSampleError, match=r"rank 0, sample 0: 12 tokens .* exceed the capacity of 10"):
            wrap(items, 2, settings=config)
        return True

    assert on_ranks(body, 4, tp=2) == [True] * 4

"""Training through Megatron-Core's schedules: every split trains like one rank."""

import random

import pytest
import torch

from .helpers import on_ranks, own_sample, place

STEPS, BATCH = 10, 8


def lengths():
    rng = random.Random(0)
    return [rng.choice([3, 5, 9, 17, 30, 44]) for _ in range(STEPS * BATCH)]


def train(*, dtype=torch.float32, positions="rope", steps=STEPS, **config):
    """Return the losses of a run on the calling rank."""
    from megatron.core import parallel_state
    from on_cpu import megatron_on_cpu
    from tiny_gpt import gpt_config, gpt_model
    from training import share, train_step, wrapped

    samples = [own_sample(length, number) for number, length in enumerate(lengths())]
    replicas = parallel_state.get_data_parallel_world_size()
    here = place()
    items = share(samples, BATCH, here.dp, replicas) if here.reads else None
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    with megatron_on_cpu():
        settings = gpt_config(dtype, **config)
        chunks = [
            wrapped(gpt_model(settings, positions=positions, vp_stage=stage)) for stage in (range(vpp) if vpp else [None])
        ]
        return [train_step(chunks, items, BATCH // replicas, lr=0.5) for _ in range(steps)]


@pytest.fixture(scope="module")
def one_rank():
    (losses,) = on_ranks(train, 1)
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "config"),
    [
        (2, {}, {}),
        (2, {"tp": 2}, {}),
        (2, {"tp": 2}, {"sequence_parallel": True}),
        (2, {"pp": 2}, {}),
        (4, {"pp": 4}, {}),
        (2, {"pp": 2, "vpp": 2}, {}),
        (2, {"cp": 2}, {}),
        (4, {"cp": 4}, {}),
        (8, {"tp": 2, "pp": 2}, {}),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_every_split_trains_like_one_rank(one_rank, num_ranks, sizes, config):
    for losses in on_ranks(lambda: train(**config), num_ranks, **sizes):
        assert losses == pytest.approx(one_rank, abs=1e-5)

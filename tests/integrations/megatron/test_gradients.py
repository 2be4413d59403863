"""What packs and context parallelism compute, in fp64, through the wrapper and `next_batch`."""

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from evenpack.core import UnsafeModelError
from evenpack.integrations.megatron import forward_step, model_arguments, next_batch, prepare_model
from evenpack.models import adapter_for
from evenpack.scheduler import SchedulerConfig

from .helpers import Samples, on_ranks, own_sample, wrap

ADAPTER = msgspec.structs.replace(
    adapter_for("qwen2_vl", trained_modalities=()), media_tokens={"image": 60, "video": 61}, pad_token_id=0, cp_slicing="caller"
)


def samples(positions):
    texts = [own_sample(length, length) for length in (1, 2, 23, 7, 12, 5)]
    for text in texts:
        text["input_ids"].clamp_(max=59)  # no text that spells a media token
    if positions == "rope":
        return texts
    image = {"input_ids": torch.tensor([3, *[60] * 6, 4, 5]), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    return [image | {"pixel_values": torch.zeros(24, 1176), "sample_id": "image"}, *texts]


def gradients(positions, *, items=None, packed=True, align=None):
    """Return the gradients of the summed loss, of all context-parallel ranks together."""
    from megatron.core import parallel_state
    from on_cpu import megatron_on_cpu
    from tiny_gpt import gpt_config, gpt_model

    items = items or samples(positions)
    room = 64 if packed else max(len(item["input_ids"]) for item in items)
    adapter = "text" if positions == "rope" else ADAPTER
    with megatron_on_cpu():
        model = gpt_model(
            gpt_config(torch.float64, num_layers=2, **({"mrope_section": [1, 1, 2]} if positions == "mrope" else {})),
            positions=positions,
        )
        prepare_model(model)
        config = SchedulerConfig(
            max_tokens=room,
            samples_per_step=1,
            align=align,
            max_segments=None if packed else 1,
        )
        iterator, count, _, _ = wrap(Samples(items), len(items), adapter=adapter, settings=config)
        for _ in range(count):
            batch = next_batch(iterator)
            logits = model(**model_arguments(batch, model) | {"labels": None})
            losses = F.cross_entropy(logits[0], batch.labels[0], reduction="none", ignore_index=-100)
            (losses * batch.loss_mask[0]).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return gradient.numpy()


@pytest.mark.parametrize("positions", ["rope", "mrope"])
def test_packs_and_context_parallelism_give_the_gradients_of_single_samples(positions):
    (alone,) = on_ranks(lambda: gradients(positions, packed=False), 1)
    for num_ranks, sizes, align in ((1, {}, None), (1, {}, 16), (2, {"cp": 2}, None), (4, {"cp": 4}, None)):
        for found in on_ranks(lambda align=align: gradients(positions, align=align), num_ranks, **sizes):
            assert np.abs(found - alone).max() < 1e-12 * max(1.0, np.abs(alone).max())


@pytest.mark.parametrize("target", [1, 4])
def test_a_single_target_on_one_context_parallel_rank_weighs_what_it_weighs_alone(target):
    """8 tokens in chunks of 2: slots 0, 1, 6, 7 are rank 0's, the others rank 1's. The rank without a target adds 0."""
    labels = torch.full((8,), -100)
    labels[target + 1] = 5
    items = [own_sample(8, "one") | {"labels": labels}]
    (alone,) = on_ranks(lambda: gradients("rope", items=items), 1)
    assert np.abs(alone).max() > 1e-3
    for found in on_ranks(lambda: gradients("rope", items=items), 2, cp=2):
        assert np.abs(found - alone).max() < 1e-12


def test_mrope_under_context_parallelism_is_refused_until_the_model_is_prepared():
    def body():
        from on_cpu import megatron_on_cpu
        from tiny_gpt import gpt_config, gpt_model

        with megatron_on_cpu():
            model = gpt_model(gpt_config(mrope_section=[1, 1, 2]), positions="mrope")
            iterator, _, _, _ = wrap(Samples(samples("mrope")), 7, adapter=ADAPTER)
            with pytest.raises(UnsafeModelError, match="prepare_model"):
                forward_step(iterator, model)
            model.config.apply_rope_fusion = True
            with pytest.raises(UnsafeModelError, match="apply_rope_fusion"):
                prepare_model(model)
        return True

    assert all(on_ranks(body, 2, cp=2))

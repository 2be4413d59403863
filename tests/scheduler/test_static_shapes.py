"""`static_shapes`: every pack has the same shapes, so that a compiled model is compiled once."""

import msgspec
import pytest
import torch
import transformers

from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, random_source, text_sample


def shapes_of(batch):
    tensors = {
        name: getattr(batch, name) for name in ("input_ids", "labels", "position_ids", "cu_seqlens_q", "cu_seqlens_q_padded")
    }
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, batch.max_seqlen_q, batch.total_tokens


@pytest.mark.parametrize(
    ("cp_size", "more", "length"), [(1, {}, 130), (2, {}, 260), (1, {"align": 16}, 128), (1, {"pack_align": 64}, 128)]
)
def test_every_pack_has_the_same_shapes_and_no_sample_is_lost(cp_size, more, length):
    config = SchedulerConfig(max_tokens=130, samples_per_step=5, static_shapes=True, max_segments=9, timeout=30.0, **more)

    def fn(rank, num_ranks):
        groups = msgspec.structs.replace(ProcessGroups.from_world(), cp_size=cp_size)
        with PackingScheduler(random_source(rank, 13), config=config, adapter=TEXT, groups=groups) as scheduler:
            batches = [batch for step in scheduler for batch in step]
        return [shapes_of(batch) for batch in batches], [n for b in batches for n in b.sample_ids if n is not None]

    outcomes = run_ranks(fn, 2)
    row, ends = (1, length), (10,)
    wanted = {"input_ids": row, "labels": row, "position_ids": row, "cu_seqlens_q": ends, "cu_seqlens_q_padded": ends}
    assert all(shape == (wanted, length, length) for shapes, _ in outcomes for shape in shapes)
    assert sorted(name for _, names in outcomes for name in names) == sorted(
        f"{rank}-{index}" for rank in (0, 1) for index in range(13)
    )


def test_a_model_is_compiled_in_the_first_step_alone():
    """Boundaries are data to the model: neither their values nor the lengths of the samples compile it again."""
    shape = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = prepare_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, max_position_embeddings=256)))
    source = [text_sample(length, index) for index, length in enumerate((5, 60, 33, 7, 90, 12, 3, 41, 9, 80))]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(called, **settings):
        config = SchedulerConfig(max_tokens=128, samples_per_step=2, **settings)
        losses, counts = [], []
        with PackingScheduler(source, config=config, adapter=adapter_for(model.config)) as scheduler:
            for step in scheduler:
                losses += [float(step.loss(called(**batch.forward_kwargs(called)).logits.detach(), batch)) for batch in step]
                counts.append(len(graphs))
        return losses, counts

    static = {"static_shapes": True, "max_segments": 6}
    expected, _ = run(model, **static)
    torch._dynamo.reset()
    losses, counts = run(torch.compile(model, backend=backend, dynamic=False), **static)
    assert losses == pytest.approx(expected) and len(counts) == 5
    assert counts[0] > 0 and set(counts) == {counts[0]}
    torch._dynamo.reset()
    assert len(set(run(torch.compile(model, backend=backend, dynamic=False))[1])) > 1, "every new length compiles"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"static_shapes": True}, "static_shapes needs max_segments"),
        ({"static_shapes": 1, "max_segments": 4}, "static_shapes must be True or False, got 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(max_tokens=8, samples_per_step=1, **settings)
